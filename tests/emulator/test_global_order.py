"""Happens-before in global memory, among all CTAs of a launch: strong accesses and fences order, and little else.

As in test_order.py, a line with a mark `/*name*/` can be deleted, and the error names the loss.
"""

import numpy as np
import pytest
from ptx_emulator import Checks, EmulationError
from ptx_emulator.samples.handwritten import run

SCHEDULES = [("eager", 0), ("late", 0), ("random", 1), ("random", 2), ("random_warps", 3)]

# Every CTA writes a partial result; the CTA that arrives last adds them, as split attention does.
LAST_ARRIVER = """mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 64, %r100; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd2, %rd100, %rd1;
add.u32 %r3, %r2, 1; st.global.u32 [%rd2], %r3;
bar.sync 0; /*all_written*/
setp.ne.u32 %p1, %r100, 0; @%p1 bra J;
fence.acq_rel.gpu; /*release*/
atom.relaxed.gpu.global.add.u32 %r4, [%rd101], 1;
fence.acq_rel.gpu; /*acquire*/
st.shared.u32 [%r103], %r4;
J: bar.sync 0; /*told*/
ld.shared.u32 %r4, [%r103]; mov.u32 %r5, %nctaid.x; sub.u32 %r5, %r5, 1; setp.ne.u32 %p2, %r4, %r5; @%p2 bra E;
mul.wide.u32 %rd3, %r100, 4; add.s64 %rd4, %rd100, %rd3; mov.u32 %r6, 0; mov.u32 %r7, 0;
L: ld.global.u32 %r8, [%rd4]; add.u32 %r6, %r6, %r8; add.s64 %rd4, %rd4, 256; add.u32 %r7, %r7, 1;
setp.le.u32 %p3, %r7, %r5; @%p3 bra L;
add.s64 %rd5, %rd102, %rd3; st.global.u32 [%rd5], %r6;
E:"""

# CTA 0 sets a flag after writing its data; CTA 1 polls the flag.
FLAG = """mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1;
setp.ne.u32 %p2, %r100, 0; mov.u32 %r5, 1; @%p1 bra C; st.global.u32 [%rd2], %r100; bar.sync 0;
@!%p2 st.release.gpu.global.u32 [%rd101], %r5; /*release*/
bra E; C: @%p2 bra D;
S: ld.acquire.gpu.global.u32 %r2, [%rd101]; setp.eq.u32 %p3, %r2, 0; @%p3 bra S; /*acquire*/
D: bar.sync 0; /*told*/
ld.global.u32 %r3, [%rd2]; add.s64 %rd3, %rd102, %rd1; st.global.u32 [%rd3], %r3; E:"""

# A bulk store copies shared memory to global memory, which is read back.
BULK = """shl.b32 %r1, %r100, 2; add.u32 %r2, %r103, %r1; st.shared.u32 [%r2], %r100; fence.proxy.async.shared::cta; bar.sync 0;
setp.ne.u32 %p1, %r100, 0; @%p1 bra J; cp.async.bulk.global.shared::cta.bulk_group [%rd100], [%r103], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0; /*written*/
J: bar.sync 0; /*told*/
xor.b32 %r3, %r100, 32; mul.wide.u32 %rd1, %r3, 4; add.s64 %rd2, %rd100, %rd1; ld.global.u32 %r4, [%rd2];
add.s64 %rd3, %rd102, %rd1; st.global.u32 [%rd3], %r4;"""

# A bulk load of data that other warps have stored.
BULK_LOAD = """mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r100;
setp.ne.u32 %p1, %r100, 0; @%p1 bra I; mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; I:
fence.proxy.async; bar.sync 0; /*stored*/
@%p1 bra W; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 256; add.u32 %r4, %r103, 1024;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd100], 256, [%r103];
mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], 0; W:"""

PROGRAMS = {"LAST_ARRIVER": (LAST_ARRIVER, 4), "FLAG": (FLAG, 2), "BULK": (BULK, 1), "BULK_LOAD": (BULK_LOAD, 1)}


def _run(name: str, body: str, schedule: str = "eager", seed: int = 0, **checks: str) -> tuple:
    data, flags, out = np.zeros(256, np.uint32), np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    grid = PROGRAMS[name][1]
    report = run(body, data, flags, out, grid=grid, threads=64, schedule=schedule, seed=seed, checks=Checks(**checks))
    return report, out


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass(name: str, schedule: str, seed: int) -> None:
    report, out = _run(name, PROGRAMS[name][0], schedule, seed)
    assert not report.warnings
    thread = np.arange(64)
    expected = {"LAST_ARRIVER": 4 * (thread + 1) + 64 * 6, "BULK_LOAD": 0 * thread}
    np.testing.assert_array_equal(out, expected.get(name, thread))


