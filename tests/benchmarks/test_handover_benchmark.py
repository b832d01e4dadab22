"""The kernel that hands rows from phase to phase, in the emulator: its results by each way, in any order of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_handover import Chain, per_phase_us
from lib.handover import Shape, Way
from ops.row_kernels import ARCH, KERNELS

from dsv4_kernels.device import dependent_launch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

PHASES = 3


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_phases_read_complete_rows(kernel: str, schedule: str, way: Way) -> None:
    """Twice, as in two replays, the second with another first row."""
    from ptx_emulator import Checks, emulated

    chain = Chain(kernel, Shape(way, ctas=4, vectors=64, phases=PHASES), torch.device("cpu"))
    checks = Checks.strict()
    if way is Way.AHEAD:  # it reads in front of the wait, and words say when they have arrived
        checks = replace(checks, grid_dependency="off")
    first = chain.rows[0].clone()
    with emulated(checks=checks, arch=ARCH[kernel], schedule=schedule, seed=1):
        for replay in range(2):
            for call in chain.calls():
                call()
            chain.check()
            assert torch.equal(chain.rows[0], first + replay + 1)
    chain.rows[2, 0, 0] += 1
    with pytest.raises(AssertionError, match=r"row 1 is .*, expected "):
        chain.check()


@pytest.mark.parametrize("way", [Way.LAUNCHES, Way.AHEAD])
def test_launches_that_may_not_begin_early_are_not_timed(way: Way) -> None:
    chain = Chain("sm90", Shape(way, ctas=4, vectors=64, phases=PHASES), torch.device("cpu"))
    with dependent_launch.switched(False), pytest.raises(RuntimeError, match="needs DSV4_DEPENDENT_LAUNCH=on"):
        chain.run()


def test_a_row_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 32 and of the number of CTAs \(6\), and at most 1,024; got 64"):
        Shape(Way.WORDS, ctas=6, vectors=64, phases=1)


def test_time_of_a_phase_leaves_out_what_each_replay_has_once() -> None:
    assert per_phase_us({8: 30.0, 24: 62.0}) == 2.0
