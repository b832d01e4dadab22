"""Share of a prompt that each policy reuses at equal device memory: our tails against SGLang's paged SWA.

    python benchmarks/prefix_simulation.py [--quick] [--json benchmarks/results/prefix_simulation.json]

Both policies replay the same request traces through SGLang 0.5.23's own scheduler calls, allocators and radix tree
(lib/prefix_replay.py); no model is run. Memory is that of V4-Flash with fp8 rows (DeepSeek-V4 specification, section
10):

    SGLang      21 CSA x 179.25 + 20 HCA x 6.75 B a token; 43 x 585 + 21 x 320 B a paged SWA token, default ratio 0.1
    this        21 x 179.25 + 20 x 4.5625 B a token; 3.65 MB a tail; 4.9 MB of rings a request slot

HCA states (10.5 MB a request) are the same in both and left out. "bound" is an unbounded cache with whole pages: a
prefix that was ever computed is reused up to its last page.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.policy_memory import REQUEST_SLOTS, Budget
from lib.prefix_replay import ReplayEngine, Totals, paged_engine, tail_engine
from lib.prefix_traces import SCENARIOS, Trace

HOST_SLOTS_PER_DEVICE_SLOT = 4


@dataclass
class Result:
    """Result of one scenario with one policy; tokens of the measured requests."""

    scenario: str
    policy: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    bound_tokens: int
    zero_hits: int  # requests that reused nothing where the bound reused something
    recomputed_per_request: float  # more than the bound

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def of_bound(self) -> float:
        """Share of the bound's hits."""
        return self.hit_tokens / self.bound_tokens if self.bound_tokens else 1.0


def measure(name: str, policy: str, engine: ReplayEngine, small: bool) -> Result:
    """Replay one scenario."""
    engine.totals = Totals()
    trace = Trace(engine, seed=17)
    SCENARIOS[name](trace, small)
    engine.cache.sanity_check()
    lost = sum(trace.bounds) - sum(trace.hits)
    return Result(
        name,
        policy,
        len(trace.hits),
        sum(trace.prompts),
        sum(trace.hits),
        sum(trace.bounds),
        sum(bound > 0 and hit == 0 for hit, bound in zip(trace.hits, trace.bounds, strict=True)),
        lost / len(trace.hits),
    )


def policies(budget: Budget, chunk_tokens: int) -> dict[str, Callable[[], ReplayEngine]]:
    """Return the engines of the compared policies."""
    how = {"context_tokens": 1 << 17, "requests": 64, "chunk_tokens": chunk_tokens}
    return {
        "SGLang 0.5.23": lambda: paged_engine(budget.sglang_tokens, budget.sglang_swa_tokens, **how),
        "tails": lambda: tail_engine(budget.tokens, budget.tails, **how),
        "tails + host": lambda: tail_engine(
            budget.tokens, budget.tails, HOST_SLOTS_PER_DEVICE_SLOT * budget.tails, **how
        ),
    }


def main() -> None:
    """Print the table, and one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a test")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    small = arguments.quick
    budget = Budget.of(65_536 if small else 163_840)
    print(
        f"device memory {budget.device_bytes / 1e6:,.0f} MB: SGLang {budget.sglang_tokens:,} tokens + "
        f"{budget.sglang_swa_tokens:,} SWA tokens; this {budget.tokens:,} tokens + {budget.tails} tails + "
        f"{REQUEST_SLOTS} rings"
    )
    columns = f"{'scenario':14} {'policy':14} {'requests':>8} {'hit rate':>9} {'of bound':>9} {'zero hits':>9}"
    print(f"{columns} {'recomputed beyond the bound, tokens a request':>46}")
    results = []
    for name in SCENARIOS:
        for policy, make in policies(budget, 1024 if small else 8192).items():
            began = time.perf_counter()
            result = measure(name, policy, make(), small)
            results.append(result)
            print(
                f"{name:14} {policy:14} {result.requests:8} {result.hit_rate:9.1%} {result.of_bound:9.1%} "
                f"{result.zero_hits:9} {result.recomputed_per_request:46,.0f}   ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    rows = [{**asdict(r), "hit_rate": round(r.hit_rate, 4), "of_bound": round(r.of_bound, 4)} for r in results]
    line = json.dumps({"benchmark": "prefix_simulation", "budget": asdict(budget), "results": rows})
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
