"""Rotation of channel pairs in kernels: sine and cosine of the angles, to two units in the last place up to 2**20
radians."""

from cutlass import Boolean, Float32, Int32, Int64, Uint32, select_

from dsv4_kernels.device import ptx
from dsv4_kernels.device.bf16_rows import add, mul

# pi / 2 as the sum of three fp32. Multiples of the first below 2**20 are subtracted without error.
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
_TURNS = 0.6366197466850281  # 2 / pi
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding a number to it rounds the number to a whole one
# Remez polynomials in x**2 on [-pi/4, pi/4]: sin x = x + x**3 S, cos x = 1 + x**2 C.
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2, -0.5)


def cosine_and_sine(angle: Float32) -> tuple:
    """(cos, sin) of one fp32 angle of magnitude up to 2**20.

    The angle is reduced as by Cody and Waite, with fused multiply-adds. Both results are at most 1.6 units in the last
    place off, for every product of a position below 2**20 and a frequency of DeepSeek-V4, with and without YaRN. The
    GPU's own `cos.approx` is off by 2**-20.5 within one turn, and by far more at large angles.
    """
    rounded = ptx.fma(angle, Float32(_TURNS), Float32(_ROUNDER))
    quarter = ptx.as_u32(rounded)
    turns = add(Float32(_ROUNDER), -rounded)  # minus the whole number of quarter turns
    x = angle
    for part in _HALF_PI:
        x = ptx.fma(turns, Float32(part), x)
    square = mul(x, x)
    sine, cosine = Float32(_SINE[0]), Float32(_COSINE[0])
    for coefficient in _SINE[1:]:
        sine = ptx.fma(sine, square, Float32(coefficient))
    for coefficient in _COSINE[1:]:
        cosine = ptx.fma(cosine, square, Float32(coefficient))
    sine = ptx.fma(mul(x, square), sine, x)
    cosine = ptx.fma(cosine, square, Float32(1.0))
    swap = (quarter & 1) != 0
    first, second = select_(swap, sine, cosine), select_(swap, cosine, sine)
    return _signed(first, (quarter + 1) & 2), _signed(second, quarter & 2)


def _signed(x: Float32, bit_1: Uint32) -> Float32:
    return ptx.as_f32(ptx.as_u32(x) ^ (bit_1 << 30))


def position_of(address: Int64) -> Float32:
    """An int64 position from global memory as fp32: the angle is the product of two fp32 numbers."""
    return ptx.asm(
        "{\n.reg .b64 x;\nld.global.b64 x, [{$r0}];\ncvt.rn.f32.s64 {$w0}, x;\n}",
        [Float32],
        address,
    )


def turned(word: Uint32, cosine: Float32, sine: Float32) -> Uint32:
    """A pair of neighbouring bf16 channels in a word, rotated: (a + ib) (cos + i sin), rounded to bf16 once."""
    a, b = ptx.as_f32(word << 16), ptx.as_f32(word & 0xFFFF0000)
    real = ptx.fma(-b, sine, mul(a, cosine))
    imaginary = ptx.fma(b, cosine, mul(a, sine))
    return ptx.pack_bf16(real, imaginary)


def inverted(sine: Float32, inverse: Int32) -> Float32:
    """The sine, negated if `inverse` is not 0 (the conjugate rotation)."""
    return select_(Boolean(inverse != 0), -sine, sine)
