"""Tensor memory and tcgen05.mma against NumPy: lane maps, descriptors, formats, block scales.

The operands are written to shared memory by this file's own description of the canonical layouts, not by TMA, so that a
wrong layout in the emulator cannot cancel out.
"""

import numpy as np
import pytest
from emulator import EmulationError, ErrorKind
from handwritten import aligned, run
from test_convert import FORMATS, decode

RNG = np.random.default_rng(9)
# Copies p0 (words) to shared memory from 0x800 on, allocates tensor memory into %r104, and initialises an mbarrier.
PROLOGUE = """setp.ne.u32 %p1, %r102, 0; @%p1 bra S0; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103+16], 512; S0:
setp.ne.u32 %p2, %r100, 0; @%p2 bra S1; mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; S1:
mov.u32 %r50, %r100; C0: setp.ge.u32 %p3, %r50, {words}; @%p3 bra C1; shl.b32 %r51, %r50, 2; add.u32 %r52, %r103, %r51;
mul.wide.u32 %rd50, %r50, 4; add.s64 %rd51, %rd100, %rd50; ld.global.u32 %r53, [%rd51]; st.shared.u32 [%r52+1024], %r53; add.u32 %r50, %r50, 128; bra C0; C1:
fence.proxy.async.shared::cta; bar.sync 0; ld.shared.u32 %r104, [%r103+16]; add.u32 %r105, %r103, 1024;
"""
COMMIT_AND_WAIT = """tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r103]; M1:
W0: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r103], 0; @!%p4 bra W0; tcgen05.fence::after_thread_sync;
"""
# Every warp reads its 32 lanes, {columns} columns from %r104 + {first}, to p1[lane][column].
READ_OUT = """shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; mov.u32 %r62, 0; mul.wide.u32 %rd52, %r100, {row_bytes}; add.s64 %rd53, %rd101, %rd52;
R0: add.u32 %r63, %r61, %r62; tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r64, %r65, %r66, %r67}}, [%r63+{first}]; tcgen05.wait::ld.sync.aligned;
st.global.v4.b32 [%rd53], {{%r64, %r65, %r66, %r67}}; add.s64 %rd53, %rd53, 16; add.u32 %r62, %r62, 4; setp.lt.u32 %p5, %r62, {columns}; @%p5 bra R0;
"""
EPILOGUE = "bar.sync 0; @%p1 bra Z; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r104, 512; Z:"


def _swizzle(offset: int, mode: int) -> int:
    return offset ^ (offset >> 3 & {16: 0, 32: 0x10, 64: 0x30, 128: 0x70}[mode])


