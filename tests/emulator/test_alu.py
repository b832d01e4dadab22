"""Element-wise instructions against NumPy, on all lanes; edge values come first."""

import numpy as np
import pytest
from ptx_emulator.samples.handwritten import run

EDGE32 = np.array([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000, 255], np.uint32)
RNG = np.random.default_rng(7)


def _u32() -> np.ndarray:
    return np.concatenate([EDGE32, RNG.integers(0, 1 << 32, 20, dtype=np.uint64).astype(np.uint32)])


def _apply(op: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, register: str, width: int) -> np.ndarray:
    out = np.zeros(32, np.uint32 if width == 4 else np.uint64)
    n = op.count("?")
    names = iter([f"%{register}1", f"%{register}2", f"%{register}3"][:n])
    text = op
    for name in names:
        text = text.replace("?", name, 1)
    t = "b32" if width == 4 else "b64"
    body = f"mul.wide.u32 %rd60, %r100, {width};\n" + "\n".join(
        f"add.s64 %rd{70 + i}, %rd10{i}, %rd60; ld.global.{t} %{register}{i + 1}, [%rd{70 + i}];" for i in range(3)
    )
    body += f"\n{text.replace('D', f'%{register}9', 1)};\nadd.s64 %rd80, %rd103, %rd60; st.global.{t} [%rd80], %{register}9;"
    run(body, a, b, c, out)
    return out


INT64 = np.int64
U32_CASES = {
    "add.u32 D, ?, ?": lambda a, b, c: a + b,
    "sub.s32 D, ?, ?": lambda a, b, c: a - b,
    "mul.lo.s32 D, ?, ?": lambda a, b, c: a * b,
    "mul.hi.u32 D, ?, ?": lambda a, b, c: ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32),
    "mul.hi.s32 D, ?, ?": lambda a, b, c: ((a.view(np.int32).astype(INT64) * b.view(np.int32)) >> 32).astype(np.uint32),
    "mad.lo.u32 D, ?, ?, ?": lambda a, b, c: a * b + c,
    "min.s32 D, ?, ?": lambda a, b, c: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "max.u32 D, ?, ?": lambda a, b, c: np.maximum(a, b),
    "max.u16x2 D, ?, ?": lambda a, b, c: np.maximum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32),
    "min.s16x2 D, ?, ?": lambda a, b, c: np.minimum(a.view(np.int16), b.view(np.int16)).view(np.uint32),
    "and.b32 D, ?, ?": lambda a, b, c: a & b,
    "xor.b32 D, ?, ?": lambda a, b, c: a ^ b,
    "not.b32 D, ?": lambda a, b, c: ~a,
    "neg.s32 D, ?": lambda a, b, c: (0 - a.astype(INT64)).astype(np.uint32),
    "abs.s32 D, ?": lambda a, b, c: np.abs(a.view(np.int32).astype(INT64)).astype(np.uint32),
    "shl.b32 D, ?, ?": lambda a, b, c: np.where(
        b > 31, 0, a.astype(np.uint64) << np.minimum(b, 31).astype(np.uint64)
    ).astype(np.uint32),
    "shr.u32 D, ?, ?": lambda a, b, c: np.where(b > 31, 0, a >> np.minimum(b, 31)).astype(np.uint32),
    "shr.s32 D, ?, ?": lambda a, b, c: (a.view(np.int32) >> np.minimum(b, 31).astype(np.int32)).view(np.uint32),
    "popc.b32 D, ?": lambda a, b, c: np.array([bin(x).count("1") for x in a], np.uint32),
    "clz.b32 D, ?": lambda a, b, c: np.array([32 - int(x).bit_length() for x in a], np.uint32),
    "brev.b32 D, ?": lambda a, b, c: np.array([int(f"{x:032b}"[::-1], 2) for x in a], np.uint32),
    "bfind.u32 D, ?": lambda a, b, c: np.array([(int(x).bit_length() - 1) & 0xFFFFFFFF for x in a], np.uint32),
    "lop3.b32 D, ?, ?, ?, 0xCA": lambda a, b, c: (a & b) | (~a & c),
    "lop3.b32 D, ?, ?, ?, 0x96": lambda a, b, c: a ^ b ^ c,
    "shf.l.wrap.b32 D, ?, ?, ?": lambda a, b, c: np.array(
        [((int(y) << 32 | int(x)) << (int(z) & 31) >> 32) & 0xFFFFFFFF for x, y, z in zip(a, b, c, strict=True)],
        np.uint32,
    ),
    "bfe.u32 D, ?, 4, 8": lambda a, b, c: (a >> 4) & 0xFF,
    "bfe.s32 D, ?, 4, 8": lambda a, b, c: ((a >> 4) & 0xFF)
    .astype(np.uint8)
    .view(np.int8)
    .astype(np.int32)
    .view(np.uint32),
    "bfi.b32 D, ?, ?, 4, 8": lambda a, b, c: (b & ~np.uint32(0xFF0)) | ((a & 0xFF) << 4),
    "prmt.b32 D, ?, ?, 0x5140": lambda a, b, c: (a & 0xFF) | (b & 0xFF) << 8 | (a & 0xFF00) << 8 | (b & 0xFF00) << 16,
    "dp2a.lo.u32.u32 D, ?, ?, ?": lambda a, b, c: (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + c,
    "dp2a.hi.u32.u32 D, ?, ?, ?": lambda a, b, c: (a & 0xFFFF) * (b >> 16 & 0xFF) + (a >> 16) * (b >> 24) + c,
    "sad.u32 D, ?, ?, ?": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
    "rem.u32 D, ?, 7": lambda a, b, c: a % 7,
    "div.s32 D, ?, -3": lambda a, b, c: np.trunc(a.view(np.int32) / -3).astype(INT64).astype(np.uint32),
}


