"""Counts of a call of the routed experts: its launches on Hopper and on Blackwell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from lib.experts_inputs import BYTES_A_WEIGHT, CHOSEN, Model, inputs
from lib.experts_sm90_static import step_bytes, widths

from dsv4_kernels.moe.sm90 import launch as hopper
from dsv4_kernels.moe.sm90.plan import FEW, HALF_CODE_BYTES, HALF_SHIFT_BYTES, Product, Shape, few_ctas, few_plan
from dsv4_kernels.moe.sm90.weights import STEP, TILE_ROWS
from dsv4_kernels.moe.workspace import EARLY_TOKENS
from step_model.hardware import Gpu
from step_model.launch import Launch
from step_model.products import ALONE_CLOCKS, BESIDE_CLOCKS

CONVERT_INSTRUCTIONS = 88
"""Integer instructions of a warp to convert 16 rows of a step (docs/log/decode_step.md)."""
WARPS_A_SCHEDULER = 2
"""Consumer warps of a CTA on a scheduler."""
PRODUCT_CLOCKS = 150
"""Clocks of four dependent `wgmma` of a step with few columns, and the wait for the last (docs/log/decode_step.md)."""
SLOT_CLOCKS = 5
"""Clocks of a column of a step: 128 rows and 128 channels on the tensor core take 4, its `fma` in fp32 1."""
SLOT_ISSUE = 1.25
"""Issue slots of a scheduler for a column of a step, for two warps of 16 rows each: half an `fma` of a warp, and an
eighth of a load of two scales (`add_scaled`)."""
WAIT_CLOCKS = 60
"""A wait for a stage and the release of it."""


@cache
def slots_of_experts(num_experts: int, tokens: int, routing: str, seed: int = 0) -> tuple[int, ...]:
    """Return the slots of each expert for the benchmark's routing (lib/experts_inputs.py)."""
    narrow = Model(num_experts, 1, 1)
    counts = (
        inputs(narrow, tokens, routing, seed, torch.device("cpu")).experts.flatten().bincount(minlength=num_experts)
    )
    return tuple(counts.tolist())


