"""Random cases of the sparse attention, in addition to the named ones (attention_cases.py)."""

from __future__ import annotations

import random

from ops.attention_cases import INF, Spec


def random_spec(seed: int) -> Spec:
    """Return a case, the same for the same seed. Small: at most 20 tokens of 128 heads, at most 1,300 entries, 300 with
    many tokens."""
    r = random.Random(seed)
    tokens = r.choice((1, 1, 2, 3, 4, 5, 7)) if r.random() < 0.85 else r.randint(8, 20)
    window = r.choice((128,) * 6 + (0, 1, 2, 64, 127, 129, 130, 200, 256, 257))
    return Spec(
        tokens=tokens,
        heads=r.choice((1, 2, 4, 8, 8, 16, 16, 24, 32, 40, 63, 64, 64, 64, 65, 96, 127, 128, 128)),
        window=window,
        window_lengths=tuple(r.choice((window, window, 0, r.randint(0, window))) for _ in range(r.randint(1, 3))),
        fp8=r.random() < 0.6,
        sink=r.choice(("random", "random", "mixed", None, INF, -INF, 3.0)),
        q_layout=r.choice(("gaps",) * 3 + ("contiguous", "wider", "heads_first", "unaligned", "expanded")),
        q_scale=r.choice((1.0, 1.0, 1.0, 1.0, 0.0, 30.0, 300.0)),
        split_keys=r.choice((None, None, None, 128, 256, 384, 512, 1152, 1152, 1280)),
        **_entries(r, tokens),
    )


def _entries(r: random.Random, tokens: int) -> dict[str, object]:
    """Return the entries and how they are named."""
    kind = r.choice(("none", "list", "list", "list", "dense", "dense"))
    if kind == "none":
        return {}
    longest = r.choice((1, 2, 32, 64, 128, 129, 130, 256, 300, 512, 512, 640, 900, 1024, 1300))
    longest = longest if tokens < 8 else min(longest, 300)
    lengths = tuple(r.choice((longest, longest, 0, r.randint(0, longest))) for _ in range(r.randint(1, 4)))
    width = max(lengths) + r.choice((0, 0, 1, 3, 64, 127, 200, 500))
    common = {"entry_lengths": lengths, "entries": max(width, 1), "tokens_per_request": r.choice((1, 1, 2, 3, tokens))}
    if kind == "dense":
        return {**common, "dense": True, "entries_per_page": r.choice((1, 2, 2, 2, 3, 4, 8, 16, 64, 64))}
    holes = r.choice((0.0, 0.0, 0.0, 0.05, 0.5, 0.95))
    return {**common, "visible": r.random() < 0.6, "holes": holes, "repeats": r.random() < 0.1}
