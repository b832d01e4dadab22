"""Products of the Blackwell kernel, issued by one thread: S = Q K^T and O += P V (kernel.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device.cta_pair import commit
from dsv4_kernels.device.mbarrier import wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES, swizzled, tmem_columns
from dsv4_kernels.sparse_attention.sm100.barriers import wait_for_tile
from dsv4_kernels.sparse_attention.sm100.plan import (
    BUFFERS,
    HALF_DIM,
    MMA_K,
    P_BYTES,
    STEPS_PER_BLOCK,
    TILE_KEYS,
    Barrier,
    Plan,
    Smem,
    Tmem,
)


@cute.jit
def multiply_scores(
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    count: Int32,
    idesc: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """S of key tile `count` = Q K^T as two summands (kernel.py).

    The softmax has read this buffer's previous scores: it signalled p_ready, for which P V of that key tile waited.
    """
    wait_for_tile(barriers, Barrier.FULL if plan.ctas == 1 else Barrier.ALL_FULL, count, plan)
    stage = stage_of(count, plan.stages)
    keys = swizzled(smem + (Smem.KV + stage.index * plan.stage_bytes))
    buffer = stage_of(count, BUFFERS)
    out = tmem_columns(tmem, Int32(0), Tmem.S + buffer.index * Tmem.S_COLUMNS, Float32)
    for step in cutlass.range_constexpr(HALF_DIM // MMA_K):
        block, step_of_block = step // STEPS_PER_BLOCK, step % STEPS_PER_BLOCK
        query = tmem_columns(tmem, Int32(0), Tmem.Q + step * MMA_K // 2, cutlass.BFloat16)
        key = keys.advance_start_address(plan.block_offset(block) + step_of_block * MMA_K * 2)
        mma(out, query, key, idesc, step > 0, plan)
    commit(barriers + (Barrier.S_READY + buffer.index), plan.ctas)


@cute.jit
def multiply_values(
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    count: Int32,
    accumulate: Boolean,
    idesc: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """O += P V, in two products of half of O's columns; `accumulate` is False for a work tile's first key tile."""
    buffer = stage_of(count, BUFFERS)
    wait(barriers, Barrier.P_READY + buffer.index, buffer.phase)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    weights = swizzled(smem + (Smem.P + buffer.index * P_BYTES))
    stage = stage_of(count, plan.stages)
    values = smem + (Smem.KV + stage.index * plan.stage_bytes)
    for product in cutlass.range_constexpr(2):
        # Blocks of 64 channels at equal distances; within a block, groups of 8 keys are 1,024 bytes apart.
        begin = plan.block_offset(plan.first_block_of_out(product))
        keys = swizzled(values + begin, leading_bytes=plan.block_offset(1))
        out = tmem_columns(tmem, Int32(0), Tmem.O + product * (HALF_DIM // 2), Float32)
        for step in cutlass.range_constexpr(TILE_KEYS // MMA_K):
            weight = weights.advance_start_address(step * MMA_K * 2)
            key = keys.advance_start_address(step * MMA_K * SWIZZLE_ROW_BYTES)
            mma(out, weight, key, idesc, accumulate or step > 0, plan)
    commit(barriers + (Barrier.PV_DONE + stage.index), plan.ctas)


def mma(
    out: cutlass.Array,
    a: cutlass.Array | prims.Tcgen05SmemDesc,
    b: prims.Tcgen05SmemDesc,
    idesc: Int32,
    accumulate: Boolean,
    plan: Plan,
) -> None:
    """Issues a product of one CTA, or of a pair; in both cases it uses every lane of tensor memory."""
    kind = prims.Tcgen05MMAKind.F16
    if plan.ctas == 1:
        prims.tcgen05_mma_ws(kind, out, a, b, idesc, accumulate)
    else:
        prims.tcgen05_mma(kind, prims.CTAGroup.CTA_2, out, a, b, idesc, accumulate)
