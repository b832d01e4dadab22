"""A boundary of many tokens in two launches has the bits of the boundary in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ops.attention_launch import delete_synchronisation
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.hyper_connection_cases import HC_EPS, ITERATIONS, NORM_EPS, Inputs, inputs
from torch import Tensor

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

ARCHES = {"sm90": "sm_90a", "sm100": "sm_100a"}


def call(i: Inputs, name: str = "sm90", fp8: bool = False, apart: bool = True) -> Callable[[], tuple[Tensor, ...]]:
    from dsv4_kernels.hyper_connection import gpu

    arguments = (i.streams, (i.y, i.post, i.comb), (i.fn, i.base, i.scale), i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    return partial(gpu.run, name, "hc_boundary", 24, *arguments, 8, 2, fp8, apart=apart)


def emulate(launches: Callable[[], tuple[Tensor, ...]], fn: Tensor, name: str = "sm90", **options: object) -> tuple:
    """Results of launches in the emulator with all its checks; memory for results is filled with NaN before."""
    from ptx_emulator import Checks, emulated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, math.nan, **options))
        with emulated(checks=Checks.strict(), arch=ARCHES[name], multiprocessors=16, **options) as device:
            device.memory.constant(fn)
            found = launches()
    assert not any(report.warnings for report in device.reports)
    return found


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    ("num_tokens", "d", "fp8", "weight", "schedule", "name"),
    [
        (35, 1024, True, torch.float32, "random", "sm90"),
        pytest.param(67, 1024, False, torch.float32, "late", "sm90", marks=pytest.mark.slow),
        pytest.param(67, 1024, True, torch.float32, "eager", "sm100", marks=pytest.mark.slow),
        pytest.param(9, 4096, True, torch.bfloat16, "random", "sm90", marks=pytest.mark.slow),
        pytest.param(3, 3072, True, torch.float32, "random", "sm90", marks=pytest.mark.slow),
    ],
)
def test_two_launches_have_the_bits_of_one(
    num_tokens: int, d: int, fp8: bool, weight: torch.dtype, schedule: str, name: str
) -> None:
    """Two CTAs of each eighth of the channels, two teams of each; the last groups are not full."""
    i = inputs(num_tokens, d, seed=num_tokens, weight=weight)
    expected = emulate(call(i, name, fp8, apart=False), i.fn, name)
    found = emulate(call(i, name, fp8), i.fn, name, schedule=schedule, seed=3)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.usefixtures("compiled_here")
def test_both_launches_may_begin_early() -> None:
    i = inputs(9, 1024)
    with launched_early():
        emulate(call(i), i.fn)


@pytest.mark.usefixtures("compiled_here")
def test_a_missing_wait_is_noticed() -> None:
    i = inputs(9, 1024)
    with a_missing_wait_is_noticed():
        emulate(call(i), i.fn)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here", "in_turns")
@pytest.mark.parametrize(("launched", "kernel"), enumerate(("multiplication", "mixture")))
def test_deleted_synchronisation_is_noticed(launched: int, kernel: str) -> None:
    """Every deletion is noticed, except those explained in emulator/results/mutation_reasons.json."""
    from ptx_emulator import Checks, emulated

    i = inputs(35, 2048)  # two warps a team; one team has two groups
    with emulated(checks=Checks.strict(), arch="sm_90a", multiprocessors=16, record=True) as device:
        call(i)()
    rates = delete_synchronisation(f"hyper_connection_{kernel}", device, launched)
    assert rates and set(rates.values()) == {1}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("arch", ARCHES.values())
def test_resources(arch: str) -> None:
    """Flash's width: one CTA of the first launch and two of the second fit a multiprocessor; two words of the first
    are on the stack."""
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.hyper_connection import many_tokens
    from dsv4_kernels.hyper_connection.plan import Plan

    with emulated(arch=arch):
        multiply, mix = many_tokens.compile(Plan(8, 4096, 24, True, teams=2, fp8=True), arch)
    for kernel, (registers, stack_bytes) in ((multiply, (255, 8)), (mix, (112, 0))):
        found = resources(kernel.__cubin__)
        assert found["registers"] <= registers and found["stack_bytes"] <= stack_bytes, found


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [129, 2048, 8192])
def test_a_gpu_has_the_same_bits(num_tokens: int, kernel_on_gpu: Callable[[str], str]) -> None:
    name = kernel_on_gpu("hc_boundary")
    i = inputs(num_tokens, 4096, seed=num_tokens).to("cuda")
    for fp8 in (False, True):
        for a, b in zip(call(i, name, fp8)(), call(i, name, fp8, apart=False)(), strict=True):
            assert torch.equal(a.float(), b.float())
