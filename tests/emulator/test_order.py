"""The happens-before checker: right programs pass under every schedule, and fail with one line deleted.

A line that can be deleted carries a mark `/*name*/`; the test deletes it and expects the named kind of error.
"""

import re
import resource

import numpy as np
import pytest
from ptx_emulator import Checks, EmulationError
from ptx_emulator.samples.handwritten import aligned, run
from ptx_emulator.samples.tensor_maps import tensor_map_of

SCHEDULES = [("eager", 0), ("late", 0), ("random", 1), ("random", 2), ("random_warps", 3)]

# Warps exchange through shared memory; the second barrier protects the buffer before it is written again.
EXCHANGE = """shl.b32 %r1, %r100, 2; add.u32 %r2, %r103, %r1; xor.b32 %r3, %r1, 128; add.u32 %r3, %r103, %r3;
st.shared.u32 [%r2], %r100;
bar.sync 0; /*full*/
ld.shared.u32 %r4, [%r3];
bar.sync 0; /*empty*/
add.u32 %r4, %r4, 1; st.shared.u32 [%r2], %r4; bar.sync 0; ld.shared.u32 %r5, [%r2];
mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r5;"""

# Two stages of TMA loads, consumed by the other warp.
PIPELINE = """setp.ne.u32 %p1, %r100, 0; @%p1 bra I; mbarrier.init.shared::cta.b64 [%r103], 1; mbarrier.init.shared::cta.b64 [%r103+8], 32;
I: bar.sync 0; /*init*/
mov.u32 %r10, 0; add.u32 %r11, %r103, 1024; setp.eq.u32 %p2, %r102, 0; @!%p2 bra CONSUME;
PRODUCE: setp.ne.u32 %p3, %r101, 0; @%p3 bra END;
P0: xor.b32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
E0: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103+8], %r12; @!%p4 bra E0; /*empty*/
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 512;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r11], [%rd101, {0, %r13}], [%r103];
add.u32 %r10, %r10, 1; shl.b32 %r13, %r10, 2; setp.lt.u32 %p5, %r10, 4; @%p5 bra P0; bra END;
CONSUME: mov.u32 %r20, 0;
C0: and.b32 %r12, %r10, 1;
F0: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], %r12; @!%p4 bra F0; /*full*/
shl.b32 %r1, %r101, 4; add.u32 %r1, %r11, %r1; ld.shared.u32 %r2, [%r1]; add.u32 %r20, %r20, %r2;
mbarrier.arrive.shared::cta.b64 _, [%r103+8]; /*release*/
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 4; @%p5 bra C0;
mul.wide.u32 %rd1, %r101, 4; add.s64 %rd2, %rd102, %rd1; st.global.u32 [%rd2], %r20; END:"""

# Threads write a tile that TMA stores.
STORE = """shl.b32 %r1, %r100, 2; add.u32 %r2, %r103, %r1; st.shared.u32 [%r2], %r100;
fence.proxy.async.shared::cta; /*fence*/
bar.sync 0; /*barrier*/
setp.ne.u32 %p1, %r100, 0; @%p1 bra E; cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd101, {0, 0}], [%r103]; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0; /*read*/
E: bar.sync 0; st.shared.u32 [%r2], %r1;"""

# A warp stores tensor memory and another warp of the same quarter loads it (warps 0 and 4).
TMEM = """setp.ne.u32 %p1, %r102, 0; @%p1 bra S; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; S:
bar.sync 0; /*alloc*/
ld.shared.u32 %r1, [%r103]; setp.eq.u32 %p2, %r102, 4; and.b32 %r5, %r102, 3; setp.ne.u32 %p4, %r5, 0; @%p4 bra J;
@%p2 bra L; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r101};
tcgen05.wait::st.sync.aligned; /*wait_st*/
tcgen05.fence::before_thread_sync; bar.arrive 1, 64; bar.sync 2, 64; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r100}; tcgen05.wait::st.sync.aligned; bra J;
L: bar.sync 1, 64;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];
tcgen05.wait::ld.sync.aligned; /*wait_ld*/
bar.arrive 2, 64; mul.wide.u32 %rd1, %r101, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r2; J: bar.sync 0; @%p1 bra Z;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; Z:"""