def calls(
    model: Model, slots: Sequence[int], tokens: int, gpu: Gpu, codes: bool = False, shape: Shape | None = None
) -> list[Launch]:
    """Return the launches of a call on Hopper (kernels/moe/sm90/launch.py).

    Args:
        model: dimensions on the rank.
        slots: of each expert.
        tokens: T.
        gpu: with its number of multiprocessors.
        codes: whether tokens come quantised.
        shape: of the work tiles; None chooses.
    """
    rows = 2 * model.channels // TILE_ROWS, model.d // TILE_ROWS
    shape = shape or hopper.shape_for(tokens, CHOSEN, model.experts, rows[0])
    pairs = sum(slots)
    weights = sum(1 for n in slots if n) * model.d * model.channels * BYTES_A_WEIGHT
    found = [work_list(pairs)]
    if shape is FEW:
        groups = sum(-(-n // 8) for n in slots)
        found += [
            few(Product.GATE_UP, groups, model.d, 2 * model.channels, 2 * weights, gpu),
            few(Product.DOWN, groups, model.channels, model.d, weights, gpu),
        ]
    else:
        steps = model.d // STEP, model.channels // STEP
        odd = any(n % 2 for n in steps)
        listed = widths(slots, shape, 10**9 if odd or not shape.paired else -(-gpu.multiprocessors // min(rows)))
        if not (codes and not shape.paired):
            found.append(row_launch("quantise", pairs * model.d * 3, 300))
        found.append(product("gate and up", listed, rows[0], steps[0], shape, 2 * weights, gpu))
        found.append(row_launch("quantise h", pairs * model.channels * 3, 300))
        found.append(product("down", listed, rows[1], steps[1], shape, weights, gpu))
    found.append(row_launch("sum of experts", (pairs + 2 * tokens) * model.d * 2, 250, loads=3))
    return found


def early(tokens: int) -> bool:
    """Return whether the launches of a call of so many tokens begin early."""
    return tokens <= EARLY_TOKENS


def work_list(pairs: int) -> Launch:
    """Return the counts of the launch that lists slots and work tiles: one CTA, three passes over the pairs.

    Not counted: the scattered stores, which held up the one CTA of a prefill for 100 us when the experts were measured,
    and the cluster that has shared them out since.
    """
    return Launch("work list", from_memory=0, from_l2=3, instructions=600 + 3 * 12 * (pairs // 512))


def row_launch(name: str, num_bytes: float, instructions: float, loads: int = 2) -> Launch:
    """Return the counts of a launch that copies or adds rows, mostly from L2."""
    return Launch(name, l2=num_bytes, from_memory=0, from_l2=loads, instructions=instructions, waves=9)


def product(
    name: str, listed: list[list[int]], row_tiles: int, steps: int, shape: Shape, weights: float, gpu: Gpu
) -> Launch:
    """Return the counts of one product, whose work tiles go round the CTAs in order (kernels/moe/sm90/kernel.py)."""
    in_order = torch.tensor([slots for of_expert in listed for _ in range(row_tiles) for slots in of_expert])
    ctas = min(shape.ctas_per_sm * gpu.multiprocessors, len(in_order))
    cta = torch.arange(len(in_order)) % ctas
    multiply = (SLOT_CLOCKS * in_order).clamp(min=PRODUCT_CLOCKS)
    convert = WARPS_A_SCHEDULER * CONVERT_INSTRUCTIONS
    issue = torch.zeros(len(in_order))
    if shape.ahead:  # the conversion of the next step runs beside the products
        alone = convert * BESIDE_CLOCKS + SLOT_CLOCKS * in_order
    else:
        alone = convert * ALONE_CLOCKS + multiply + WAIT_CLOCKS
        # The other CTA multiplies during a part of the conversion.
        beside = multiply / (multiply + convert * ALONE_CLOCKS)
        issue = convert * (ALONE_CLOCKS + beside * (BESIDE_CLOCKS - ALONE_CLOCKS)) + SLOT_ISSUE * in_order
    moved = sum_by(cta % gpu.multiprocessors, steps * step_bytes(in_order))
    together = min(shape.ctas_per_sm, -(-ctas // gpu.multiprocessors))
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=weights,
        waves=len(in_order) / ctas,
        l2=float(moved.sum()),
        busiest=float(moved.max()),
        in_flight=together * shape.stages * step_bytes(8),
        clocks={
            "issue": float(sum_by(cta % gpu.multiprocessors, steps * issue).max()),
            "step by step": float(sum_by(cta, steps * alone).max()),
        },
        chain=300,
        from_l2=4,
    )


def sum_by(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the values with the same index, fp64."""
    return torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(0, index, values.double())


def few(which: Product, groups: int, k: int, rows: int, weights: float, gpu: Gpu) -> Launch:
    """Return the counts of one product of few tokens: warpgroups share a tile's K (kernels/moe/sm90/few_kernel.py)."""
    plan = few_plan(which, k // STEP)
    tiles = groups * rows // (TILE_ROWS // 2)
    ctas = few_ctas(plan, tiles, gpu.multiprocessors)
    of_sm = -(-tiles // gpu.multiprocessors)
    steps = k // STEP
    a_step = HALF_CODE_BYTES + HALF_SHIFT_BYTES + 8 * (STEP + 4)
    convert = CONVERT_INSTRUCTIONS * ALONE_CLOCKS
    alone = steps / plan.splits * (convert + PRODUCT_CLOCKS + WAIT_CLOCKS)
    return Launch(
        f"few {which.name.lower()}",
        ctas=min(ctas, gpu.multiprocessors),
        memory=weights,
        l2=tiles * steps * a_step,
        busiest=of_sm * steps * a_step,
        in_flight=plan.stages * a_step * max(1, ctas // gpu.multiprocessors),
        clocks={"issue": of_sm * steps * convert, "step by step": of_sm * alone},
        chain=300,
        from_l2=2,
        ahead=1.0 if which is Product.DOWN else 0.0,
    )
