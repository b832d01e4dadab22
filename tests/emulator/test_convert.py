"""cvt against exhaustive nearest-value searches: every rounding of the small floats, and the integer conversions."""

import numpy as np
import pytest
import torch
from ptx_emulator.samples.handwritten import run
from ptx_emulator.samples.small_floats import FORMATS, decode

RNG = np.random.default_rng(11)


def encode(fmt: str, x: np.ndarray) -> np.ndarray:
    """The nearest code, with ties to even and saturation, by a search over all values."""
    exponent_bits, mantissa_bits, _, _ = FORMATS[fmt]
    values = decode(fmt)
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - values)
    best = distance.min(axis=1, keepdims=True)
    ties = distance == best
    even = ties & (np.arange(len(values)) % 2 == 0)
    code = np.where(even.any(axis=1), even.argmax(axis=1), ties.argmax(axis=1))
    return code | np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits)


def _inputs(fmt: str) -> np.ndarray:
    values = decode(fmt)
    middles = (values[1:] + values[:-1]) / 2
    near = np.concatenate([middles, np.nextafter(middles.astype(np.float32), np.float32(0)), values])
    x = np.concatenate([near, -near, [0.0, -0.0, 1e9, -1e9], RNG.standard_normal(40) * values[-1] / 2])
    return np.resize(x, -(-len(x) // 64) * 64).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_small_float_from_f32(fmt: str) -> None:
    x = _inputs(fmt)
    n = len(x) // 2
    out = np.zeros(n, np.uint16)
    bits = 4 if fmt == "e2m1" else 8
    convert = f"cvt.rn.satfinite.{fmt}x2.f32 %h1, %f2, %f1;"
    if fmt == "e2m1":
        convert = "{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %f2, %f1; cvt.u16.u8 %h1, t; }"
    run(
        f"""mul.wide.u32 %rd1, %r100, 8; add.s64 %rd2, %rd100, %rd1; ld.global.v2.f32 {{%f1, %f2}}, [%rd2]; {convert}
    mul.wide.u32 %rd1, %r100, 2; add.s64 %rd3, %rd101, %rd1; st.global.u16 [%rd3], %h1;""",
        x,
        out,
        threads=n,
    )
    codes = encode(fmt, x)
    np.testing.assert_array_equal(out, codes[0::2] | codes[1::2] << bits)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m3", "e3m2"])
def test_small_float_to_f16(fmt: str) -> None:
    count = FORMATS[fmt][3]
    codes = np.resize(np.arange(count, dtype=np.uint16), 128)
    out = np.zeros(128, np.uint32)
    run(
        f"""mul.wide.u32 %rd1, %r100, 2; add.s64 %rd2, %rd100, %rd1; ld.global.u16 %h1, [%rd2];
    cvt.rn.f16x2.{fmt}x2 %r1, %h1; mul.wide.u32 %rd1, %r100, 4; add.s64 %rd3, %rd101, %rd1; st.global.u32 [%rd3], %r1;""",
        codes,
        out,
        threads=128,
    )
    np.testing.assert_array_equal(out.view(np.float16)[0::2], np.resize(decode(fmt), 128).astype(np.float16))


def test_every_scaled_e4m3_to_bf16() -> None:
    """Every code with every scale in the lower half of the pair, and in another order in the upper half."""
    low = np.arange(1 << 16, dtype=np.uint32)
    high = low[::-1]  # code in the lower byte, scale in the upper byte
    out = np.zeros(1 << 16, np.uint32)
    run(
        """mov.u32 %r1, %r100; L: mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd100, %rd1; ld.global.v2.u16 {%h1, %h2}, [%rd2];
    cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2 %r2, %h1, %h2; add.s64 %rd3, %rd101, %rd1; st.global.u32 [%rd3], %r2;
    add.u32 %r1, %r1, 1024; setp.lt.u32 %p1, %r1, 65536; @%p1 bra L;""",
        (low & 0xFF) | (high & 0xFF) << 8 | (low >> 8) << 16 | (high >> 8) << 24,
        out,
        threads=1024,
    )
    magnitudes = np.append(decode("e4m3"), np.nan)
    values = np.concatenate([magnitudes, -magnitudes])
    scales = np.append(2.0 ** (np.arange(255) - 127), np.nan)
    for part, half in ((low, out & 0xFFFF), (high, out >> 16)):
        exact = torch.from_numpy(values[part & 0xFF] * scales[part >> 8])
        expected = exact.float().bfloat16()  # exact in fp32, or out of the range of bf16 too
        converted = torch.from_numpy(half.astype(np.uint16)).view(torch.bfloat16)
        torch.testing.assert_close(converted, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(converted)[~exact.isnan()], torch.signbit(expected)[~exact.isnan()])


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_ue8m0(mode: str) -> None:
    x = np.abs(RNG.standard_normal(64)).astype(np.float32) * 100
    x[:6] = [1.0, 2.0, 0.75, 2.0**-127, 2.0**127, np.nextafter(np.float32(1), np.float32(2))]
    out = np.zeros(32, np.uint16)
    run(
        f"""mul.wide.u32 %rd1, %r100, 8; add.s64 %rd2, %rd100, %rd1; ld.global.v2.f32 {{%f1, %f2}}, [%rd2];
    cvt.{mode}.satfinite.ue8m0x2.f32 %h1, %f2, %f1; mul.wide.u32 %rd1, %r100, 2; add.s64 %rd3, %rd101, %rd1; st.global.u16 [%rd3], %h1;""",
        x,
        out,
    )
    e = np.log2(x.astype(np.float64))
    e = np.floor(e) if mode == "rz" else np.ceil(e)
    expected = (e + 127).astype(np.uint16)
    np.testing.assert_array_equal(out, expected[0::2] | expected[1::2] << 8)


@pytest.mark.parametrize(("op", "dtype"), [("f16", np.float16)])
def test_half_from_f32_rounds_to_even(op: str, dtype: type) -> None:
    x = np.concatenate([RNG.standard_normal(30), [65519.0, 1e6]]).astype(np.float32)
    out = np.zeros(32, np.uint16)
    run(
        f"""mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; ld.global.f32 %f1, [%rd2]; cvt.rn.{op}.f32 %h1, %f1;
    mul.wide.u32 %rd1, %r100, 2; add.s64 %rd3, %rd101, %rd1; st.global.b16 [%rd3], %h1;""",
        x,
        out,
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.view(dtype), x.astype(dtype))


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("cvt.rzi.s32.f32", lambda x: np.clip(np.trunc(x), -(2**31), 2**31 - 1)),
        ("cvt.rni.s32.f32", lambda x: np.clip(np.rint(x), -(2**31), 2**31 - 1)),
        ("cvt.rmi.s32.f32", lambda x: np.clip(np.floor(x), -(2**31), 2**31 - 1)),
        ("cvt.rpi.s32.f32", lambda x: np.clip(np.ceil(x), -(2**31), 2**31 - 1)),
    ],
)
def test_float_to_integer_clamps(op: str, reference) -> None:  # noqa: ANN001
    x = np.concatenate([RNG.standard_normal(24) * 100, [0.5, 1.5, -0.5, 2.5, 3e9, -3e9, 1e20, -0.0]]).astype(np.float32)
    out = np.zeros(32, np.int32)
    run(
        f"""mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; ld.global.f32 %f1, [%rd2]; {op} %r1, %f1;
    add.s64 %rd3, %rd101, %rd1; st.global.u32 [%rd3], %r1;""",
        x,
        out,
    )
    np.testing.assert_array_equal(out, reference(x.astype(np.float64)).astype(np.int64).astype(np.int32))


