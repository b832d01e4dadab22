"""Bytes and estimated time of a call of Hopper's experts, counted from its work list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4_kernels.moe.sm90.plan import NARROW, PAIRED, WIDE, Shape
from dsv4_kernels.moe.sm90.weights import CODE_BYTES, SHIFT_BYTES, STEP, TILE_ROWS
from dsv4_kernels.moe.workspace import GROUP
from lib.experts_inputs import BYTES_A_WEIGHT, Model

RESULTS = Path(__file__).resolve().parents[1] / "results" / "experts_h200.json"
SHAPES = {"narrow": NARROW, "paired": PAIRED, "wide": WIDE}
MULTIPROCESSORS = 132
FIXED_US = 22.0
"""Six launches, one after the other, each with the latency of its first loads."""
L2_BYTES_US = 38_900.0
"""Bytes a microsecond from L2 to one multiprocessor while all of them read."""
STEP_US, STEP_SLOT_US = 0.52, 0.003
"""Microseconds of a CTA's step alone (conversion, products and sums in sequence), and of each column of it."""
DRAM_BYTES_US = 4.238e6


@dataclass(frozen=True)
class Estimate:
    """Estimate of one call."""

    tiles: int
    most_tiles: int
    most_bytes: int
    us: float


def widths(slots_of_expert: Sequence[int], shape: Shape, least_paired: int) -> list[list[int]]:
    """Return the slots of each expert's work tiles, as `work_list` divides them."""
    groups = [-(-slots // GROUP) for slots in slots_of_expert if slots]
    paired = sum(-(-n * GROUP // shape.slots) for n in groups) >= least_paired
    room = (shape.slots if paired else shape.room) // GROUP
    found = []
    for n in groups:
        tiles = -(-n // room)
        found.append([GROUP * (n // tiles + (i < n % tiles)) for i in range(tiles)])
    return found


def step_bytes(slots: int) -> int:
    """Return the bytes that a work tile of `slots` slots reads in one step."""
    return CODE_BYTES + SHIFT_BYTES + slots * (STEP + 4)


def one_after_the_other(tiles: list[list[int]], steps: int) -> float:
    """Return the microseconds of a multiprocessor that computes these tiles: for each CTA a list of widths."""
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
    """Return the estimate for a call whose experts have these numbers of slots."""
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
    """Return measured microseconds by (case, shape of work tiles), with launches one after the other."""
    cases = json.loads(RESULTS.read_text())["by_shape"]
    return {(case["name"], shape): case[f"ours_by_{shape}_us"] for case in cases for shape in SHAPES}
