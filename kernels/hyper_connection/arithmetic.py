"""Arithmetic of the hyper-connection kernel, and memory accesses that only this kernel needs."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import ptx
from dsv4_kernels.hyper_connection.plan import QUAD, STREAMS, WARP

LOG2_E = 1.4426950408889634


def sum_of_squares(values: list) -> Float32:
    """The sum of the squares, added in order."""
    total = values[0] * values[0]
    for value in values[1:]:
        total = ptx.fma(value, value, total)
    return total


def sum_over_units(values: list, tokens: int) -> Float32:
    """The sum over all units of a warp, from a thread's values for its own units; every thread of the token gets it.

    Neighbouring units are added first, then neighbouring pairs of units, whichever threads have them, and the four
    threads of a unit last: so the bits do not depend on how many units a thread has.
    """
    offset = QUAD * tokens
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    value = values[0]
    while offset < WARP:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
        offset *= 2
    for offset in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


def max_over_units(value: Float32, tokens: int) -> Float32:
    """The largest value of all units of a warp; every thread of the token gets it."""
    offset = QUAD * tokens
    while offset < WARP:
        value = ptx.fmax(value, cute.arch.shuffle_sync_bfly(value, offset))
        offset *= 2
    for offset in (1, 2):
        value = ptx.fmax(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


UPPER_BITS = 0xFFFFE000
"""Bits of an fp32 that the tensor core uses as tf32."""


def split_tf32(x: Float32, upper_bits: Uint32) -> tuple:
    """An fp32 as two tf32: the upper 11 bits of its significand, and the rest, of which the tensor core uses 11 bits:
    at most the last two of 24 bits are lost.

    Args:
        x: the number.
        upper_bits: UPPER_BITS.
    """
    high = ptx.as_u32(x) & upper_bits
    return high, ptx.as_u32(x - ptx.as_f32(high))


def upper_bits_at_run_time() -> Uint32:
    """UPPER_BITS, as a value that the compiler does not know: computed from the grid's second dimension, which is 1."""
    _, one, _ = cute.arch.grid_dim()
    return Uint32(0) - (Uint32(one) << 13)


def in_turn(values: list) -> Float32:
    """The sum of the values, added one after the other."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@cute.jit
def balance_matrix(matrix: cute.Tensor, eps: Float32, iterations: Int32) -> None:
    """Balances a matrix of comb: softmax, then Sinkhorn's iteration.

    With a matrix in one thread no step needs a shuffle between lanes, which takes longer than adding in sequence.
    """
    softmax_rows(matrix, eps)
    divide_columns(matrix, eps)
    for _ in cutlass.range(1, iterations, 1, unroll=1):
        divide_rows(matrix, eps)
        divide_columns(matrix, eps)


def softmax_rows(matrix: cute.Tensor, eps: Float32) -> None:
    """Replaces each row by its softmax plus eps."""
    for j in range(STREAMS):
        row = [matrix[STREAMS * j + k] for k in range(STREAMS)]
        highest = ptx.fmax(ptx.fmax(row[0], row[1]), ptx.fmax(row[2], row[3]))
        row = [ptx.exp2((value - highest) * LOG2_E) for value in row]
        inverse = reciprocal((row[0] + row[1]) + (row[2] + row[3]))
        for k in range(STREAMS):
            matrix[STREAMS * j + k] = ptx.fma(row[k], inverse, eps)


def divide_rows(matrix: cute.Tensor, eps: Float32) -> None:
    """Divides each row by its sum plus eps."""
    _divide(matrix, [[STREAMS * j + k for k in range(STREAMS)] for j in range(STREAMS)], eps)


def divide_columns(matrix: cute.Tensor, eps: Float32) -> None:
    """Divides each column by its sum plus eps."""
    _divide(matrix, [[STREAMS * j + k for j in range(STREAMS)] for k in range(STREAMS)], eps)


def _divide(matrix: cute.Tensor, lines: list, eps: Float32) -> None:
    for line in lines:
        a, b, c, d = (matrix[i] for i in line)
        inverse = reciprocal(((a + b) + (c + d)) + eps)
        for i in line:
            matrix[i] = matrix[i] * inverse


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)): 0 where exp(-x) overflows."""
    return reciprocal(1.0 + ptx.exp2(x * -LOG2_E))


def reciprocal(x: Float32) -> Float32:
    """1 / x, to one unit in the last place."""
    return ptx.asm("rcp.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def rsqrt(x: Float32) -> Float32:
    """1 / sqrt(x), to 2**-22.9."""
    return ptx.asm("rsqrt.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


# Memory


def address_of(part: cute.Pointer, team: Int32 | int, team_bytes: int) -> Int32:
    """The address of one team's part of an array that has a part for each team, in shared memory."""
    return Int32(part.data_ptr().toint()) + team * team_bytes


def load_words(address: Int64, count: int) -> tuple:
    """Two or four words that are read once."""
    return ptx.load_or_zeros(Uint32, count, address, Int32(1))


def load_words_if(exists: Int32, address: Int64, count: int) -> tuple:
    """Two or four words that are read once, or zeros unless `exists` is positive."""
    return ptx.load_or_zeros(Uint32, count, address, exists, "gt.s32")


def store_words_if(exists: Int32, address: Int64, words: list) -> None:
    """Stores two or four words to global memory if `exists` is positive."""
    listed = ", ".join(f"{{$r{2 + i}}}" for i in range(len(words)))
    ptx.asm(
        f"{{\n.reg .pred p;\nsetp.gt.s32 p, {{$r0}}, 0;\n@p st.global.v{len(words)}.b32 [{{$r1}}], {{{listed}}};\n}}",
        [],
        exists,
        address,
        *words,
    )


def store_codes(address: Int64, words: tuple) -> None:
    """Stores one or two words of four codes to global memory."""
    code = "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};" if len(words) == 2 else "st.global.b32 [{$r0}], {$r1};"
    ptx.asm(code, [], address, *words)


def load_words_or_floats(address: Int64, count: int, floats: bool) -> list:
    """Two, four or eight 32-bit values that stay in L1, as fp32 or as words."""
    kind, at_once = Float32 if floats else Uint32, min(count, 4)
    loaded = []
    for first in range(0, count, at_once):
        loaded += ptx.load_or_zeros(kind, at_once, address + first * 4, Int32(1), cache="")
    return loaded
