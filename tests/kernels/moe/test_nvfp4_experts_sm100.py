"""Blackwell's experts over NVFP4 weights and NVFP4 inputs (kind::mxf4nvf4), emulated, against their definition.

test_experts_sm100.py tests the main loop, the work list and the roles; these tests cover the operands, the factors of
an expert's matrices, and the quantiser of h.
"""

from __future__ import annotations

import functools

import pytest
import torch
from ops.experts_cases import LIMIT, Case, emulated_on
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels import moe, registry
from dsv4_kernels.moe import Nvfp4Experts, ref
from dsv4_kernels.number_formats import dequantise_nvfp4_weight, encode_nvfp4, quantise_nvfp4_weight

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


@functools.cache
def packed_experts(experts: int, d: int, channels: int) -> Nvfp4Experts:
    generator = torch.Generator().manual_seed(d + channels)

    def matrix(rows: int, columns: int, gain: float) -> list[Tensor]:
        spread = torch.exp2(torch.randint(-3, 4, (experts, rows, columns // 16), generator=generator))
        weights = torch.randn(experts, rows, columns, generator=generator) * spread.repeat_interleave(16, 2)
        made = [quantise_nvfp4_weight(weight * (gain * (1 + i) / columns**0.5)) for i, weight in enumerate(weights)]
        return [torch.stack([parts[i] for parts in made]) for i in range(3)]

    w1, w1_scale, w1_global = matrix(channels, d, 1.0)
    w3, w3_scale, w3_global = matrix(channels, d, 2.0)  # another global scale than w1's
    w2, w2_scale, w2_global = matrix(d, channels, 1.0)
    w13, w13_scale = torch.cat((w1, w3), 1), torch.cat((w1_scale.view(torch.uint8), w3_scale.view(torch.uint8)), 1)
    w13_global = torch.stack((w1_global, w3_global), 1)
    inputs = torch.tensor(5.0) / 2688, torch.tensor(90.0) / 2688
    return Nvfp4Experts(
        w13, w13_scale.view(torch.float8_e4m3fn), w13_global, inputs[0], w2, w2_scale, w2_global, inputs[1]
    )


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Nvfp4Experts]:
    x, weights, ids, _ = case.inputs()
    return x, weights, ids, packed_experts(case.experts, case.d, case.channels)


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
        launch.nvfp4_experts_forward(x[:, :384], weights, ids, packed_experts(3, 384, 256).tiled(), LIMIT, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert registry.chosen("nvfp4_experts_forward", torch.device("cuda"), torch.bfloat16).name == "ref"