def _k_major(bytes_of_rows: np.ndarray, width: int, base: int, image: np.ndarray) -> int:
    """Puts rows of 32 bytes in the K-major canonical layout with `width`-byte rows; returns the descriptor's bits."""
    rows, nbytes = bytes_of_rows.shape
    stride = 8 * width if width > 16 else 256
    leading = 128
    for r in range(rows):
        for c in range(nbytes // 16):
            if width == 16:
                at = base + r % 8 * 16 + r // 8 * stride + c * leading
            else:
                at = _swizzle(base + r % 8 * width + r // 8 * stride + c * 16, width)
            image[at : at + 16] = bytes_of_rows[r, 16 * c : 16 * c + 16]
    return _descriptor(leading, stride, width)


def _mn_major(elements: np.ndarray, width: int, base: int, image: np.ndarray) -> int:
    """`elements` [K][rows] as bytes [K, rows * size]: rows consecutive in memory, `width` bytes of them a swizzled row."""
    k_count, nbytes = elements.shape
    chunks = nbytes // width
    leading, stride = 8 * width, 8 * width * chunks
    for k in range(k_count):
        for c in range(chunks):
            for x in range(width // 16):
                at = _swizzle(base + c * leading + k % 8 * width + k // 8 * stride + 16 * x, width)
                image[at : at + 16] = elements[k, c * width + 16 * x : c * width + 16 * x + 16]
    return _descriptor(leading, stride, width)


def _descriptor(leading: int, stride: int, width: int) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | {16: 0, 32: 6, 64: 4, 128: 2}[width] << 61


SMEM_IMAGE = 0x400 + 0x400  # where the image lies: reserved kilobyte, then 1024 bytes of the kernel's own


def _bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _operand(kind: str, fmt: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random values [rows, k] that the format holds exactly, and their bytes per row."""
    if fmt in FORMATS:
        codes = RNG.integers(0, min(FORMATS[fmt][3], 96), (rows, k))
        sign = RNG.integers(0, 2, (rows, k))
        bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(fmt, 8)
        values = decode(fmt)[codes] * (1 - 2 * sign)
        stored = codes | sign << (bits - 1)
        if bits == 8:
            return values, stored.astype(np.uint8)
        per_chunk = 32 if kind.startswith("mxf4") else 16
        out = np.zeros((rows, k // per_chunk, 16), np.uint8)
        for r in range(rows):
            for c in range(k // per_chunk):
                packed = sum(int(v) << bits * i for i, v in enumerate(stored[r, c * per_chunk : (c + 1) * per_chunk]))
                out[r, c] = np.frombuffer(packed.to_bytes(16, "little"), np.uint8)
        return values, out.reshape(rows, -1)
    values = RNG.integers(-8, 9, (rows, k)) / 4
    if fmt == "f16":
        return values, values.astype(np.float16).view(np.uint8).reshape(rows, -1)
    if fmt == "bf16":
        return values, _bf16(values).view(np.uint8).reshape(rows, -1)
    return values, values.astype(np.float32).view(np.uint8).reshape(rows, -1)


FORMAT_CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


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
    """What the MMA wrote, what it should have, and how far f32 summation in any order may be off."""
    a, a_bytes = _operand(kind, fmt_a, m, k)
    b, b_bytes = _operand(kind, fmt_b, n, k)
    image = np.zeros(131072, np.uint8)
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(fmt_a, 1)

    def place(rows_bytes: np.ndarray, mn: bool, base: int) -> int:
        if mn:
            per_k = rows_bytes.reshape(len(rows_bytes), k, size).transpose(1, 0, 2).reshape(k, -1)
            return _mn_major(np.ascontiguousarray(per_k), width, base, image) + (base >> 4)
        return _k_major(rows_bytes, width, base, image) + (base >> 4)

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


READ_OUT_64 = """shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; mov.u32 %r62, 0; mul.wide.u32 %rd52, %r100, {row_bytes}; add.s64 %rd53, %rd101, %rd52;
shr.u32 %r70, %r101, 4; R0: add.u32 %r63, %r61, %r62; tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {{%r64, %r65}}, [%r63], 2; tcgen05.wait::ld.sync.aligned;
and.b32 %r71, %r101, 15; shl.b32 %r72, %r102, 5; add.u32 %r71, %r71, %r72; mul.wide.u32 %rd52, %r71, {row_bytes}; add.s64 %rd53, %rd101, %rd52; shl.b32 %r73, %r70, 1; add.u32 %r73, %r73, %r62;
mul.wide.u32 %rd54, %r73, 4; add.s64 %rd53, %rd53, %rd54; st.global.v2.b32 [%rd53], {{%r64, %r65}}; add.u32 %r62, %r62, 4; setp.lt.u32 %p5, %r62, {columns}; @%p5 bra R0;
"""


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
            + f"""@%p2 bra M1; mov.b64 %rd1, {_descriptor(128, 256, 32) + (SMEM_IMAGE >> 4)}; mov.b32 %r1, {1 << 4 | 8 << 17 | 8 << 24};
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
            + f"@%p2 bra M1; mov.b64 %rd1, {_descriptor(128, 256, 32)}; mov.b32 %r1, {idesc}; setp.ne.u32 %p6, %r100, 0;"
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
    a, a_bytes = _operand("f16", "bf16", 128, 16)
    b, b_bytes = _operand("f16", "bf16", 64, 16)
    image = np.zeros(16384, np.uint8)
    db = _k_major(b_bytes, 32, 0x800, image) + (0x800 >> 4)
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
def test_narrow_a_is_unpacked_on_its_way_to_tensor_memory(fmt: str, bits: int, form: str) -> None:
    """tcgen05.cp puts each element of a padded chunk into the middle of a byte, where tcgen05.mma reads it."""
    a, a_bytes = _operand("f8f6f4", fmt, 128, 32)
    b, b_bytes = _operand("f8f6f4", "e4m3", 64, 32)
    image = np.zeros(16384, np.uint8)
    da = _k_major(a_bytes, 16, 0x800, image) + (0x800 >> 4)
    db = _k_major(b_bytes, 32, 0x2000, image) + (0x2000 >> 4)
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
    """2^31 - 1 is stored, 16 products of 1 are added."""
    image = np.zeros(16384, np.uint8)
    ones = np.zeros((128, 32), np.uint8)
    ones[:, :16] = 1
    d = _k_major(ones, 32, 0x800, image) + (0x800 >> 4)
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
    """The only layout of MN-major tf32 with a swizzle of 128 bytes: 4 rows of K lie together."""
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
    a, a_bytes = _operand(kind, fmt, m, k)
    b, b_bytes = _operand(kind, fmt, n, k)
    image = np.zeros(32768, np.uint8)
    base_a, base_b, base_s = 0x800, 0x2000, 0x4000
    da = _k_major(a_bytes, 32, base_a, image) + (base_a >> 4)
    db = _k_major(b_bytes, 32, base_b, image) + (base_b >> 4)
    # Row r, factor j: byte 16 * (r % 32) + 4 * (r // 32) + j of a 512-byte block.
    codes = RNG.integers(120, 132, (2, 128, 4)) if scale == "ue8m0" else RNG.integers(40, 80, (2, 128, 4))
    values = 2.0 ** (codes - 127.0) if scale == "ue8m0" else decode("e4m3")[codes]
    for which in range(2):
        for r in range(128):
            at = base_s + 512 * which + 16 * (r % 32) + 4 * (r // 32)
            image[at : at + 4] = codes[which, r]
    ds = [_descriptor(16, 128, 16) + (base_s + 512 * which >> 4) for which in range(2)]
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


# ---- tensor memory itself

SHAPES = {
    "32x32b": lambda i, r: (i, r),
    "16x64b": lambda i, r: (8 * (i % 2) + i // 4, i // 2 % 2 + 2 * r),
    "16x128b": lambda i, r: (i // 4 + 8 * (r % 2), i % 4 + 4 * (r // 2)),
    "16x256b": lambda i, r: (i // 4 + 8 * (r // 2 % 2), 2 * (i % 4) + r % 2 + 8 * (r // 4)),
}


@pytest.mark.parametrize(
    ("shape", "repeat", "registers"), [("32x32b", 4, 4), ("16x64b", 4, 4), ("16x128b", 2, 4), ("16x256b", 1, 4)]
)
def test_lane_maps(shape: str, repeat: int, registers: int) -> None:
    """Written through one lane map, read back through 32x32b."""
    columns = max(SHAPES[shape](i, r)[1] for i in range(32) for r in range(registers)) + 1
    rows = max(SHAPES[shape](i, r)[0] for i in range(32) for r in range(registers)) + 1
    out = np.zeros((32, columns), np.uint32)
    zero = ", ".join(["0"] * columns)
    back = ", ".join(f"%r{200 + c}" for c in range(columns))
    stores = "".join(f"st.global.b32 [%rd3+{4 * c}], %r{200 + c};" for c in range(columns))
    run(
        f"""tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; bar.sync 0; ld.shared.u32 %r104, [%r103];
    tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r104], {{{zero}}}; tcgen05.wait::st.sync.aligned;
    shl.b32 %r1, %r101, 8; add.u32 %r2, %r1, 1; add.u32 %r3, %r1, 2; add.u32 %r4, %r1, 3;
    tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%r104], {{%r1, %r2, %r3, %r4}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{back}}}, [%r104]; tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd1, %r101, {4 * columns}; add.s64 %rd3, %rd100, %rd1; {stores}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r104, 32;""",
        out,
    )
    expected = np.zeros_like(out)
    for i in range(32):
        for r in range(registers):
            lane, column = SHAPES[shape](i, r)
            expected[lane, column] = i << 8 | r
    assert rows in (16, 32)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "quarters"),
    [
        ("128x256b", (0, 32, 64, 96)),
        ("128x128b", (0, 32, 64, 96)),
        ("64x128b.warpx2::02_13", (0, 32, 0, 32)),
        ("32x128b.warpx4", (0, 0, 0, 0)),
    ],
)
def test_copy_into_tensor_memory(shape: str, quarters: tuple[int, ...]) -> None:
    rows, nbytes = (int(x) for x in (shape.split("x")[0], {"256b": 32, "128b": 16}[shape.split("x")[1][:4]]))
    data = RNG.integers(0, 256, (rows, nbytes), dtype=np.uint8)
    image = np.zeros(16384, np.uint8)
    for r in range(rows):
        for c in range(nbytes // 16):
            at = 0x800 + r % 8 * 16 + r // 8 * 256 + c * 128
            image[at : at + 16] = data[r, 16 * c : 16 * c + 16]
    words = image[0x800:].copy().view(np.uint32)
    out = np.zeros((128, nbytes // 4), np.uint32)
    run(
        PROLOGUE.format(words=len(words))
        + f"@%p2 bra M1; mov.b64 %rd1, {_descriptor(128, 256, 16) + (0x800 >> 4)}; tcgen05.cp.cta_group::1.{shape} [%r104], %rd1;"
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=nbytes, columns=nbytes // 4, first=0)
        + EPILOGUE,
        aligned(words),
        out,
        threads=128,
        schedule="late",
    )
    expected = np.concatenate([data[q : q + 32] for q in quarters]).copy().view(np.uint32)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32;", ErrorKind.tmem_leak),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 48;", ErrorKind.illegal_instruction),
        ("mov.u32 %r1, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];", ErrorKind.out_of_bounds),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; ld.shared.u32 %r1, [%r103]; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];",
            ErrorKind.uninitialised_tmem,
        ),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; ld.shared.u32 %r1, [%r103]; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1+32], {%r2};",
            ErrorKind.out_of_bounds,
        ),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; ld.shared.u32 %r1, [%r103]; add.u32 %r1, %r1, 0x200000; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r2};",
            ErrorKind.illegal_instruction,
        ),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 32; setp.lt.u32 %p1, %r101, 9; @%p1 ret; ld.shared.u32 %r1, [%r103]; @!%p1 bra L; L: tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;",
            ErrorKind.illegal_instruction,
        ),
    ],
)
def test_misuse(body: str, kind: ErrorKind) -> None:
    with pytest.raises(EmulationError) as e:
        run(body, np.zeros(1, np.uint32))
    assert e.value.kind is kind


