"""Hopper's experts for few tokens, a group of slots in each work tile, emulated: the bits of narrow work tiles.

Regimes: one token, and more of one expert than a group holds; experts of other ranks, with one slot, and with all;
chunks of one step and of two, fewer chunks than warpgroups and more; more steps than stages; more work tiles than CTAs;
codes that a launch before has made, and rows that are quantised on the way; weights and the work list read before the
launch before has ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import launched_early
from ops.experts_cases import LIMIT, Case
from ops.hopper_experts import arranged, emulated_experts, shapes
from ops.memory_layout import strided
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.moe import Mxfp4Experts, ref
from dsv4_kernels.quant import fp8_quantise

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

CASES = {
    "few": Case(5, d=1024),
    "one-token": Case(1, chosen=3, d=1024, multiprocessors=132),
    "several-groups-of-an-expert": Case(19, chosen=1, d=1024, one_expert=True),
    "other-ranks": Case(7, chosen=3, experts=2, d=1024, offset=3, all_experts=7, multiprocessors=1),
    "chunks-of-one-step": Case(3, d=256, channels=256),
    "all-warpgroups-twice": Case(2, d=2048, channels=640, multiprocessors=2),
    "k-longer-than-the-stages": Case(3, d=5120, channels=128, experts=2, multiprocessors=3),
}


def launched(case: Case, shape: str, quantised: bool, **options: Any) -> tuple[Tensor, Any]:
    """(result, emulated device), of tokens that are quantised before or by the first product."""
    from ptx_emulator import Checks

    from dsv4_kernels.moe.sm90 import launch

    x, weights, ids, _ = case.inputs()
    packed = arranged(case.experts, case.d, case.channels)
    codes, scales = fp8_quantise(x, 128, column_major=True)
    fp8 = strided(codes.view(torch.uint8), 1, 32).view(torch.float8_e4m3fn), strided(scales.T, 1, 3).T
    launch.hardware_multiprocessors.cache_clear()
    options = {"checks": Checks.strict(), "schedule": "random", **options}
    with emulated_experts(multiprocessors=case.multiprocessors, **options) as device:
        work = launch.plan_work(weights, ids, packed, case.offset, shapes()[shape])
        rows = launch.multiply_all(strided(x, 1, 24), work, packed, LIMIT, fp8 if quantised else None)
        out = launch.sum_products(rows, work, torch.float32, None)
    launch.hardware_multiprocessors.cache_clear()
    assert not any(report.warnings for report in device.reports)
    return out, device


QUICK = "few", "one-token", "several-groups-of-an-expert", "other-ranks"


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        pytest.param(name, quantised, marks=() if quantised and name in QUICK else pytest.mark.slow)
        for name in CASES
        for quantised in (True, False)
    ],
)
def test_the_bits_are_those_of_narrow_tiles(name: str, quantised: bool) -> None:
    case = CASES[name]
    expected, _ = launched(case, "narrow", quantised=False)
    out, device = launched(case, "few", quantised)
    assert same_bits(out, expected)
    assert len(device.reports) == 4
    x, weights, ids, packed = case.inputs()
    defined = ref.mxfp4_experts_forward(x, weights, ids, packed, LIMIT, case.offset)
    assert (out - defined).norm() <= 2.0**-9 * defined.norm()


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("few", "late"),
        *(pytest.param("few", schedule, marks=pytest.mark.slow) for schedule in ("eager", "random_warps")),
        *(
            pytest.param(name, schedule, marks=pytest.mark.slow)
            for name in ("all-warpgroups-twice", "k-longer-than-the-stages", "other-ranks")
            for schedule in ("late", "random_warps")
        ),
    ],
)
def test_bits_do_not_depend_on_the_schedule(name: str, schedule: str) -> None:
    expected, _ = launched(CASES[name], "few", quantised=True, schedule="eager")
    assert same_bits(launched(CASES[name], "few", quantised=True, schedule=schedule, seed=3)[0], expected)


def test_the_second_product_and_the_sum_read_ahead() -> None:
    """The first product waits before it reads anything: the work list is of the launch before it."""
    ahead = {"experts_sm90_few_down": ("LDG",) * 5, "experts_sum": ("LDG",) * 4}
    with launched_early(read_ahead=ahead):
        launched(CASES["few"], "few", quantised=True)


@pytest.mark.slow
def test_ctas_of_both_products_fit_a_multiprocessor_together() -> None:
    """Registers are of four partitions of a multiprocessor; warp i of a CTA runs in partition i % 4."""
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.moe.sm90 import launch

    with emulated(arch="sm_90a"):
        for hidden_size in (4096, 7168):
            plans = launch.few_plans(hidden_size, gathers=True)
            found = [resources(launch.compile(plan).__cubin__) for plan in plans]
            assert [of_plan["stack_bytes"] for of_plan in found] == [0, 0]
            a_partition = [-(-plan.threads // 128) for plan in plans]
            registers = [-(-of_plan["registers"] // 8) * 8 * 32 for of_plan in found]
            assert sum(warps * of_warp for warps, of_warp in zip(a_partition, registers, strict=True)) <= 65_536 // 4
            assert sum(plan.smem_bytes + 2048 for plan in plans) <= 228 * 1024
            assert sum(plan.threads for plan in plans) <= 2048


def test_every_multiprocessor_has_a_cta_or_two() -> None:
    """Flash on one of four ranks: 96 and 384 work tiles for a token, four times as many for four."""
    from dsv4_kernels.moe.sm90.plan import few_ctas

    gate_up, down = plans()
    assert [few_ctas(gate_up, tiles, 132) for tiles in (96, 384)] == [96, 132]
    assert [few_ctas(down, tiles, 132) for tiles in (96, 384, 1056, 1057)] == [96, 132, 132, 264]


def plans() -> tuple[Any, Any]:
    from dsv4_kernels.moe.sm90 import launch

    return launch.few_plans(4096, gathers=True)


@pytest.mark.slow
@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("product", [0, 1], ids=["gate-up", "down"])
def test_deleted_synchronisation_is_noticed(product: int) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    case = replace(CASES["k-longer-than-the-stages"], tokens=7, d=4096, channels=512, multiprocessors=2)
    _, device = launched(case, "few", quantised=True, schedule="late", record=True)
    name = f"experts_sm90_few_{('gate_up', 'down')[product]}"
    rates = delete_synchronisation(name, device, 1 + product)
    if product == 0:
        assert rates.pop("fence") == 3 / 5, rates
    assert rates and set(rates.values()) == {1}, rates


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [512, 1024, 2048])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_a_hopper_gpu_has_the_bits_of_narrow_tiles(tokens: int, channels: int) -> None:
    """Flash's shapes on four, two and one rank, with fewer experts; in a replayed graph after other layers' calls. A
    read before its wait, or of codes that have not come, is only sometimes wrong."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU (sm_90a)")
    from dsv4_kernels.moe.sm90 import launch

    _, _, _, packed = Case(tokens, chosen=6, experts=16, d=4096, channels=channels).inputs()
    packed = Mxfp4Experts(*(matrix.cuda() for matrix in (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)))
    hopper = packed.for_hopper()
    calls = []
    for seed in range(12):  # layers of different routing, whose work lists lie at the same addresses
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, 4096, generator=generator).bfloat16().cuda()
        ids = torch.rand(tokens, 16, generator=generator).topk(6).indices.int().cuda()
        calls.append((x, torch.rand(tokens, 6, generator=generator).cuda(), ids))

    def call(x: Tensor, weights: Tensor, ids: Tensor, shape: str, quantised: bool) -> Tensor:
        codes = fp8_quantise(x, 128, column_major=True) if quantised else None
        work = launch.plan_work(weights, ids, hopper, shape=shapes()[shape])
        return launch.sum_products(launch.multiply_all(x, work, hopper, LIMIT, codes), work, torch.float32, None)

    with dependent_launch.switched(False):
        expected = [call(*each, "narrow", False) for each in calls]
    for quantised in (True, False):
        with dependent_launch.switched(True):
            found = [call(*each, "few", quantised) for each in calls]
            assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = [call(*each, "few", quantised) for each in calls]
        for _ in range(50):
            for each in found:
                each.zero_()
            graph.replay()
            assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
