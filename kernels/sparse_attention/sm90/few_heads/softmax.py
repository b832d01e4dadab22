"""The softmax of a tile in the kernel for few heads: scores, maxima, P, and their merge (kernel.py)."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    COLUMNS,
    ROWS,
    SCORES,
    STATISTICS,
    TILE_BARRIER,
    WARPGROUP,
    WARPS,
)
from dsv4_kernels.sparse_attention.sm90.plan import NO_ROW_MAX, ROW_STRIDE, Arguments
from dsv4_kernels.sparse_attention.sm90.softmax import rescale_factors

# In the accumulators, element 4 * j + 2 * i + k of a thread is row `row` + 8 i, column 8 j + 2 quad + k; statistics of
# that column are at 2 * j + k.


@cute.jit
def find_tile_max(
    args: Arguments,
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    is_hole: tuple,
    scores: cute.Tensor,
) -> tuple:
    """Largest scores of this thread's columns over the tile, in log2 units; NO_ROW_MAX if all keys are holes."""
    for i in cutlass.range_constexpr(ROWS):
        if is_hole[i]:
            for at in cutlass.range_constexpr(SCORES):
                if const_expr(at // 2 % 2 == i):
                    scores[at] = -Float32.inf
    largest = []
    for c in cutlass.range_constexpr(STATISTICS):
        at = 4 * (c // 2) + c % 2
        x = ptx.fmax(scores[at], scores[at + 2])
        for offset in (4, 8, 16):
            x = ptx.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
        largest.append(ptx.fmax(x * args.scale_log2, Float32(NO_ROW_MAX)))
    first = place_of_columns(shared.row_max, lane % 4)
    store_of_warp(first, warp, lane, tuple(largest))
    sync(TILE_BARRIER, WARPGROUP)
    return tuple(functools.reduce(ptx.fmax, values) for values in load_of_warps(first))


def place_of_columns(statistics: object, quad: Int32) -> Int32:
    """Address of the first warp's statistics of a thread's columns."""
    return Int32(statistics.data_ptr().toint()) + quad * (STATISTICS * 4)


@cute.jit
def store_of_warp(first: Int32, warp: Int32, lane: Int32, values: tuple) -> None:
    """Stores a statistic over the warp's keys, equal in all lanes of a column; `first` is the first warp's address."""
    if lane < 4:
        ptx.store_shared_f32x4(first + warp * (COLUMNS * 4), values)


def load_of_warps(first: Int32) -> list:
    """The statistics [column][warp] that `store_of_warp` stored."""
    loaded = [ptx.load_shared_f32x4(first + warp * (COLUMNS * 4)) for warp in range(WARPS)]
    return [[of_warp[c] for of_warp in loaded] for c in range(STATISTICS)]


@cute.jit
def exponentiate(
    args: Arguments,
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    tile_max: tuple,
    scores: cute.Tensor,
) -> None:
    """Stores P^T = 2**(s - tile_max) in bf16 to shared memory, a head's keys adjacent, and its sums over a warp's keys.

    The sums are of the rounded values that are multiplied: their rounding then cancels in O / sum.
    """
    packed, sums = [], [Float32(0.0)] * len(tile_max)
    for at in cutlass.range_constexpr(0, SCORES, 2):
        c = at // 4 * 2
        pair = ptx.pack_bf16(*(ptx.exp2(ptx.fma(scores[at + k], args.scale_log2, -tile_max[c + k])) for k in range(2)))
        packed.append(pair)
        sums[c] = sums[c] + ptx.as_f32(pair << 16)
        sums[c + 1] = sums[c + 1] + ptx.as_f32(pair & Uint32(0xFFFF0000))
    # Four matrices of 8 keys x 8 heads, transposed: lane l has the address of head l % 8 of matrix l // 8.
    head, chunk = lane // 16 * 8 + lane % 8, 2 * warp + lane // 8 % 2
    place = Int32(shared.p.data_ptr().toint()) + head * ROW_STRIDE + (chunk ^ (lane & 7)) * 16
    ptx.store_matrices_transposed(place, tuple(packed))
    for c in cutlass.range_constexpr(len(tile_max)):
        for offset in (4, 8, 16):
            sums[c] = sums[c] + cute.arch.shuffle_sync_bfly(sums[c], offset=offset)
    store_of_warp(place_of_columns(shared.row_sums, lane % 4), warp, lane, tuple(sums))
    cute.arch.fence_view_async_shared()  # P and values, read by wgmma
    sync(TILE_BARRIER, WARPGROUP)


@cute.jit
def rescale_out(
    shared: cutlass.Constexpr,
    warp: Int32,
    quad: Int32,
    tile_max: tuple,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Merges a tile into the row sums, rescales O for it, and writes `weight`, the scale of the tile's product.

    Row sums are valid in the first warp only, which stores them (`elements.store_stats`): loading and adding the tile's
    sums takes a twentieth of the loop's instructions.
    """
    before, changed = cute.make_rmem_tensor((STATISTICS,), Float32), Boolean(False)
    for c in cutlass.range_constexpr(STATISTICS):
        before[c], weight[c] = rescale_factors(row_max, tile_max[c], c)
        changed = changed | (before[c] != 1.0)
    if warp == 0:
        sums = load_of_warps(place_of_columns(shared.row_sums, quad))
        for c in cutlass.range_constexpr(STATISTICS):
            s0, s1, s2, s3 = sums[c]
            row_sum[c] = ptx.fma((s0 + s1) + (s2 + s3), weight[c], row_sum[c] * before[c])
    if cute.arch.vote_any_sync(changed):
        for at in cutlass.range_constexpr(cute.size(out)):
            out[at] = out[at] * before[column_of(at)]


def column_of(at: int) -> int:
    """The thread's column that accumulator element `at` of O belongs to; channel groups follow each other in O."""
    at %= COLUMNS // 2
    return at // 4 * 2 + at % 2


def add_product(out: cute.Tensor, product: cute.Tensor, weight: cute.Tensor, i: int) -> None:
    """Adds 64 channels of a tile's product to O."""
    for j in range(cute.size(product)):
        at = i * cute.size(product) + j
        out[at] = ptx.fma(product[j], weight[column_of(j)], out[at])
