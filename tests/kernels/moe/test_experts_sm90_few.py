"""Hopper's experts for so few tokens that one group holds an expert's slots, emulated: the bits of narrow work tiles.

Regimes: one token and as many as a group holds; experts of other ranks, with one slot, and with all; chunks of one step
and of four, fewer chunks than warpgroups and more; more steps than stages; more work tiles than CTAs; codes that a
launch before has made, and rows that are quantised on the way; weights and the work list read before the launch before
has ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.experts_cases import LIMIT, Case
from ops.hopper_experts import arranged, shapes
from ops.memory_layout import strided
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.moe import Mxfp4Experts, ref
from dsv4_kernels.quant import fp8_quantise

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

CASES = {
    "few": Case(5, d=512),
    "one-token": Case(1, chosen=3, multiprocessors=132),
    "a-full-group": Case(8, chosen=1, one_expert=True, channels=256),
    "all-chunks": Case(2, d=2048, channels=640, multiprocessors=2),
    "k-longer-than-the-stages": Case(3, d=5120, channels=128, experts=2, multiprocessors=3),
    "other-ranks": Case(7, chosen=3, experts=2, offset=3, all_experts=7, multiprocessors=1),
}
"""K of both products, in chunks: 1 x 4, 1; 1 x 2, 1; 1 x 2, 1 x 2; 4 x 4, 1 x 5; 4 x 10, 1; 1 x 2, 1."""


def launched(case: Case, shape: str, quantised: bool, **options: Any) -> tuple[Tensor, Any]:
    """(result, emulated device), of tokens that are quantised before or by the first product."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    codes, scales = fp8_quantise(x, 128, column_major=True)
    fp8 = strided(codes.view(torch.uint8), 1, 32).view(torch.float8_e4m3fn), strided(scales.T, 1, 3).T
    launch.hardware_multiprocessors.cache_clear()
    options = {"checks": Checks.strict(), "schedule": "random", **options}
    with emulated(arch="sm_90a", multiprocessors=case.multiprocessors, **options) as device:
        work = launch.plan_work(weights, ids, packed, case.offset, shapes()[shape])
        for constant in (*packed.w13[:3], *packed.w2[:3], work.listed.source, work.listed.tiles, work.listed.totals):
            device.memory.constant(constant)
        rows = launch.multiply_all(strided(x, 1, 24), work, packed, LIMIT, fp8 if quantised else None)
        out = launch.sum_products(rows, work, torch.float32, None)
    launch.hardware_multiprocessors.cache_clear()
    assert not any(report.warnings for report in device.reports)
    return out, device


@pytest.mark.parametrize("quantised", [True, False], ids=["codes", "rows"])
@pytest.mark.parametrize("name", [*CASES])
def test_the_bits_are_those_of_narrow_tiles(name: str, quantised: bool) -> None:
    case = CASES[name]
    expected, _ = launched(case, "narrow", quantised=False)
    out, device = launched(case, "few", quantised)
    assert same_bits(out, expected)
    assert len(device.reports) == 4
    x, weights, ids, packed = case.inputs()
    defined = ref.mxfp4_experts_forward(x, weights, ids, packed, LIMIT, case.offset)
    assert (out - defined).norm() <= 2.0**-9 * defined.norm()