@pytest.mark.parametrize("op", U32_CASES)
def test_integer(op: str) -> None:
    a, b, c = _u32(), np.roll(_u32(), 5), np.roll(_u32(), 11)
    with np.errstate(over="ignore"):
        expected = U32_CASES[op](a, b, c)
    np.testing.assert_array_equal(_apply(op, a, b, c, "r", 4), expected)


F32_CASES = {
    "add.f32 D, ?, ?": lambda a, b, c: a + b,
    "sub.rn.f32 D, ?, ?": lambda a, b, c: a - b,
    "mul.f32 D, ?, ?": lambda a, b, c: a * b,
    "div.rn.f32 D, ?, ?": lambda a, b, c: a / b,
    "fma.rn.f32 D, ?, ?, ?": lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(np.float32),
    "max.f32 D, ?, ?": lambda a, b, c: np.fmax(a, b),
    "min.f32 D, ?, ?": lambda a, b, c: np.fmin(a, b),
    "max.f32 D, ?, ?, ?": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "neg.f32 D, ?": lambda a, b, c: -a,
    "sqrt.rn.f32 D, ?": lambda a, b, c: np.sqrt(a),
    "add.ftz.f32 D, ?, ?": lambda a, b, c: _ftz(_ftz(a) + _ftz(b)),
    "cvt.rmi.f32.f32 D, ?": lambda a, b, c: np.floor(a),
    "cvt.rni.f32.f32 D, ?": lambda a, b, c: np.rint(a),
}


def _ftz(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(1.17549435e-38), np.copysign(np.float32(0), x), x)


def _floats() -> np.ndarray:
    edge = np.array([0, -0.0, 1, -1, 1e-40, -1e-40, 3e38, -3e38, np.inf, 1.5, 2.5, 0.1], np.float32)
    return np.concatenate([edge, RNG.standard_normal(20).astype(np.float32) * 10])


@pytest.mark.parametrize("op", F32_CASES)
def test_float(op: str) -> None:
    a, b, c = _floats(), np.roll(_floats(), 7), np.roll(_floats(), 3)
    with np.errstate(all="ignore"):
        expected = F32_CASES[op](a, b, c).astype(np.float32)
    got = _apply(op, a, b, c, "f", 4).view(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("op", "reference", "ulps"),
    [
        ("ex2.approx.f32 D, ?", np.exp2, 2),
        ("lg2.approx.f32 D, ?", np.log2, 2),
        ("rcp.approx.ftz.f32 D, ?", lambda x: 1 / x, 1),
        ("rsqrt.approx.f32 D, ?", lambda x: 1 / np.sqrt(x), 1),
        ("tanh.approx.f32 D, ?", np.tanh, 2),
        ("sin.approx.f32 D, ?", np.sin, 2),
        ("cos.approx.f32 D, ?", np.cos, 2),
    ],
)
def test_approximations(op: str, reference, ulps: int) -> None:  # noqa: ANN001
    a = np.linspace(0.05, 8, 32, dtype=np.float32)
    got = _apply(op, a, a, a, "f", 4).view(np.float32)
    np.testing.assert_array_max_ulp(got, reference(a.astype(np.float64)).astype(np.float32), maxulp=ulps)