# A CTA writes a peer's shared memory, and the peer does not exit before that.
CLUSTER = """mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; shl.b32 %r3, %r101, 2; add.u32 %r4, %r103, %r3; mapa.shared::cluster.u32 %r5, %r4, %r2;
st.shared.u32 [%r4], %r101; barrier.cluster.arrive; barrier.cluster.wait; /*start*/
st.shared::cluster.u32 [%r5], %r101;
barrier.cluster.arrive; barrier.cluster.wait; /*end*/
ld.shared.u32 %r6, [%r4]; mad.lo.u32 %r7, %r1, 32, %r101; mul.wide.u32 %rd1, %r7, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r6;"""

# Remote arrivals only, no reads: the only possible error is an early exit.
LAST_ARRIVAL = """mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p1, %r101, 0; @%p1 bra I; mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; /*init_fence*/
I: barrier.cluster.arrive.relaxed; barrier.cluster.wait; setp.ne.u32 %p2, %r1, 0; @!%p2 bra E; @%p1 bra E; mov.u32 %r3, 0; mapa.shared::cluster.u32 %r2, %r103, %r3;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
E: barrier.cluster.arrive; barrier.cluster.wait; /*stay*/"""


def _tiles() -> np.ndarray:
    return aligned(np.arange(16 * 32, dtype=np.uint32).reshape(16, 32))


def _arguments(name: str) -> dict:
    if name == "PIPELINE":
        t = _tiles()
        return {"args": (t, tensor_map_of(t, (32, 4)), np.zeros(32, np.uint32)), "threads": 64}
    if name == "STORE":
        t = _tiles()
        return {"args": (t, tensor_map_of(t, (32, 4))), "threads": 128}
    return {
        "args": (np.zeros(256, np.uint32),),
        "threads": {"EXCHANGE": 64, "TMEM": 160}.get(name, 32),
        **({"grid": 2, "cluster": 2} if name in ("CLUSTER", "LAST_ARRIVAL") else {}),
    }


PROGRAMS = {
    "EXCHANGE": EXCHANGE,
    "PIPELINE": PIPELINE,
    "STORE": STORE,
    "TMEM": TMEM,
    "CLUSTER": CLUSTER,
    "LAST_ARRIVAL": LAST_ARRIVAL,
}


def _run(name: str, body: str, schedule: str, seed: int) -> tuple:
    a = _arguments(name)
    args = a.pop("args")
    return args, run(body, *args, schedule=schedule, seed=seed, checks=Checks(tmem_freed="error"), **a)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass(name: str, schedule: str, seed: int) -> None:
    _run(name, PROGRAMS[name], schedule, seed)


@pytest.mark.parametrize(
    ("name", "mark", "kinds"),
    [
        ("EXCHANGE", "full", "race uninitialised_smem"),
        ("EXCHANGE", "empty", "race"),
        ("PIPELINE", "init", "race mbarrier"),
        ("PIPELINE", "empty", "race mbarrier"),
        ("PIPELINE", "full", "race uninitialised_smem"),
        ("PIPELINE", "release", "deadlock"),
        ("STORE", "fence", "proxy_fence"),
        ("STORE", "barrier", "race uninitialised_smem proxy_fence"),
        ("STORE", "read", "race"),
        ("TMEM", "alloc", "race uninitialised_smem"),
        ("TMEM", "wait_st", "race"),
        ("TMEM", "wait_ld", "race"),
        ("CLUSTER", "start", "race exited_cta"),
        ("CLUSTER", "end", "race exited_cta"),
        ("LAST_ARRIVAL", "init_fence", "race"),
        ("LAST_ARRIVAL", "stay", "exited_cta"),
    ],
)
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_without_one_synchronisation(name: str, mark: str, kinds: str, schedule: str, seed: int) -> None:
    lines = PROGRAMS[name].splitlines()
    (line,) = [x for x in lines if f"/*{mark}*/" in x]
    # Deletes the last statement, or the last two for a barrier's halves or a wait's loop; labels stay.
    label = re.match(r"\w+:(?!:)", line)
    keep = label.group(0) if label else ""
    deleted = {
        "start": "barrier.cluster.arrive; barrier.cluster.wait;",
        "end": "barrier.cluster.arrive; barrier.cluster.wait;",
        "stay": "barrier.cluster.arrive; barrier.cluster.wait;",
        "init_fence": "fence.mbarrier_init.release.cluster;",
    }.get(mark)
    changed = line.replace(deleted, "") if deleted else keep
    with pytest.raises(EmulationError) as e:
        _run(name, "\n".join(changed if x is line else x for x in lines), schedule, seed)
    assert e.value.kind.name in kinds.split(), str(e.value)


