"""Lanes of one warp are threads: a lane may use or publish accesses of another lane only after a barrier of both.

A line that can be deleted carries a mark `/*name*/`. The right programs pass under every schedule; without such a line
they end with `lane_race` under every schedule, since the check does not depend on timing.
"""

import re

import numpy as np
import pytest
from ptx_emulator import Checks, EmulationError
from ptx_emulator.samples.handwritten import aligned, run

SCHEDULES = [("eager", 0), ("late", 0), ("random", 1), ("random_warps", 2)]
CHECKS = Checks(lane_race="error", async_write_fence="error")

# %r2: this lane's word; %r3: its neighbour's word; %rd2: its address in the output.
PLACES = """shl.b32 %r1, %r100, 2; add.u32 %r2, %r103, %r1; xor.b32 %r3, %r2, 4; mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1;
setp.ne.u32 %p1, %r101, 0; setp.ne.u32 %p2, %r102, 0; add.u32 %r6, %r103, 1024; setp.ne.u32 %p3, %r100, 0;
@%p3 bra I; mbarrier.init.shared::cta.b64 [%r6], 1; mbarrier.init.shared::cta.b64 [%r6+8], 32; I: bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r6], 0; @!%p4 bra W;"
OUTPUT = "st.global.u32 [%rd2], %r5;"

PROGRAMS = {
    "lanes exchange words": f"""st.shared.u32 [%r2], %r101;
bar.warp.sync -1; /*full*/
ld.shared.u32 %r4, [%r3];
bar.warp.sync -1; /*empty*/
st.shared.u32 [%r2], %r4;
bar.warp.sync -1; /*full_again*/
ld.shared.u32 %r5, [%r3]; {OUTPUT}""",
    "one lane tells the others": f"""@!%p1 st.shared.u32 [%r103], 7;
bar.warp.sync -1; /*told*/
ld.shared.u32 %r5, [%r103]; {OUTPUT}
bar.warp.sync -1; /*read*/
@!%p1 st.shared.u32 [%r103], 8;""",
    "one lane tells the others through global memory": f"""@!%p1 st.global.u32 [%rd100+128], 7;
bar.warp.sync -1; /*told*/
ld.global.u32 %r5, [%rd100+128]; {OUTPUT}
bar.warp.sync -1; /*read*/
@!%p1 st.global.u32 [%rd100+128], 8;""",
    "each lane's cp.async": f"""shl.b32 %r8, %r101, 4; add.u32 %r9, %r103, %r8; cvt.u64.u32 %rd3, %r8; add.s64 %rd3, %rd101, %rd3;
cp.async.cg.shared.global [%r9], [%rd3], 16; cp.async.commit_group; cp.async.wait_group 0;
bar.warp.sync -1; /*loaded*/
xor.b32 %r9, %r9, 16; ld.shared.u32 %r5, [%r9]; {OUTPUT}""",
    "a matrix is stored, and read line by line": f"""shl.b32 %r8, %r101, 4; add.u32 %r9, %r103, %r8; @%p2 bra E;
stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%r9], {{%r101, %r101, %r101, %r101}};
bar.warp.sync -1; /*stored*/
ld.shared.u32 %r5, [%r3]; {OUTPUT}
bar.warp.sync -1; /*read*/
stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%r9], {{%r5, %r5, %r5, %r5}}; E:""",
    "words are stored, and loaded as a matrix": f"""shl.b32 %r8, %r101, 4; add.u32 %r9, %r103, %r8; @%p2 bra E;
st.shared.u32 [%r2], %r101;
bar.warp.sync -1; /*stored*/
ldmatrix.sync.aligned.m8n8.x1.shared::cta.b16 {{%r5}}, [%r9]; {OUTPUT} E:""",
    "one lane arrives for all": f"""@%p2 bra R; st.shared.u32 [%r2], %r101;
bar.warp.sync -1; /*together*/
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6]; bra E;
R: {WAIT} ld.shared.u32 %r5, [%r2+-128]; {OUTPUT} E:""",
    "one lane frees what all have read": f"""@%p2 bra R; @!%p1 st.shared.u32 [%r103], 5;