def test_narrow_integers_extend_as_their_type_says() -> None:
    x = np.array([0x80, 0x7F, 0xFFFF8001, 0x12345678], np.uint32)
    out = np.zeros(32, np.uint32)
    run(
        """setp.ge.u32 %p1, %r100, 4; @%p1 bra END; mul.wide.u32 %rd1, %r100, 4; add.s64 %rd2, %rd100, %rd1; ld.global.u32 %r1, [%rd2];
    mul.wide.u32 %rd1, %r100, 16; add.s64 %rd3, %rd101, %rd1;
    cvt.s8.s32 %r2, %r1; cvt.u32.u16 %r3, %h1; cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r4, %h1; cvt.u32.u8 %r5, %r1;
    st.global.v4.u32 [%rd3], {%r2, %r4, %r5, %r1}; END:""",
        x,
        out,
    )
    np.testing.assert_array_equal(
        out[:16].reshape(4, 4)[:, 0], x.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    )
    np.testing.assert_array_equal(
        out[:16].reshape(4, 4)[:, 1], x.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32)
    )
    np.testing.assert_array_equal(out[:16].reshape(4, 4)[:, 2], x & 0xFF)


def test_f64_of_every_f16() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[np.isfinite(codes.view(np.float16))]
    padded = np.concatenate([codes, np.zeros(-len(codes) % 1024, np.uint16)])
    out = np.zeros(len(padded), np.float64)
    run(
        f"""mov.u32 %r1, %r100; L: mul.wide.u32 %rd1, %r1, 2; add.s64 %rd1, %rd100, %rd1; ld.global.u16 %h1, [%rd1]; cvt.f64.f16 %d1, %h1;
    mul.wide.u32 %rd2, %r1, 8; add.s64 %rd2, %rd101, %rd2; st.global.f64 [%rd2], %d1; add.u32 %r1, %r1, 1024; setp.lt.u32 %p1, %r1, {len(padded)}; @%p1 bra L;""",
        padded,
        out,
        threads=1024,
    )
    np.testing.assert_array_equal(out, padded.view(np.float16).astype(np.float64))
