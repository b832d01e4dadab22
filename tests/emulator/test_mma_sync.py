"""mma.sync against NumPy: fragments of every type and shape."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, UnknownInstruction
from ptx_emulator.samples.handwritten import run
from ptx_emulator.samples.small_floats import FORMATS, decode

RNG = np.random.default_rng(3)
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def _matrix(kind: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random values [rows, k] that the type holds exactly, and their codes."""
    if kind in FORMATS:
        codes = RNG.integers(0, 96, (rows, k))
        return decode(kind)[codes], codes
    if kind in ("s8", "u8"):
        values = RNG.integers(-128 if kind == "s8" else 0, 128, (rows, k))
        return values, values & 255
    values = (RNG.integers(-16, 17, (rows, k)) / 8).astype(np.float32)
    if kind == "f16":
        return values, values.astype(np.float16).view(np.uint16).astype(np.int64)
    return values, values.view(np.uint32).astype(np.int64) >> (16 if kind == "bf16" else 0)


def _fragments(codes: np.ndarray, bits: int) -> np.ndarray:
    """The registers [count, 32] of a row-major matrix of 8 or 16 rows: lane / 4 selects the row, lane % 4 the
    elements."""
    rows, k = codes.shape
    each = 32 // bits
    registers = np.zeros((rows * k * bits // 1024, 32), np.uint32)
    for r in range(len(registers)):
        for lane in range(32):
            row = lane // 4 + (8 * (r % 2) if rows == 16 else 0)
            first = each * (lane % 4 + 4 * (r // (rows // 8)))
            registers[r, lane] = sum(int(codes[row, first + j]) << bits * j for j in range(each))
    return registers


@pytest.mark.parametrize(
    ("a", "b", "k", "accumulator"),
    [
        ("f16", "f16", 16, "f32"),
        ("f16", "f16", 8, "f32"),
        ("f16", "f16", 16, "f16"),
        ("bf16", "bf16", 16, "f32"),
        ("tf32", "tf32", 8, "f32"),
        ("tf32", "tf32", 4, "f32"),
        ("e4m3", "e5m2", 32, "f32"),
        ("s8", "u8", 32, "s32"),
        ("u8", "s8", 16, "s32"),
    ],
)
def test_products(a: str, b: str, k: int, accumulator: str) -> None:
    (left, codes_a), (right, codes_b) = _matrix(a, 16, k), _matrix(b, 8, k)
    start = RNG.integers(-50, 50, (16, 8))
    fa, fb = _fragments(codes_a, BITS[a]), _fragments(codes_b, BITS[b])
    words = {"f32": start.astype(np.float32).view(np.uint32), "s32": start.astype(np.int32).view(np.uint32)}
    if accumulator == "f16":
        pairs = start.astype(np.float16).view(np.uint16).astype(np.uint32)
        fc = np.stack(
            [
                [pairs[8 * h + g // 4, g % 4 * 2] | pairs[8 * h + g // 4, g % 4 * 2 + 1] << 16 for g in range(32)]
                for h in (0, 1)
            ]
        )
    else:
        c = words[accumulator]
        fc = np.stack([[c[8 * (r // 2) + g // 4, g % 4 * 2 + r % 2] for g in range(32)] for r in range(4)])
    given = np.concatenate([fa, fb, fc]).astype(np.uint32)
    out = np.zeros((len(fc), 32), np.uint32)
    load = "".join(f"ld.global.u32 %r{200 + r}, [%rd1+{128 * r}];" for r in range(len(given)))
    store = "".join(f"st.global.u32 [%rd2+{128 * r}], %r{300 + r};" for r in range(len(out)))

    def group(first: int, count: int) -> str:
        return "{" + ", ".join(f"%r{first + r}" for r in range(count)) + "}"

    operands = [
        group(300, len(fc)),
        group(200, len(fa)),
        group(200 + len(fa), len(fb)),
        group(200 + len(fa) + len(fb), len(fc)),
    ]
    run(
        f"""mul.wide.u32 %rd3, %r101, 4; add.s64 %rd1, %rd100, %rd3; add.s64 %rd2, %rd101, %rd3; {load}
    mma.sync.aligned.m16n8k{k}.row.col.{accumulator}.{a}.{b}.{accumulator} {", ".join(operands)}; {store}""",
        given,
        out,
    )
    expected = left.astype(np.float64) @ right.astype(np.float64).T + start
    got = np.zeros((16, 8))
    for r in range(len(out)):
        for lane in range(32):
            if accumulator == "f16":
                two = np.frombuffer(out[r, lane].tobytes(), np.float16)
                got[8 * r + lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2] = two
            else:
                view = out[r, lane : lane + 1].view(np.float32 if accumulator == "f32" else np.int32)
                got[8 * (r // 2) + lane // 4, lane % 4 * 2 + r % 2] = view[0]
    bound = np.abs(expected) * 2.0**-11 if accumulator == "f16" else np.abs(left) @ np.abs(right).T * k * 2.0**-24
    assert (np.abs(got - expected) <= bound).all()


def test_half_a_warp_is_an_error() -> None:
    body = """setp.lt.u32 %p1, %r101, 16; @!%p1 bra E; mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
    {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7}, {%r1, %r2, %r3, %r4}; E: bar.warp.sync -1;"""
    with pytest.raises(EmulationError, match="waits for the others"):
        run(body, np.zeros(1, np.uint32))


@pytest.mark.parametrize(
    "form",
    [
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r9, %r10}, {%r1, %r2, %r3, %r4};",
    ],
)
def test_unknown_forms_are_refused(form: str) -> None:
    with pytest.raises(UnknownInstruction):
        run(form, np.zeros(1, np.uint32))
