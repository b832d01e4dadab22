"""Cost of prefix lookup and tail bookkeeping per request, in a tree of 100,000 nodes.

    python benchmarks/prefix_lookup.py [--nodes N] [--json benchmarks/results/prefix_lookup.json]

Scheduler time only: no model, no bytes. For prompts of several lengths, median over the repeats of

    first match    the prompt is seen for the first time: its pages are hashed
    later match    the scheduler matches waiting requests again in every round: the digests are known
    bookkeeping    one forward's resume, reservation and publication of a tail, and its release

and SGLang's own walk over the same tree (`UnifiedTreeCore._match_prefix_helper`) for comparison.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from lib.prefix_replay import PAGE, tail_engine

from dsv4_radix_cache.tail_store import TailStore

PROMPTS = (2_000, 5_000, 30_000, 100_000)


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Return the median microseconds of one call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def main() -> None:
    """Build the tree, check that both walks agree, measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    rng = random.Random(3)
    longest = max(PROMPTS)
    engine = tail_engine(longest * 4, 64, 256, context_tokens=longest + PAGE, chunk_tokens=8192)
    cache, core = engine.cache, engine.cache.tree_core
    prompts = {length: [rng.randrange(1 << 17) for _ in range(length)] for length in PROMPTS}
    for prompt in prompts.values():
        engine.run(prompt, [1])
    while len(core._node_arena) < arguments.nodes:  # one-page conversations; their pages are never allocated or freed
        key = RadixKey(array("q", [rng.randrange(1 << 17) for _ in range(PAGE)]))
        cache.insert(InsertParams(key=key, value=torch.zeros(PAGE, dtype=torch.int64)))

    print(f"{len(core._node_arena):,} nodes, Python {platform.python_version()}")
    print(f"{'prompt':>8} {'first match':>12} {'later match':>12} {'SGLang walk':>12}   microseconds")
    rows = []
    for length, prompt in prompts.items():
        tokens = array("q", prompt)

        def match(request: object, tokens: array = tokens) -> object:
            key = RadixKey(token_ids=tokens, limit=len(tokens) - 1)
            return core.match_prefix(MatchPrefixParams(key=key, req=request))

        request = SimpleNamespace()
        result = match(request)
        aligned = RadixKey(token_ids=tokens, limit=len(tokens) - 1).page_aligned(PAGE)
        params = MatchPrefixParams(key=aligned)
        walked = UnifiedTreeCore._match_prefix_helper(core, aligned, params)
        assert (walked.device_prefix_len, walked.full_kv_hit_length, walked.best_match_node) == (
            result.device_prefix_len,
            result.full_kv_hit_length,
            result.best_match_node,
        ), "the two walks disagree"
        row = {
            "prompt_tokens": length,
            "hit_tokens": result.device_prefix_len,
            "first_match_us": median_us(lambda: match(SimpleNamespace()), arguments.repeats),
            "later_match_us": median_us(lambda: match(request), arguments.repeats),  # noqa: B023
            "sglang_walk_us": median_us(
                lambda: UnifiedTreeCore._match_prefix_helper(core, aligned, params),  # noqa: B023
                arguments.repeats,
            ),
        }
        rows.append(row)
        first, later, walk = row["first_match_us"], row["later_match_us"], row["sglang_walk_us"]
        print(f"{length:8,} {first:12.1f} {later:12.1f} {walk:12.1f}", flush=True)

    store = TailStore(arguments.nodes // 10, arguments.nodes)
    previous = None
    while len(store) < arguments.nodes:
        tail, _ = store.reserve(rng.randrange(1, 400) * PAGE)
        store.publish(tail.id, None)
        store.pop_copies()
        previous = tail.id

    def bookkeeping() -> None:
        store.hit(previous)
        store.pop_copies()
        tail, _ = store.reserve(4096)
        store.publish(tail.id, None)
        store.pop_copies()

    cost = median_us(bookkeeping, 2001)
    print(f"bookkeeping of a hit, a reservation that evicts and a publication, {len(store):,} tails: {cost:.1f} us")
    line = json.dumps(
        {
            "benchmark": "prefix_lookup",
            "nodes": len(core._node_arena),
            "matches": [{k: round(v, 1) for k, v in row.items()} for row in rows],
            "bookkeeping_us": round(cost, 1),
        }
    )
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
