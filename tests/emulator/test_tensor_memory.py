"""Tensor memory against NumPy: lane maps of tcgen05.ld and st, tcgen05.cp, tcgen05.shift, misuse."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind
from ptx_emulator.samples.handwritten import aligned, run
from ptx_emulator.samples.tcgen05_body import (
    COMMIT_AND_WAIT,
    EPILOGUE,
    PROLOGUE,
    READ_OUT,
    RNG,
    descriptor,
)

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
    """Data written through one lane map is read back through 32x32b."""
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
        + f"@%p2 bra M1; mov.b64 %rd1, {descriptor(128, 256, 16) + (0x800 >> 4)}; tcgen05.cp.cta_group::1.{shape} [%r104], %rd1;"
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
    """In 8 columns of one quarter, lane r gets the contents of lane r + 1; the last lane and all other cells stay."""
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
