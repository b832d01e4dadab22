"""Operands and PTX around one tcgen05.mma: canonical layouts in shared memory, allocation, commit, read-out.

The layouts are written down here independently of the emulator, so that an error in its layouts cannot cancel out.
"""

import numpy as np

from ptx_emulator.samples.small_floats import FORMATS, decode

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


def k_major(bytes_of_rows: np.ndarray, width: int, base: int, image: np.ndarray) -> int:
    """Writes rows of 32 bytes in the K-major canonical layout with `width`-byte rows; returns the descriptor's bits."""
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
    return descriptor(leading, stride, width)


def mn_major(elements: np.ndarray, width: int, base: int, image: np.ndarray) -> int:
    """Writes an operand in the MN-major canonical layout; returns the descriptor's bits.

    elements: bytes [K, rows * size]; `width` bytes of consecutive rows form a swizzled row.
    """
    k_count, nbytes = elements.shape
    chunks = nbytes // width
    leading, stride = 8 * width, 8 * width * chunks
    for k in range(k_count):
        for c in range(chunks):
            for x in range(width // 16):
                at = _swizzle(base + c * leading + k % 8 * width + k // 8 * stride + 16 * x, width)
                image[at : at + 16] = elements[k, c * width + 16 * x : c * width + 16 * x + 16]
    return descriptor(leading, stride, width)


def descriptor(leading: int, stride: int, width: int) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | {16: 0, 32: 6, 64: 4, 128: 2}[width] << 61


SMEM_IMAGE = 0x400 + 0x400  # address of the image: after the reserved kilobyte and 1024 bytes for the kernel


def _bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_operand(kind: str, fmt: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
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
