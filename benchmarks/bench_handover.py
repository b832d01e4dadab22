"""Times of handing a row to the next phase: by a launch, or inside of a kernel whose CTAs stay.

    python benchmarks/bench_handover.py [--ctas 16,64,128] [--impl sm90] [--out FILE.json]

A decode step of one request is a chain of some 600 launches whose bytes take less time than the way from one launch to
the next. A kernel that stays resident for a layer would pay another price: its CTAs wait for each other's results in
global memory. `lib/handover.py` is that chain without arithmetic: every CTA reads a row of 8 KB, the latents of a token
of V4-Flash, and writes its share of the next one.

    launches   each phase is a launch that begins early, as in our graphs
    ahead      the same, but a phase takes the words of the row before it waits for the launch before
    counters   one launch; a counter for each phase, by release and acquire
    words      one launch; each word says itself that it has arrived, as in our sums over ranks

Results are compared with the definition first. Then graphs with PHASES phases are replayed in turns; the difference of
their times is that of the phases alone. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from lib import handover
from lib.handover import Shape, Way
from lib.measuring import gpu_state, interleaved
from lib.versions import versions
from torch import Tensor

from dsv4_kernels.device.peer_words import EMPTY

CTAS = (16, 64, 128)
VECTORS = 512
PHASES = (64, 256)
SECONDS = 2.0


def rows_and_counters(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows before the first phase, with random numbers in row 0, and the counters."""
    rows = torch.full((shape.phases + 1, shape.vectors, 4), EMPTY - (1 << 32), dtype=torch.int32)
    rows[0] = torch.randint(0, handover.MASK, rows[0].shape, generator=torch.Generator().manual_seed(shape.ctas))
    return rows.to(device), torch.zeros(shape.phases, dtype=torch.int32, device=device)


def check(impl: str, shape: Shape, device: torch.device) -> None:
    """Compare all rows with the definition.

    Raises:
        AssertionError: a row differs.
    """
    rows, counters = rows_and_counters(shape, device)
    first = rows[0].cpu()
    handover.run(impl, shape, rows, counters)
    assert torch.equal(rows[1:].cpu(), handover.expected(first, shape.phases)), f"{shape}: rows are wrong"


def calls_of(impl: str, shape: Shape, device: torch.device) -> list:
    """Return the calls of a graph: empty rows and counters, then all phases."""
    rows, counters = rows_and_counters(shape, device)
    return [
        lambda: rows[1:].fill_(EMPTY - (1 << 32)),
        counters.zero_,
        lambda: handover.run(impl, shape, rows, counters),
    ]


def per_phase_us(of_phases: dict[int, float]) -> float:
    """Return microseconds of a phase, from the times of graphs with two numbers of phases."""
    (few, short), (many, long) = sorted(of_phases.items())
    return (long - short) / (many - few)


def run_case(impl: str, ctas: int, device: torch.device) -> dict:
    """Return one row of the result."""
    shapes = {(way, phases): Shape(way, ctas, VECTORS, phases) for way in Way for phases in PHASES}
    for shape in shapes.values():
        check(impl, shape, device)
    contenders = {f"{way.value} {phases}": calls_of(impl, shape, device) for (way, phases), shape in shapes.items()}
    timings = interleaved(contenders, device, SECONDS)
    row: dict = {"ctas": ctas, "bytes_a_row": VECTORS * handover.VECTOR_BYTES}
    for way in Way:
        # `interleaved` divides by the number of calls.
        graphs = {p: timings[f"{way.value} {p}"].median_us * len(contenders[f"{way.value} {p}"]) for p in PHASES}
        row[way.value] = round(per_phase_us(graphs), 3)
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctas", type=lambda text: [int(x) for x in text.split(",")], default=list(CTAS))
    parser.add_argument("--impl", default="sm90", choices=("sm90", "sm100"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    result = {"benchmark": "handover", "gpu": gpu_state(), "versions": versions(), "rows": []}
    for ctas in arguments.ctas:
        row = run_case(arguments.impl, ctas, device)
        result["rows"].append(row)
        print(
            f"{ctas:4d} CTAs, us a phase: " + ", ".join(f"{way.value} {row[way.value]:.2f}" for way in Way), flush=True
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
