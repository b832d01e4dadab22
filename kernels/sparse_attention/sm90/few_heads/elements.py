"""Elements of a token's keys in the kernel for few heads: which there are, whose, and their merges (kernel.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4_kernels import ptx
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.epilogue import inverse_sum, load_sink
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import PIECES, FewHeads
from dsv4_kernels.sparse_attention.sm90.few_heads.softmax import column_of
from dsv4_kernels.sparse_attention.sm90.plan import DIM, GROUP, GROUPS, KEY_TILE, NO_ROW_MAX, STEP, Arguments

# Elements of a token, and parts of them


class Keys(NamedTuple):
    """How a token's keys are divided."""

    steps: Int32
    kv_splits: Int32
    elements: Int32


@cute.jit
def divide_keys(args: Arguments, steps: Int32) -> Keys:
    """Of a token with so many steps."""
    kv_splits = Int32(1)
    if args.steps_per_kv_split > 0:
        if steps > args.steps_per_kv_split:
            kv_splits = scheduler.count_kv_splits(args, steps)
    elements = kv_splits
    if kv_splits == 1:
        elements = ptx.imin(steps * (STEP // KEY_TILE), Int32(PIECES))
    return Keys(steps, kv_splits, elements)


@cute.jit
def first_tile(keys: Keys, element: Int32) -> Int32:
    """Of an element, or behind the last one; KV splits begin at steps, pieces of one at any tile."""
    tile = Int32(0)
    if keys.kv_splits > 1:
        tile = ptx.divide(element * keys.steps, keys.elements) * (STEP // KEY_TILE)
    else:
        tile = ptx.divide(element * keys.steps * (STEP // KEY_TILE), keys.elements)
    return tile


def first_element(keys: Keys, part: Int32, parts: Int32) -> Int32:
    """Of a part, or behind the last one. The first part has at least one."""
    return ptx.divide(part * keys.elements + parts - 1, parts)


# Merges


def clear(row_max: cute.Tensor, row_sum: cute.Tensor, values: cute.Tensor) -> None:
    """The result of no keys."""
    row_max.fill(NO_ROW_MAX)
    row_sum.fill(0.0)
    values.fill(0.0)


def merge_factors(before: Float32, joining: Float32) -> tuple:
    """(row max of both, factor of what is there, factor of what joins it), of elements and their merges.

    Not lazily, as tiles are merged: weights within an element may be 2**RESCALE_LOG2 already.
    """
    largest = ptx.fmax(before, joining)
    return largest, ptx.exp2(before - largest), ptx.exp2(joining - largest)


@cute.jit
def merge_element(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    half: Int32 | int,
    warp: Int32,
    lane: Int32,
    total: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Merges an element into those before it, as `combine` does with all; their statistics are in shared memory."""
    stats = Int32(shared.stats.data_ptr().toint()) + lane % 4 * 16
    total_max, total_sum = (cute.make_rmem_tensor((config.columns,), Float32) for _ in range(2))
    before, joining = (cute.make_rmem_tensor((config.columns,), Float32) for _ in range(2))
    for c in cutlass.range_constexpr(config.columns):
        total_max[c], total_sum[c] = ptx.load_shared_f32x2(stats + (c // 2 * 8 + c % 2) * 8)
        total_max[c], before[c], joining[c] = merge_factors(total_max[c], row_max[c])
        total_sum[c] = ptx.fma(row_sum[c], joining[c], total_sum[c] * before[c])
    for at in cutlass.range_constexpr(cute.size(out)):
        c = column_of(config, at)
        total[at] = ptx.fma(out[at], joining[c], total[at] * before[c])
    cute.arch.barrier()  # all have read them
    store_stats(config, shared, half, warp, lane, 0, total_max, total_sum)


@cute.jit
def store_stats(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    half: Int32 | int,
    warp: Int32,
    lane: Int32,
    place: cutlass.Constexpr,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
) -> None:
    """Statistics of an element to shared memory, by four lanes."""
    if (warp == 0) & (lane < 4):
        if half == 0:
            stats = Int32(shared.stats.data_ptr().toint()) + (place * config.heads + lane * 2) * 8
            for c in cutlass.range_constexpr(config.columns):
                ptx.store_shared_f32x2(stats + (c // 2 * 8 + c % 2) * 8, (row_max[c], row_sum[c]))


# Elements of all parts


@cute.jit
def leave_element(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    half: Int32 | int,
    warp: Int32,
    lane: Int32,
    place: cutlass.Constexpr,
    out: cute.Tensor,
) -> None:
    """An element to shared memory, where all CTAs of the cluster read it."""
    channel = half * (config.groups * GROUP) + warp * 16 + lane // 4
    base = Int32(shared.values.data_ptr().toint()) + (channel * config.heads + lane % 4 * 2) * 4
    for at in cutlass.range_constexpr(0, cute.size(out), 2):
        group, j, i = at // (config.heads // 2), at // 4 % (config.heads // 8), at // 2 % 2
        offset = place * config.element_bytes + ((group * GROUP + 8 * i) * config.heads + 8 * j) * 4
        ptx.store_shared_f32x2(base + offset, (out[at], out[at + 1]))


def load_channels(config: FewHeads, values: Int32, parts: Int32) -> list:
    """Eight adjacent channels of every 64 that a CTA has, of a head."""
    exists = [Int32(GROUPS - 1) - group * parts for group in range(GROUPS)]
    offsets = [(group * GROUP + j) * config.heads * 4 for group in range(GROUPS) for j in range(8)]
    return [ptx.load_cluster_f32_if(exists[n // 8], values + offset) for n, offset in enumerate(offsets)]


@cute.jit
def combine(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    token: Int32,
    keys: Keys,
    part: Int32,
    parts: Int32,
) -> None:
    """Merges all elements of the token for this CTA's part of the channels, and writes O.

    A thread has a head, and of every 64 channels eight.
    """
    head, chunk = thread % config.heads, thread // config.heads
    channel = part * ptx.divide(Int32(DIM), parts) + chunk * 8
    own = Int32(shared.values.data_ptr().toint()) + (channel * config.heads + head) * 4
    own_stats = Int32(shared.stats.data_ptr().toint()) + head * 8
    row_max, row_sum = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
    out = cute.make_rmem_tensor((DIM // 8,), Float32)
    clear(row_max, row_sum, out)
    for other in cutlass.range(parts, unroll=1):
        begin, end = first_element(keys, other, parts), first_element(keys, other + 1, parts)
        if begin == 0:
            end = Int32(1)  # it has merged its own
        for i in cutlass.range(end - begin, unroll=1):
            values = ptx.remote(own + i * config.element_bytes, other)
            stats = ptx.remote(own_stats + i * (config.heads * 8), other)
            joining_max, joining_sum = ptx.load_cluster_f32x2(stats)
            joining = load_channels(config, values, parts)
            row_max[0], before, weight = merge_factors(row_max[0], joining_max)
            row_sum[0] = ptx.fma(joining_sum, weight, row_sum[0] * before)
            for at in cutlass.range_constexpr(DIM // 8):
                out[at] = ptx.fma(joining[at], weight, out[at] * before)
    inverse = inverse_sum(load_sink(args, head), row_max[0], row_sum[0])
    if head < args.num_heads:
        at = Int64(token) * args.out_token_stride + Int64(head) * args.out_head_stride + channel
        for group in cutlass.range_constexpr(GROUPS):
            if group * parts < GROUPS:
                pairs = [
                    ptx.pack_bf16(out[8 * group + j] * inverse, out[8 * group + j + 1] * inverse) for j in (0, 2, 4, 6)
                ]
                ptx.store_16_bytes(args.out + (at + group * GROUP) * 2, tuple(pairs))
