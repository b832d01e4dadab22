"""clusterlaunchcontrol: a running CTA cancels CTAs that have not started; every CTA's work is done once."""

import numpy as np
import pytest
from ptx_emulator import Checks, EmulationError
from ptx_emulator.samples.handwritten import run

# Counts the visits of every CTA of the grid at [%rd100]; stores the running CTA's %ctaid.x + 1 at [%rd101].
PERSISTENT = """mov.u32 %r10, %ctaid.x; mov.u32 %r11, %r10; mov.u32 %r12, 0; setp.ne.u32 %p1, %r100, 0;
@%p1 bra I; mbarrier.init.shared::cta.b64 [%r103+16], 1; fence.mbarrier_init.release.cluster; I: bar.sync 0;
L: @%p1 bra W; mul.wide.u32 %rd1, %r10, 4; add.s64 %rd2, %rd100, %rd1; add.s64 %rd3, %rd101, %rd1; add.u32 %r13, %r11, 1;
red.global.add.u32 [%rd2], 1; st.global.u32 [%rd3], %r13;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103+16], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r103], [%r103+16];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r103+16], %r12; @!%p2 bra W;
ld.shared.v2.b64 {%rd4, %rd5}, [%r103]; mov.b128 %q1, {%rd4, %rd5};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;
@%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r14, %r15, %r16}, %q1;
fence.proxy.async.shared::cta; bar.sync 0;
xor.b32 %r12, %r12, 1; @%p3 bra L;"""


@pytest.mark.parametrize(("schedule", "seed"), [("eager", 0), ("late", 1), ("random", 2), ("random_warps", 3)])
def test_every_cta_is_done_once(schedule: str, seed: int) -> None:
    visits, by = np.zeros(7, np.uint32), np.zeros(7, np.uint32)
    checks = Checks(async_write_fence="error", mbarrier_init_fence="error")
    run(PERSISTENT, visits, by, grid=7, threads=64, schedule=schedule, seed=seed, checks=checks)
    np.testing.assert_array_equal(visits, 1)
    if schedule == "eager":
        np.testing.assert_array_equal(by, 1)  # the first CTA canceled all other CTAs
    else:
        assert 1 < len(set(by)) < 7  # some requests were refused


def test_response_is_overwritten_after_a_proxy_fence() -> None:
    body = PERSISTENT.replace("fence.proxy.async.shared::cta;", "")
    arrays = np.zeros(7, np.uint32), np.zeros(7, np.uint32)
    with pytest.raises(EmulationError) as e:
        run(body, *arrays, grid=7, threads=64, checks=Checks(async_write_fence="error"))
    assert e.value.kind.name == "async_write_fence", str(e.value)
    assert "after the read" in e.value.message