def test_race_message_names_both_sides() -> None:
    with pytest.raises(EmulationError) as e:
        _run("EXCHANGE", EXCHANGE.replace("bar.sync 0; /*empty*/", ""), "eager", 0)
    assert "warp" in e.value.message and "ptx line" in e.value.message and "ld.shared" in e.value.ptx_text


def test_checks_can_be_switched_off() -> None:
    body = EXCHANGE.replace("bar.sync 0; /*empty*/", "")
    report = run(body, np.zeros(64, np.uint32), threads=64, checks=Checks(race="warn"))
    assert any(w.startswith("race") for w in report.warnings)
    assert not run(body, np.zeros(64, np.uint32), threads=64, checks=Checks(order=False)).warnings


# tcgen05.fence: the allocation, the stores and the loads of another warp, an MMA-free version of a producer and a
# consumer.
FENCED = """setp.ne.u32 %p1, %r102, 0; @%p1 bra S; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; S:
tcgen05.fence::before_thread_sync; /*alloc_before*/
bar.sync 0; ld.shared.u32 %r1, [%r103];
tcgen05.fence::after_thread_sync; /*alloc_after*/
setp.eq.u32 %p2, %r102, 4; and.b32 %r5, %r102, 3; setp.ne.u32 %p4, %r5, 0; @%p4 bra J; @%p2 bra L;
bar.sync 2, 64; tcgen05.fence::after_thread_sync; /*ld_after*/
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1]; tcgen05.wait::ld.sync.aligned; tcgen05.fence::before_thread_sync; bra J;
L: tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r101}; tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync; /*st_before*/
bar.sync 2, 64;
J: bar.sync 0; @%p1 bra Z;
tcgen05.fence::after_thread_sync; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; Z:"""


