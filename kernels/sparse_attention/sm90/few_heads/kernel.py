"""Attention on Hopper with 32 heads or less, where gathering and converting rows is the work.

The other kernels multiply 64 heads by the keys, as many as there are or not. Here keys are the rows of both products
and heads the columns, so that the tensor core's time and what is read for it shrink with the heads:

    S^T[64 keys, heads] = K Q^T          keys from registers: those of the threads that converted them
    O^T[64 channels, heads] = V^T P^T    values from shared memory, where the same threads have stored them

Every row is loaded, converted and stored once. A thread has two rows, of which it loads 16 adjacent channels of every
group; those are its part of four operands of `wgmma` if the channels of Q are put into their order (`rows.load_q`), so
nothing is exchanged for the scores. Row numbers, holes and scales are the thread's own, too, and need no shared memory.

A work tile is a token, or a part of its keys; a CTA has one and ends. There are no roles: all threads load, convert,
multiply and merge. With 16 heads a CTA is one warpgroup, of which two find room on a multiprocessor: while one waits,
the other one works. With 32 heads O takes twice the registers, so two warpgroups have half of the channels each, of
rows, values and O, and the softmax of half of the heads: they exchange sums of scores through shared memory, once a
tile.

Keys come in tiles of 64. Each is computed as if it were alone, with its own maximum and products that begin at zero,
and then merged, lazily as in persistent.py. The order of the merges follows from the token's own length: tiles are
merged to elements, and elements to the token's result. Elements are its KV splits (split.py); if it has a single one,
PIECES of that. So whoever computes an element, the bits are the same.

Where tokens are few, `parts` CTAs share the elements of a token, at most two each (but the first CTA, which may merge
those it has). They are a cluster: each leaves its elements in its own shared memory, all meet, and each merges all
elements for its part of the channels. No CTA waits for another one but within a cluster, whose CTAs begin together,
and there are no counters or scratch memory; so nothing depends on what else runs on the GPU.

    who waits                      for what                                               at
    both warpgroups of two         scores of own heads over the other one's channels      BOTH
    a warpgroup                    maxima of its warps                                    TEAM
    all warpgroups                 P, values and sums                                     TEAM or BOTH
    a warpgroup                    its products have read the values                      TEAM
    the CTA                        Q; reads of the statistics that an element changes     barrier 0
    the cluster                    elements of all parts; that all have been read         cluster barrier
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4_kernels import dependent_launch, ptx
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.few_heads import elements, rows, softmax
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import ROWS, TEAM, WARPGROUP, WARPS, FewHeads, shared_memory
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    GROUP,
    GROUPS,
    KEY_TILE,
    NO_ROW_MAX,
    ROW_STRIDE,
    Arguments,
)
from dsv4_kernels.sparse_attention.sm90.softmax import multiply
from dsv4_kernels.sparse_attention.sm90.tma import swizzled_layout


@cute.jit
def launch(config: cutlass.Constexpr, arguments: Arguments, parts: Int32, stream: cuda.CUstream) -> None:
    """As many CTAs as a token has parts are a cluster."""
    kernel(config, arguments).launch(
        grid=[parts, arguments.num_tokens, 1],
        cluster=[parts, 1, 1],
        block=[config.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=config.ctas,
        preferred_smem_carveout=100,  # for two CTAs
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(config: cutlass.Constexpr, args: Arguments) -> None:
    """One part of a token's keys, and one part of its channels."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    part, token, _ = cute.arch.block_idx()
    parts, _, _ = cute.arch.grid_dim()
    shared = cutlass.utils.SmemAllocator().allocate(shared_memory(config))
    half = 0
    if const_expr(config.warpgroups > 1):
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS
    visible = scheduler.visible_entries(config, args, token)
    keys = elements.divide_keys(args, scheduler.count_steps(args, visible))
    attend(config, args, shared, thread, half, token, visible, keys, part, parts)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()  # all elements of the token are there
    elements.combine(config, args, shared, thread, token, keys, part, parts)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()  # nobody reads this CTA's any more


