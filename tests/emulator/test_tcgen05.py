"""tcgen05.mma against NumPy: descriptors, formats, majors, block scales, A in tensor memory, pairs of CTAs.

The operands are written to shared memory by tcgen05_body.py's own description of the canonical layouts, not by TMA, so
that an error in the emulator's layouts cannot cancel out.
"""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind
from ptx_emulator.samples.handwritten import aligned, run
from ptx_emulator.samples.small_floats import decode
from ptx_emulator.samples.tcgen05_body import (
    COMMIT_AND_WAIT,
    EPILOGUE,
    FORMAT_CODE,
    PROLOGUE,
    READ_OUT,
    RNG,
    SMEM_IMAGE,
    descriptor,
    k_major,
    mn_major,
    random_operand,
)

READ_OUT_64 = """shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; mov.u32 %r62, 0; mul.wide.u32 %rd52, %r100, {row_bytes}; add.s64 %rd53, %rd101, %rd52;
shr.u32 %r70, %r101, 4; R0: add.u32 %r63, %r61, %r62; tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {{%r64, %r65}}, [%r63], 2; tcgen05.wait::ld.sync.aligned;
and.b32 %r71, %r101, 15; shl.b32 %r72, %r102, 5; add.u32 %r71, %r71, %r72; mul.wide.u32 %rd52, %r71, {row_bytes}; add.s64 %rd53, %rd101, %rd52; shl.b32 %r73, %r70, 1; add.u32 %r73, %r73, %r62;
mul.wide.u32 %rd54, %r73, 4; add.s64 %rd53, %rd53, %rd54; st.global.v2.b32 [%rd53], {{%r64, %r65}}; add.u32 %r62, %r62, 4; setp.lt.u32 %p5, %r62, {columns}; @%p5 bra R0;
"""