@pytest.mark.parametrize("mark", ["", "alloc_before", "alloc_after", "ld_after", "st_before"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_tensor_fences_are_checked_on_request(mark: str, schedule: str, seed: int) -> None:
    body = re.sub(rf"tcgen05\.fence::\w+; /\*{mark}\*/", "", FENCED) if mark else FENCED
    assert (body != FENCED) == bool(mark)
    run(body, np.zeros(1, np.uint32), threads=160, schedule=schedule, seed=seed)  # by default they are optional
    asked = {"threads": 160, "schedule": schedule, "seed": seed, "checks": Checks(tcgen05_fence="error")}
    if not mark:
        run(body, np.zeros(1, np.uint32), **asked)
        return
    with pytest.raises(EmulationError) as e:
        run(body, np.zeros(1, np.uint32), **asked)
    assert e.value.kind.name == "tcgen05_fence" and "tcgen05.fence" in e.value.message


# A tcgen05.ld whose registers NVVM moves, packs and selects before the wait; another warp of the quarter then
# overwrites.
MOVED = """setp.ne.u32 %p1, %r102, 0; @%p1 bra S; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; S:
bar.sync 0; ld.shared.u32 %r1, [%r103]; setp.eq.u32 %p2, %r102, 4; and.b32 %r5, %r102, 3; setp.ne.u32 %p4, %r5, 0; @%p4 bra J;
@%p2 bra L; add.u32 %r10, %r101, 100;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {%r101, %r10}; tcgen05.wait::st.sync.aligned; bar.arrive 1, 64;
bar.sync 2, 64; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {%r100, %r100}; tcgen05.wait::st.sync.aligned; bra J;
L: bar.sync 1, 64; setp.lt.u32 %p5, %r101, 16;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r2, %r3}, [%r1];
mov.b64 %rd1, {%r2, %r3}; mov.b64 {%r6, %r7}, %rd1; mov.b32 %r8, %r6; selp.b32 %r9, %r8, %r7, %p5;
tcgen05.wait::ld.sync.aligned; /*wait*/
bar.arrive 2, 64; /*used early*/
add.u32 %r9, %r9, 1; mul.wide.u32 %rd2, %r101, 4; add.s64 %rd3, %rd100, %rd2; st.global.u32 [%rd3], %r9; /*use*/
J: bar.sync 0; @%p1 bra Z; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; Z:"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_moves_of_loaded_registers_are_no_wait(schedule: str, seed: int) -> None:
    options = {"threads": 160, "schedule": schedule, "seed": seed}
    out = np.zeros(32, np.uint32)
    run(MOVED, out, checks=Checks(tmem_wait="error"), **options)
    np.testing.assert_array_equal(out, [lane + 1 if lane < 16 else lane + 101 for lane in range(32)])
    # Nothing used the registers before the arrival: the second store is not ordered after the load.
    with pytest.raises(EmulationError) as e:
        run(MOVED.replace("tcgen05.wait::ld.sync.aligned;", ""), out, **options)
    assert e.value.kind.name == "race" and "tcgen05.ld" in e.value.message
    # A use before the arrival counts as the compiler's wait: a warning, or an error on request.
    use, arrive = (next(x for x in MOVED.splitlines() if mark in x) for mark in ("/*use*/", "/*used early*/"))
    early = MOVED.replace("tcgen05.wait::ld.sync.aligned;", "").replace(use, arrive).replace(arrive, use, 1)
    report = run(early, out, **options)
    assert sum("before tcgen05.wait::ld" in w for w in report.warnings) == 1
    with pytest.raises(EmulationError) as e:
        run(early, out, checks=Checks(tmem_wait="error"), **options)
    assert e.value.kind.name == "tmem_wait" and e.value.ptx_text.startswith("add.u32")


# A TMA load into a buffer that a thread has read: it needs a barrier and a proxy fence between.
OVERWRITE = """setp.ne.u32 %p1, %r100, 0; @%p1 bra I; mbarrier.init.shared::cta.b64 [%r103], 1;
fence.mbarrier_init.release.cluster; /*init*/
I: shl.b32 %r1, %r100, 2; add.u32 %r2, %r103, %r1; st.shared.u32 [%r2+1024], %r100; ld.shared.u32 %r3, [%r2+1024];
fence.proxy.async.shared::cta; /*fence*/
bar.sync 0; @%p1 bra W; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 512; add.u32 %r4, %r103, 1024;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r4], [%rd101, {0, 0}], [%r103];
W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], 0; @!%p4 bra W;"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_fences_before_asynchronous_writes(schedule: str, seed: int) -> None:
    t = _tiles()
    options = {"threads": 128, "schedule": schedule, "seed": seed}
    asked = {"checks": Checks(async_write_fence="error", mbarrier_init_fence="error")}
    run(OVERWRITE, t, tensor_map_of(t, (32, 4)), **options, **asked)
    unfenced = OVERWRITE.replace("fence.proxy.async.shared::cta;", "")
    assert not run(unfenced, t, tensor_map_of(t, (32, 4)), **options).warnings
    with pytest.raises(EmulationError) as e:
        run(unfenced, t, tensor_map_of(t, (32, 4)), **options, **asked)
    assert e.value.kind.name == "async_write_fence" and "fence.proxy.async" in e.value.message
    # A proxy fence by the initialising thread is enough for the mbarrier, too.
    uninitialised = OVERWRITE.replace("fence.mbarrier_init.release.cluster;", "")
    run(uninitialised, t, tensor_map_of(t, (32, 4)), **options, **asked)
    report = run(unfenced.replace("fence.mbarrier_init.release.cluster;", ""), t, tensor_map_of(t, (32, 4)), **options)
    assert [w.split()[0] for w in report.warnings] == ["mbarrier_init_fence"]


