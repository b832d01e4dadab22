"""The report of kernels small enough to count by hand."""

import numpy as np
import pytest
from ptx_emulator.report import (
    ALU_LANES_PER_CLOCK,
    B200,
    FMA_LANES_PER_CLOCK,
    INSTRUCTIONS_PER_CLOCK,
    L2_BYTES_PER_CLOCK,
    SFU_LANES_PER_CLOCK,
    SHARED_BYTES_PER_CLOCK,
    TMEM_BYTES_PER_CLOCK,
    classify,
    mma_cycles,
)
from ptx_emulator.samples.handwritten import run
from ptx_emulator.samples.tcgen05_body import COMMIT_AND_WAIT, EPILOGUE, PROLOGUE, READ_OUT, SMEM_IMAGE, descriptor

# handwritten.py's code before a body with one parameter: ld.param, and four moves or shifts, of classes alu and move.
BEFORE = run("", np.zeros(1, np.uint32))


def _more(report: object, by: str) -> dict[str, int]:
    """The counts beyond those of the empty kernel."""
    have, empty = getattr(report, by), getattr(BEFORE, by)
    return {k: n - empty.get(k, 0) for k, n in have.items() if n != empty.get(k, 0)}


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("tcgen05.mma.cta_group::1.kind::f16", "mma"),
        ("tcgen05.ld.sync.aligned.32x32b.x4.b32", "tmem"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes", "tma"),
        ("cp.async.cg.shared.global", "cp.async"),
        ("mbarrier.try_wait.parity.shared::cta.b64", "mbarrier"),
        ("ex2.approx.ftz.f32", "sfu"),
        ("bar.sync", "barrier"),
        ("fence.proxy.async.shared::cta", "barrier"),
        ("shfl.sync.bfly.b32", "warp"),
        ("ld.shared.v4.b32", "shared"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared"),
        ("st.global.b32", "global"),
        ("bra", "control"),
        ("cvt.rn.f16x2.f32", "convert"),
        ("mov.b32", "move"),
        ("fma.rn.f32x2", "alu"),
    ],
)
def test_classes(opcode: str, name: str) -> None:
    assert classify(opcode) == name


def test_instructions_and_operations() -> None:
    """Two warps; in the second, 8 lanes are predicated off."""
    body = """setp.lt.u32 %p1, %r100, 56; @%p1 ex2.approx.ftz.f32 %f1, %f2; add.f32 %f3, %f1, %f1; fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;
    cvt.rn.f16x2.f32 %r1, %f1, %f3; bar.sync 0;"""
    report = run(body, np.zeros(1, np.uint32), threads=64)
    empty = run("", np.zeros(1, np.uint32), threads=64)
    assert report.instructions - empty.instructions == 12
    more = {k: n - empty.by_class.get(k, 0) for k, n in report.by_class.items() if n != empty.by_class.get(k, 0)}
    assert more == {"alu": 6, "sfu": 2, "convert": 2, "barrier": 2}
    assert report.sfu_operations == 56
    # add is one operation a lane, fma.f32x2 two; setp and cvt run on the integer pipe.
    assert report.fma_operations - empty.fma_operations == 64 * (1 + 2)
    assert report.alu_operations - empty.alu_operations == 64 * (1 + 1)
    assert report.cycles["sfu"] == 56 / SFU_LANES_PER_CLOCK
    assert report.cycles["fma"] == report.fma_operations / FMA_LANES_PER_CLOCK
    assert report.cycles["alu"] == report.alu_operations / ALU_LANES_PER_CLOCK
    assert report.cycles["issue"] == report.instructions / INSTRUCTIONS_PER_CLOCK


def test_a_loop_counts_every_turn() -> None:
    report = run(
        "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 10; @%p1 bra L; @!%p1 bra E; add.u32 %r1, %r1, 1; E:",
        np.zeros(1, np.uint32),
    )
    assert _more(report, "by_class") == {"alu": 20, "control": 10 + 1 - 1, "move": 1}
    assert report.unexecuted == BEFORE.unexecuted + 1


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (16, 4), (128, 32), (132, 1), (0, 1)])
def test_bank_conflicts(stride: int, wavefronts: int) -> None:
    """32 lanes a `stride` apart: 32 banks of 4 bytes; the same word is broadcast."""
    report = run(
        f"mul.lo.u32 %r1, %r101, {stride}; add.u32 %r2, %r103, %r1; st.shared.u32 [%r2], %r101;", np.zeros(1, np.uint32)
    )
    assert (report.shared_wavefronts, report.shared_conflicts) == (wavefronts, wavefronts - 1)
    assert report.bytes["shared_written"] == 128
    assert report.cycles["shared"] == wavefronts


def test_wide_accesses_take_several_wavefronts_without_conflict() -> None:
    report = run(
        "mul.lo.u32 %r1, %r101, 16; add.u32 %r2, %r103, %r1; st.shared.v4.u32 [%r2], {%r101, %r101, %r101, %r101};",
        np.zeros(1, np.uint32),
    )
    assert (report.shared_wavefronts, report.shared_conflicts) == (4, 0)


