"""Faults planted in a right attention kernel: each is caught, and the message names the cause.

The right kernel itself passes under 20 seeds of every schedule, bit for bit.
"""

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from ptx_emulator import Options, Recording
from ptx_emulator.campaigns import summaries
from ptx_emulator.campaigns.planted_faults import Caught, Fault, catch, faults, record

FAULTS = faults()


@pytest.fixture(scope="module")
def right() -> Recording:
    recording, error = record()
    assert not error, error
    return recording


@pytest.mark.parametrize("schedule", ["eager", "late", "random", "random_warps"])
def test_right_kernel_passes_under_20_seeds(right: Recording, schedule: str) -> None:
    for seed in range(20):
        _, memory = right.replay(Options(schedule=schedule, seed=seed))
        assert memory == right.results, f"{schedule} {seed}: the output differs"


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_is_named(right: Recording, fault: Fault) -> None:
    caught = catch(fault, right)
    assert isinstance(caught, Caught), "not caught under any schedule"
    assert caught.kind in fault.kinds.split(), f"{caught.kind} under {caught.schedule}:\n{caught.message}"
    assert re.search(fault.says, caught.message), caught.message
    assert caught.kind == summaries.read("planted_faults")[fault.name][0]


def test_there_are_at_least_25() -> None:
    assert len(FAULTS) >= 25
