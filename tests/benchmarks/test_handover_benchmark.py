"""The kernel that hands rows from phase to phase, in the emulator: its results by each way, in any order of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_handover import per_phase_us, rows_and_counters
from lib import handover
from lib.handover import Shape, Way
from ops.row_kernels import ARCH, KERNELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.usefixtures("compiled_here")

PHASES = 3


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_phases_read_complete_rows(kernel: str, schedule: str, way: Way) -> None:
    from ptx_emulator import Checks, emulated

    shape = Shape(way, ctas=4, vectors=64, phases=PHASES)
    rows, counters = rows_and_counters(shape, torch.device("cpu"))
    first = rows[0].clone()
    checks = Checks.strict()
    if way is Way.AHEAD:  # it reads in front of the wait, and words say when they have arrived
        checks = replace(checks, grid_dependency="off")
    with emulated(checks=checks, arch=ARCH[kernel], schedule=schedule, seed=1):
        handover.run(kernel, shape, rows, counters)
    assert torch.equal(rows[1:], handover.expected(first, PHASES))


def test_a_row_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="vectors should be at most 1,024 and divide by 32 and by 6 CTAs; got 64"):
        Shape(Way.WORDS, ctas=6, vectors=64, phases=1)


def test_time_of_a_phase_leaves_out_what_each_replay_has_once() -> None:
    assert per_phase_us({8: 30.0, 24: 62.0}) == 2.0
