"""The epilogue of the Blackwell kernel: normalised O, or a partial result that the token's last CTA combines."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.device.pointers import gmem, store_words, typed
from dsv4_kernels.device.tcgen05 import as_float, load_tmem, tmem_columns
from dsv4_kernels.sparse_attention.sm100.barriers import softmax_barrier
from dsv4_kernels.sparse_attention.sm100.plan import (
    CHUNK,
    GROUP_THREADS,
    HALF_DIM,
    HEADS,
    LOG2_E,
    Arguments,
    Smem,
    Tmem,
)
from dsv4_kernels.sparse_attention.sm100.softmax import RowState, finite
from dsv4_kernels.sparse_attention.sm100.tile_scheduler import WorkTile


@cute.jit
def finish_work_tile(
    a: Arguments,
    smem: cutlass.Pointer,
    tmem: prims.TmemAddr,
    work_tile: WorkTile,
    thread: Int32,
    warp: Int32,
    state: RowState,
    can_split: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Writes the output, or a partial result; the CTA that writes the token's last partial result combines them."""
    half = warp // 2
    head = work_tile.head_block * HEADS + thread % HEADS
    if cutlass.const_expr(can_split):
        if work_tile.kv_splits > 1:
            store_partial(a, tmem, work_tile.slot, thread, warp, state)
            if is_last_kv_split(a, smem, work_tile, thread, plan):
                combine(a, work_tile, thread, head, half, plan)
        else:
            store_result(a, tmem, warp, work_tile.token, head, half, state, plan)
    else:
        store_result(a, tmem, warp, work_tile.token, head, half, state, plan)


@cute.jit
def inverse_sum(a: Arguments, head: Int32, state: RowState) -> Float32:
    """1 / (row sum + weight of the sink); 0 if there are no keys."""
    denominator = state.row_sum
    if a.sink != 0:
        if head < a.num_heads:
            sink = (gmem(a.sink, Float32) + head).load()
            denominator = denominator + cute.arch.exp2(sink * LOG2_E - finite(state.row_max))
    inverse = Float32(0.0)
    if state.row_sum > 0.0:
        inverse = cute.arch.rcp_approx(denominator)
    return inverse


@cute.jit
def store_result(
    a: Arguments,
    tmem: prims.TmemAddr,
    warp: Int32,
    token: Int32,
    head: Int32,
    half: Int32,
    state: RowState,
    plan: cutlass.Constexpr,
) -> None:
    """Writes normalised O of a token that has one KV split."""
    inverse = inverse_sum(a, head, state)
    for column in cutlass.range(0, HALF_DIM, CHUNK):
        words = load_tmem(tmem_columns(tmem, warp, Tmem.O + column, Int32), CHUNK)
        prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
        store_channels(a, token, head, half, column, [as_float(word) * inverse for word in words], plan)


@cute.jit
def store_channels(
    a: Arguments, token: Int32, head: Int32, half: Int32, column: Int32, values: list[Float32], plan: cutlass.Constexpr
) -> None:
    """Writes CHUNK columns of O of one lane to the output."""
    if head < a.num_heads:
        element = token * a.out_token_stride + head * a.out_head_stride + plan.channel(column, half)
        store_bf16(gmem(a.out, cutlass.BFloat16) + element, values)


def store_bf16(target: cutlass.Pointer, values: list[Float32]) -> None:
    """Stores values, rounded to bf16, to adjacent elements, 16 bytes at a time."""
    for i in range(0, len(values), 8):
        chunk = cutlass.Vector.from_elements(tuple(values[i : i + 8]), Float32).to(cutlass.BFloat16)
        (target + i).store(chunk, alignment=16)


