"""Latency from the stores of one phase to the loads of the next: between launches, and between resident CTAs of one.

    python benchmarks/bench_handover.py [--ctas 16,64,128] [--out FILE.json]

A decode step of one request is a chain of some 600 launches whose bytes take less time than the way from one launch to
the next. A kernel whose CTAs stay resident for a layer would pay another price: its CTAs wait for each other's results
in global memory. `lib/handover.py` is that chain without arithmetic: every CTA reads a row of 8 KB, 4,096 channels in
bf16, and writes its share of the next row.

    launches   each phase is a launch that begins early, as in our graphs
    ahead      the same, but a phase takes the words of the row before it waits for the launch before; a lower bound,
               since many of these small launches are resident together
    counters   one launch; a counter for each phase, by release and acquire
    words      one launch; each word says itself that it has arrived, as in our sums over ranks

Results are compared with the definition first, and again after the timing: each replay begins with another row. Graphs
with PHASES phases are replayed in turns; the difference of their times is that of the phases, and of some nanoseconds a
phase in which rows are emptied. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from lib import handover
from lib.handover import Shape, Way
from lib.measuring import gpu_state, interleaved
from lib.versions import versions

from dsv4_kernels.device.peer_words import EMPTY
from dsv4_kernels.host.arch import implementation_of

CTAS = (16, 64, 128)
VECTORS = 512
PHASES = (64, 256)
SECONDS = 2.0


class Chain:
    """The phases of a graph, with rows and counters of their own.

    Args:
        impl: "sm90" or "sm100".
    """

    def __init__(self, impl: str, shape: Shape, device: torch.device) -> None:
        self.impl, self.shape = impl, shape
        rows = torch.full((shape.phases + 1, shape.vectors, 4), EMPTY - (1 << 32), dtype=torch.int32)
        rows[0] = torch.randint(0, handover.MASK, rows[0].shape, generator=torch.Generator().manual_seed(shape.ctas))
        self.rows, self.counters = rows.to(device), torch.zeros(shape.phases, dtype=torch.int32, device=device)

    def calls(self) -> list[Callable[[], object]]:
        """Return the calls of a graph: the next first row, empty rows and counters, then all phases.

        The counters come between the empty rows and the first phase, which with `ahead` stores before it waits.
        """
        return [
            lambda: self.rows[0].add_(1).bitwise_and_(handover.MASK),
            lambda: self.rows[1:].fill_(EMPTY - (1 << 32)),
            self.counters.zero_,
            self.run,
        ]

    def run(self) -> None:
        """Compute all rows after the first one."""
        handover.run(self.impl, self.shape, self.rows, self.counters)

    def check(self) -> None:
        """Compare all rows with the definition.

        Raises:
            AssertionError: names the first row that differs.
        """
        rows = self.rows.cpu()
        wanted = handover.expected(rows[0], self.shape.phases)
        for phase, (found, row) in enumerate(zip(rows[1:], wanted, strict=True)):
            assert torch.equal(found, row), f"{self.shape}: row {phase} is {found.tolist()}, expected {row.tolist()}"


def per_phase_us(of_phases: dict[int, float]) -> float:
    """Return microseconds of a phase, from the times of graphs with two numbers of phases."""
    (few, short), (many, long) = sorted(of_phases.items())
    return (long - short) / (many - few)


def run_case(ctas: int, device: torch.device) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: rows are wrong, before or after the timing.
    """
    impl = implementation_of(device)
    chains = {(way, n): Chain(impl, Shape(way, ctas, VECTORS, n), device) for way in Way for n in PHASES}
    for chain in chains.values():
        chain.run()
        chain.check()
    calls = {f"{way.value} {n}": chain.calls() for (way, n), chain in chains.items()}
    timings = interleaved(calls, device, SECONDS)
    for chain in chains.values():
        chain.check()
    row: dict = {"ctas": ctas, "bytes_a_row": VECTORS * handover.VECTOR_BYTES}
    for way in Way:
        # `interleaved` divides by the number of calls.
        graphs = {n: timings[f"{way.value} {n}"].median_us * len(calls[f"{way.value} {n}"]) for n in PHASES}
        row[way.value] = round(per_phase_us(graphs), 3)
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctas", type=lambda text: [int(x) for x in text.split(",")], default=list(CTAS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    result = {"benchmark": "handover", "gpu": gpu_state(), "versions": versions(), "rows": []}
    for ctas in arguments.ctas:
        row = run_case(ctas, device)
        result["rows"].append(row)
        times = ", ".join(f"{way.value} {row[way.value]:.2f}" for way in Way)
        print(f"{ctas:4d} CTAs, us a phase: {times}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