# Two arrivals at the cluster barrier and two waits (FlashAttention-4): each wait covers one arrival of every thread.
TWICE = """mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mapa.shared::cluster.u32 %r5, %r103, %r2;
barrier.cluster.arrive; st.shared.u32 [%r103], %r1; barrier.cluster.arrive;
barrier.cluster.wait; barrier.cluster.wait; /*second*/
ld.shared::cluster.u32 %r6, [%r5]; barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_each_cluster_wait_covers_one_arrival(schedule: str, seed: int) -> None:
    options = {"grid": 2, "cluster": 2, "schedule": schedule, "seed": seed}
    run(TWICE, **options)
    with pytest.raises(EmulationError) as e:
        run(TWICE.replace("barrier.cluster.wait; /*second*/", ""), **options)
    assert e.value.kind.name in ("race", "uninitialised_smem", "exited_cta")


def test_incomplete_barrier_at_exit() -> None:
    report = run("setp.ne.u32 %p1, %r102, 0; @%p1 bra E; bar.arrive 1, 64; E:", threads=64)
    assert any("barrier 1 incomplete: 32 of 64" in w for w in report.warnings)


# Warp 0 starts a bulk copy and reads another buffer afterwards; warp 1 waits for the copy and overwrites that buffer.
AFTERWARDS = """setp.ne.u32 %p1, %r101, 0; shl.b32 %r1, %r101, 2; add.u32 %r2, %r103, %r1; setp.ne.u32 %p2, %r102, 0;
@!%p2 st.shared.u32 [%r2+2048], %r101; setp.ne.u32 %p3, %r100, 0; @%p3 bra I; mbarrier.init.shared::cta.b64 [%r103], 1;
fence.mbarrier_init.release.cluster; I: bar.sync 0; @%p2 bra W; @%p1 bra R;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 128; add.u32 %r4, %r103, 1024;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd100], 128, [%r103];
R: ld.shared.u32 %r3, [%r2+2048];
bar.sync 1, 64; /*read*/
bra E;
W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], 0; @!%p4 bra W;
bar.sync 1, 64; /*overwritten*/
st.shared.u32 [%r2+2048], %r100; E:"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_copy_publishes_only_earlier_accesses(schedule: str, seed: int) -> None:
    options = {"threads": 64, "schedule": schedule, "seed": seed}
    run(AFTERWARDS, _tiles(), **options)
    with pytest.raises(EmulationError) as e:
        run(AFTERWARDS.replace("bar.sync 1, 64;", ""), _tiles(), **options)
    assert e.value.kind.name == "race"


# CTA 1 commits to both CTAs; CTA 0 waits for the commit before it exits.
COMMIT_TO_PEER = """mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p1, %r101, 0; @%p1 bra I;
mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; I: barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p2, %r1, 1; mov.b16 %h1, 3; @%p2 bra W; @%p1 bra E;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r103], %h1; bra E;
W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], 0; @!%p4 bra W; /*wait*/
E:"""


def test_commit_to_a_peer_that_does_not_wait() -> None:
    assert not run(COMMIT_TO_PEER, grid=2, cluster=2).warnings
    line = next(x for x in COMMIT_TO_PEER.splitlines() if "/*wait*/" in x)
    (warning,) = run(COMMIT_TO_PEER.replace(line, "W:"), grid=2, cluster=2).warnings
    assert warning.startswith("exited_cta") and "arrives at CTA rank 0" in warning


# CTA 1 completes the bytes that CTA 0 expects; CTA 0 waits for the bytes before it exits.
COMPLETE_AT_PEER = """mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p1, %r100, 0; @%p1 bra I;
mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; I: barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p2, %r1, 1; mov.u32 %r2, 0; mapa.shared::cluster.u32 %r5, %r103, %r2; mov.u32 %r6, 16; @%p1 bra J;
@%p2 bra X; mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r5], %r6; bra J;
X: mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 16; J: @!%p2 bra E;
W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], 0; @!%p4 bra W; /*wait*/
E:"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_bytes_completed_at_a_peer_that_waits_for_them(schedule: str, seed: int) -> None:
    options = {"grid": 2, "cluster": 2, "schedule": schedule, "seed": seed}
    assert not run(COMPLETE_AT_PEER, **options).warnings
    line = next(x for x in COMPLETE_AT_PEER.splitlines() if "/*wait*/" in x)
    with pytest.raises(EmulationError) as e:
        run(COMPLETE_AT_PEER.replace(line, ""), **options)
    assert e.value.kind.name == "exited_cta"


# .relaxed arrivals and waits: tcgen05.fence orders tensor-core work across them, and nothing else.
RELAXED = """setp.ne.u32 %p1, %r102, 0; @%p1 bra S; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32;
setp.ne.u32 %p6, %r101, 0; @%p6 bra S; mbarrier.init.shared::cta.b64 [%r103+8], 32; S: bar.sync 0;
ld.shared.u32 %r1, [%r103]; setp.eq.u32 %p2, %r102, 4; and.b32 %r5, %r102, 3; setp.ne.u32 %p4, %r5, 0; @%p4 bra J; @%p2 bra L;
W: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p5, [%r103+8], 0; @!%p5 bra W;
tcgen05.fence::after_thread_sync; /*after*/
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1]; tcgen05.wait::ld.sync.aligned; /*generic*/ bra J;
L: st.shared.u32 [%r103+16], %r101; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r101}; tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync; /*before*/
mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r103+8];
J: bar.sync 0; @%p1 bra Z; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; Z:"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_tensor_fences_order_tensor_memory_over_a_relaxed_mbarrier(schedule: str, seed: int) -> None:
    options = {"threads": 160, "schedule": schedule, "seed": seed}
    # Only one lane stores, so that the stores do not race.
    right = RELAXED.replace("st.shared.u32", "@%p6 bra T; st.shared.u32", 1).replace(
        "%r101; tcgen05.st", "%r101; T: tcgen05.st"
    )
    right = right.replace("L: ", "L: setp.ne.u32 %p6, %r101, 0; ")
    run(right, np.zeros(1, np.uint32), **options)
    for mark in ("after", "before"):
        with pytest.raises(EmulationError) as e:
            run(re.sub(rf"tcgen05\.fence::\w+; /\*{mark}\*/", "", right), np.zeros(1, np.uint32), **options)
        assert e.value.kind.name == "race" and "tensor memory" in e.value.message
    with pytest.raises(EmulationError) as e:
        run(right.replace("/*generic*/", "ld.shared.u32 %r6, [%r103+16];"), np.zeros(1, np.uint32), **options)
    assert e.value.kind.name == "race" and "shared memory" in e.value.message


