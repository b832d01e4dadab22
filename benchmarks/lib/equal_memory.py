"""The tokens at which ours and SGLang's built-in have the same bytes of KV memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.servers import running

GUESS_TOKENS = 65_536


def builtin_tokens(
    model: Path, flags: Sequence[str], size: float, port: int, logs: Path, env: Mapping[str, str] | None = None
) -> int:
    """Return the built-in's --max-total-tokens for about `size` bytes of KV memory.

    The built-in computes bytes from tokens by rules of its own, so a server is started, and its log is read.
    """
    log = logs / "builtin_guess.log"
    with running("builtin", model, (*flags, "--max-total-tokens", str(GUESS_TOKENS)), port, log, env=env) as server:
        used, held = server.kv_memory()
    return max(4096, int(held * size / used) // 256 * 256)


def tokens_that_fit(model: Path, size: float, flags: Sequence[str]) -> int:
    """Return our --max-total-tokens whose pools, rings and tails have at most `size` bytes.

    Raises:
        ValueError: not even the smallest pool fits.
    """
    from sglang_dsv4.cache.pool_plan import largest_plan
    from sglang_dsv4.cache.tail_options import TailOptions
    from sglang_dsv4.doctor import geometry_of_checkpoint

    requests = int(flags[flags.index("--max-running-requests") + 1]) if "--max-running-requests" in flags else 256
    slots, options = requests + 1, TailOptions.from_environment()
    geometry = geometry_of_checkpoint(model, fp8=True)
    return largest_plan(geometry, int(size), lambda tokens: slots, options.slots_on_device).full_tokens