bar.warp.sync -1; ld.shared.u32 %r5, [%r103]; {OUTPUT}
bar.warp.sync -1; /*together*/
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6]; bra E;
R: {WAIT} @!%p1 st.shared.u32 [%r103], 6; E:""",
    "one lane frees two stages, one after the other": f"""@%p3 bra J; mbarrier.init.shared::cta.b64 [%r6+16], 1;
J: bar.sync 0; mov.u32 %r10, 0; @%p2 bra R;
C: shl.b32 %r12, %r10, 4; add.u32 %r12, %r6, %r12; shl.b32 %r13, %r10, 7; add.u32 %r13, %r103, %r13;
@!%p1 st.shared.u32 [%r13], 5; bar.warp.sync -1; ld.shared.u32 %r5, [%r13];
bar.warp.sync -1; /*together*/
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r12]; add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 2; @%p5 bra C; {OUTPUT} bra E;
R: {WAIT} @!%p1 st.shared.u32 [%r103], 6; E:""",
    "one lane publishes for all": f"""@%p2 bra R; st.global.u32 [%rd2], %r101;
bar.warp.sync -1; /*together*/
@!%p1 st.release.gpu.global.u32 [%rd101], 1; bra E;
R: ld.acquire.gpu.global.u32 %r4, [%rd101]; setp.eq.u32 %p4, %r4, 0; @%p4 bra R; ld.global.u32 %r5, [%rd2+-128]; {OUTPUT} E:""",
    "one lane publishes for all, after a fence": f"""@%p2 bra R; st.global.u32 [%rd2], %r101; fence.acq_rel.gpu;
bar.warp.sync -1; /*together*/
@!%p1 st.relaxed.gpu.global.u32 [%rd101], 1; bra E;
R: ld.acquire.gpu.global.u32 %r4, [%rd101]; setp.eq.u32 %p4, %r4, 0; @%p4 bra R; ld.global.u32 %r5, [%rd2+-128]; {OUTPUT} E:""",
    "one lane stores a tile": """@%p2 bra E; st.shared.u32 [%r2], %r101; fence.proxy.async.shared::cta;
bar.warp.sync -1; /*together*/
@!%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd101], [%r103], 128; @!%p1 cp.async.bulk.commit_group;
@!%p1 cp.async.bulk.wait_group.read 0;
bar.warp.sync -1; st.shared.u32 [%r2], %r1; E:""",
    "one lane loads over what all have read": f"""@%p2 bra E; st.shared.u32 [%r2], %r101;
bar.warp.sync -1; ld.shared.u32 %r5, [%r3]; {OUTPUT} fence.proxy.async.shared::cta;
bar.warp.sync -1; /*together*/
@%p1 bra L; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r103], [%rd101], 128, [%r6];
L: {WAIT} E:""",
    "one lane arrives for tensor memory": f"""@%p2 bra S; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; S:
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.u32 %r10, [%r103]; @%p2 bra R;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {{%r101}}; tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
bar.warp.sync -1; /*together*/
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6]; bra E;
R: setp.ne.u32 %p5, %r102, 4; @%p5 bra E; {WAIT} tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r10]; tcgen05.wait::ld.sync.aligned; {OUTPUT}
E: tcgen05.fence::before_thread_sync; bar.sync 0; @%p2 bra Z; tcgen05.fence::after_thread_sync;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32; Z:""",
}
MARKS = [(name, mark) for name, body in PROGRAMS.items() for mark in re.findall(r"/\*(\w+)\*/", body)]


def _run(name: str, body: str, schedule: str = "eager", seed: int = 0, checks: Checks = CHECKS) -> np.ndarray:
    out, other = np.zeros(256, np.uint32), aligned(np.zeros(128, np.uint32))
    threads = 160 if "tensor memory" in name else 64 if "R:" in body or "E:" in body else 32
    report = run(PLACES + body, out, other, threads=threads, schedule=schedule, seed=seed, checks=checks)
    assert report.warnings == []
    return out


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_program_passes(name: str, schedule: str, seed: int) -> None:
    assert (_run(name, PROGRAMS[name], schedule, seed) == _run(name, PROGRAMS[name])).all()


# These make lanes wait for each other without ordering memory.
NO_BARRIERS = {
    "nothing": "",
    "elect": "elect.sync _|%p9, -1;",
    "shfl": "shfl.sync.idx.b32 %r40, %r101, 0, 31, -1;",
    "vote": "vote.sync.any.pred %p9, %p1, -1;",
}


@pytest.mark.parametrize("instead", NO_BARRIERS)
@pytest.mark.parametrize(("name", "mark"), MARKS)
def test_missing_line_is_named(name: str, mark: str, instead: str) -> None:
    """The message must name the cause, a missing bar.warp.sync."""
    body, count = re.subn(rf"^.*/\*{mark}\*/.*$", NO_BARRIERS[instead], PROGRAMS[name], flags=re.MULTILINE)
    assert count == 1
    for schedule, seed in SCHEDULES:
        with pytest.raises(EmulationError, match=r"bar\.warp\.sync") as e:
            _run(name, body, schedule, seed)
        assert e.value.kind.name == "lane_race"
    _run(name, body, checks=Checks())  # the check is off for released kernels


# Other instructions that order lanes, and accesses that need no order.
ORDERED = {
    "bar.sync": f"st.shared.u32 [%r2], %r101; bar.sync 0; ld.shared.u32 %r5, [%r3]; {OUTPUT}",
    "a barrier to which all lanes arrive": f"""st.shared.u32 [%r2], %r101; mbarrier.arrive.shared::cta.b64 _, [%r6+8];
