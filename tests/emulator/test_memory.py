"""Loads, stores, atomics, matrix loads and stores, bounds."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind
from ptx_emulator.samples.handwritten import run

RNG = np.random.default_rng(3)


def test_vectors_and_sign_extension() -> None:
    a = RNG.integers(0, 256, 512, dtype=np.uint8)
    out = np.zeros(128, np.int32)
    run(
        """mul.wide.u32 %rd1, %r100, 16; add.s64 %rd2, %rd100, %rd1; ld.global.nc.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2];
    ld.global.s8 %r5, [%rd2+5]; ld.global.u16 %h1, [%rd2+2]; cvt.u32.u16 %r6, %h1; ld.global.s16 %r7, [%rd2+6];
    add.s64 %rd3, %rd101, %rd1; st.global.v4.b32 [%rd3], {%r4, %r5, %r6, %r7};""",
        a,
        out,
    )
    rows, got = a.reshape(32, 16), out.reshape(32, 4)
    np.testing.assert_array_equal(got[:, 0], rows[:, 12:16].copy().view(np.int32)[:, 0])
    np.testing.assert_array_equal(got[:, 1], rows[:, 5].view(np.int8))
    np.testing.assert_array_equal(got[:, 2], rows[:, 2:4].copy().view(np.uint16)[:, 0])
    np.testing.assert_array_equal(got[:, 3], rows[:, 6:8].copy().view(np.int16)[:, 0])


@pytest.mark.parametrize(
    ("op", "dtype", "reference"),
    [
        ("add.u32", np.uint32, np.sum),
        ("max.u32", np.uint32, np.max),
        ("min.s32", np.int32, np.min),
        ("add.f32", np.float32, np.sum),
        ("or.b32", np.uint32, np.bitwise_or.reduce),
        ("add.u64", np.uint64, np.sum),
    ],
)
def test_atomics(op: str, dtype: type, reference) -> None:  # noqa: ANN001
    a = RNG.integers(1, 1000, 64).astype(dtype)
    out = np.zeros(1, dtype)
    if op.startswith("min"):
        out[:] = 10**6
    size, reg = a.itemsize, "rd" if a.itemsize == 8 else "r" if dtype != np.float32 else "f"
    t = op.split(".")[1]
    run(
        f"""mul.wide.u32 %rd1, %r100, {size}; add.s64 %rd2, %rd100, %rd1; ld.global.{t} %{reg}1, [%rd2]; red.global.{op} [%rd101], %{reg}1;""",
        a,
        out,
        threads=64,
    )
    assert out[0] == reference(a)


def test_compare_and_swap_counts_exactly_once() -> None:
    out = np.zeros(1, np.uint32)
    run(
        "LOOP: ld.volatile.global.u32 %r1, [%rd100]; add.u32 %r2, %r1, 1; atom.global.cas.b32 %r3, [%rd100], %r1, %r2; setp.ne.u32 %p1, %r3, %r1; @%p1 bra LOOP;",
        out,
        threads=96,
        schedule="random_warps",
        seed=5,
    )
    assert out[0] == 96


def test_ldmatrix_and_stmatrix_transpose() -> None:
    a = RNG.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    out = np.zeros((4, 8, 8), np.uint16)
    run(
        """mul.wide.u32 %rd1, %r100, 16; add.s64 %rd2, %rd100, %rd1; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2];
    shl.b32 %r5, %r101, 4; add.u32 %r6, %r103, %r5; st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r7, %r8, %r9, %r10}, [%r6];
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6+1024], {%r7, %r8, %r9, %r10}; bar.warp.sync -1;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6+1024]; add.s64 %rd3, %rd101, %rd1; st.global.v4.b32 [%rd3], {%r1, %r2, %r3, %r4};""",
        a,
        out,
    )
    np.testing.assert_array_equal(out, a.transpose(0, 2, 1))


@pytest.mark.parametrize("count", [1, 2])
def test_byte_matrix_transposing_load(count: int) -> None:
    """Thread t gives the address of row t.

    An earlier layout came from CUTLASS's traits, which hold only after a permutation of the registers that CUTLASS
    adds: half of the elements of mixed_input_fmha_decode were wrong.
    """
    a = RNG.integers(0, 256, (32, 16), dtype=np.uint8)
    out = np.zeros((32, 2 * count), np.uint32)
    registers = ", ".join(f"%r{7 + k}" for k in range(2 * count))
    stores = "".join(f"st.global.u32 [%rd3+{4 * k}], %r{7 + k};" for k in range(2 * count))
    run(
        f"""mul.wide.u32 %rd1, %r101, 16; add.s64 %rd2, %rd100, %rd1; shl.b32 %r5, %r101, 4; add.u32 %r6, %r103, %r5;
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd2]; st.shared.v4.b32 [%r6], {{%r1, %r2, %r3, %r4}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{registers}}}, [%r6];
    mul.wide.u32 %rd1, %r101, {8 * count}; add.s64 %rd3, %rd101, %rd1; {stores}""",
        a,
        out,
    )
    for t in range(32):
        for k in range(2 * count):
            expected = a[16 * (k // 2) + 4 * (t % 4) + np.arange(4), t // 4 + 8 * (k % 2)]
            np.testing.assert_array_equal(out[t, k : k + 1].view(np.uint8), expected)


def test_byte_matrix_transpose_there_and_back() -> None:
    a = RNG.integers(0, 256, (16, 16), dtype=np.uint8)
    out = np.zeros((16, 16), np.uint8)
    # The result of ldmatrix, with bytes exchanged between its two registers as in CUTLASS, is the input of stmatrix if
    # thread s gives ldmatrix the address of row s0 + 2*s2 + 8*s1.
    run(
        """setp.ge.u32 %p1, %r101, 16; mul.wide.u32 %rd1, %r101, 16; add.s64 %rd2, %rd100, %rd1; add.s64 %rd3, %rd101, %rd1;
    shl.b32 %r5, %r101, 4; add.u32 %r6, %r103, %r5; @%p1 bra A; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2]; st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4}; A: bar.warp.sync -1;
    and.b32 %r11, %r101, 1; bfe.u32 %r12, %r101, 1, 1; bfe.u32 %r13, %r101, 2, 2; shl.b32 %r12, %r12, 3; shl.b32 %r13, %r13, 1;
    add.u32 %r11, %r11, %r12; add.u32 %r11, %r11, %r13; shl.b32 %r11, %r11, 4; add.u32 %r11, %r103, %r11;
    ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r7, %r8}, [%r11]; prmt.b32 %r9, %r7, %r8, 0x5410; prmt.b32 %r10, %r7, %r8, 0x7632;
    and.b32 %r14, %r101, 15; shl.b32 %r14, %r14, 4; add.u32 %r14, %r103, %r14;
    stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r14+1024], {%r9, %r10}; bar.warp.sync -1;
    @%p1 bra B; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6+1024]; st.global.v4.b32 [%rd3], {%r1, %r2, %r3, %r4}; B:""",
        a,
        out,
    )
    np.testing.assert_array_equal(out, a)


def test_cp_async_zero_fills_and_waits() -> None:
    a = RNG.integers(0, 1 << 32, 128, dtype=np.uint64).astype(np.uint32)
    for schedule in ("eager", "late", "random"):
        out = np.zeros(128, np.uint32)
        run(
            """mul.wide.u32 %rd1, %r100, 16; add.s64 %rd2, %rd100, %rd1; shl.b32 %r5, %r101, 4; add.u32 %r6, %r103, %r5; and.b32 %r7, %r101, 1; shl.b32 %r7, %r7, 4;
        cp.async.cg.shared.global [%r6], [%rd2], 16, %r7; cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6]; add.s64 %rd3, %rd101, %rd1; st.global.v4.b32 [%rd3], {%r1, %r2, %r3, %r4};""",
            a,
            out,
            schedule=schedule,
        )
        expected = a.reshape(32, 4).copy()
        expected[0::2] = 0
        np.testing.assert_array_equal(out.reshape(32, 4), expected)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("ld.global.u32 %r1, [%rd100+128];", ErrorKind.out_of_bounds),
        ("st.global.u32 [%rd100], %r1;", ErrorKind.out_of_bounds),
        ("ld.global.u32 %r1, [%rd100+2];", ErrorKind.misaligned),
        ("mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1];", ErrorKind.out_of_bounds),
        ("ld.shared.u32 %r1, [%r103+65536];", ErrorKind.out_of_bounds),
        ("mov.u32 %r2, 16; ld.shared.u32 %r1, [%r2];", ErrorKind.out_of_bounds),
        ("ld.shared.u32 %r1, [%r103];", ErrorKind.uninitialised_smem),
        ("red.shared.max.s32 [%r103], %r100;", ErrorKind.uninitialised_smem),
        ("atom.shared.exch.b32 %r1, [%r103], %r100;", ErrorKind.uninitialised_smem),
        ("trap;", ErrorKind.trap),
        ("L: bra L;", ErrorKind.instruction_limit),
    ],
)
def test_bad_access(body: str, kind: ErrorKind) -> None:
    with pytest.raises(EmulationError) as e:
        run(body, np.zeros(32, np.uint32), read_only=(0,))
    assert e.value.kind is kind


def test_an_atomic_operation_on_initialised_shared_memory() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """setp.eq.u32 %p1, %r101, 0; @%p1 st.shared.u32 [%r103], 3; bar.warp.sync 0xffffffff;
    red.shared.max.s32 [%r103], %r101; bar.warp.sync 0xffffffff; ld.shared.u32 %r1, [%r103];
    mul.wide.u32 %rd3, %r101, 4; add.s64 %rd4, %rd100, %rd3; st.global.u32 [%rd4], %r1;""",
        out,
    )
    np.testing.assert_array_equal(out, np.full(32, 31))


def test_local_memory_is_per_lane() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """{ .local .align 8 .b8 frame[64]; mov.u64 %rd1, frame; cvta.local.u64 %rd2, %rd1; st.u32 [%rd2+8], %r101; ld.local.u32 %r1, [%rd1+8]; }
    mul.wide.u32 %rd3, %r100, 4; add.s64 %rd4, %rd100, %rd3; st.global.u32 [%rd4], %r1;""",
        out,
    )
    np.testing.assert_array_equal(out, np.arange(32))


def test_bank_conflicts_are_counted() -> None:
    row = run("shl.b32 %r1, %r101, 2; add.u32 %r1, %r103, %r1; st.shared.u32 [%r1], %r101;")
    column = run("shl.b32 %r1, %r101, 7; add.u32 %r1, %r103, %r1; st.shared.u32 [%r1], %r101;")
    assert (row.shared_conflicts, column.shared_conflicts) == (0, 31)
