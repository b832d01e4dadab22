"""Attention on Hopper with at most 16 heads, where gathering and converting rows dominates.

The other kernels always multiply 64 heads by the keys, missing heads included. Here keys are the rows of both products
and heads the columns, so that the time and the operand reads of the tensor core shrink with the heads:

    S^T[64 keys, heads] = K Q^T          keys from registers of the threads that converted them
    O^T[64 channels, heads] = V^T P^T    values from shared memory, where the same threads have stored them

Every row is loaded, converted and stored once. A thread has two rows, and 16 adjacent channels of each in every group.
These are its fragments of four `wgmma` operands if the channels of Q are permuted accordingly (`rows.store_q`), so the
scores need no exchange between threads. The operands are stored to shared memory as they are, so values are permuted in
the same way, and so is O until it is written. Row indices, holes and scales stay in the thread's registers.

A thread loads its rows a tile ahead by `cp.async`: e4m3 to a buffer of its own, which it alone reads and refills; bf16
(the last 64 channels of an FP8 row) to the values' memory, as soon as the previous tile's values have been multiplied.
So a tile's rows are loaded during the whole previous tile, without using registers.

A work tile is a token, or a part of its keys. Warps have no roles: all threads load, convert, multiply and merge. A CTA
is one warpgroup, and two CTAs fit on a multiprocessor: while one waits, the other works.

Whole tokens, which may be many, are computed by as many CTAs as fit, in a loop over tokens: the first rows, Q and row
indices of the next token are loaded while the elements of the current token are merged. If a token is divided into
parts, each part has a CTA, which then ends.

Keys come in tiles of 64. Each is computed by itself, with its own maximum and products that begin at zero, and then
merged, lazily as in persistent.py. The order of the merges follows from the token's own length: tiles are merged to
elements, and elements to the token's result. The elements of a token are its KV splits (split.py), or, if it has a
single KV split, PIECES pieces of it. So the bits do not depend on which CTA computes an element.

Where tokens are few, `parts` CTAs share the elements of a token, at most two each (except the first CTA, which may
merge its elements). They are a cluster: each stores its elements in its own shared memory, all meet, and each merges
all elements for its part of the channels. If there are more CTAs than pieces, they share the tiles: each stores up to
two, and every CTA merges tiles to elements first. Leaves are the units that parts compute and store separately:
elements, or tiles. A CTA waits for other CTAs only within a cluster, whose CTAs start together, and there are no
counters and no scratch memory: correctness does not depend on what else runs on the GPU.

    who waits         for what                                                      at
    a thread          16 channels of its rows, of the group it converts next        cp.async group
    the CTA           maxima of its warps                                           TILE_BARRIER
    the CTA           P, values and sums                                            TILE_BARRIER
    the CTA           its products have read the values                             TILE_BARRIER
    the CTA           the last copies (zeros) to the memory of the elements         TILE_BARRIER
    the CTA           Q; reads of the statistics that an element changes            barrier 0
    the cluster       leaves of all parts; reads of all leaves                      cluster barrier
    the CTA           the same for a whole token, before the next token             barrier 0
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.epilogue import load_sink
from dsv4_kernels.sparse_attention.sm90.few_heads import elements, rows, softmax
from dsv4_kernels.sparse_attention.sm90.few_heads.operands import mma_operands
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    COLUMNS,
    CTAS,
    PRODUCTS,
    ROWS,
    STATISTICS,
    TILE_BARRIER,
    TILES_OF_STEP,
    WARPGROUP,
    shared_memory,
)
from dsv4_kernels.sparse_attention.sm90.plan import GROUP, GROUPS, KEY_TILE, NO_ROW_MAX, Arguments
from dsv4_kernels.sparse_attention.sm90.softmax import multiply


@cute.jit
def launch(config: cutlass.Constexpr, arguments: Arguments, clusters: Int32, stream: cuda.CUstream) -> None:
    """Launches clusters of as many CTAs as a token has parts."""
    kernel(config, arguments).launch(
        grid=[arguments.ctas_per_token, clusters, 1],
        cluster=[arguments.ctas_per_token, 1, 1],
        block=[WARPGROUP, 1, 1],
        stream=stream,
        min_blocks_per_mp=CTAS,
        preferred_smem_carveout=100,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(config: cutlass.Constexpr, args: Arguments) -> None:
    """Computes one part of the keys of some tokens, and one part of their channels."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    part, token, _ = cute.arch.block_idx()
    parts, clusters, _ = cute.arch.grid_dim()
    shared = cutlass.utils.SmemAllocator().allocate(shared_memory(config))
    attend(config, args, shared, thread, token, clusters, part, parts)


