"""Elements of a token's keys in the kernel for few heads: their division among CTAs, and their merges (kernel.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.epilogue import inverse_sum
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    COLUMNS,
    ELEMENT_BYTES,
    MAX_ELEMENTS,
    PIECES,
    STATISTICS,
    TILES_OF_STEP,
)
from dsv4_kernels.sparse_attention.sm90.few_heads.softmax import column_of
from dsv4_kernels.sparse_attention.sm90.plan import DIM, GROUP, GROUPS, NO_ROW_MAX, Arguments
from dsv4_kernels.sparse_attention.sm90.softmax import rescale_factors

# Elements of a token, and its parts


class Keys(NamedTuple):
    """The division of a token's keys."""

    steps: Int32
    kv_splits: Int32
    elements: Int32
    leaves: Int32
    """Units that CTAs compute separately: the token's elements, or its tiles."""


@cute.jit
def divide_keys(args: Arguments, steps: Int32, parts: Int32) -> Keys:
    """The division of a token of `steps` steps among `parts` CTAs."""
    kv_splits = Int32(1)
    if args.steps_per_kv_split > 0:
        if steps > args.steps_per_kv_split:
            kv_splits = scheduler.count_kv_splits(args, steps)
    elements, leaves = kv_splits, kv_splits
    if kv_splits == 1:
        tiles = steps * TILES_OF_STEP
        elements = ptx.imin(tiles, Int32(PIECES))
        leaves = elements
        if (parts > PIECES) & (tiles <= MAX_ELEMENTS * parts):
            leaves = tiles
    return Keys(steps, kv_splits, elements, leaves)


@cute.jit
def first_tile(keys: Keys, leaf: Int32) -> Int32:
    """First tile of a leaf; for `leaf == keys.leaves` the end. KV splits begin at steps, pieces at any tile."""
    tile = Int32(0)
    if keys.kv_splits > 1:
        tile = ptx.divide(leaf * keys.steps, keys.leaves) * TILES_OF_STEP
    else:
        tile = ptx.divide(leaf * keys.steps * TILES_OF_STEP, keys.leaves)
    return tile


def first_leaf(keys: Keys, part: Int32, parts: Int32) -> Int32:
    """First leaf of a part; for `part == parts` the end. The first part has at least one leaf."""
    return ptx.divide(part * keys.leaves + parts - 1, parts)


# Merges


def clear(row_max: cute.Tensor, row_sum: cute.Tensor, values: cute.Tensor) -> None:
    """Sets a result to the result of no keys."""
    row_max.fill(NO_ROW_MAX)
    row_sum.fill(0.0)
    values.fill(0.0)


def merge_factors(before: Float32, joining: Float32) -> tuple:
    """(row max of both, scale of the old values, scale of the new values), for merges of elements.

    Unlike merges of tiles it is not lazy: weights within an element may be 2**RESCALE_LOG2 already.
    """
    largest = ptx.fmax(before, joining)
    return largest, ptx.exp2(before - largest), ptx.exp2(joining - largest)