# ---- shift


@pytest.mark.parametrize("quarter", [0, 3])
def test_shift(quarter: int) -> None:
    """In one quarter, 8 columns: lane r takes what lane r + 1 holds; the last lane and all other cells stay."""
    out = np.zeros((128, 12), np.uint32)
    values = ", ".join(f"%r{110 + c}" for c in range(12))
    fill = "".join(f"add.u32 %r{110 + c}, %r109, {c};" for c in range(12))
    run(
        PROLOGUE.format(words=64)
        + f"""shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; shl.b32 %r109, %r100, 8; {fill}
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r61], {{%r110, %r111, %r112, %r113}}; tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61+4], {{{values.split(", ", 4)[4]}}};
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @%p2 bra M1; add.u32 %r2, %r104, {quarter << 21 | 2}; tcgen05.shift.cta_group::1.down [%r2];"""
        + COMMIT_AND_WAIT
        + READ_OUT.format(row_bytes=48, columns=12, first=0)
        + EPILOGUE,
        np.zeros(64, np.uint32),
        out,
        threads=128,
        schedule="late",
    )
    expected = (np.arange(128)[:, None] << 8 | np.arange(12)).astype(np.uint32)
    expected[32 * quarter : 32 * quarter + 31, 2:10] = expected[32 * quarter + 1 : 32 * quarter + 32, 2:10].copy()
    np.testing.assert_array_equal(out, expected)


