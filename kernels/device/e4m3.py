"""Blocks of e4m3 with one power-of-two scale in kernels, with the bits of `encode_fp8` (specification, section 4.2)."""

from collections.abc import Sequence

from cutlass import Float32, Uint32

from dsv4_kernels.device import ptx
from dsv4_kernels.device.bf16_rows import magnitude, mul, umin

_AMAX_FLOOR = 1e-4
_PER_LARGEST = 1 / 448
_MANTISSA = 0x7FFFFF


def largest(values: Sequence[Float32]) -> Float32:
    """The largest magnitude of one lane's channels; NaN only if all are NaN."""
    found = magnitude(values[0])
    for value in values[1:]:
        found = ptx.fmax(found, magnitude(value))
    return found


def scale_exponent(amax: Float32) -> Uint32:
    """The ue8m0 byte of a block's scale: `2**ceil(log2(max(amax, 1e-4) / 448))`; 255, which is NaN, for infinity."""
    bits = ptx.as_u32(mul(ptx.fmax(amax, Float32(_AMAX_FLOOR)), Float32(_PER_LARGEST)))
    return (bits + _MANTISSA) >> 23


def scale_of(exponent: Uint32) -> Float32:
    """The scale of a ue8m0 byte, in fp32."""
    return ptx.as_f32(exponent << 23)


def codes(values: Sequence[Float32], exponent: Uint32) -> tuple:
    """e4m3 codes of the channels, four in a word, the first in the lowest byte.

    Multiplying by the inverse of the power of two is exact, and where the quotient is subnormal it rounds as dividing
    does.
    """
    inverse = ptx.as_f32((254 - umin(exponent, 254)) << 23)
    scaled = [mul(value, inverse) for value in values]
    return tuple(_word(*scaled[i : i + 4]) for i in range(0, len(scaled), 4))


def _word(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    return ptx.asm(
        "{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\nmov.b32 {$w0}, {low, high};\n}",
        [Uint32],
        *(a, b, c, d),
    )


def as_bf16(codes: Uint32, factor: Uint32) -> list:
    """Four e4m3 codes times a power of two, as two words of two bf16, without rounding.

    A code becomes bf16 by moving its sign to the top and its other bits to where bf16 has the last bits of the exponent
    and the first of the mantissa. The result lacks a factor 2^120, for subnormal codes too. That factor is multiplied
    in separately from `factor`, whose halves both hold the power of two as bf16: their product may overflow.
    """
    return [_two_as_bf16(codes, which, factor) for which in (0x9180, 0xB3A2)]


def _two_as_bf16(codes: Uint32, which: int, factor: Uint32) -> Uint32:
    """Two of four codes as bf16. `prmt` puts each into the low byte of a half, its sign into all bits of the high
    byte."""
    return ptx.asm(
        f"{{\n.reg .b32 x, y;\nprmt.b32 x, {{$r0}}, 0, {which:#x};\nshl.b32 x, x, 4;\nand.b32 x, x, 0x87F087F0;\n"
        "mov.b32 y, 0x7B807B80;\n"  # 2^120, twice
        "mul.rn.bf16x2 x, x, y;\nmul.rn.bf16x2 {$w0}, x, {$r1};\n}",
        [Uint32],
        codes,
        factor,
    )
