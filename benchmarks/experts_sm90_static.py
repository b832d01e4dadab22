"""What a call of Hopper's experts moves, and about how long that takes, counted from its work list: needs no GPU.

    python benchmarks/experts_sm90_static.py [--models flash] [--slices 1] [--routing six,zipf] [--tokens 64,128]

For each shape of work tiles ("taken": what `launch.shape_for` takes): work tiles of both products, the most that one
multiprocessor gets, the bytes that it reads for them (codes, scales and slots, by way of L2), and microseconds:

    FIXED_US + the sum over both products of the slowest multiprocessor's time, or of DRAM's if that is longer

A multiprocessor's CTAs take their tiles in the order of the list. Of two that run side by side a step takes what their
bytes take (L2_BYTES_US), or what one step of a CTA takes by itself (STEP_US, STEP_SLOT_US), whichever is longer. These
constants were fitted to a run of narrow tiles; beside a case that was measured by shape of work tiles (see
`results/experts_h200.json`) the measured time is printed. Narrow tiles are within 6 % of it; pairs took up to 13 %
longer than estimated. Wide ones take less: their constants and measured times are of steps that convert no codes ahead
(`results/experts_prefill_h200.json` has newer times). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_experts import BYTES_A_WEIGHT, MODELS, Model, inputs

from dsv4_kernels.moe.sm90 import launch
from dsv4_kernels.moe.sm90.plan import NARROW, PAIRED, WIDE, Shape
from dsv4_kernels.moe.sm90.weights import CODE_BYTES, SHIFT_BYTES, STEP, TILE_ROWS
from dsv4_kernels.moe.sm90.workspace import GROUP

RESULTS = Path(__file__).resolve().parent / "results" / "experts_h200.json"
SHAPES = {"narrow": NARROW, "paired": PAIRED, "wide": WIDE}
MULTIPROCESSORS = 132
FIXED_US = 22.0
"""Six launches, one after the other, each with the latency of its first loads."""
L2_BYTES_US = 38_900.0
"""To one multiprocessor while all of them ask."""
STEP_US, STEP_SLOT_US = 0.52, 0.003
"""A CTA's step by itself: conversion, products and sums one after the other, and so much for each column."""
DRAM_BYTES_US = 4.238e6


@dataclass(frozen=True)
class Estimate:
    """Of one call."""

    tiles: int
    most_tiles: int
    most_bytes: int
    us: float


def widths(slots_of_expert: Sequence[int], shape: Shape, least_paired: int) -> list[list[int]]:
    """Slots of each expert's work tiles, as `work_list` divides them."""
    groups = [-(-slots // GROUP) for slots in slots_of_expert if slots]
    paired = sum(-(-n * GROUP // shape.slots) for n in groups) >= least_paired
    room = (shape.slots if paired else shape.room) // GROUP
    found = []
    for n in groups:
        tiles = -(-n // room)
        found.append([GROUP * (n // tiles + (i < n % tiles)) for i in range(tiles)])
    return found


def step_bytes(slots: int) -> int:
    """That a work tile of so many slots reads a step."""
    return CODE_BYTES + SHIFT_BYTES + slots * (STEP + 4)


def one_after_the_other(tiles: list[list[int]], steps: int) -> float:
    """Microseconds of a multiprocessor whose CTAs have these tiles, each a list of widths."""
    left = [[(slots, float(steps)) for slots in of_cta] for of_cta in tiles]
    us = 0.0
    while running := [of_cta for of_cta in left if of_cta]:
        widths_now = [of_cta[0][0] for of_cta in running]
        a_step = max(
            sum(map(step_bytes, widths_now)) / L2_BYTES_US, *(STEP_US + STEP_SLOT_US * slots for slots in widths_now)
        )
        passed = min(of_cta[0][1] for of_cta in running)
        us += passed * a_step
        for of_cta in running:
            slots, steps_left = of_cta.pop(0)
            if steps_left > passed:
                of_cta.insert(0, (slots, steps_left - passed))
    return us


def estimate(slots_of_expert: Sequence[int], model: Model, shape: Shape) -> Estimate:
    """Of a call whose experts have so many slots."""
    rows = 2 * model.channels // TILE_ROWS, model.d // TILE_ROWS
    steps = model.d // STEP, model.channels // STEP
    odd = any(n % 2 for n in steps)
    listed = widths(slots_of_expert, shape, 10**9 if odd else -(-MULTIPROCESSORS // min(rows)))
    weights = sum(1 for slots in slots_of_expert if slots) * model.d * model.channels * BYTES_A_WEIGHT
    tiles = most_tiles = most_bytes = 0
    us = FIXED_US
    for row_tiles, of_product, matrices in zip(rows, steps, (2, 1), strict=True):
        in_order = [slots for of_expert in listed for _ in range(row_tiles) for slots in of_expert]
        ctas = min(shape.ctas_per_sm * MULTIPROCESSORS, len(in_order))
        of_ctas = [in_order[cta::ctas] for cta in range(ctas)]
        of_multiprocessors = [of_ctas[i::MULTIPROCESSORS] for i in range(min(MULTIPROCESSORS, ctas))]
        tiles += len(in_order)
        most_tiles += max(sum(map(len, of_one)) for of_one in of_multiprocessors)
        most_bytes += max(
            of_product * sum(step_bytes(slots) for of_cta in of_one for slots in of_cta)
            for of_one in of_multiprocessors
        )
        slowest = max(one_after_the_other(of_one, of_product) for of_one in of_multiprocessors)
        us += max(slowest, matrices * weights / DRAM_BYTES_US)
    return Estimate(tiles, most_tiles, most_bytes, us)


def measured_us() -> dict[tuple[str, str], float]:
    """By case and shape of work tiles, launches one after the other."""
    cases = json.loads(RESULTS.read_text())["by_shape"]
    return {(case["name"], shape): case[f"ours_by_{shape}_us"] for case in cases for shape in SHAPES}


def main() -> None:
    """Prints the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="flash")
    parser.add_argument("--slices", default="1")
    parser.add_argument("--routing", default="six,zipf,uniform")
    parser.add_argument("--tokens", default="16,64,128,256,1024")
    options = parser.parse_args()
    measured, rows = measured_us(), []
    print(f"{'case':24} {'shape':8} {'tiles':>7} {'most':>5} {'KB':>7} {'us':>8} {'measured':>9}")
    for name in options.models.split(","):
        for ranks in map(int, options.slices.split(",")):
            model = Model(MODELS[name].experts, MODELS[name].d, MODELS[name].channels // ranks)
            for routing in options.routing.split(","):
                for tokens in map(int, options.tokens.split(",")):
                    ids = inputs(model, tokens, routing, 0, torch.device("cpu")).experts
                    slots = torch.bincount(ids.flatten(), minlength=model.experts).tolist()
                    taken = launch.shape_for(*ids.shape, model.experts)
                    case = f"{name}{'' if ranks == 1 else f'-tp{ranks}'}-{routing}-t{tokens}"
                    for shape_name, shape in SHAPES.items():
                        found = estimate(slots, model, shape)
                        rows.append({"case": case, "shape": shape_name, "taken": shape is taken, **vars(found)})
                        us = f"{measured[case, shape_name]:9.1f}" if (case, shape_name) in measured else f"{'':9}"
                        print(
                            f"{case:24} {shape_name:8} {found.tiles:7} {found.most_tiles:5} "
                            f"{found.most_bytes / 1e3:7,.0f} {found.us:8.1f} {us}{' taken' if shape is taken else ''}"
                        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