class Leaves(NamedTuple):
    """The leaves of a token that a part computes."""

    keys: elements.Keys
    begin: Int32
    end: Int32
    tile: Int32
    """First tile of the part's leaves."""
    last: Int32
    """End of the tiles of the part's leaves."""


@cute.jit
def leaves_of(
    config: cutlass.Constexpr, args: Arguments, token: Int32, visible: Int32, part: Int32, parts: Int32
) -> Leaves:
    """The leaves of a part of a token; no tiles if the token does not exist."""
    keys = elements.divide_keys(args, scheduler.count_steps(args, visible), parts)
    begin, end, tile, last = Int32(0), keys.leaves, Int32(0), keys.steps * TILES_OF_STEP
    if parts > 1:
        begin, end = elements.first_leaf(keys, part, parts), elements.first_leaf(keys, part + 1, parts)
        tile, last = elements.first_tile(keys, begin), elements.first_tile(keys, end)
    if token >= args.num_tokens:
        last = tile
    return Leaves(keys, begin, end, tile, last)


@cute.jit
def attend(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    token: Int32,
    clusters: Int32,
    part: Int32,
    parts: Int32,
) -> None:
    """Computes this part's leaves of every token of the cluster, stores them to shared memory, and merges them.

    The part that has a token's first elements merges its elements before it stores them.
    """
    lane, warp = thread % 32, thread // 32
    row, quad = warp * 16 + lane // 4, lane % 4
    places = rows.Places.of(shared, thread)
    scores_mma, out_mma, q_operand, value_operand, p_operand = mma_operands(shared, thread)

    q = cute.make_rmem_tensor((4 * GROUPS,), Uint32)
    out = cute.make_rmem_tensor((GROUPS * COLUMNS // 2,), Float32)
    total = cute.make_rmem_tensor((GROUPS * COLUMNS // 2,), Float32)
    scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((KEY_TILE, COLUMNS)), Float32)
    shape = out_mma.partition_shape_C((GROUP, COLUMNS))
    products = [cute.make_rmem_tensor(shape, Float32) for _ in range(PRODUCTS)]
    shape = scores_mma.partition_shape_A((KEY_TILE, GROUP // 2))
    operands = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(2)]
    scales, next_scales = (cute.make_rmem_tensor((2 * ROWS,), Uint32) for _ in range(2))
    indices, next_indices = (cute.make_rmem_tensor((ROWS,), Int32) for _ in range(2))
    addresses = cute.make_rmem_tensor((ROWS,), Int64)
    row_max, row_sum, weight = (cute.make_rmem_tensor((STATISTICS,), Float32) for _ in range(3))

    visible = scheduler.visible_entries(config, args, token)
    rows.prefetch_lists(config, args, thread, token)
    rows.load_q(args, thread, token, q)
    leaves = leaves_of(config, args, token, visible, part, parts)
    rows.load_indices(config, args, token, visible, leaves.tile, leaves.last, row, indices)
    rows.load_indices(config, args, token, visible, leaves.tile + 1, leaves.last, row, next_indices)
    # After the loads of row indices and before the loads of rows: the fence may wait for all loads under way.
    rows.store_q(shared, thread, q)
    cute.arch.fence_view_async_shared()
    rows.locate(config, args, leaves.tile, quad, indices, addresses, scales)
    for i in cutlass.range_constexpr(config.staged_groups):
        rows.copy_group(config, addresses, places, quad, i)
    while token < args.num_tokens:
        for i in cutlass.range_constexpr(config.staged_groups, GROUPS):
            rows.copy_group(config, addresses, places, quad, i)
        next_token = token + clusters
        rows.prefetch_lists(config, args, thread, next_token)
        keys, begin, end, tile, last = leaves
        merges_all = (begin == 0) & (keys.leaves == keys.elements)
        elements.clear(row_max, row_sum, out)
        total.fill(0.0)
        if thread < COLUMNS:
            ptx.store_shared_f32x2(
                Int32(shared.stats.data_ptr().toint()) + thread * 8, (Float32(NO_ROW_MAX), Float32(0.0))
            )
        leaf, leaf_end = begin, elements.first_tile(keys, begin + 1)
        cute.arch.barrier()  # the first Q and the empty statistics are in shared memory
        while tile < last:
            rows.locate(config, args, tile + 1, quad, next_indices, addresses, next_scales)
            is_hole = (indices[0] < 0, indices[1] < 0)
            for i in cutlass.range_constexpr(ROWS):
                indices[i] = next_indices[i]
            rows.load_indices(config, args, token, visible, tile + 2, last, row, next_indices)
            rows.wait_for_group(config, 0)
            words = rows.load_group(config, places, 0)
            for i in cutlass.range_constexpr(GROUPS):
                next_words = words
                if const_expr(i + 1 < GROUPS):
                    rows.wait_for_group(config, i + 1)
                    next_words = rows.load_group(config, places, i + 1)
                for j in cutlass.range_constexpr(2):
                    if const_expr(2 * i + j > 1):
                        warpgroup.wait_group(1)  # the operand's previous contents have been multiplied
                    packed = cute.recast_tensor(operands[j], Uint32)
                    rows.convert_half_group(config, i, j, words, scales, packed)
                    rows.store_values(config, places, i, j, packed)
                    of_group = q_operand[None, None, None, i]
                    rows.multiply_half_group(scores_mma, scores, operands[j], of_group, j, i + j > 0)
                if const_expr(i == config.early_groups - 1):
                    for group in cutlass.range_constexpr(config.early_groups):
                        rows.copy_group(config, addresses, places, quad, group)
                words = next_words
            warpgroup.wait_group(0)
            tile_max = softmax.find_tile_max(args, shared, warp, lane, is_hole, scores)
            softmax.exponentiate(args, shared, warp, lane, tile_max, scores)
            softmax.rescale_out(shared, warp, quad, tile_max, row_max, row_sum, weight, out)
            ahead = PRODUCTS - 1
            for i in cutlass.range_constexpr(GROUPS + ahead):
                if const_expr(i < GROUPS):
                    values = value_operand[None, None, None, i]
                    multiply(out_mma, products[i % PRODUCTS], values, p_operand, 0, False)
                    warpgroup.commit_group()
                if const_expr(i == 0):
                    for group in cutlass.range_constexpr(config.early_groups, config.staged_groups):
                        rows.copy_group(config, addresses, places, quad, group)
                if const_expr(i >= ahead):
                    warpgroup.wait_group(ahead if i < GROUPS else 0)
                    softmax.add_product(out, products[(i - ahead) % PRODUCTS], weight, i - ahead)
            sync(TILE_BARRIER, WARPGROUP)  # all values have been read
            for i in cutlass.range_constexpr(config.staged_groups, GROUPS):
                rows.copy_group(config, addresses, places, quad, i)
            if const_expr(config.fp8_rows):
                for i in cutlass.range_constexpr(cute.size(scales)):
                    scales[i] = next_scales[i]
            tile += 1
            if tile == leaf_end:
                if merges_all | (leaf == begin):
                    elements.merge_element(shared, warp, lane, total, row_max, row_sum, out)
                    elements.clear(row_max, row_sum, out)
                leaf += 1
                leaf_end = elements.first_tile(keys, leaf + 1)
        sink = load_sink(args, thread % COLUMNS)
        next_visible = Int32(0)
        if next_token < args.num_tokens:
            next_visible = scheduler.visible_entries(config, args, next_token)
        # Elements overwrite the values. The copies after the last tile, of zeros, must have completed in all threads.
        cute.arch.cp_async_wait_group(0)
        sync(TILE_BARRIER, WARPGROUP)
        if end > begin:
            elements.leave_element(config, shared, warp, lane, 0, total)
        if (end > begin + 1) & (merges_all == 0):
            elements.leave_element(config, shared, warp, lane, 1, out)
            elements.store_stats(shared, warp, lane, 1, row_max, row_sum)
        cute.arch.cluster_arrive()
        # The next token's first rows, except those that are copied to the values, are loaded while this token's
        # elements are merged.
        rows.load_q(args, thread, next_token, q)
        leaves = leaves_of(config, args, next_token, next_visible, part, parts)
        first, next_last = leaves.tile, leaves.last
        rows.load_indices(config, args, next_token, next_visible, first, next_last, row, indices)
        rows.load_indices(config, args, next_token, next_visible, first + 1, next_last, row, next_indices)
        cute.arch.cluster_wait()  # all elements of the token are in shared memory
        if next_token < args.num_tokens:
            rows.locate(config, args, first, quad, indices, addresses, scales)
            for i in cutlass.range_constexpr(config.staged_groups):
                rows.copy_group(config, addresses, places, quad, i)
        elements.combine(args, shared, thread, token, keys, part, parts, sink)
        if next_token < args.num_tokens:
            rows.store_q(shared, thread, q)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier()  # Q is stored, the elements are read: a token before a next one has one part
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()  # all CTAs have read this CTA's elements
        token = next_token
        visible = next_visible