@cute.jit
def merge_element(
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    total: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Merges an element into the earlier elements, as `combine` does; shared memory has the earlier statistics."""
    stats = Int32(shared.stats.data_ptr().toint()) + lane % 4 * 16
    total_max, total_sum = (cute.make_rmem_tensor((STATISTICS,), Float32) for _ in range(2))
    before, joining = (cute.make_rmem_tensor((STATISTICS,), Float32) for _ in range(2))
    for c in cutlass.range_constexpr(STATISTICS):
        total_max[c], total_sum[c] = ptx.load_shared_f32x2(stats + (c // 2 * 8 + c % 2) * 8)
        total_max[c], before[c], joining[c] = merge_factors(total_max[c], row_max[c])
        total_sum[c] = ptx.fma(row_sum[c], joining[c], total_sum[c] * before[c])
    for at in cutlass.range_constexpr(cute.size(out)):
        c = column_of(at)
        total[at] = ptx.fma(out[at], joining[c], total[at] * before[c])
    cute.arch.barrier()  # all threads have read the statistics
    store_stats(shared, warp, lane, 0, total_max, total_sum)


@cute.jit
def store_stats(
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    place: cutlass.Constexpr,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
) -> None:
    """Stores the statistics of an element to shared memory, by four lanes."""
    if (warp == 0) & (lane < 4):
        stats = Int32(shared.stats.data_ptr().toint()) + (place * COLUMNS + lane * 2) * 8
        for c in cutlass.range_constexpr(STATISTICS):
            ptx.store_shared_f32x2(stats + (c // 2 * 8 + c % 2) * 8, (row_max[c], row_sum[c]))


# Elements of all parts


def place_of(channel: Int32, head: Int32) -> Int32:
    """Byte offset of a channel of a head in an element: [512 channels][heads] fp32, swizzled so that the threads of a
    warp access different banks both when storing and when merging. Bit 3 of the channel flips the channel's bit 0, and
    bits 1 and 4 of the channel each flip bit 3 of the head."""
    other = (channel // 16 ^ channel // 2) & 1
    return ((channel ^ (channel // 8 & 1)) * COLUMNS + (head ^ (other * 8))) * 4


@cute.jit
def leave_element(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    place: cutlass.Constexpr,
    out: cute.Tensor,
) -> None:
    """Stores an element to shared memory, where all CTAs of the cluster read it; undoes the permutation of channels."""
    lane = ptx.opaque(lane)  # offsets are computed here, not kept in registers during the loops
    quad, group_bytes = lane % 4, GROUP * COLUMNS * 4
    base = Int32(shared.values.data_ptr().toint()) + (place * ELEMENT_BYTES)
    plain = [warp * 16 + lane // 4 + 8 * i for i in range(2)]
    # 16 b + 8 h + 2 q + j of `rows.store_q`
    staged = [lane // 8 * 16 + warp * 4 + 2 * i + lane // 4 % 2 for i in range(2)]
    for group in cutlass.range_constexpr(GROUPS):
        channels = staged if group < config.staged_groups else plain
        places = [base + place_of(channels[i], 2 * quad) for i in range(2)]
        for j in cutlass.range_constexpr(COLUMNS // 8):
            for i in cutlass.range_constexpr(2):
                at = (group * (COLUMNS // 8) + j) * 4 + 2 * i
                ptx.store_shared_f32x2((places[i] ^ (32 * j)) + group * group_bytes, (out[at], out[at + 1]))


def load_channels(groups: int, values: list, parts: Int32) -> list:
    """Eight adjacent channels of one head from each of `groups` groups of 64; 0 beyond this CTA's channels.

    `values` are the addresses of the first four channels; the others have the same distances.
    """
    offsets = [(group * GROUP + j) * COLUMNS * 4 for group in range(groups) for j in (0, 0, 0, 0, 4, 4, 4, 4)]
    if groups == GROUPS:  # a single CTA: its own shared memory
        return [ptx.load_shared_f32(values[n % 4] + offset) for n, offset in enumerate(offsets)]
    exists = [Int32(GROUPS - 1) - group * parts for group in range(groups)]
    return [ptx.load_cluster_f32_if(exists[n // 8], values[n % 4] + offset) for n, offset in enumerate(offsets)]


@cute.jit
def merge_all(
    groups: cutlass.Constexpr,
    own: tuple,
    own_stats: Int32,
    keys: Keys,
    parts: Int32,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Merges all leaves of the token, for this CTA's channels; `own` are the addresses of the first four channels in
    this CTA's first leaf.

    Tiles are merged to elements as in a CTA that has the whole element; a merge into an empty result changes no bit.
    """
    tiles_max, tiles_sum = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
    tiles_out = cute.make_rmem_tensor((8 * groups,), Float32)
    clear(tiles_max, tiles_sum, tiles_out)
    element, element_end = Int32(0), ptx.divide(keys.leaves, keys.elements)
    for other in cutlass.range(parts, unroll=1):
        begin, end = first_leaf(keys, other, parts), first_leaf(keys, other + 1, parts)
        if (begin == 0) & (keys.leaves == keys.elements):
            end = Int32(1)  # the first part has merged its elements
        for i in cutlass.range(end - begin, unroll=1):
            values = [place + i * ELEMENT_BYTES for place in own]
            stats = own_stats + i * (COLUMNS * 8)
            if const_expr(groups < GROUPS):
                values, stats = [ptx.remote(place, other) for place in values], ptx.remote(stats, other)
                joining_max, joining_sum = ptx.load_cluster_f32x2(stats)
            else:
                joining_max, joining_sum = ptx.load_shared_f32x2(stats)
            joining = load_channels(groups, values, parts)
            if const_expr(groups > GROUPS // PIECES):  # at most as many parts as pieces: leaves are elements
                merge_into(row_max, row_sum, out, joining_max, joining_sum, joining)
            else:
                before, weight = rescale_factors(tiles_max, joining_max, 0)
                tiles_sum[0] = ptx.fma(joining_sum, weight, tiles_sum[0] * before)
                for at in cutlass.range_constexpr(8 * groups):
                    tiles_out[at] = ptx.fma(joining[at], weight, tiles_out[at] * before)
                if begin + i + 1 >= element_end:
                    merge_into(row_max, row_sum, out, tiles_max[0], tiles_sum[0], tiles_out)
                    clear(tiles_max, tiles_sum, tiles_out)
                    element += 1
                    element_end = ptx.divide((element + 1) * keys.leaves, keys.elements)


def merge_into(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    out: cute.Tensor,
    joining_max: Float32,
    joining_sum: Float32,
    joining: cute.Tensor | list,
) -> None:
    """Merges an element, or some of its channels, into the earlier elements."""
    row_max[0], before, weight = merge_factors(row_max[0], joining_max)
    row_sum[0] = ptx.fma(joining_sum, weight, row_sum[0] * before)
    for at in range(len(joining) if isinstance(joining, list) else cute.size(joining)):
        out[at] = ptx.fma(joining[at], weight, out[at] * before)


@cute.jit
def combine(
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    token: Int32,
    keys: Keys,
    part: Int32,
    parts: Int32,
    sink: Float32,
) -> None:
    """Merges all elements of the token for this CTA's part of the channels, and writes O.

    A thread has one head and eight channels of every 64.
    """
    head, chunk = thread % COLUMNS, thread // COLUMNS
    first = part * ptx.divide(Int32(DIM), parts)
    channel = first + chunk * 8
    base = Int32(shared.values.data_ptr().toint()) + first * (COLUMNS * 4)
    own = tuple(base + place_of(chunk * 8 + j, head) for j in range(4))
    own_stats = Int32(shared.stats.data_ptr().toint()) + head * 8
    row_max, row_sum = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
    out = cute.make_rmem_tensor((DIM // 8,), Float32)
    clear(row_max, row_sum, out)
    if parts == 1:
        merge_all(GROUPS, own, own_stats, keys, parts, row_max, row_sum, out)
    elif parts == 2:
        merge_all(GROUPS // 2, own, own_stats, keys, parts, row_max, row_sum, out)
    else:
        merge_all(GROUPS // 4, own, own_stats, keys, parts, row_max, row_sum, out)
    inverse = inverse_sum(sink, row_max[0], row_sum[0])
    if head < args.num_heads:
        at = Int64(token) * args.out_token_stride + Int64(head) * args.out_head_stride + channel
        for group in cutlass.range_constexpr(GROUPS):
            if group * parts < GROUPS:
                pairs = [
                    ptx.pack_bf16(out[8 * group + j] * inverse, out[8 * group + j + 1] * inverse) for j in (0, 2, 4, 6)
                ]
                ptx.store_16_bytes(args.out + (at + group * GROUP) * 2, tuple(pairs))
