"""FP4 rows (e2m1 with ue8m0 scales) in kernels, with the bits of `hadamard` and `encode_fp4`: a warp has 128 channels,
a lane four neighbours."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4_kernels.device import ptx
from dsv4_kernels.device.bf16_rows import add, magnitude, mul

DIM = 128
LANE_CHANNELS = 4
_AMAX_FLOOR = 6 * 2.0**-126
_BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Bounds between neighbouring magnitudes of e2m1, and whether the bound itself rounds up (to an even code)."""


def scale_exponent(amax: Float32) -> Uint32:
    """The ue8m0 byte of a block's scale: `2**ceil(log2(max(amax, 6 * 2**-126) / 6))`."""
    return (ptx.as_u32(mul(ptx.fmax(amax, Float32(_AMAX_FLOOR)), Float32(1 / 6))) + 0x7FFFFF) >> 23


def hadamard(values: list, lane: Int32) -> list:
    """The Hadamard transform of a warp's 128 channels, with the additions of the definition in its order."""
    stride = 1
    while stride < DIM:
        if stride < LANE_CHANNELS:
            paired = list(values)
            for i in range(LANE_CHANNELS):
                if i & stride == 0:
                    low, high = values[i], values[i + stride]
                    paired[i], paired[i + stride] = add(low, high), add(low, -high)
            values = paired
        else:
            is_high = (lane & (stride // LANE_CHANNELS)) != 0
            values = [_across_lanes(x, stride // LANE_CHANNELS, is_high) for x in values]
        stride *= 2
    return [mul(x, Float32(DIM**-0.5)) for x in values]


def _across_lanes(x: Float32, step: int, is_high: cutlass.Boolean) -> Float32:
    other = cute.arch.shuffle_sync_bfly(x, offset=step)
    return add(other, cutlass.select_(is_high, -x, x))


def codes(values: list, exponent: Uint32) -> list:
    """The e2m1 codes of four channels over their scale, rounded to nearest, ties to the even code."""
    inverse = ptx.as_f32((254 - exponent) << 23)
    found = []
    for value in values:
        size = magnitude(mul(value, inverse))
        code = (ptx.as_u32(value) >> 31) << 3
        for bound, included in _BOUNDS:
            above = size >= bound if included else size > bound
            code += cutlass.select_(above, Uint32(1), Uint32(0))
        found.append(code)
    return found


def value_of(code: Uint32, exponent: Uint32) -> Float32:
    """The fp32 value of an e2m1 code under a scale."""
    index = code & 7
    small, middle, large = Float32(index) * 0.5, Float32(index) - 2.0, Float32(index) * 2.0 - 8.0
    size = cutlass.select_(index < 4, small, cutlass.select_(index < 6, middle, large))
    sized = mul(size, ptx.as_f32(exponent << 23))
    return ptx.as_f32(ptx.as_u32(sized) | (code >> 3) << 31)