@pytest.mark.parametrize(("suffix", "direction"), [("rm", -np.inf), ("rp", np.inf), ("rz", 0.0)])
def test_directed_rounding(suffix: str, direction: float) -> None:
    a = RNG.standard_normal(32).astype(np.float32)
    b = (RNG.standard_normal(32) * 1e-3).astype(np.float32)
    exact = a.astype(np.float64) + b  # exact: the exponents differ by less than 29
    nearest = exact.astype(np.float32)
    toward = np.nextafter(nearest, np.float32(direction))
    wrong_side = {"rm": nearest > exact, "rp": nearest < exact, "rz": np.abs(nearest) > np.abs(exact)}[suffix]
    got = _apply(f"add.{suffix}.f32 D, ?, ?", a, b, a, "f", 4).view(np.float32)
    np.testing.assert_array_equal(got, np.where(wrong_side, toward, nearest))


def test_packed_f32x2() -> None:
    a, b, c = (RNG.standard_normal(64).astype(np.float32) for _ in range(3))
    got = _apply("fma.rn.f32x2 D, ?, ?, ?", a.view(np.uint64), b.view(np.uint64), c.view(np.uint64), "rd", 8).view(
        np.float32
    )
    np.testing.assert_array_equal(got, (a.astype(np.longdouble) * b + c).astype(np.float32))


@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne", "ltu", "geu", "num", "nan"])
def test_float_comparisons_with_nan(op: str) -> None:
    a = _floats()
    a[5] = np.nan
    b = np.roll(_floats(), 1)
    b[9] = np.nan
    out = np.zeros(32, np.uint32)
    run(
        f"""mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; add.s64 %rd3, %rd101, %rd1; add.s64 %rd4, %rd102, %rd1;
    ld.global.f32 %f1, [%rd2]; ld.global.f32 %f2, [%rd3]; setp.{op}.f32 %p1, %f1, %f2; selp.u32 %r1, 1, 0, %p1;
    st.global.u32 [%rd4], %r1;""",
        a,
        b,
        out,
    )
    unordered = np.isnan(a) | np.isnan(b)
    with np.errstate(invalid="ignore"):
        expected = {
            "lt": a < b,
            "le": a <= b,
            "gt": a > b,
            "ge": a >= b,
            "eq": a == b,
            "ne": (a != b) & ~unordered,
            "ltu": (a < b) | unordered,
            "geu": (a >= b) | unordered,
            "num": ~unordered,
            "nan": unordered,
        }[op]
    np.testing.assert_array_equal(out.astype(bool), expected)


def test_carry_chain_adds_128_bits() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 1 << 63, 64, dtype=np.uint64) * 2 + 1 for _ in range(2))
    out = np.zeros(64, np.uint64)
    run(
        """mul.wide.u32 %rd1, %r100, 16; add.s64 %rd2, %rd100, %rd1; add.s64 %rd3, %rd101, %rd1; add.s64 %rd4, %rd102, %rd1;
    ld.global.v2.u64 {%rd5, %rd6}, [%rd2]; ld.global.v2.u64 {%rd7, %rd8}, [%rd3];
    add.cc.u64 %rd9, %rd5, %rd7; addc.u64 %rd10, %rd6, %rd8; st.global.v2.u64 [%rd4], {%rd9, %rd10};""",
        a,
        b,
        out,
    )
    for i in range(32):
        x, y = (int(v[2 * i]) | int(v[2 * i + 1]) << 64 for v in (a, b))
        assert int(out[2 * i]) | int(out[2 * i + 1]) << 64 == (x + y) % (1 << 128)
