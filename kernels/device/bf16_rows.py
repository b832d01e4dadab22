"""What kernels over rows of bf16 share: 16 bytes as eight channels, fp32 rounded where it says so, reductions of lanes.

Every operation here names its rounding. The compiler contracts a plain product and sum into one rounding where it
likes, and not alike in two configurations of one kernel; a row's bits must not depend on which of them a batch takes.
"""

from collections.abc import Callable, Sequence

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import ptx

CHUNK = 8
"""Channels of 16 bytes."""
CHUNK_BYTES = 16
WARP = 32


def load_words(address: Int64) -> tuple:
    """16 bytes from global memory that are read once, as four words: channel 2i is the low half of word i."""
    code = "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return ptx.asm(code, [Uint32] * 4, address)


def load_words_if(exists: Int32, address: Int64) -> tuple:
    """The same, or zeros."""
    return ptx.load_or_zeros(Uint32, 4, address, Int32(exists))


def load_f32x4(address: Int64) -> tuple:
    """Four fp32 from global memory that others read too."""
    return ptx.asm("ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Float32] * 4, address)


def load_i64(address: Int64) -> Int64:
    """An int64 from global memory."""
    return ptx.asm("ld.global.b64 {$w0}, [{$r0}];", [Int64], address)


def load_8_bytes(address: Int64) -> tuple:
    """8 bytes from global memory, as two words."""
    return ptx.asm("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", [Uint32] * 2, address)


def store_8_bytes(address: Int64, words: tuple) -> None:
    """8 bytes to global memory."""
    ptx.asm("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", [], address, *words)


def low(word: Uint32) -> Float32:
    """The even channel of a word."""
    return ptx.as_f32(word << 16)


def high(word: Uint32) -> Float32:
    """The odd channel of a word."""
    return ptx.as_f32(word & 0xFFFF0000)


def channels(words: Sequence[Uint32]) -> list:
    """The channels of words, in order."""
    return [half(word) for word in words for half in (low, high)]


def packed(values: Sequence[Float32]) -> tuple:
    """The inverse of `channels`, rounded to bf16."""
    return tuple(ptx.pack_bf16(a, b) for a, b in zip(values[::2], values[1::2], strict=True))


def add(a: Float32, b: Float32) -> Float32:
    """a + b."""
    return ptx.asm("add.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def mul(a: Float32, b: Float32) -> Float32:
    """a * b."""
    return ptx.asm("mul.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def divide(a: Float32, b: Float32) -> Float32:
    """a / b, correctly rounded."""
    return ptx.asm("div.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def reciprocal(x: Float32) -> Float32:
    """1 / x to an ulp; of infinity 0."""
    return ptx.asm("rcp.approx.f32 {$w0}, {$r0};", [Float32], x)


def reciprocal_root(x: Float32) -> Float32:
    """1 / sqrt(x), to a relative 2**-22.9."""
    return ptx.asm("rsqrt.approx.f32 {$w0}, {$r0};", [Float32], x)


def root(x: Float32) -> Float32:
    """sqrt(x), correctly rounded."""
    return ptx.asm("sqrt.rn.f32 {$w0}, {$r0};", [Float32], x)


def magnitude(x: Float32) -> Float32:
    """|x|."""
    return ptx.asm("abs.f32 {$w0}, {$r0};", [Float32], x)


def at_most(x: Float32, bound: Float32) -> Float32:
    """The smaller one; NaN if x is."""
    return ptx.asm("min.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], x, bound)


def at_least(x: Float32, bound: Float32) -> Float32:
    """The larger one; NaN if x is."""
    return ptx.asm("max.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], x, bound)


def umin(a: Uint32, b: Uint32 | int) -> Uint32:
    """The smaller one."""
    return ptx.asm("min.u32 {$w0}, {$r0}, {$r1};", [Uint32], a, Uint32(b))


def exp(x: Float32) -> Float32:
    """e**x, to a relative 2**-21.8: x * log2(e) is split into a whole number, exactly, and at most a half.

    2**n is multiplied in two halves, so that no result of a subnormal or of infinity comes too early.
    """
    rounder = Float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to a whole number
    bounded = at_most(at_least(x, Float32(-150.0)), Float32(150.0))
    whole = add(ptx.fma(bounded, Float32(1.4426950216293335), rounder), Float32(-12582912.0))
    rest = ptx.fma(bounded, Float32(1.4426950216293335), -whole)
    rest = ptx.fma(bounded, Float32(1.925963033500011e-08), rest)
    n = Int32(whole)
    first = n >> 1
    scaled = mul(ptx.exp2(rest), ptx.as_f32(Uint32((first + 127) << 23)))
    return mul(scaled, ptx.as_f32(Uint32((n - first + 127) << 23)))


def _over_lanes(x: Float32, lanes: int, join: Callable) -> Float32:
    """A power of two of neighbouring lanes, as a butterfly: all get the same bits."""
    step = 1
    while step < lanes:
        x = join(x, cute.arch.shuffle_sync_bfly(x, offset=step))
        step *= 2
    return x


def sum_over_lanes(x: Float32, lanes: int = WARP) -> Float32:
    """Sum over each group of `lanes` lanes."""
    return _over_lanes(x, lanes, add)


def max_over_lanes(x: Float32, lanes: int = WARP) -> Float32:
    """Largest of each group of `lanes` lanes; NaN only if all are."""
    return _over_lanes(x, lanes, ptx.fmax)


def sum_of_squares(values: Sequence[Float32]) -> Float32:
    """Of one lane's channels, in order."""
    total = mul(values[0], values[0])
    for value in values[1:]:
        total = ptx.fma(value, value, total)
    return total
