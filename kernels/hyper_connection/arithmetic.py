"""Arithmetic of the hyper-connection kernel, and its accesses to memory that no other kernel has."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels import ptx
from dsv4_kernels.hyper_connection.plan import STREAMS, WARP

LOG2_E = 1.4426950408889634


def sum_over_lanes(values: list, lane: Int32) -> Float32:
    """The sums of a power of two of values over a warp; lane l gets that of values[l * len(values) // 32].

    Each step adds what lanes have that differ in one bit of their number, the highest first. Of several values a lane
    goes on with half of them, and the bits are those of a single one.
    """
    offset = WARP // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        halves = list(zip(values[:half], values[half:], strict=True))
        kept = [cutlass.select_(upper, b, a) for a, b in halves]
        given = [cutlass.select_(upper, a, b) for a, b in halves]
        values = [k + cute.arch.shuffle_sync_bfly(g, offset) for k, g in zip(kept, given, strict=True)]
        offset //= 2
    value = values[0]
    while offset:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
        offset //= 2
    return value


def in_turn(values: list) -> Float32:
    """The sum, one after the other."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def softmax_rows(matrix: cute.Tensor, eps: Float32) -> None:
    """Each row's softmax, and eps."""
    for j in range(STREAMS):
        row = [matrix[STREAMS * j + k] for k in range(STREAMS)]
        highest = ptx.fmax(ptx.fmax(row[0], row[1]), ptx.fmax(row[2], row[3]))
        row = [ptx.exp2((value - highest) * LOG2_E) for value in row]
        inverse = reciprocal((row[0] + row[1]) + (row[2] + row[3]))
        for k in range(STREAMS):
            matrix[STREAMS * j + k] = ptx.fma(row[k], inverse, eps)


def divide_rows(matrix: cute.Tensor, eps: Float32) -> None:
    """Each row by its sum and eps."""
    _divide(matrix, [[STREAMS * j + k for k in range(STREAMS)] for j in range(STREAMS)], eps)


def divide_columns(matrix: cute.Tensor, eps: Float32) -> None:
    """Each column by its sum and eps."""
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


def unpack(words: tuple | list) -> list:
    """bf16 in words -> fp32, the low halves first."""
    return [ptx.as_f32(half) for word in words for half in (word << 16, word & 0xFFFF0000)]


# Memory


def address_of(part: cute.Pointer, team: Int32 | int, team_bytes: int) -> Int32:
    """Of a team's part of what all teams have side by side in shared memory."""
    return Int32(part.data_ptr().toint()) + team * team_bytes


def load_8_bytes_if(exists: Int32, address: Int64) -> tuple:
    """Two words that are read once, or zeros unless `exists` is positive."""
    return ptx.load_or_zeros(Uint32, 2, address, exists, "gt.s32")


def store_8_bytes_if(exists: Int32, address: Int64, low: Uint32, high: Uint32) -> None:
    """Two words to global memory, if `exists` is positive."""
    ptx.asm(
        "{\n.reg .pred p;\nsetp.gt.s32 p, {$r0}, 0;\n@p st.global.v2.b32 [{$r1}], {{$r2}, {$r3}};\n}",
        [],
        exists,
        address,
        low,
        high,
    )


def copy_bulk(shared: Int32, address: Int64, num_bytes: int, barrier: Int32) -> None:
    """Neighbouring bytes from global to shared memory, by the copy engine; a barrier counts them."""
    ptx.asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        [],
        shared,
        address,
        Int32(num_bytes),
        barrier,
    )
