"""Rows of bf16 in kernels: 16 bytes as eight channels, fp32 arithmetic with named rounding, reductions over lanes.

Every operation here names its rounding. The compiler may contract a plain product and sum into one rounding, and
contracts differently in two configurations of one kernel; a row's bits must not depend on the configuration that serves
a batch.
"""

from collections.abc import Callable, Sequence

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import ptx

CHUNK = 8
"""Channels in 16 bytes."""
CHUNK_BYTES = 16
WARP = 32


def load_words(address: Int64) -> tuple:
    """16 bytes from global memory that are read once, as four words: channel 2i is the low half of word i."""
    code = "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return ptx.asm(code, [Uint32] * 4, address)


def load_words_if(exists: Int32, address: Int64) -> tuple:
    """Four words as from `load_words`, or zeros if `exists` is 0."""
    return ptx.load_or_zeros(Uint32, 4, address, Int32(exists))


def load_f32x4(address: Int64) -> tuple:
    """Four fp32 from global memory, through L1, because other threads read them, too."""
    return ptx.asm("ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Float32] * 4, address)


def load_i64(address: Int64) -> Int64:
    """An int64 from global memory."""
    return ptx.asm("ld.global.b64 {$w0}, [{$r0}];", [Int64], address)


def load_8_bytes(address: Int64) -> tuple:
    """8 bytes from global memory, as two words."""
    return ptx.asm("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", [Uint32] * 2, address)


def store_8_bytes(address: Int64, words: tuple) -> None:
    """Stores two words to global memory."""
    ptx.asm("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", [], address, *words)


def low(word: Uint32) -> Float32:
    """The even channel of a word: its low half."""
    return ptx.as_f32(word << 16)


def high(word: Uint32) -> Float32:
    """The odd channel of a word: its high half."""
    return ptx.as_f32(word & 0xFFFF0000)


def channels(words: Sequence[Uint32]) -> list:
    """The channels of some words as fp32, in order."""
    return [half(word) for word in words for half in (low, high)]


def packed(values: Sequence[Float32]) -> tuple:
    """Words of bf16 from fp32 channels, rounded: the inverse of `channels`."""
    return tuple(ptx.pack_bf16(a, b) for a, b in zip(values[::2], values[1::2], strict=True))


def add(a: Float32, b: Float32) -> Float32:
    """a + b, rounded to nearest."""
    return ptx.asm("add.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def mul(a: Float32, b: Float32) -> Float32:
    """a * b, rounded to nearest."""
    return ptx.asm("mul.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def divide(a: Float32, b: Float32) -> Float32:
    """a / b, correctly rounded."""
    return ptx.asm("div.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def reciprocal(x: Float32) -> Float32:
    """1 / x, to one unit in the last place; 0 for infinity."""
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
    """min(x, bound); NaN if x is NaN."""
    return ptx.asm("min.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], x, bound)


def at_least(x: Float32, bound: Float32) -> Float32:
    """max(x, bound); NaN if x is NaN."""
    return ptx.asm("max.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], x, bound)


def umin(a: Uint32, b: Uint32 | int) -> Uint32:
    """The smaller of two uint32."""
    return ptx.asm("min.u32 {$w0}, {$r0}, {$r1};", [Uint32], a, Uint32(b))


def exp(x: Float32) -> Float32:
    """e**x, to a relative 2**-21.8.

    x * log2(e) is split, without error, into a whole number n and a rest of at most a half. 2**n is multiplied in as
    two factors, so that neither underflows nor overflows before the product does.
    """
    rounder = Float32(12582912.0)  # 1.5 * 2**23: adding a number to it rounds the number to a whole one
    bounded = at_most(at_least(x, Float32(-150.0)), Float32(150.0))
    whole = add(ptx.fma(bounded, Float32(1.4426950216293335), rounder), Float32(-12582912.0))
    rest = ptx.fma(bounded, Float32(1.4426950216293335), -whole)
    rest = ptx.fma(bounded, Float32(1.925963033500011e-08), rest)
    n = Int32(whole)
    first = n >> 1
    scaled = mul(ptx.exp2(rest), ptx.as_f32(Uint32((first + 127) << 23)))
    return mul(scaled, ptx.as_f32(Uint32((n - first + 127) << 23)))


def _over_lanes(x: Float32, lanes: int, join: Callable) -> Float32:
    """`join` over a power of two of neighbouring lanes, as a butterfly: all lanes get the same bits."""
    step = 1
    while step < lanes:
        x = join(x, cute.arch.shuffle_sync_bfly(x, offset=step))
        step *= 2
    return x


def sum_over_lanes(x: Float32, lanes: int = WARP) -> Float32:
    """The sum over every run of `lanes` neighbouring lanes."""
    return _over_lanes(x, lanes, add)


def max_over_lanes(x: Float32, lanes: int = WARP) -> Float32:
    """The largest value of every run of `lanes` neighbouring lanes; NaN only if all are NaN."""
    return _over_lanes(x, lanes, ptx.fmax)


def sum_of_squares(values: Sequence[Float32]) -> Float32:
    """The sum of the squares of one lane's channels, added in order."""
    total = mul(values[0], values[0])
    for value in values[1:]:
        total = ptx.fma(value, value, total)
    return total