W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r6+8], 0; @!%p4 bra W; ld.shared.u32 %r5, [%r3]; {OUTPUT}""",
    "a barrier to which the writer arrives": f"""@!%p1 st.shared.u32 [%r103], 7; @!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6];
{WAIT} ld.shared.u32 %r5, [%r103]; {OUTPUT}""",
    "a lane's own": f"st.shared.u32 [%r2], %r101; ld.shared.u32 %r5, [%r2]; st.shared.u32 [%r2], %r1; {OUTPUT}",
    "a lane's own, alone and with others": f"""st.shared.u32 [%r2], %r101; @!%p1 ld.shared.u32 %r5, [%r2];
@!%p1 st.shared.u32 [%r2], 3; ld.shared.u32 %r5, [%r2]; {OUTPUT}""",
    "bytes of one word": f"""add.u32 %r2, %r103, %r101; st.shared.u8 [%r2], %r101; ld.shared.u8 %r5, [%r2];
st.shared.u8 [%r2], %r1; {OUTPUT}""",
    "one place written by one instruction": f"st.shared.u32 [%r103], 5; mov.u32 %r5, 5; {OUTPUT}",
    "atomics": f"""@!%p1 st.shared.u32 [%r103], 0; bar.warp.sync -1;
red.shared.add.u32 [%r103], 1; atom.shared.add.u32 %r4, [%r103], 1; mov.u32 %r5, 1; {OUTPUT}""",
    "the arriving lane's own": f"""@%p2 bra R; ld.shared.u64 %rd5, [%r6]; @!%p1 st.shared.u32 [%r103], 9;
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6]; bra E; R: {WAIT} ld.shared.u32 %r5, [%r103]; {OUTPUT} E:""",
}


@pytest.mark.parametrize("name", ORDERED)
def test_no_false_alarm(name: str) -> None:
    for schedule, seed in SCHEDULES:
        _run(name, ORDERED[name], schedule, seed)


def test_a_lane_publishes_only_accesses_that_it_waited_for() -> None:
    """Lane 0 may not arrive on behalf of lane 1, even if each of them executed alone."""
    body = f"""setp.ne.u32 %p6, %r101, 1; @%p2 bra R; @!%p6 st.shared.u32 [%r103], 9;
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6]; bra E; R: {WAIT} ld.shared.u32 %r5, [%r103]; {OUTPUT} E:"""
    with pytest.raises(EmulationError, match="lanes 00000001 handed on"):
        _run("", body)
    _run("", body.replace("@!%p1 mbarrier", "@!%p6 mbarrier"))
