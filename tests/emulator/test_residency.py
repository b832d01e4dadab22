"""CTAs of one grid that wait for each other through global memory: as many are resident as the GPU has SMs."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind
from ptx_emulator.report import rates_of
from ptx_emulator.samples.handwritten import run

# Ways for one thread to read the counter in [%rd100] into %r3.
POLLS = {
    "ld.acquire": "ld.acquire.gpu.global.u32 %r3, [%rd100];",
    "ld.acquire as CUTLASS spells it": "ld.global.acquire.gpu.u32 %r3, [%rd100];",
    "ld.relaxed and fence": "ld.relaxed.gpu.global.u32 %r3, [%rd100]; fence.acq_rel.gpu;",
    "atom.add of 0": "atom.acquire.gpu.global.add.u32 %r3, [%rd100], 0;",
    "atom.cas": "atom.acquire.gpu.global.cas.b32 %r3, [%rd100], 0, 0;",
    "ld.acquire and nanosleep": "ld.acquire.gpu.global.u32 %r3, [%rd100]; nanosleep.u32 20;",
}


def _meet(ctas: int, poll: str, threads: int, schedule: str, target: str = "sm_100a") -> np.ndarray:
    """The counter values that the CTAs saw: each counts itself, and waits with all its warps until all have counted."""
    counter, seen = np.zeros(4, np.uint32), np.zeros(ctas, np.uint32)
    body = f"""mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd101, %rd1;
setp.ne.u32 %p1, %r100, 0; @%p1 bra L; red.release.gpu.global.add.u32 [%rd100], 1;
L: {poll} setp.lt.u32 %p2, %r3, {ctas}; @%p2 bra L;
@!%p1 st.global.u32 [%rd2], %r3;"""
    run(body, counter, seen, grid=ctas, threads=threads, schedule=schedule, seed=2, target=target)
    return seen


@pytest.mark.parametrize("schedule", ["eager", "random", "late"])
@pytest.mark.parametrize("poll", POLLS)
def test_all_ctas_meet(poll: str, schedule: str) -> None:
    assert (_meet(20, POLLS[poll], 512, schedule) == 20).all()


@pytest.mark.parametrize("target", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_one_cta_for_each_sm(schedule: str, target: str) -> None:
    sms = rates_of(target).sms
    assert (_meet(sms, POLLS["ld.acquire"], 32, schedule, target) == sms).all()
    with pytest.raises(EmulationError) as e:
        _meet(sms + 1, POLLS["ld.acquire"], 32, schedule, target)
    assert e.value.kind is ErrorKind.deadlock
