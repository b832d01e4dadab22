"""Blackwell's experts over NVFP4 weights and NVFP4 inputs (kind::mxf4nvf4), emulated, against their definition.

test_experts_sm100.py tests the main loop, the work list and the roles; these tests cover the operands, the factors of
an expert's matrices, and the quantiser of h.
"""

from __future__ import annotations

import pytest
import torch
from ops.early_launches import launched_early
from ops.experts_cases import LIMIT, Case, emulated_on, packed_nvfp4_experts
from ops.memory_layout import strided
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
        out = launch.nvfp4_experts_forward(strided(x, 1, 24), weights, ids, packed.tiled(), LIMIT, case.offset)
    assert len(device.reports) == 5 and not any(report.warnings for report in device.reports)
    return out


@pytest.mark.parametrize("width", [16, 512, 2064])
def test_tokens_are_encoded_as_defined(width: int) -> None:
    """All magnitudes from below the least scale to above the largest, ties between codes, zeros and rows with gaps."""
    from dsv4_kernels.moe.sm100 import nvfp4

    generator = torch.Generator().manual_seed(width)
    x = torch.randn(37, width, generator=generator) * torch.exp2(torch.arange(37.0) - 18)[:, None]
    codes = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6])
    x[0], x[1] = 0, codes.repeat(width // 16) * (2.0**-9 * 8)
    x[20] = codes.repeat(width // 16)
    x = strided(x.bfloat16(), 2, 24)
    factor = torch.tensor(0.125)
    with emulated_on(4) as device:
        found = nvfp4.quantise(x, factor, "sm_100a")
    assert not device.reports[0].warnings
    for made, wanted in zip(found, encode_nvfp4(x, factor), strict=True):
        assert same_bits(made, wanted)


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
    tiled = packed.tiled()
    with emulated_on(case.multiprocessors, schedule="random", seed=3):
        work = launch.plan_work(weights, ids, tiled)
        hidden, scales = made = launch.hidden_rows(launch.quantise(x, tiled), tiled, work, LIMIT)
        rows = launch.output_rows(made, tiled, work)
    listed = work.listed
    values = dequantise_nvfp4_weight(*encode_nvfp4(x, packed.w13_input), packed.w13_input, torch.float32).double()
    stored = dequantise_nvfp4_weight(hidden, scales, packed.w2_input, torch.float32)
    for expert, first, groups in listed.tiles[: int(listed.totals[0]), :3].tolist():
        slots = torch.arange(8 * first, 8 * (first + groups))
        slots = slots[listed.source[slots] >= 0]
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
    tiled = packed.tiled()
    with emulated_on(4):
        out = launch.nvfp4_experts_forward(large, weights, ids, tiled, LIMIT, 0)
        work = launch.plan_work(weights, ids, tiled)
        hidden, scales = launch.hidden_rows(launch.quantise(large, tiled), tiled, work, LIMIT)
    slots, listed = 8 * int(work.listed.totals[1]), work.listed
    hidden, scales = hidden[:slots], scales[:slots]
    expected = ref.nvfp4_experts_forward(large, weights, ids, packed, LIMIT, 0)
    assert out.isfinite().all() and (out - expected).norm() <= 2.0**-8 * expected.norm() and not out[0].any()
    assert scales.view(torch.uint8).max() >= 0x78 and not hidden[listed.source[:slots] <= 0].bitwise_and(0x77).any()


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


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 64, 300, 4096])
def test_a_blackwell_gpu_makes_the_sum(tokens: int) -> None:
    """Flash's shapes with fewer experts: a token has the same bits alone, in a batch and in a replayed graph."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs a Blackwell GPU of data centres (sm_100a)")
    x, weights, ids, packed = inputs(Case(tokens, chosen=6, experts=8, d=4096, channels=2048))
    x, weights, ids = x.cuda(), weights.cuda(), ids.cuda()
    packed = Nvfp4Experts(**{name: part.cuda() for name, part in vars(packed).items() if isinstance(part, Tensor)})
    tiled = packed.tiled().with_factors()

    def run(rows: slice) -> Tensor:
        return moe.nvfp4_experts_forward(x[rows], weights[rows], ids[rows], tiled, LIMIT, impl="sm100")

    out = run(slice(None))
    few = slice(0, min(tokens, 64))
    expected = moe.nvfp4_experts_forward(x[few], weights[few], ids[few], packed, LIMIT, impl="ref")
    assert (out[few] - expected).norm() <= 2.0**-7 * expected.norm()
    assert same_bits(run(slice(tokens - 1, tokens)), out[-1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(slice(None))
    graph.replay()
    assert same_bits(again, out)
