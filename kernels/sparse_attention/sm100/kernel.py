"""Sparse attention on Blackwell (sm_100a): one CTA for up to 64 heads, a pair of CTAs for up to 128.

A work tile is (query token, KV split of the token's keys). Persistent CTAs, or pairs, compute work tiles in order; keys
come in key tiles of 64, window rows first, then entries. Warps of a CTA, and their waits:

    GATHER (2 x 4 warps, alternate key tiles)  rows from global memory to registers, dequantised into a pipeline stage
        waits pv_done[stage] (the previous key tile of the stage is done), arrives at full[stage]
    MMA (1 warp, one thread, first CTA)    S = Q K^T, O += P V, for the whole pair
        waits q_ready once a work tile, full[stage] of all CTAs before S, p_ready[buffer] before P V;
        commits s_ready[buffer] and pv_done[stage] in all CTAs
    SOFTMAX (4 warps)                      Q into tensor memory; P = exp2(S - row max); rescales O, lazily: only when a
        row max has grown by more than RESCALE_LOG2; epilogue: sink, normalisation, output or partial result, combine
        waits s_ready[buffer], full[stage] (key mask), pv_done of the key tile two before (P's buffer) and, to access
        O, of the previous key tile; arrives at q_ready and p_ready[buffer]

Both products use all 128 lanes of tensor memory for a CTA's 64 rows: columns [0, N/2) are in lanes 0-63 and [N/2, N)
in lanes 64-127, and a lane's results are products with the operand A of the same lane, if A is in tensor memory. A
single CTA uses `tcgen05.mma.ws` at M = 64; a pair uses `cta_group::2` at M = 128, where each CTA also holds one half of
B.

S = Q K^T runs as one product with N = 128 and half of the channels: lanes 0-63 hold Q[:, 0:256] and meet the keys'
channels 0-255 (rows 0-63 of B), lanes 64-127 hold Q[:, 256:512] and meet channels 256-511 (rows 64-127 of B). The
softmax adds the two halves of S. So Q takes 128 columns instead of 256, and everything fits into tensor memory; and in
a pair each CTA holds 256 channels of every key, which are its half of B in both products: no key is gathered,
dequantised or read by the tensor core twice.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.device.cta_pair import cta_rank, group_of, of_first_cta, sync_all
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.pointers import typed
from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES
from dsv4_kernels.sparse_attention.sm100.barriers import wait_for_tile
from dsv4_kernels.sparse_attention.sm100.epilogue import finish_work_tile
from dsv4_kernels.sparse_attention.sm100.gather import load_row, row_addresses, row_bits, store_row
from dsv4_kernels.sparse_attention.sm100.mma import multiply_scores, multiply_values
from dsv4_kernels.sparse_attention.sm100.plan import (
    BUFFERS,
    FEW_TILES,
    GATHER_GROUPS,
    HALF_DIM,
    HEADS,
    RESCALE_LOG2,
    ROW_BITS_BYTES,
    THREADS,
    TILE_KEYS,
    WARPS_OF_GROUP,
    Arguments,
    Barrier,
    Smem,
    Tmem,
    Warp,
)
from dsv4_kernels.sparse_attention.sm100.softmax import (
    RowState,
    exchanged,
    finite,
    largest_of,
    load_queries_of,
    rescale,
    scores_of_tile,
    store_weights,
)
from dsv4_kernels.sparse_attention.sm100.tile_scheduler import WorkTile, first_and_stride, work_tile_of


@cute.jit
def launch(
    a: Arguments,
    num_ctas: Int32,
    fp8: cutlass.Constexpr,
    can_split: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launches the persistent kernel; num_ctas is at most the number of multiprocessors."""
    attention_kernel(a, fp8, can_split, plan).launch(
        grid=(num_ctas, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(plan.ctas, 1, 1),
        smem=Smem.BYTES,
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def attention_kernel(
    a: Arguments, fp8: cutlass.Constexpr, can_split: cutlass.Constexpr, plan: cutlass.Constexpr
) -> None:
    """Sets up barriers and tensor memory, and sends every warp to its role."""
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + Smem.BARRIERS, Int64)
    tmem_address = typed(smem + Smem.TMEM_ADDRESS, Int32)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    rank = cta_rank(plan.ctas)
    group = group_of(plan.ctas)

    if warp == Warp.MMA:
        if prims.elect_sync():
            for stage in cutlass.range_constexpr(plan.stages):
                prims.mbarrier_init(barriers + (Barrier.FULL + stage), WARPS_OF_GROUP)
                prims.mbarrier_init(barriers + (Barrier.ALL_FULL + stage), WARPS_OF_GROUP * plan.ctas)
                prims.mbarrier_init(barriers + (Barrier.PV_DONE + stage), 1)
            for buffer in cutlass.range_constexpr(BUFFERS):
                prims.mbarrier_init(barriers + (Barrier.S_READY + buffer), 1)
                prims.mbarrier_init(barriers + (Barrier.P_READY + buffer), WARPS_OF_GROUP * plan.ctas)
            prims.mbarrier_init(barriers + Barrier.Q_READY, WARPS_OF_GROUP * plan.ctas)
            prims.fence_mbarrier_init()
        dependent_launch.wait()  # afterwards the previous kernel has freed its tensor memory
        prims.tcgen05_alloc(tmem_address, Tmem.COLUMNS, group=group)
        prims.tcgen05_relinquish_alloc_permit(group=group)
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    sync_all(plan.ctas)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    dependent_launch.begin()  # the next kernel may start: tensor memory is allocated
    tmem = prims.TmemAddr(tmem_address.load())

    if warp < Warp.GATHER:
        compute_softmax(a, smem, barriers, tmem, can_split, plan)
    elif warp < Warp.MMA:
        gather_group = (warp - Warp.GATHER) // WARPS_OF_GROUP
        if cutlass.const_expr(plan.ctas == 1):
            gather_rows(a, smem, barriers, gather_group, warp % WARPS_OF_GROUP, lane, fp8, range(8), plan)
        elif rank == 0:
            gather_rows(a, smem, barriers, gather_group, warp % WARPS_OF_GROUP, lane, fp8, range(4), plan)
        else:
            gather_rows(a, smem, barriers, gather_group, warp % WARPS_OF_GROUP, lane, fp8, range(4, 8), plan)
    elif rank == 0:
        if prims.elect_sync():
            issue_mmas(a, smem, barriers, tmem, plan)

    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    sync_all(plan.ctas)
    if warp == Warp.MMA:
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        prims.tcgen05_dealloc(tmem.as_ptr(Float32), Tmem.COLUMNS, group=group)


# Gather warps


@cute.jit
def gather_rows(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    group: Int32,
    group_warp: Int32,
    lane: Int32,
    fp8: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Fills the stages of every second key tile with the channel blocks `blocks`, of 64 channels each.

    Four lanes share a row: in a block of 64 channels, lane q of the four converts channels [16 q, 16 q + 16), which are
    the 16-byte chunks 2 q and 2 q + 1 of a swizzled row. A warp's 8 rows then access every bank equally often.
    """
    quarter = lane % 4
    row_in_8 = lane // 4
    row_0 = group_warp * 16 + row_in_8
    row_1 = row_0 + 8
    # Row r of the 128-byte swizzle holds chunk c at position c ^ (r % 8).
    place_0 = ((2 * quarter) ^ row_in_8) * 16
    place_1 = ((2 * quarter + 1) ^ row_in_8) * 16
    before = Int32(0)  # key tiles of the previous work tiles
    first, stride = first_and_stride(plan)
    for index in cutlass.range(first, a.num_work_tiles, stride):
        work_tile = work_tile_of(index, a, plan)
        begin = (before + group) % GATHER_GROUPS
        data_0, scales_0, exists_0 = row_addresses(work_tile, work_tile.first_tile + begin, row_0, a, fp8)
        data_1, scales_1, exists_1 = row_addresses(work_tile, work_tile.first_tile + begin, row_1, a, fp8)
        for tile in cutlass.range(begin, work_tile.num_tiles, GATHER_GROUPS):
            count = before + tile
            stage = stage_of(count, plan.stages).index
            target = smem + (Smem.KV + stage * plan.stage_bytes)
            loads_0 = load_row(data_0, scales_0, quarter, fp8, blocks)
            if cutlass.const_expr(fp8):  # bf16 rows have twice the bytes: one row at a time in registers
                loads_1 = load_row(data_1, scales_1, quarter, fp8, blocks)
            # The next rows' indices are loaded at the same time as these rows.
            next_tile = work_tile.first_tile + tile + GATHER_GROUPS
            next_data_0, next_scales_0, next_exists_0 = row_addresses(work_tile, next_tile, row_0, a, fp8)
            next_data_1, next_scales_1, next_exists_1 = row_addresses(work_tile, next_tile, row_1, a, fp8)
            if count >= plan.stages:
                wait_for_tile(barriers, Barrier.PV_DONE, count - plan.stages, plan)
            target_0, target_1 = target + row_0 * SWIZZLE_ROW_BYTES, target + row_1 * SWIZZLE_ROW_BYTES
            store_row(target_0, loads_0, place_0, place_1, fp8, blocks, plan)
            if cutlass.const_expr(not fp8):
                loads_1 = load_row(data_1, scales_1, quarter, fp8, blocks)
            store_row(target_1, loads_1, place_0, place_1, fp8, blocks, plan)
            bits = row_bits(exists_0, exists_1)
            if lane == 0:
                (typed(smem + (Smem.ROWS + stage * ROW_BITS_BYTES), Int32) + group_warp).store(bits)
            prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
            arrive(barriers + (Barrier.FULL + stage))
            if cutlass.const_expr(plan.ctas == 2):
                arrive(of_first_cta(barriers + (Barrier.ALL_FULL + stage), plan.ctas))
            data_0, scales_0, exists_0 = next_data_0, next_scales_0, next_exists_0
            data_1, scales_1, exists_1 = next_data_1, next_scales_1, next_exists_1
        before = before + work_tile.num_tiles


# MMA warp


@cute.jit
def issue_mmas(
    a: Arguments, smem: cutlass.Pointer, barriers: cutlass.Pointer, tmem: prims.TmemAddr, plan: cutlass.Constexpr
) -> None:
    """One thread issues S of key tile t + 1 before P V of key tile t, which hides the softmax of t."""
    bf16 = cutlass.BFloat16
    rows = HEADS * plan.ctas
    scores = prims.Tcgen05InstrDesc.build(c_dtype=Float32, a_dtype=bf16, b_dtype=bf16, n_dim=2 * TILE_KEYS, m_dim=rows)
    values = prims.Tcgen05InstrDesc.build(
        c_dtype=Float32, a_dtype=bf16, b_dtype=bf16, b_major=1, n_dim=HALF_DIM, m_dim=rows
    )
    first, stride = first_and_stride(plan)
    before = Int32(0)
    work_tiles = Int32(0)
    for index in cutlass.range(first, a.num_work_tiles, stride):
        work_tile = work_tile_of(index, a, plan)
        if work_tile.num_tiles > 0:
            wait(barriers, Int32(Barrier.Q_READY), work_tiles & 1)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
            work_tiles = work_tiles + 1
            for tile in cutlass.range(work_tile.num_tiles + 1):
                if tile < work_tile.num_tiles:
                    multiply_scores(smem, barriers, tmem, before + tile, scores, plan)
                if tile > 0:
                    multiply_values(smem, barriers, tmem, before + tile - 1, tile > 1, values, plan)
        before = before + work_tile.num_tiles


# Softmax warps


@cute.jit
def compute_softmax(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    can_split: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Thread i has head i % 64, keys [32 * (i // 64), + 32) of every key tile, and the channels of O in its lane.

    The next work tile's Q is copied to tensor memory before this work tile's epilogue, so that the next work tile's
    first products run during the epilogue.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, stride = first_and_stride(plan)
    before = Int32(0)
    load_queries_of(first, a, barriers, tmem, thread, warp, plan)
    for index in cutlass.range(first, a.num_work_tiles, stride):
        work_tile = work_tile_of(index, a, plan)
        state = RowState(Float32(-math.inf), Float32(0.0))
        if work_tile.num_tiles > 0:
            state = softmax_of_work_tile(a, smem, barriers, tmem, work_tile, thread, warp, before, plan)
        load_queries_of(index + stride, a, barriers, tmem, thread, warp, plan)
        before = before + work_tile.num_tiles
        if work_tile.num_tiles > 0:
            wait_for_tile(barriers, Barrier.PV_DONE, before - 1, plan)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
            finish_work_tile(a, smem, tmem, work_tile, thread, warp, state, can_split, plan)


@cute.jit
def softmax_of_work_tile(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    work_tile: WorkTile,
    thread: Int32,
    warp: Int32,
    before: Int32,
    plan: cutlass.Constexpr,
) -> RowState:
    """Computes P of all key tiles of a work tile; returns the final softmax state of its rows.

    `before` is the number of key tiles of the CTA's earlier work tiles.
    """
    half = warp // 2
    head_row = thread % HEADS
    # With few keys the rounding errors of P do not average out; they are smallest relative to the true row max.
    tolerated = cutlass.select_(work_tile.num_tiles <= FEW_TILES, Float32(0.0), Float32(RESCALE_LOG2))
    row_max, row_sum = Float32(-math.inf), Float32(0.0)
    for tile in cutlass.range(work_tile.num_tiles):
        count = before + tile
        buffer = stage_of(count, BUFFERS).index
        scores = scores_of_tile(a, smem, barriers, tmem, thread, warp, half, count, plan)
        largest = largest_of(scores)
        largest = cutlass.max(largest, exchanged(smem + Smem.ROW_MAX, thread, largest))
        grown = largest > row_max
        factor = Float32(1.0)
        if grown:
            factor = cute.arch.exp2(row_max - (largest + tolerated))
            row_max = largest + tolerated
        if tile > 0:
            if prims.vote_sync(0xFFFFFFFF, grown, prims.VoteSync.ANY):
                wait_for_tile(barriers, Barrier.PV_DONE, count - 1, plan)
                prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                rescale(tmem, warp, factor)
        if tile > 1:  # the key tile two before used this P buffer; across work tiles the epilogue has waited
            wait_for_tile(barriers, Barrier.PV_DONE, count - 2, plan)
        subtracted = finite(row_max)
        weights = [cute.arch.exp2(score - subtracted) for score in scores]
        row_sum = row_sum * factor + store_weights(smem, weights, head_row, half, buffer)
        prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        arrive(of_first_cta(barriers + (Barrier.P_READY + buffer), plan.ctas))
    row_sum = row_sum + exchanged(smem + Smem.ROW_SUMS, thread, row_sum)
    return RowState(row_max, row_sum)