# A part of the keys


@cute.jit
def attend(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    half: Int32 | int,
    token: Int32,
    visible: Int32,
    keys: elements.Keys,
    part: Int32,
    parts: Int32,
) -> None:
    """Computes this part's elements and leaves them in shared memory, the first ones of the token as one."""
    in_group = thread % WARPGROUP
    lane, warp = thread % 32, in_group // 32
    row, quad = warp * 16 + lane // 4, lane % 4
    own_values = Int32(shared.values.data_ptr().toint()) + row * ROW_STRIDE
    scores_mma, out_mma, q_operand, value_operand, p_operand = mma_operands(config, shared, in_group)
    groups, depth = config.groups, config.depth

    out = cute.make_rmem_tensor((groups * config.heads // 2,), Float32)
    total = cute.make_rmem_tensor((groups * config.heads // 2,), Float32)
    scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((KEY_TILE, config.heads)), Float32)
    shape = out_mma.partition_shape_C((GROUP, config.heads))
    products = [cute.make_rmem_tensor(shape, Float32) for _ in range(config.products)]
    shape = scores_mma.partition_shape_A((KEY_TILE, GROUP // 2))
    operands = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(2)]
    words = [
        cute.make_rmem_tensor((16 if rows.may_be_copied(config, groups - depth + i) else 8,), Uint32)
        for i in range(depth)
    ]
    scales, next_scales = (cute.make_rmem_tensor((ROWS * config.groups // 4,), Uint32) for _ in range(2))
    indices, next_indices = (cute.make_rmem_tensor((ROWS,), Int32) for _ in range(2))
    addresses, next_addresses = (cute.make_rmem_tensor((ROWS,), Int64) for _ in range(2))
    row_max, row_sum, weight = (cute.make_rmem_tensor((config.columns,), Float32) for _ in range(3))

    begin, end = elements.first_element(keys, part, parts), elements.first_element(keys, part + 1, parts)
    tile, last = elements.first_tile(keys, begin), elements.first_tile(keys, end)
    rows.load_indices(config, args, token, visible, tile, last, row, indices)
    rows.load_indices(config, args, token, visible, tile + 1, last, row, next_indices)
    rows.load_q(config, args, shared, thread, token)
    rows.locate(config, args, tile, half, quad, indices, addresses, scales)
    for i in cutlass.range_constexpr(depth):
        rows.load_group(config, addresses, half, quad, i, words[i])
    elements.clear(row_max, row_sum, out)
    total.fill(0.0)
    if thread < config.heads:
        ptx.store_shared_f32x2(Int32(shared.stats.data_ptr().toint()) + thread * 8, (Float32(NO_ROW_MAX), Float32(0.0)))
    element, element_end = begin, elements.first_tile(keys, begin + 1)
    cute.arch.barrier()  # Q is there, and statistics of no element
    while tile < last:
        if const_expr(config.warpgroups > 1):
            half = cute.arch.make_warp_uniform(half)  # what is computed from it needs no registers meanwhile
        rows.locate(config, args, tile + 1, half, quad, next_indices, next_addresses, next_scales)
        is_hole = (indices[0] < 0, indices[1] < 0)
        for i in cutlass.range_constexpr(ROWS):
            indices[i] = next_indices[i]
        rows.load_indices(config, args, token, visible, tile + 2, last, row, next_indices)
        for i in cutlass.range_constexpr(groups):
            group = half * groups + i
            for j in cutlass.range_constexpr(2):
                if const_expr(2 * i + j > 1):
                    warpgroup.wait_group(1)  # what the operand was before has been multiplied
                packed = cute.recast_tensor(operands[j], Uint32)
                rows.convert_half_group(config, half, i, j, words[i % depth], scales, packed)
                rows.store_values(own_values + group * BLOCK_BYTES, row, quad, j, packed)
                rows.multiply_half_group(
                    scores_mma, scores, operands[j], q_operand[None, None, None, group], j, i + j > 0
                )
            if const_expr(i + depth < groups):
                rows.load_group(config, addresses, half, quad, i + depth, words[i % depth])
            elif const_expr(rows.always_copied(config, i) or not rows.may_be_copied(config, i)):
                rows.load_group(config, next_addresses, half, quad, i + depth - groups, words[i % depth])
        warpgroup.wait_group(0)
        if const_expr(rows.may_be_copied(config, groups - 1) and not rows.always_copied(config, groups - 1)):
            # The compiler may have left it where it was loaded, and the products read it there.
            rows.load_group(config, next_addresses, half, quad, depth - 1, words[depth - 1])
        own_scores = scores
        if const_expr(config.warpgroups > 1):
            own_scores = cute.make_rmem_tensor((config.registers_of_scores,), Float32)
            softmax.add_other_scores(config, shared, in_group, half, scores, own_scores)
        tile_max = softmax.find_tile_max(config, args, shared, half, warp, lane, is_hole, own_scores)
        softmax.exponentiate(config, args, shared, half, warp, lane, tile_max, own_scores)
        softmax.rescale_out(config, shared, quad, tile_max, row_max, row_sum, weight, out)
        ahead = config.products - 1
        for i in cutlass.range_constexpr(groups + ahead):
            if const_expr(i < groups):
                values = value_operand[None, None, None, half * groups + i]
                multiply(out_mma, products[i % config.products], values, p_operand, 0, False)
                warpgroup.commit_group()
            if const_expr(i >= ahead):
                warpgroup.wait_group(ahead if i < groups else 0)
                softmax.add_product(config, out, products[(i - ahead) % config.products], weight, i - ahead)
        sync(TEAM + half, WARPGROUP)  # all of it has been read
        for i in cutlass.range_constexpr(ROWS):
            addresses[i] = next_addresses[i]
        if const_expr(config.fp8_rows):
            for i in cutlass.range_constexpr(cute.size(scales)):
                scales[i] = next_scales[i]
        tile += 1
        if tile == element_end:
            if (begin == 0) | (element == begin):
                elements.merge_element(config, shared, half, warp, lane, total, row_max, row_sum, out)
                elements.clear(row_max, row_sum, out)
            element += 1
            element_end = elements.first_tile(keys, element + 1)
    # Elements go where this warpgroup's values were, or behind all.
    if end > begin:
        elements.leave_element(config, shared, half, warp, lane, 0, total)
    if (begin > 0) & (end > begin + 1):
        elements.leave_element(config, shared, half, warp, lane, 1, out)
        elements.store_stats(config, shared, half, warp, lane, 1, row_max, row_sum)


def mma_operands(config: FewHeads, shared: cutlass.Constexpr, in_group: Int32) -> tuple:
    """The products of a warpgroup's thread (scores, O) and what they read from shared memory: Q, values, P."""
    q = shared.q.get_tensor(*swizzled_layout((config.heads, GROUP, GROUPS)))
    keys = shared.values.get_tensor(*swizzled_layout((KEY_TILE, GROUP, GROUPS)))
    values = cute.composition(keys, cute.make_ordered_layout((GROUP, KEY_TILE, GROUPS), order=(1, 0, 2)))
    p = shared.p.get_tensor(*swizzled_layout((config.heads, KEY_TILE)))
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    types, one = (BFloat16, BFloat16), (1, 1, 1)
    scores_mma = hopper.make_trivial_tiled_mma(
        *types, k_major, k_major, Float32, one, (KEY_TILE, config.heads), warpgroup.OperandSource.RMEM
    )
    out_mma = hopper.make_trivial_tiled_mma(*types, mn_major, k_major, Float32, one, (GROUP, config.heads))
    thread_mma = scores_mma.get_slice(in_group)
    q_operand = thread_mma.make_fragment_B(thread_mma.partition_B(q))
    thread_mma = out_mma.get_slice(in_group)
    value_operand = thread_mma.make_fragment_A(thread_mma.partition_A(values))
    p_operand = thread_mma.make_fragment_B(thread_mma.partition_B(p))
    return scores_mma, out_mma, q_operand, value_operand, p_operand
