"""The softmax warps of the Blackwell kernel: Q into tensor memory, scores, P, rescaling of O (kernel.py)."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device.cta_pair import of_first_cta
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.pointers import load_words, store_words, typed
from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES, as_float, load_tmem, tmem_columns
from dsv4_kernels.sparse_attention.sm100.barriers import softmax_barrier, wait_for_tile
from dsv4_kernels.sparse_attention.sm100.plan import (
    ALL_ROWS,
    BUFFERS,
    CHUNK,
    GROUP_THREADS,
    HALF_DIM,
    HALF_KEYS,
    HEADS,
    P_BYTES,
    ROW_BITS_BYTES,
    Arguments,
    Barrier,
    Plan,
    Smem,
    Tmem,
)
from dsv4_kernels.sparse_attention.sm100.tile_scheduler import work_tile_of


class RowState(NamedTuple):
    """Softmax of one head over some keys. Sums are in units of 2**row_max."""

    row_max: Float32  # reference of the exponents, in log2: the row max, or up to RESCALE_LOG2 more; -inf: no key
    row_sum: Float32  # sum of the weights rounded to bf16, as in P: the rounding of a dominating weight cancels


@cute.jit
def load_queries_of(
    index: Int32,
    a: Arguments,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    thread: Int32,
    warp: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Copies Q of work tile `index` into tensor memory, if the work tile exists and has keys."""
    if index < a.num_work_tiles:
        work_tile = work_tile_of(index, a, plan)
        if work_tile.num_tiles > 0:
            head = work_tile.head_block * HEADS + thread % HEADS
            load_queries(a, barriers, tmem, warp, work_tile.token, head, warp // 2, plan)


@cute.jit
def load_queries(
    a: Arguments,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    token: Int32,
    head: Int32,
    half: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Copies Q into tensor memory. These warps have read the last S of the previous work tile, so its Q is free."""
    row = a.zeros
    if head < a.num_heads:
        row = a.q + 2 * (token * a.q_token_stride + head * a.q_head_stride + half * HALF_DIM)
    for quarter in cutlass.range_constexpr(4):
        words = []
        for chunk in cutlass.range_constexpr(8):
            words += load_words(row, quarter * 128 + chunk * 16, 4)
        target = tmem_columns(tmem, warp, Tmem.Q + quarter * 32, Int32)
        prims.tcgen05_st("32x32b", target, cutlass.Vector.from_elements(tuple(words), Int32))
    prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    arrive(of_first_cta(barriers + Barrier.Q_READY, plan.ctas))


def scores_of_tile(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    thread: Int32,
    warp: Int32,
    half: Int32,
    count: Int32,
    plan: Plan,
) -> list[Float32]:
    """Scores of this thread's head and 32 keys, in log2 units, -inf at holes.

    Each half of the lanes has one summand of the scores of all 64 keys; it keeps the summands of its own 32 keys and
    passes the others to the other half through shared memory.
    """
    buffer, stage = stage_of(count, BUFFERS), stage_of(count, plan.stages)
    wait(barriers, Barrier.S_READY + buffer.index, buffer.phase)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    wait_for_tile(barriers, Barrier.FULL, count, plan)  # returns at once; acquires the row bits
    column = Tmem.S + buffer.index * Tmem.S_COLUMNS
    others = load_tmem(tmem_columns(tmem, warp, column + (1 - half) * HALF_KEYS, Int32), HALF_KEYS)
    own = load_tmem(tmem_columns(tmem, warp, column + half * HALF_KEYS, Int32), HALF_KEYS)
    prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
    exchange = typed(smem + Smem.EXCHANGE, Float32)
    for chunk in range(HALF_KEYS // 4):
        store_words(exchange + (chunk * GROUP_THREADS + thread) * 4, others[chunk * 4 : chunk * 4 + 4])
    softmax_barrier()
    rows = typed(smem + (Smem.ROWS + stage.index * ROW_BITS_BYTES + half * (ROW_BITS_BYTES // 2)), Int32)
    bits = rows.load(count=2, alignment=8)
    scores = []
    for chunk in range(HALF_KEYS // 4):
        summand = (exchange + (chunk * GROUP_THREADS + (thread ^ HEADS)) * 4).load(count=4, alignment=16)
        for i in range(4):
            scores.append((as_float(own[chunk * 4 + i]) + summand[i]) * a.scale_log2)
    scores = masked(cutlass.Vector.from_elements(tuple(scores), Float32), bits[0], bits[1])
    return [scores[i] for i in range(HALF_KEYS)]


@cute.jit
def masked(scores: cutlass.Vector, low: Int32, high: Int32) -> cutlass.Vector:
    """The scores of 32 keys, with -inf at holes; `low` and `high` are bits of 16 rows each, as in `ALL_ROWS`."""
    if (low & high) != ALL_ROWS:
        values = []
        for key in cutlass.range_constexpr(HALF_KEYS):
            bits = low if key < HALF_KEYS // 2 else high
            exists = (bits >> (key % 8 * 4 + key % 16 // 8)) & 1
            values.append(cutlass.select_(exists == 0, Float32(-math.inf), scores[key]))
        scores = cutlass.Vector.from_elements(tuple(values), Float32)
    return scores


def largest_of(values: list[Float32]) -> Float32:
    """The largest value, reduced as a tree."""
    while len(values) > 1:
        values = [cute.arch.fmax(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def sum_of(values: list[Float32]) -> Float32:
    """The sum of the values, reduced as a tree in a fixed order."""
    while len(values) > 1:
        values = [first + second for first, second in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def exchanged(place: cutlass.Pointer, thread: Int32, value: Float32) -> Float32:
    """The value of the thread that has the other keys of the same head.

    Another barrier must precede the next write to `place`, so that the write follows this read.
    """
    place = typed(place, Float32)
    (place + thread).store(value)
    softmax_barrier()
    return (place + (thread ^ HEADS)).load()


def finite(row_max: Float32) -> Float32:
    """The row max, or 0 while all scores are -inf; it is subtracted from scores."""
    return cutlass.select_(row_max == -math.inf, Float32(0.0), row_max)


def store_weights(
    smem: cutlass.Pointer, weights: list[Float32], head_row: Int32, half: Int32, buffer: Int32
) -> Float32:
    """Stores P in bf16 to shared memory; returns the sum of the rounded weights.

    O is divided by the sum of the rounded weights, so that the rounding of a dominating weight cancels.
    """
    target = smem + (Smem.P + buffer * P_BYTES + head_row * SWIZZLE_ROW_BYTES)
    rounded = []
    for chunk in range(HALF_KEYS // 8):
        pairs = cutlass.Vector.from_elements(tuple(weights[chunk * 8 : chunk * 8 + 8]), Float32).to(cutlass.BFloat16)
        words = pairs.bitcast(Int32)
        words = [words[i] for i in range(4)]
        place = ((half * (HALF_KEYS // 8) + chunk) ^ (head_row % 8)) * 16
        store_words(target + place, words)
        for word in words:
            rounded += [as_float(word << 16), as_float(word & Int32(0xFFFF0000 - 2**32))]
    return sum_of(rounded)


@cute.jit
def rescale(tmem: prims.TmemAddr, warp: Int32, factor: Float32) -> None:
    """O *= factor, for this warp's lanes."""
    for column in cutlass.range(0, HALF_DIM, CHUNK):
        place = tmem_columns(tmem, warp, Tmem.O + column, Int32)
        words = load_tmem(place, CHUNK)
        prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
        scaled = tuple([as_float(word) * factor for word in words])
        prims.tcgen05_st("32x32b", place, cutlass.Vector.from_elements(scaled, Float32).bitcast(Int32))
    prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
