"""Hopper's experts whose first product gathers the tokens' codes: the bits of codes that a launch has arranged.

Regimes: one token and many, slots that pad, experts of other ranks, more steps than stages, work tiles of several
widths, more work tiles than CTAs; rows of codes with gaps, scales by columns; all schedules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.experts_cases import LIMIT, Case
from ops.hopper_experts import CASES, arranged, shapes
from ops.memory_layout import strided
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host.strides import check_codes
from dsv4_kernels.moe import Mxfp4Experts
from dsv4_kernels.quant import fp8_quantise

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def gathered(case: Case, quantised: bool, **options: object) -> tuple[Tensor, Any]:
    """(result with NARROW work tiles, emulated device), of tokens that are quantised before or by a launch here."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    codes, scales = fp8_quantise(x, 128, column_major=True)
    fp8 = strided(codes.view(torch.uint8), 1, 32).view(torch.float8_e4m3fn), strided(scales.T, 1, 3).T
    launch.hardware_multiprocessors.cache_clear()
    options = {"checks": Checks.strict(), "schedule": "random", **options}
    with emulated(arch="sm_90a", multiprocessors=case.multiprocessors, **options) as device:
        work = launch.plan_work(weights, ids, packed, case.offset, shapes()["narrow"])
        rows = launch.multiply_all(strided(x, 1, 24), work, packed, LIMIT, fp8 if quantised else None)
        out = launch.sum_products(rows, work, torch.float32, None)
    launch.hardware_multiprocessors.cache_clear()
    assert len(device.reports) == 6 - quantised and not any(report.warnings for report in device.reports)
    return out, device


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("few", "random"),
        *(pytest.param(name, "late", marks=pytest.mark.slow) for name in CASES),
        *(pytest.param("few", schedule, marks=pytest.mark.slow) for schedule in ("eager", "random_warps")),
    ],
)
def test_gathered_tokens_give_the_bits_of_arranged_ones(name: str, schedule: str) -> None:
    with dependent_launch.switched(True):
        expected, _ = gathered(CASES[name], quantised=False)
        assert same_bits(gathered(CASES[name], quantised=True, schedule=schedule)[0], expected)


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
def test_deleted_synchronisation_of_a_gather_is_noticed() -> None:
    """The fence that is not noticed is explained in emulator/results/mutation_reasons.json."""
    case = replace(CASES["k-longer-than-the-stages"], tokens=7, channels=384)
    _, device = gathered(case, quantised=True, schedule="late", record=True)
    rates = delete_synchronisation("experts_sm90_gate_up_gathering", device, 1)
    assert rates.pop("fence") == 2 / 3 and set(rates.values()) == {1}, rates


def test_codes_that_cannot_be_gathered() -> None:
    codes = torch.zeros(2, 264, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for wrong in (codes[:, :256], codes[:, :256].T, codes):
        with pytest.raises(ValueError, match=r"codes of tokens must be \[T, 256\] with contiguous channels"):
            check_codes("codes of tokens", wrong, 256)
    check_codes("codes of tokens", codes[:1, :256], 256)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 300])
def test_a_hopper_gpu_gathers(tokens: int) -> None:
    """Flash's shapes with fewer experts; a read before its wait, or of codes that have not come, is only sometimes
    wrong."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU (sm_90a)")
    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, packed = Case(tokens, chosen=6, experts=16, d=4096, channels=512).inputs()
    x, weights, ids = x.cuda(), weights.cuda(), ids.cuda()
    packed = Mxfp4Experts(*(matrix.cuda() for matrix in (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)))
    hopper = packed.for_hopper()
    expected = launch.experts_forward(x, weights, ids, hopper, LIMIT)
    with dependent_launch.switched(True):
        for _ in range(50):
            work = launch.plan_work(weights, ids, hopper, shape=shapes()["narrow"])
            codes = fp8_quantise(x, 128, column_major=True)
            rows = launch.multiply_all(x, work, hopper, LIMIT, codes)
            assert same_bits(launch.sum_products(rows, work, torch.float32, None), expected)