@pytest.mark.parametrize(
    ("name", "mark", "kinds"),
    [
        ("LAST_ARRIVER", "all_written", "global_race"),
        ("LAST_ARRIVER", "release", "global_race"),
        ("LAST_ARRIVER", "acquire", "global_race"),
        ("LAST_ARRIVER", "told", "race uninitialised_smem"),
        ("FLAG", "release", "deadlock"),
        ("FLAG", "acquire", "global_race"),
        ("FLAG", "told", "global_race"),
        ("BULK", "written", "global_race"),
        ("BULK", "told", "global_race"),
        ("BULK_LOAD", "stored", "global_race"),
    ],
)
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_without_one_synchronisation(name: str, mark: str, kinds: str, schedule: str, seed: int) -> None:
    body = PROGRAMS[name][0]
    (line,) = [x for x in body.splitlines() if f"/*{mark}*/" in x]
    label = line[: line.index(":") + 1] if line[1] == ":" else ""
    with pytest.raises(EmulationError) as e:
        _run(name, body.replace(line, label), schedule, seed)
    assert e.value.kind.name in kinds.split(), str(e.value)
    _run(name, body.replace(line, label), schedule, seed, global_race="off") if kinds == "global_race" else None


@pytest.mark.parametrize("schedule", ["late", "random", "random_warps"])
def test_a_cta_may_start_before_lower_numbered_ctas_end(schedule: str) -> None:
    """If CTAs ran in order of their numbers only, a wait for a lower number would never be exercised."""
    busy = (
        "mov.u32 %r6, 0; B: add.u32 %r6, %r6, 1; setp.lt.u32 %p4, %r6, 3000; @%p4 bra B; st.global.u32 [%rd2], %r100;"
    )
    body = FLAG.replace("st.global.u32 [%rd2], %r100;", busy, 1)
    first = run_flag(body, "eager", 0)
    assert max(run_flag(body, schedule, seed) for seed in range(4)) > first


def run_flag(body: str, schedule: str, seed: int) -> int:
    """The number of times that CTA 1 read the flag."""
    report, out = _run("FLAG", body, schedule, seed)
    np.testing.assert_array_equal(out, np.arange(64))
    (looks,) = (count for form, count in report.by_form.items() if form.startswith("ld.acquire"))
    return looks


def test_wait_group_read_does_not_cover_the_write() -> None:
    """wait_group.read frees the shared memory; the global memory need not be written yet."""
    with pytest.raises(EmulationError) as e:
        _run("BULK", BULK.replace("wait_group 0", "wait_group.read 0"))
    assert e.value.kind.name == "global_race" and "bulk store" in e.value.message


def test_message_names_tensor_and_cluster() -> None:
    with pytest.raises(EmulationError) as e:
        _run("LAST_ARRIVER", LAST_ARRIVER.replace("fence.acq_rel.gpu; /*acquire*/", ""))
    assert "(p0 + " in e.value.message and "of the cluster that began at CTA (0,0,0)" in e.value.message


def test_same_value_is_a_warning() -> None:
    """Several warps may write the same result, as in CUTLASS's MLA decode."""
    out = np.zeros(1, np.uint32)
    report = run("mov.u32 %r1, 7; st.global.u32 [%rd100], %r1;", out, threads=64)
    assert [w.split()[0] for w in report.warnings] == ["global_race"]
    with pytest.raises(EmulationError) as e:
        run("add.u32 %r1, %r102, 7; st.global.u32 [%rd100], %r1;", out, threads=64)
    assert e.value.kind.name == "global_race"


def test_write_after_reads_of_another_cluster() -> None:
    body = """mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra W; ld.global.u32 %r2, [%rd100]; bra E;
W: st.global.u32 [%rd100], %r1; E:"""
    with pytest.raises(EmulationError) as e:
        run(body, np.zeros(1, np.uint32), grid=2)
    assert e.value.kind.name == "global_race" and "the read by" in e.value.message


@pytest.mark.parametrize("where", ["global", "shared"])
def test_a_tensor_map_that_two_clusters_replace(where: str) -> None:
    replace = (
        "setp.ne.u32 %p1, %r101, 0; @%p1 bra E; tensormap.replace.tile.global_dim.global.b1024.b32 [%rd100], 0, 32; E:"
    )
    copy = """shl.b32 %r1, %r101, 2; add.u32 %r2, %r103, %r1; st.shared.u32 [%r2], %r101; bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd100], [%r103], 128;"""
    body = replace if where == "global" else copy
    tensor_map = np.zeros(32, np.uint32)
    assert not run(body, tensor_map, threads=32).warnings
    with pytest.raises(EmulationError) as e:
        run(body, tensor_map, threads=32, grid=2)
    assert e.value.kind.name == "global_race" and "the write by" in e.value.message


def test_one_bulk_store_issued_twice_is_a_warning() -> None:
    """CUTLASS's tma_store example: every warp's elected thread issues the store of the whole tile."""
    body = BULK.replace("setp.ne.u32 %p1, %r100, 0;", "setp.ne.u32 %p1, %r101, 0;")
    report, out = _run("BULK", body)
    assert [w.split()[0] for w in report.warnings] == ["global_race"]
    np.testing.assert_array_equal(out, np.arange(64))
