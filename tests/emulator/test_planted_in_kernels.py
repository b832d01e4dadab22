"""Faults planted in this project's attention and unpacking kernels: each is caught, and the message names the cause."""

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from ptx_emulator.campaigns.planted_in_kernels import FAULTS, LAUNCHES, KernelFault, catch_in_kernel


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=f"{fault.kernel}: {fault.name}", marks=() if fault.quick else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_fault_is_named(fault: KernelFault) -> None:
    caught = catch_in_kernel(fault)
    assert caught is not None, "not caught under any schedule"
    allowed = (fault.kinds, *fault.kinds.split())  # "wrong result" is one kind
    assert caught.kind in allowed, f"{caught.kind} under {caught.schedule}:\n{caught.message}"
    assert re.search(fault.says, caught.message), caught.message


def test_every_kernel_has_quick_ones() -> None:
    assert {fault.kernel for fault in FAULTS if fault.quick} == set(LAUNCHES)