def partial_place(a: Arguments, slot: Int32, column: Int32, thread: Int32) -> cutlass.Pointer:
    """Address of a thread's columns [column, column + 4) of O in the scratch slot of a work tile."""
    columns = slot * Int64(HALF_DIM // 4) + column // 4
    return gmem(a.partial_out, Float32) + (columns * GROUP_THREADS + thread) * 4


def partial_state(a: Arguments, slot: Int32, thread: Int32) -> cutlass.Pointer:
    """Address of the first field of RowState for a thread's head in a scratch slot; fields are HEADS apart."""
    return gmem(a.partial_state, Float32) + (slot * Int64(len(RowState._fields) * HEADS) + thread % HEADS)


@cute.jit
def store_partial(a: Arguments, tmem: prims.TmemAddr, slot: Int32, thread: Int32, warp: Int32, state: RowState) -> None:
    """Stores O, not normalised, and the state of the softmax to the work tile's scratch slot."""
    for column in cutlass.range(0, HALF_DIM, CHUNK):
        words = load_tmem(tmem_columns(tmem, warp, Tmem.O + column, Int32), CHUNK)
        prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
        for i in cutlass.range_constexpr(0, CHUNK, 4):
            store_words(partial_place(a, slot, column + i, thread), words[i : i + 4])
    if thread < HEADS:
        place = partial_state(a, slot, thread)
        for i in cutlass.range_constexpr(len(state)):
            (place + i * HEADS).store(state[i])


@cute.jit
def is_last_kv_split(
    a: Arguments, smem: cutlass.Pointer, work_tile: WorkTile, thread: Int32, plan: cutlass.Constexpr
) -> Boolean:
    """Publishes this work tile's partial result; returns True in the CTA that sees all KV splits published.

    The first barrier orders all threads' stores before the first thread's release fence; the second barrier orders its
    acquire fence before all threads' loads.
    """
    is_last = typed(smem + Smem.IS_LAST, Int32)
    softmax_barrier()
    if thread == 0:
        arrived = gmem(a.arrived, Int32) + (work_tile.token * plan.ctas + work_tile.head_block)
        prims.fence_acq_rel(prims.MemScope.GPU)
        # Relaxed, because the fences before and after order it. The last increment wraps to zero, for the next launch.
        before = prims.atomicrmw(prims.AtomicOp.INC, arrived, work_tile.kv_splits - 1)
        prims.fence_acq_rel(prims.MemScope.GPU)
        last = Int32(0)
        if before == work_tile.kv_splits - 1:
            last = Int32(1)
        is_last.store(last)
    softmax_barrier()
    return is_last.load() != 0


@cute.jit
def combine(
    a: Arguments, work_tile: WorkTile, thread: Int32, head: Int32, half: Int32, plan: cutlass.Constexpr
) -> None:
    """Merges the KV splits in their order, so that the result does not depend on which CTA is the last."""
    first = work_tile.slot - work_tile.kv_split
    row_max = Float32(-math.inf)
    for kv_split in cutlass.range(work_tile.kv_splits):
        row_max = cute.arch.fmax(row_max, partial_state(a, first + kv_split, thread).load())
    row_sum = Float32(0.0)
    for kv_split in cutlass.range(work_tile.kv_splits):
        place = partial_state(a, first + kv_split, thread)
        weight = cute.arch.exp2(place.load() - finite(row_max))
        row_sum = row_sum + weight * (place + HEADS).load()
    inverse = inverse_sum(a, head, RowState(row_max, row_sum))
    for column in cutlass.range(0, HALF_DIM, CHUNK):
        sums = cutlass.full([CHUNK], 0.0, dtype=Float32)
        for kv_split in cutlass.range(work_tile.kv_splits):
            weight = cute.arch.exp2(partial_state(a, first + kv_split, thread).load() - finite(row_max))
            sums = weighted_sum(sums, weight, partial_place(a, first + kv_split, column, thread))
        store_channels(a, work_tile.token, head, half, column, [sums[i] * inverse for i in range(CHUNK)], plan)


def weighted_sum(sums: cutlass.Vector, weight: Float32, kv_split: cutlass.Pointer) -> cutlass.Vector:
    """sums [CHUNK] + weight * columns of a KV split."""
    values = []
    for i in range(0, CHUNK, 4):
        chunk = (kv_split + i * GROUP_THREADS).load(count=4, alignment=16)
        values += [sums[i + j] + weight * chunk[j] for j in range(4)]
    return cutlass.Vector.from_elements(tuple(values), Float32)