# Every thread sends the other CTA of its pair `steps` pieces of 16 bytes by st.async, numbered from
# 4 * (64 * CTA + thread) on; a CTA copies the received pieces to global memory.
STORE_ASYNC = """mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r100, 0; @%p1 bra I;
mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; mov.u32 %r3, {nbytes};
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], %r3; I: barrier.cluster.arrive; barrier.cluster.wait;
mapa.shared::cluster.u32 %r4, %r103, %r2; shl.b32 %r5, %r100, {shift}; and.b32 %r5, %r5, 0xfffffff0;
add.u32 %r6, %r103, 1024; add.u32 %r6, %r6, %r5; mapa.shared::cluster.u32 %r7, %r6, %r2;
shl.b32 %r8, %r1, 6; add.u32 %r8, %r8, %r100; shl.b32 %r8, %r8, 2; mov.u32 %r9, 0;
S: add.u32 %r10, %r8, 1; add.u32 %r11, %r8, 2; add.u32 %r12, %r8, 3;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r7], {{%r8, %r10, %r11, %r12}}, [%r4];
add.u32 %r7, %r7, 1024; add.u32 %r8, %r8, 512; add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, {steps}; @%p2 bra S;
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r103], 0; @!%p3 bra W;
mul.lo.u32 %r13, %r1, {nbytes}; cvt.u64.u32 %rd1, %r13; add.s64 %rd2, %rd100, %rd1; cvt.u64.u32 %rd3, %r5;
add.s64 %rd2, %rd2, %rd3; mov.u32 %r9, 0;
L: ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r6]; st.global.v4.b32 [%rd2], {{%r20, %r21, %r22, %r23}};
add.u32 %r6, %r6, 1024; add.s64 %rd2, %rd2, 1024; add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, {steps}; @%p2 bra L;
barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize("schedule", ["eager", "late", "random", "random_warps"])
def test_store_async(schedule: str) -> None:
    """One clock component for each lane's store would need 2 GB; one for each instruction needs a few MB."""
    steps, before = 192, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = np.zeros((2, steps, 64, 4), np.uint32)
    body = STORE_ASYNC.format(nbytes=steps * 1024, shift=4, steps=steps)
    run(body, out, grid=2, cluster=2, threads=64, smem=(steps + 1) * 1024, schedule=schedule, seed=1)
    numbers = np.arange(steps * 2 * 64 * 4, dtype=np.uint32).reshape(steps, 2, 64, 4)
    np.testing.assert_array_equal(out, numbers.transpose(1, 0, 2, 3)[::-1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


@pytest.mark.parametrize("shift", [3, 2])
def test_store_async_of_two_lanes_to_one_location_is_a_race(shift: int) -> None:
    with pytest.raises(EmulationError) as e:
        body = STORE_ASYNC.format(nbytes=1024, shift=shift, steps=1)
        run(body, np.zeros(512, np.uint32), grid=2, cluster=2, threads=64)
    assert e.value.kind.name == "race", str(e.value)


def test_received_store_async_needs_a_wait() -> None:
    lines = STORE_ASYNC.format(nbytes=1024, shift=4, steps=1).splitlines()
    body = "\n".join(line for line in lines if not line.startswith("W:"))
    with pytest.raises(EmulationError) as e:
        run(body, np.zeros(512, np.uint32), grid=2, cluster=2, threads=64)
    assert e.value.kind.name in ("race", "uninitialised_smem"), str(e.value)