def _mma(
    kind: str,
    fmt_a: str,
    fmt_b: str,
    m: int,
    n: int,
    k: int,
    *,
    width: int = 32,
    accumulate: int = 0,
    a_mn: bool = False,
    b_mn: bool = False,
    schedule: str = "late",
    descriptor_change: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the MMA's result, the expected result, the error bound of f32 summation in any order)."""
    a, a_bytes = random_operand(kind, fmt_a, m, k)
    b, b_bytes = random_operand(kind, fmt_b, n, k)
    image = np.zeros(131072, np.uint8)
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(fmt_a, 1)

    def place(rows_bytes: np.ndarray, mn: bool, base: int) -> int:
        if mn:
            per_k = rows_bytes.reshape(len(rows_bytes), k, size).transpose(1, 0, 2).reshape(k, -1)
            return mn_major(np.ascontiguousarray(per_k), width, base, image) + (base >> 4)
        return k_major(rows_bytes, width, base, image) + (base >> 4)

    da = place(a_bytes, a_mn, SMEM_IMAGE)
    db = place(b_bytes, b_mn, SMEM_IMAGE + 32768 - 2048)
    idesc = (
        1 << 4
        | FORMAT_CODE[fmt_a] << 7
        | FORMAT_CODE[fmt_b] << 10
        | int(a_mn) << 15
        | int(b_mn) << 16
        | n // 8 << 17
        | m // 16 << 24
    )
    words = image[SMEM_IMAGE : SMEM_IMAGE + 64 * 1024].copy().view(np.uint32)
    out = np.zeros((128, n), np.float32)
    body = (
        PROLOGUE.format(words=len(words))
        + f"""@%p2 bra M1; mov.b64 %rd1, {da + descriptor_change}; mov.b64 %rd2, {db}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0;
    tcgen05.mma.cta_group::1.kind::{kind} [%r104], %rd1, %rd2, %r1, %p6;"""
        + (
            f"setp.eq.u32 %p6, %r100, 0; tcgen05.mma.cta_group::1.kind::{kind} [%r104], %rd1, %rd2, %r1, %p6;"
            * accumulate
        )
        + COMMIT_AND_WAIT
    )
    if m == 64:  # only lanes 0-15 of each quarter are written
        body += READ_OUT_64.format(row_bytes=4 * n, columns=n)
    else:
        body += READ_OUT.format(row_bytes=4 * n, columns=n, first=0)
    run(body + EPILOGUE, aligned(words), out, threads=128, smem=68 * 1024, schedule=schedule)
    expected = (a @ b.T) * (1 + accumulate)
    if m == 64:
        out = np.concatenate([out[32 * q : 32 * q + 16] for q in range(4)])
    return out, expected, (np.abs(a) @ np.abs(b).T) * (1 + accumulate) * k * (1 + accumulate) * 2.0**-24


@pytest.mark.parametrize(
    ("kind", "fmt_a", "fmt_b", "m", "n", "k", "width"),
    [
        ("f16", "f16", "f16", 128, 64, 16, 32),
        ("f16", "bf16", "bf16", 128, 256, 16, 128),
        ("f16", "f16", "f16", 128, 16, 16, 16),
        ("f16", "f16", "bf16", 128, 32, 16, 64),
        ("f16", "f16", "f16", 64, 64, 16, 32),
        ("f16", "bf16", "bf16", 64, 8, 16, 128),
        ("tf32", "tf32", "tf32", 128, 32, 8, 32),
        ("f8f6f4", "e4m3", "e4m3", 128, 64, 32, 32),
        ("f8f6f4", "e5m2", "e4m3", 128, 64, 32, 64),
        ("f8f6f4", "e2m1", "e4m3", 128, 32, 32, 32),
        ("f8f6f4", "e2m3", "e3m2", 128, 32, 32, 32),
    ],
)
@pytest.mark.parametrize("accumulate", [0, 1])
def test_k_major(kind: str, fmt_a: str, fmt_b: str, m: int, n: int, k: int, width: int, accumulate: int) -> None:
    got, expected, bound = _mma(kind, fmt_a, fmt_b, m, n, k, width=width, accumulate=accumulate)
    assert (np.abs(got - expected) <= bound).all()
    if kind != "f8f6f4":
        np.testing.assert_array_equal(got, expected)  # these sums are exact


@pytest.mark.parametrize(("a_mn", "b_mn"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("fmt", "width"), [("f16", 32), ("bf16", 128), ("f16", 64)])
def test_mn_major(fmt: str, width: int, a_mn: bool, b_mn: bool) -> None:
    if a_mn != b_mn and width != 32:
        width = 32  # one operand K-major: its 16 elements fill 32 bytes
    got, expected, _ = _mma("f16", fmt, fmt, 128, 64, 16, width=width, a_mn=a_mn, b_mn=b_mn)
    np.testing.assert_array_equal(got, expected)


def test_accumulating_into_fresh_tensor_memory_is_an_error() -> None:
    with pytest.raises(EmulationError) as e:
        run(
            PROLOGUE.format(words=4096)
            + f"""@%p2 bra M1; mov.b64 %rd1, {descriptor(128, 256, 32) + (SMEM_IMAGE >> 4)}; mov.b32 %r1, {1 << 4 | 8 << 17 | 8 << 24};
        setp.eq.u32 %p6, %r100, 0; tcgen05.mma.cta_group::1.kind::f16 [%r104], %rd1, %rd1, %r1, %p6;"""
            + COMMIT_AND_WAIT
            + EPILOGUE,
            aligned(np.zeros(4096, np.uint32)),
            np.zeros(1, np.uint32),
            threads=128,
        )
    assert e.value.kind is ErrorKind.uninitialised_tmem and "accumulator" in e.value.message


@pytest.mark.parametrize(
    ("idesc", "text"),
    [
        (1 << 4 | 33 << 17 | 8 << 24, "no shape M=128 N=264"),
        (1 << 4 | 8 << 17 | 6 << 24, "no shape M=96"),
        (3 << 7 | 1 << 4 | 8 << 17 | 8 << 24, "format 3 of A"),
    ],
)
def test_illegal_shapes(idesc: int, text: str) -> None:
    with pytest.raises(EmulationError, match=text):
        run(
            PROLOGUE.format(words=64)
            + f"@%p2 bra M1; mov.b64 %rd1, {descriptor(128, 256, 32)}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0;"
            "tcgen05.mma.cta_group::1.kind::f16 [%r104], %rd1, %rd1, %r1, %p6;" + COMMIT_AND_WAIT + EPILOGUE,
            aligned(np.zeros(64, np.uint32)),
            np.zeros(1, np.uint32),
            threads=128,
        )


# ---- A from tensor memory


STORE_A = """shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; mul.wide.u32 %rd1, %r100, 32; add.s64 %rd2, %rd102, %rd1;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2]; ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd2+16];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61+128], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}; tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 1, 128;
    """
"""Each thread stores its row of A, the third parameter, from column 128 of tensor memory on."""


def _a_from_tensor_memory() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]:
    """A [128, 16] and its bytes, B [64, 16], B's shared memory as words, its descriptor, the instruction descriptor."""
    a, a_bytes = random_operand("f16", "bf16", 128, 16)
    b, b_bytes = random_operand("f16", "bf16", 64, 16)
    image = np.zeros(16384, np.uint8)
    db = k_major(b_bytes, 32, 0x800, image) + (0x800 >> 4)
    return a, a_bytes, b, image[0x800:].copy().view(np.uint32), db, 1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 8 << 24


def test_a_from_tensor_memory() -> None:
    a, a_bytes, b, words, db, idesc = _a_from_tensor_memory()
    out = np.zeros((128, 64), np.float32)
    run(
        PROLOGUE.format(words=len(words))
        + STORE_A
        + f"""@%p2 bra M1; mov.b64 %rd2, {db}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0; add.u32 %r2, %r104, 128;
    tcgen05.mma.cta_group::1.kind::f16 [%r104], [%r2], %rd2, %r1, %p6;"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=256, columns=64, first=0)
        + EPILOGUE,
        aligned(words),
        out,
        aligned(a_bytes),
        threads=128,
        schedule="late",
    )
    np.testing.assert_array_equal(out, a @ b.T)


@pytest.mark.parametrize(
    ("fmt", "bits", "form"), [("e2m1", 4, "b4x16_p64"), ("e3m2", 6, "b6x16_p32"), ("e2m3", 6, "b6x16_p32")]
)
def test_narrow_a_is_unpacked_by_the_copy_to_tensor_memory(fmt: str, bits: int, form: str) -> None:
    """tcgen05.cp puts each element of a padded chunk into the middle of a byte, where tcgen05.mma reads it."""
    a, a_bytes = random_operand("f8f6f4", fmt, 128, 32)
    b, b_bytes = random_operand("f8f6f4", "e4m3", 64, 32)
    image = np.zeros(16384, np.uint8)
    da = k_major(a_bytes, 16, 0x800, image) + (0x800 >> 4)
    db = k_major(b_bytes, 32, 0x2000, image) + (0x2000 >> 4)
    words = image[0x800:].copy().view(np.uint32)
    out, raw = np.zeros((128, 64), np.float32), np.zeros((128, 8), np.uint32)
    idesc = 1 << 4 | FORMAT_CODE[fmt] << 7 | 8 << 17 | 8 << 24
    run(
        PROLOGUE.format(words=len(words))
        + f"""@%p2 bra M1; mov.b64 %rd1, {da}; mov.b64 %rd2, {db}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0; add.u32 %r2, %r104, 128;
    tcgen05.cp.cta_group::1.128x256b.b8x16.{form} [%r2], %rd1;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r104], [%r2], %rd2, %r1, %p6;"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=256, columns=64, first=0)
        + READ_OUT.format(row_bytes=32, columns=8, first=128).replace("%rd101", "%rd102").replace("R0", "R1")
        + EPILOGUE,
        aligned(words),
        out,
        raw,
        threads=128,
        schedule="late",
    )
    codes = raw.view(np.uint8)
    assert not (codes & (255 ^ ((1 << bits) - 1) << (8 - bits) // 2)).any()
    assert (np.abs(out - a @ b.T) <= np.abs(a) @ np.abs(b).T * 32 * 2.0**-24).all()


@pytest.mark.parametrize(("saturate", "expected"), [(0, -(1 << 31) + 15), (1, (1 << 31) - 1)])
def test_integers_saturate_on_request(saturate: int, expected: int) -> None:
    """16 products of 1 are added to 2^31 - 1."""
    image = np.zeros(16384, np.uint8)
    ones = np.zeros((128, 32), np.uint8)
    ones[:, :16] = 1
    d = k_major(ones, 32, 0x800, image) + (0x800 >> 4)
    out = np.zeros((128, 8), np.int32)
    idesc = saturate << 3 | 2 << 4 | 1 << 7 | 1 << 10 | 1 << 17 | 8 << 24
    run(
        PROLOGUE.format(words=2048) + "shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; mov.b32 %r1, 0x7fffffff;"
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1}; tcgen05.wait::st.sync.aligned; bar.sync 1, 128;"
        + f"""@%p2 bra M1; mov.b64 %rd1, {d}; mov.b32 %r1, {idesc}; setp.eq.u32 %p6, %r100, 0;
    tcgen05.mma.cta_group::1.kind::i8 [%r104], %rd1, %rd1, %r1, %p6;"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=32, columns=8, first=0)
        + EPILOGUE,
        aligned(image[0x800:].copy().view(np.uint32)),
        out,
        threads=128,
    )
    assert (out == expected).all()


def test_mn_major_tf32_in_atoms_of_32_bytes() -> None:
    """The only layout of MN-major tf32 with a swizzle of 128 bytes: 4 rows of K form a pattern."""
    a, b = (RNG.integers(-8, 9, (rows, 8)).astype(np.float32) for rows in (128, 64))
    image = np.zeros(32768, np.uint8)
    descriptors = []
    for matrix, base in ((a, 0x800), (b, 0x4800)):
        rows = len(matrix)
        for k in range(8):
            for r in range(rows):
                at = base + r // 32 * 1024 + k // 4 * 512 + k % 4 * 128 + r % 32 * 4
                at ^= at >> 2 & 0x60
                image[at : at + 4] = np.frombuffer(matrix[r, k].tobytes(), np.uint8)
        descriptors.append(base >> 4 | 1024 >> 4 << 16 | 512 >> 4 << 32 | 1 << 46 | 1 << 61)
    out = np.zeros((128, 64), np.float32)
    idesc = 1 << 4 | 2 << 7 | 2 << 10 | 1 << 15 | 1 << 16 | 8 << 17 | 8 << 24
    run(
        PROLOGUE.format(words=7680)
        + f"""@%p2 bra M1; mov.b64 %rd1, {descriptors[0]}; mov.b64 %rd2, {descriptors[1]}; mov.b32 %r1, {idesc};
    setp.ne.u32 %p6, %r100, 0; tcgen05.mma.cta_group::1.kind::tf32 [%r104], %rd1, %rd2, %r1, %p6;"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=256, columns=64, first=0)
        + EPILOGUE,
        aligned(image[0x800:].copy().view(np.uint32)),
        out,
        threads=128,
    )
    np.testing.assert_array_equal(out, a @ b.T)


# ---- block scales: the factors go through tcgen05.cp in the layout of 32 rows x 16 bytes


@pytest.mark.parametrize(
    ("kind", "qualifier", "fmt", "factors", "scale"),
    [
        ("mxf8f6f4", "", "e4m3", 1, "ue8m0"),
        ("mxf4", "", "e2m1", 2, "ue8m0"),
        ("mxf4nvf4", ".scale_vec::4X", "e2m1", 4, "e4m3"),
        ("mxf4nvf4", ".block16", "e2m1", 4, "e4m3"),
        ("mxf4nvf4", ".scale_vec::2X", "e2m1", 2, "ue8m0"),
    ],
)
def test_block_scaled(kind: str, qualifier: str, fmt: str, factors: int, scale: str) -> None:
    m, n, k = 128, 128, 64 if kind.startswith("mxf4") else 32
    a, a_bytes = random_operand(kind, fmt, m, k)
    b, b_bytes = random_operand(kind, fmt, n, k)
    image = np.zeros(32768, np.uint8)
    base_a, base_b, base_s = 0x800, 0x2000, 0x4000
    da = k_major(a_bytes, 32, base_a, image) + (base_a >> 4)
    db = k_major(b_bytes, 32, base_b, image) + (base_b >> 4)
    # Row r, factor j: byte 16 * (r % 32) + 4 * (r // 32) + j of a 512-byte block.
    codes = RNG.integers(120, 132, (2, 128, 4)) if scale == "ue8m0" else RNG.integers(40, 80, (2, 128, 4))
    values = 2.0 ** (codes - 127.0) if scale == "ue8m0" else decode("e4m3")[codes]
    for which in range(2):
        for r in range(128):
            at = base_s + 512 * which + 16 * (r % 32) + 4 * (r // 32)
            image[at : at + 4] = codes[which, r]
    ds = [descriptor(16, 128, 16) + (base_s + 512 * which >> 4) for which in range(2)]
    code = 1 if kind.startswith("mxf4") else FORMAT_CODE[fmt]
    idesc = code << 7 | code << 10 | n // 8 << 17 | int(scale == "ue8m0") << 23 | m // 16 << 24
    words = image[0x800:].copy().view(np.uint32)
    out = np.zeros((128, n), np.float32)
    run(
        PROLOGUE.format(words=len(words))
        + f"""@%p2 bra M1; mov.b64 %rd1, {da}; mov.b64 %rd2, {db}; mov.b64 %rd3, {ds[0]}; mov.b64 %rd4, {ds[1]};
    add.u32 %r2, %r104, 256; add.u32 %r3, %r104, 260; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r2], %rd3; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3], %rd4;
    mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0; tcgen05.mma.cta_group::1.kind::{kind}.block_scale{qualifier} [%r104], %rd1, %rd2, %r1, [%r2], [%r3], %p6;"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=4 * n, columns=n, first=0)
        + EPILOGUE,
        aligned(words),
        out,
        threads=128,
        schedule="random",
        seed=2,
    )
    scales = [np.repeat(v[:, :factors], k // factors, axis=1) for v in values]
    sa, sb = a * scales[0], b * scales[1]
    assert (np.abs(out - sa @ sb.T) <= np.abs(sa) @ np.abs(sb).T * k * 2.0**-24).all()


def test_mma_with_ashift() -> None:
    """The first product uses A unshifted; the second MMA sees A shifted by one lane in every quarter."""
    a, a_bytes, b, words, db, idesc = _a_from_tensor_memory()
    out = np.zeros((128, 128), np.float32)
    run(
        PROLOGUE.format(words=len(words))
        + STORE_A
        + f"""@%p2 bra M1; mov.b64 %rd2, {db}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0; add.u32 %r2, %r104, 128; add.u32 %r3, %r104, 64;
    tcgen05.mma.cta_group::1.kind::f16.ashift [%r104], [%r2], %rd2, %r1, %p6; tcgen05.mma.cta_group::1.kind::f16 [%r3], [%r2], %rd2, %r1, %p6;"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=512, columns=128, first=0)
        + EPILOGUE,
        aligned(words),
        out,
        aligned(a_bytes),
        threads=128,
        schedule="late",
    )
    shifted = a.reshape(4, 32, 16)
    shifted = np.concatenate([shifted[:, 1:], shifted[:, -1:]], axis=1).reshape(128, 16)
    np.testing.assert_array_equal(out, np.concatenate([a @ b.T, shifted @ b.T], axis=1))


# ---- pairs of CTAs: CTA r holds rows r * M/2.. of A and columns r * N/2.. of B; CTA 0 issues.


def test_a_pair_allocates_together() -> None:
    """The even CTA continues only after the other CTA has allocated, too, however late."""
    body = """mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p1, %r1, 0; @%p1 bra A; mov.u32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 500; @%p2 bra L;
    {other} st.relaxed.gpu.global.u32 [%rd100], %r2; A: tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r103], 32;
    @!%p1 bra B; ld.relaxed.gpu.global.u32 %r3, [%rd100]; st.global.u32 [%rd100+4], %r3; B: ld.shared.u32 %r4, [%r103];
    barrier.cluster.arrive; barrier.cluster.wait; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r4, 32;"""
    for schedule in ("eager", "random"):
        seen = np.zeros(2, np.uint32)
        run(body.format(other=""), seen, grid=2, cluster=2, schedule=schedule)
        assert seen.tolist() == [500, 500]
    with pytest.raises(EmulationError) as e:
        run(body.format(other="ret;"), np.zeros(2, np.uint32), grid=2, cluster=2)
    assert e.value.kind is ErrorKind.deadlock


@pytest.mark.parametrize(("m", "n"), [(256, 64), (256, 256), (128, 64), (128, 256)])
@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_two_cta_mma(m: int, n: int, schedule: str) -> None:
    """M=256: each CTA has 128 rows. M=128: each has 64, columns N/2.. of them on lanes 64..."""
    a, a_bytes = random_operand("f16", "f16", m, 16)
    b, b_bytes = random_operand("f16", "f16", n, 16)
    base_a, base_b, size = 0x800, 0x800 + 8192, 16384
    images = np.zeros((2, size), np.uint8)
    for r in range(2):
        full = np.zeros(0x800 + size, np.uint8)
        da = k_major(a_bytes[r * m // 2 : (r + 1) * m // 2], 32, base_a, full) + (base_a >> 4)
        db = k_major(b_bytes[r * n // 2 : (r + 1) * n // 2], 32, base_b, full) + (base_b >> 4)
        images[r] = full[0x800:]
    columns = n if m == 256 else n // 2
    out = np.zeros((2, 128, columns), np.float32)
    idesc = 1 << 4 | n // 8 << 17 | m // 16 << 24
    prologue = (
        PROLOGUE.replace("cta_group::1", "cta_group::2")
        .format(words=size // 4)
        .replace("bar.sync 0;", "barrier.cluster.arrive; barrier.cluster.wait;")
    )
    run(
        f"""mov.u32 %r110, %cluster_ctarank; mul.wide.u32 %rd90, %r110, {size}; add.s64 %rd100, %rd100, %rd90; mul.wide.u32 %rd90, %r110, {128 * columns * 4}; add.s64 %rd101, %rd101, %rd90;
    """
        + prologue
        + f"""setp.ne.u32 %p7, %r110, 0; or.pred %p8, %p7, %p2; @%p8 bra M1; mov.b64 %rd1, {da}; mov.b64 %rd2, {db}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0;
    tcgen05.mma.cta_group::2.kind::f16 [%r104], %rd1, %rd2, %r1, %p6; mov.b16 %h1, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r103], %h1; M1:
    """
        + COMMIT_AND_WAIT.splitlines()[1]
        + READ_OUT.format(row_bytes=4 * columns, columns=columns, first=0)
        + "barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra Z; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r104, 512; Z:",
        aligned(images),
        out,
        threads=128,
        grid=2,
        cluster=2,
        smem=32768,
        schedule=schedule,
        seed=3,
    )
    expected = (a @ b.T).astype(np.float32)
    for r in range(2):
        rows = expected[r * m // 2 : (r + 1) * m // 2]
        lanes = rows if m == 256 else np.concatenate([rows[:, : n // 2], rows[:, n // 2 :]])
        np.testing.assert_array_equal(out[r], lanes)
