"""Calls of Hopper's experts, and their weights as the kernels read them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ops.experts_cases import Case, packed_experts
from ops.memory_layout import strided

from dsv4_kernels.moe.sm90 import weights as arrangement

CASES = {
    "few": Case(5),
    "one-token": Case(1, chosen=3),
    "several-tiles-of-one-expert": Case(70, chosen=1, one_expert=True, channels=256, multiprocessors=3),
    "k-longer-than-the-stages": Case(3, d=1280, channels=256, experts=2, multiprocessors=2),
    "uneven-tiles": Case(45, chosen=2, experts=2, multiprocessors=1),
    "other-ranks": Case(12, chosen=3, experts=2, offset=3, all_experts=7),
}


def shapes() -> dict[str, Any]:
    from dsv4_kernels.moe.sm90.plan import FEW, NARROW, PAIRED, WIDE

    return {"few": FEW, "narrow": NARROW, "paired": PAIRED, "wide": WIDE}


@functools.cache
def arranged(experts: int, d: int, channels: int) -> arrangement.HopperExperts:
    """Shifts and factors with gaps between experts, as where they lie in the memory of the scales."""

    def with_gaps(matrix: arrangement.HopperMatrix) -> arrangement.HopperMatrix:
        shifts, factors = strided(matrix.shifts.flatten(1), 1, 48), strided(matrix.factors, 1, 20)
        return matrix._replace(shifts=shifts.unflatten(1, matrix.shifts.shape[1:]), factors=factors)

    packed = packed_experts(experts, d, channels).for_hopper()
    return arrangement.HopperExperts(with_gaps(packed.w13), with_gaps(packed.w2))


@contextlib.contextmanager
def reading_ahead(device: Any) -> Iterator[None]:
    """Inside, the second product and the sum of few tokens may read weights and the work list before they wait.

    The emulator takes each launch for one that may overlap all earlier ones. The work list's has ended before the
    second product: the first product waits for it before it releases the second.
    """
    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import FewPlan, Product

    multiply, sum_rows = launch.multiply, launch.sum_rows

    def declared(plan: Any, listed: Any, codes: Any, scales: Any, weights: Any, limit: float = 0.0) -> Any:
        if isinstance(plan, FewPlan) and plan.product is Product.DOWN:
            for tensor in (*weights[:3], listed.source, listed.tiles, listed.totals):
                device.memory.constant(tensor)
        return multiply(plan, listed, codes, scales, weights, limit)

    def declared_sum(rows: Any, experts: Any, listed: Any, *arguments: Any, reads_ahead: bool = False) -> Any:
        for tensor in (experts, listed.slot_of_pair) if reads_ahead else ():
            device.memory.constant(tensor)
        return sum_rows(rows, experts, listed, *arguments, reads_ahead)

    with mock.patch.multiple(launch, multiply=declared, sum_rows=declared_sum):
        yield


@contextlib.contextmanager
def emulated_experts(**options: Any) -> Iterator[Any]:
    """An emulated device with `reading_ahead`."""
    from ptx_emulator import emulated

    with emulated(arch="sm_90a", **options) as device, reading_ahead(device):
        yield device


def shape_names() -> list[str]:
    """Shapes that take any number of tokens."""
    return [name for name in shapes() if name != "few"]


def listed_widths(case: Case, shape: str = "paired") -> list[int]:
    """Slots of the work tiles of a call, padding included."""
    from ptx_emulator import emulated

    from dsv4_kernels.moe.sm90 import launch

    _, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    with emulated(arch="sm_90a", multiprocessors=case.multiprocessors):
        least = launch.least_paired_tiles(packed, case.multiprocessors)
        listed = launch.list_work(weights, ids, case.experts, case.offset, shapes()[shape], least)
    return (8 * listed.tiles[: int(listed.totals[0]), 2]).tolist()


PAIRED = {
    "pairs-beyond-the-stages": Case(41, chosen=1, experts=2, d=1280, channels=256, one_expert=True, multiprocessors=1),
    "pairs-between-singles": Case(48, chosen=2, experts=3, d=512, channels=256, multiprocessors=1),
}
"""Tiles of more than 32 slots, whose steps use two stages, before and after tiles whose steps use one."""


WIDE_PAIRS = {
    "wide-pairs-beyond-the-stages": Case(
        170, chosen=1, experts=2, d=1280, channels=256, one_expert=True, multiprocessors=1
    ),
    "singles-between-wide-pairs": Case(169, chosen=2, experts=3, d=512, channels=256, multiprocessors=3),
}
"""The same for prefill: tiles of more than 112 slots."""
