"""Blackwell's experts over NVFP4 weights and NVFP4 inputs (kind::mxf4nvf4), emulated, against their definition.

test_experts_sm100.py tests the main loop, the work list and the roles; these tests cover the operands, the factors of
an expert's matrices, and the quantiser of h.
"""

from __future__ import annotations

import pytest
import torch
from ops.early_launches import launched_early
from ops.experts_cases import LIMIT, Case, emulated_on, packed_nvfp4_experts
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels import moe, registry
from dsv4_kernels.moe import Nvfp4Experts, ref
from dsv4_kernels.number_formats import dequantise_nvfp4_weight, encode_nvfp4

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

CASES = {
    "few": Case(5, d=512, channels=256),
    "several-tiles-of-one-expert": Case(20, chosen=1, one_expert=True, d=256, channels=256, multiprocessors=2),
    "k-longer-than-the-stages": Case(2, d=2048, channels=256, experts=2, multiprocessors=1),
    "other-ranks": Case(7, chosen=3, experts=2, offset=3, all_experts=7, d=256, channels=256),
}
SLOW = {
    "tiles-of-32": Case(40, experts=4, d=512, channels=512),
    "tiles-of-96": Case(150, experts=3, d=256, channels=256),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Nvfp4Experts]:
    x, weights, ids, _ = case.inputs()
    return x, weights, ids, packed_nvfp4_experts(case.experts, case.d, case.channels)


def launched(case: Case, **options: object) -> Tensor:
    from dsv4_kernels.moe.sm100 import launch

    x, weights, ids, packed = inputs(case)
    with emulated_on(case.multiprocessors, **options) as device:
        out = launch.nvfp4_experts_forward(x, weights, ids, packed.tiled(), LIMIT, case.offset)
    assert len(device.reports) == 2 and not any(report.warnings for report in device.reports)
    return out


ALL = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("name", ALL)
def test_the_sum_is_the_definition_s(name: str) -> None:
    from ptx_emulator import Checks

    case = (CASES | SLOW)[name]
    x, weights, ids, packed = inputs(case)
    expected = ref.nvfp4_experts_forward(x, weights, ids, packed, LIMIT, case.offset)
    out = launched(case, schedule="late", checks=Checks.strict())
    assert (out - expected).norm() <= 2.0**-8 * expected.norm()
    assert expected.norm() > 0 and not out[0].any()  # a token of zeros


@pytest.mark.parametrize("name", ["few", "k-longer-than-the-stages"])
def test_both_products_are_right(name: str) -> None:
    """Codes of h, and output rows up to a rounding to bf16, each computed from the kernel's own input."""
    from dsv4_kernels.moe.sm100 import launch

    case = CASES[name]
    x, weights, ids, packed = inputs(case)
    listed = launch.work_list(weights, ids, case.experts, 0, 16)
    with emulated_on(case.multiprocessors, schedule="random", seed=3):
        hidden, scales = launch.nvfp4_hidden_rows(x, packed.tiled(), listed, LIMIT, 16)
        rows = launch.nvfp4_output_rows(hidden, scales, packed.tiled(), listed, 16)
    values = dequantise_nvfp4_weight(*encode_nvfp4(x, packed.w13_input), packed.w13_input, torch.float32).double()
    stored = dequantise_nvfp4_weight(hidden, scales, packed.w2_input, torch.float32)
    for tile in range(int(listed.num_tiles)):
        expert, first = int(listed.tile_expert[tile]), int(listed.tile_first[tile])
        slots = slice(first, first + int(listed.tile_count[tile]))
        of_halves = packed.w13[expert].chunk(2), packed.w13_scale[expert].chunk(2), packed.w13_global[expert]
        halves = zip(*of_halves, strict=True)
        gate, up = (
            (values[listed.source[slots].long()] @ dequantise_nvfp4_weight(*half, torch.float64).T).bfloat16().float()
            for half in halves
        )
        wanted = (listed.routing[slots, None] * ref.swiglu(gate, up, LIMIT)).bfloat16()
        codes, wanted_scales = encode_nvfp4(wanted, packed.w2_input)
        assert (wanted_scales.view(torch.uint8) != scales[slots].view(torch.uint8)).double().mean() <= 0.01
        assert (codes != hidden[slots]).double().mean() <= 0.01
        of_w2 = packed.w2[expert], packed.w2_scale[expert], packed.w2_global[expert]
        w2 = dequantise_nvfp4_weight(*of_w2, torch.float64)
        exact = stored[slots].double() @ w2.T
        bound = 2.0**-8 * exact.abs() + case.channels * 2.0**-22 * (stored[slots].double().abs() @ w2.abs().T)
        assert ((rows[slots].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("schedule", ["random", "random_warps"])
def test_bits_depend_on_neither_schedule_nor_batch(schedule: str) -> None:
    from dsv4_kernels.moe.sm100 import launch

    case = CASES["few"]
    x, weights, ids, packed = inputs(case)
    expected = launched(case, schedule="eager")
    assert same_bits(launched(case, schedule=schedule, seed=2), expected)
    with emulated_on(1):
        alone = launch.nvfp4_experts_forward(x[3:4], weights[3:4], ids[3:4], packed.tiled(), LIMIT, 0)
    assert same_bits(alone, expected[3:4])


def test_it_may_begin_early() -> None:
    with launched_early():
        test_the_sum_is_the_definition_s("few")


def test_h_of_zeros_and_of_large_numbers() -> None:
    """A token of zeros gives zeros; gates and ups of thousands are clamped, so h is the definition's, with the largest
    codes and scales."""
    from dsv4_kernels.moe.sm100 import launch

    case = CASES["few"]
    x, weights, ids, packed = inputs(case)
    large = (x.float() * 2.0**12).bfloat16()
    listed = launch.work_list(weights, ids, case.experts, 0, 16)
    with emulated_on(4):
        out = launch.nvfp4_experts_forward(large, weights, ids, packed.tiled(), LIMIT, 0)
        hidden, scales = launch.nvfp4_hidden_rows(large, packed.tiled(), listed, LIMIT, 16)
    expected = ref.nvfp4_experts_forward(large, weights, ids, packed, LIMIT, 0)
    assert out.isfinite().all() and (out - expected).norm() <= 2.0**-8 * expected.norm() and not out[0].any()
    assert scales.view(torch.uint8).max() >= 0x78 and not hidden[listed.source == 0].bitwise_and(0x77).any()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_kernels.moe.sm100 import launch

    x, weights, ids, packed = inputs(CASES["few"])
    with pytest.raises(ValueError, match=r"call Nvfp4Experts\.tiled"):
        launch.nvfp4_experts_forward(x, weights, ids, packed, LIMIT, 0)
    with pytest.raises(ValueError, match="as stored, not in tiles"):
        moe.nvfp4_experts_forward(x, weights, ids, packed.tiled(), LIMIT)
    with pytest.raises(ValueError, match=r"nvfp4_experts_forward: x is \(5, 128\); expected \[T, 512\]"):
        moe.nvfp4_experts_forward(x[:, :128], weights, ids, packed, LIMIT)
    with pytest.raises(ValueError, match="multiples of 256"):
        launch.nvfp4_experts_forward(x[:, :384], weights, ids, packed_nvfp4_experts(3, 384, 256).tiled(), LIMIT, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert registry.chosen("nvfp4_experts_forward", torch.device("cuda"), torch.bfloat16).name == "ref"