def test_bytes_of_global_memory() -> None:
    x = np.zeros(64, np.uint64)
    report = run(
        "mul.wide.u32 %rd1, %r100, 8; add.s64 %rd2, %rd100, %rd1; ld.global.b64 %rd3, [%rd2]; ld.global.b32 %r1, [%rd2]; st.global.b32 [%rd2], %r1;",
        x,
        threads=64,
    )
    assert (report.bytes["global_read"], report.bytes["global_written"]) == (64 * 12, 64 * 4)
    assert report.cycles["l2"] == 64 * 16 / L2_BYTES_PER_CLOCK
    # 1024 bytes were read and written, but the tensor has only half as many.
    assert report.cycles["hbm"] == pytest.approx(x.nbytes / B200.hbm_bytes_per_clock)


@pytest.mark.parametrize(("m", "n"), [(128, 64), (128, 128), (64, 64)])
def test_an_mma_and_its_read_out(m: int, n: int) -> None:
    k = 16
    d = descriptor(128, 256, 32) + (SMEM_IMAGE >> 4)
    body = (
        PROLOGUE.format(words=2048)
        + f"""@%p2 bra M1; mov.b64 %rd1, {d}; mov.b32 %r1, {1 << 4 | n // 8 << 17 | m // 16 << 24};
    setp.ne.u32 %p6, %r100, 0; tcgen05.mma.cta_group::1.kind::f16 [%r104], %rd1, %rd1, %r1, %p6;"""
        + COMMIT_AND_WAIT
    )
    read_out = READ_OUT.format(row_bytes=4 * n, columns=n, first=0) if m == 128 else ""
    report = run(
        body + read_out + EPILOGUE,
        np.zeros(2048, np.uint32),
        np.zeros((128, n), np.float32),
        threads=128,
    )
    assert report.mma_flops == 2 * m * n * k
    assert report.by_class["mma"] == 1
    assert report.by_form[f"tcgen05.mma kind::f16 cta_group::1 SS KK m{m} n{n} k16"] == 1
    # M=64 takes as long as M=128.
    assert report.cycles["tensor"] == n / 2
    assert report.bytes["operands_read"] == (m + n) * k * 2
    assert report.cycles["operands"] == (m + n) * k * 2 / SHARED_BYTES_PER_CLOCK
    if m == 128:
        assert report.bytes["tmem_read"] == m * n * 4
        assert report.cycles["tmem"] == m * n * 4 / TMEM_BYTES_PER_CLOCK


# Clocks that one tcgen05.mma of a long sequence took on a B200 (report.py's source [3]).
@pytest.mark.parametrize(
    ("kind", "operands", "ctas", "m", "n", "k", "measured"),
    [
        ("f16", "SS", 1, 64, 64, 16, 32.6),
        ("f16", "SS", 1, 64, 256, 16, 128.6),
        ("f16", "SS", 1, 128, 64, 16, 48.6),
        ("f16", "SS", 1, 128, 96, 16, 56.6),
        ("f16", "SS", 1, 128, 128, 16, 64.6),
        ("f16", "SS", 2, 128, 64, 16, 25.7),
        ("f16", "SS", 2, 128, 256, 16, 64.7),
        ("f16", "SS", 2, 256, 64, 16, 43.7),
        ("f16", "SS", 2, 256, 256, 16, 128.7),
        ("f16", "TS", 1, 128, 64, 16, 32.5),
        ("f16", "TS", 2, 128, 128, 16, 32.7),
        ("f8f6f4", "SS", 1, 64, 256, 32, 128.3),
        ("f8f6f4", "SS", 1, 128, 64, 32, 48.3),
        ("i8", "SS", 2, 256, 256, 32, 128.4),
        ("mxf8f6f4", "TS", 1, 128, 256, 32, 128.3),
        ("mxf4", "SS", 1, 128, 96, 64, 56.2),
        ("mxf4", "SS", 2, 128, 128, 64, 32.2),
    ],
)
def test_the_bound_of_an_mma_is_just_below_the_measured_time(
    kind: str, operands: str, ctas: int, m: int, n: int, k: int, measured: float
) -> None:
    tensor = mma_cycles(f"tcgen05.mma kind::{kind} cta_group::{ctas} {operands} KK m{m} n{n} k{k}") / ctas
    row_bytes = 32  # of K, for every type
    rows = (m if operands == "SS" else 0) + n
    shared = rows * row_bytes / ctas / SHARED_BYTES_PER_CLOCK
    assert 0.9 * measured < max(tensor, shared) <= measured


def test_ctas_are_spread_over_the_multiprocessors() -> None:
    one, four = (run("ex2.approx.ftz.f32 %f1, %f2;", np.zeros(1, np.uint32), grid=g) for g in (1, 4))
    assert four.sfu_operations == 4 * one.sfu_operations == 128
    assert four.cycles["sfu"] == one.cycles["sfu"] == 2