def test_shift_is_ordered_like_an_mma() -> None:
    with pytest.raises(EmulationError) as e:
        run(
            PROLOGUE.format(words=64)
            + """shl.b32 %r60, %r102, 21; add.u32 %r61, %r104, %r60; mov.u32 %r1, 0;
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1}; bar.sync 0;
        @%p2 bra M1; tcgen05.shift.cta_group::1.down [%r104];"""
            + COMMIT_AND_WAIT
            + EPILOGUE,
            np.zeros(64, np.uint32),
            np.zeros(1, np.uint32),
            threads=128,
        )
    assert e.value.kind is ErrorKind.race and "tcgen05.st" in e.value.message


def test_mma_with_ashift() -> None:
    """The product is with A as it was; the second MMA sees it shifted by one lane in every quarter."""
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
    """The even CTA goes on only when the other one has allocated too, however late that is."""
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
    a, a_bytes = _operand("f16", "f16", m, 16)
    b, b_bytes = _operand("f16", "f16", n, 16)
    base_a, base_b, size = 0x800, 0x800 + 8192, 16384
    images = np.zeros((2, size), np.uint8)
    for r in range(2):
        full = np.zeros(0x800 + size, np.uint8)
        da = _k_major(a_bytes[r * m // 2 : (r + 1) * m // 2], 32, base_a, full) + (base_a >> 4)
        db = _k_major(b_bytes[r * n // 2 : (r + 1) * n // 2], 32, base_b, full) + (base_b >> 4)
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
