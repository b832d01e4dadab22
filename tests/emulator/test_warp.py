"""Divergence and reconvergence, warp collectives, CTA and cluster barriers."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind
from ptx_emulator.samples.handwritten import run

STORE = "mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r1;"


def _run(body: str, threads: int = 32, **options: object) -> np.ndarray:
    out = np.zeros(threads, np.uint32)
    run(body + STORE, out, threads=threads, **options)
    return out


def test_divergent_loop_runs_each_lane_its_own_count() -> None:
    got = _run(
        "mov.u32 %r1, 0; mov.u32 %r2, %r101; LOOP: setp.eq.u32 %p1, %r2, 0; @%p1 bra DONE; add.u32 %r1, %r1, %r2; sub.u32 %r2, %r2, 1; bra LOOP; DONE:"
    )
    np.testing.assert_array_equal(got, [i * (i + 1) // 2 for i in range(32)])


def test_nested_branches_reconverge_for_a_collective() -> None:
    got = _run("""and.b32 %r2, %r101, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra A; mov.u32 %r3, 10; bra B;
    A: setp.lt.u32 %p2, %r101, 16; @%p2 bra C; mov.u32 %r3, 20; bra B; C: mov.u32 %r3, 30; B:
    shfl.sync.bfly.b32 %r1, %r3, 1, 31, -1;""")
    value = [30 if i % 2 == 0 and i < 16 else 20 if i % 2 == 0 else 10 for i in range(32)]
    np.testing.assert_array_equal(got, [value[i ^ 1] for i in range(32)])


def test_indexed_branch() -> None:
    got = _run("""and.b32 %r2, %r101, 3; T: .branchtargets L0, L1, L2, L3; brx.idx %r2, T; L0: mov.u32 %r1, 5; bra E; L1: mov.u32 %r1, 6; bra E;
    L2: mov.u32 %r1, 7; bra E; L3: mov.u32 %r1, 8; E:""")
    np.testing.assert_array_equal(got, np.resize([5, 6, 7, 8], 32))


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("idx", 3, 31, lambda i: 3),
        ("up", 2, 0, lambda i: i - 2 if i >= 2 else i),
        ("down", 4, 31, lambda i: i + 4 if i + 4 < 32 else i),
        ("bfly", 5, 31, lambda i: i ^ 5),
        ("down", 1, 0x181F, lambda i: i + 1 if (i & 7) < 7 else i),
    ],
)
def test_shfl(mode: str, b: int, c: int, source) -> None:  # noqa: ANN001
    got = _run(f"mul.lo.u32 %r2, %r101, 10; shfl.sync.{mode}.b32 %r1|%p1, %r2, {b}, {c}, -1;")
    np.testing.assert_array_equal(got, [source(i) * 10 for i in range(32)])


def test_votes_and_reductions() -> None:
    got = _run("""setp.lt.u32 %p1, %r101, 5; vote.sync.ballot.b32 %r2, %p1, -1; redux.sync.add.u32 %r3, %r101, -1;
    redux.sync.max.s32 %r4, %r101, -1; add.u32 %r1, %r2, %r3; add.u32 %r1, %r1, %r4; vote.sync.any.pred %p2, %p1, -1; @!%p2 bra NO; add.u32 %r1, %r1, 1000; NO:""")
    assert (got == 31 + 496 + 31 + 1000).all()


def test_elect_picks_one_lane() -> None:
    got = _run("mov.u32 %r1, 0; elect.sync %r2|%p1, -1; @%p1 mov.u32 %r1, 1;")
    assert got.sum() == 1


def test_collective_that_lanes_skip_is_an_error() -> None:
    with pytest.raises(EmulationError) as e:
        _run(
            "mov.u32 %r1, 0; setp.lt.u32 %p1, %r101, 8; @%p1 bra SKIP; shfl.sync.bfly.b32 %r1, %r101, 1, 31, -1; ret; SKIP: bar.warp.sync -1;"
        )
    assert e.value.kind is ErrorKind.divergent_collective


def test_named_barriers_and_reduction() -> None:
    got = _run(
        """setp.ge.u32 %p1, %r100, 96; barrier.cta.red.popc.aligned.u32 %r1, 3, 128, %p1; bar.sync 2, 128;""",
        threads=128,
    )
    assert (got == 32).all()


def test_barrier_with_different_counts_is_an_error() -> None:
    with pytest.raises(EmulationError) as e:
        _run(
            "mov.u32 %r1, 0; setp.eq.u32 %p1, %r102, 0; @%p1 bra A; bar.sync 1, 96; bra B; A: bar.sync 1, 64; B:",
            threads=96,
        )
    assert e.value.kind in (ErrorKind.barrier, ErrorKind.deadlock)


def test_incomplete_barrier_is_a_deadlock_with_a_dump() -> None:
    with pytest.raises(EmulationError) as e:
        _run("mov.u32 %r1, 0; setp.eq.u32 %p1, %r102, 0; @%p1 bra E; bar.sync 1, 64; E:", threads=64)
    assert e.value.kind is ErrorKind.deadlock and "warp 1" in e.value.message and "CTA barrier" in e.value.message


@pytest.mark.parametrize("schedule", ["eager", "random_warps"])
def test_cluster_barrier_and_distributed_shared_memory(schedule: str) -> None:
    out = np.zeros(2 * 32, np.uint32)
    run(
        """mov.u32 %r1, %cluster_ctarank; mul.lo.u32 %r2, %r1, 100; add.u32 %r2, %r2, %r101; shl.b32 %r3, %r101, 2; add.u32 %r4, %r103, %r3;
    st.shared.u32 [%r4], %r2; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    xor.b32 %r5, %r1, 1; mapa.shared::cluster.u32 %r6, %r4, %r5; ld.shared::cluster.u32 %r7, [%r6];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mad.lo.u32 %r8, %r1, 32, %r101; mul.wide.u32 %rd1, %r8, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r7;""",
        out,
        grid=2,
        cluster=2,
        schedule=schedule,
        seed=3,
    )
    np.testing.assert_array_equal(out, np.concatenate([np.arange(32) + 100, np.arange(32)]))


@pytest.mark.parametrize(("more", "enough"), [(112, True), (120, False)])
def test_setmaxnreg_moves_registers_between_warps(more: int, enough: bool) -> None:
    """768 threads begin with 80 registers each: if four warpgroups keep 64, each of the other two can get 32 more."""
    body = f"""shr.u32 %r1, %r100, 7; setp.lt.u32 %p1, %r1, 2; @%p1 bra CONSUME;
setmaxnreg.dec.sync.aligned.u32 64; bra.uni END;
CONSUME: setmaxnreg.inc.sync.aligned.u32 {more};
END: setp.eq.u32 %p2, %r100, 0; @%p2 st.global.u32 [%rd100], {more};"""
    out = np.zeros(1, np.uint32)
    if enough:
        run(body, out, threads=768, target="sm_90a")
        assert out[0] == more
        return
    with pytest.raises(EmulationError) as e:
        run(body, out, threads=768, target="sm_90a")
    assert e.value.kind is ErrorKind.deadlock and "setmaxnreg" in str(e.value)
