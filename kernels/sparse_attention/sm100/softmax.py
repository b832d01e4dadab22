"""Softmax warps of the Blackwell kernel: Q into tensor memory, P, corrections of O, and the epilogue with its merge."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.experimental import primitives as prims

from dsv4_kernels.sparse_attention.sm100.plan import (
    ALL_ROWS,
    CHUNK,
    FEW_TILES,
    GROUP_THREADS,
    HALF_DIM,
    HALF_KEYS,
    HEADS,
    LOG2_E,
    P_BYTES,
    RESCALE_LOG2,
    ROW_BITS_BYTES,
    SWIZZLE_ROW_BYTES,
    Arguments,
    Barrier,
    Item,
    Plan,
    Smem,
    Tmem,
    arrive,
    as_float,
    first_and_stride,
    gmem,
    item_of,
    load_tmem,
    load_words,
    of_first_cta,
    softmax_barrier,
    store_words,
    tmem_columns,
    typed,
    wait,
    wait_for_tile,
)


class RowState(NamedTuple):
    """Softmax of one head over some keys. Sums are in units of 2**reference."""

    reference: Float32  # what exponents are relative to, in log2: the maximum, or up to RESCALE_LOG2 more; -inf: no key
    total: (
        Float32  # of the weights as P holds them, rounded to bf16: a dominating weight's rounding cancels in O / total
    )
    exact_total: Float32  # of the weights themselves, for the log-sum-exp; only kept up if that is asked for


@cute.jit
def softmax(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    can_split: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Thread i has head i % 64: of every tile keys [32 * (i // 64), + 32), of O the channels of its lane.

    The next item's Q goes into tensor memory before this item's epilogue, so that its first products run meanwhile.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, stride = first_and_stride(plan)
    before = Int32(0)
    load_queries_of(first, a, barriers, tmem, thread, warp, plan)
    for index in cutlass.range(first, a.num_items, stride):
        item = item_of(index, a, plan)
        state = RowState(Float32(-math.inf), Float32(0.0), Float32(0.0))
        if item.num_tiles > 0:
            state = softmax_of_item(a, smem, barriers, tmem, item, thread, warp, before, plan)
        load_queries_of(index + stride, a, barriers, tmem, thread, warp, plan)
        before = before + item.num_tiles
        if item.num_tiles > 0:
            wait_for_tile(barriers, Barrier.PV_DONE, before - 1, plan)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
            finish_item(a, smem, tmem, item, thread, warp, state, can_split, plan)


@cute.jit
def softmax_of_item(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    item: Item,
    thread: Int32,
    warp: Int32,
    before: Int32,
    plan: cutlass.Constexpr,
) -> RowState:
    """P of all tiles; `before` tiles were in the items before."""
    half = warp // 2
    head_row = thread % HEADS
    # Few keys do not average out the rounding of P, which is least relative to the true maximum.
    tolerated = cutlass.select_(item.num_tiles <= FEW_TILES, Float32(0.0), Float32(RESCALE_LOG2))
    reference, total, exact_total = Float32(-math.inf), Float32(0.0), Float32(0.0)
    for tile in cutlass.range(item.num_tiles):
        count = before + tile
        scores = scores_of_tile(a, smem, barriers, tmem, thread, warp, half, count, plan)
        largest = maximum(scores)
        largest = cutlass.max(largest, exchanged(smem + Smem.MAXIMA, thread, largest))
        grown = largest > reference
        factor = Float32(1.0)
        if grown:
            factor = cute.arch.exp2(reference - (largest + tolerated))
            reference = largest + tolerated
        if tile > 0:
            if prims.vote_sync(0xFFFFFFFF, grown, prims.VoteSync.ANY):
                wait_for_tile(barriers, Barrier.PV_DONE, count - 1, plan)
                prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                rescale(tmem, warp, factor)
        if tile > 1:  # the tile two before used this buffer of P; across items the epilogue has waited
            wait_for_tile(barriers, Barrier.PV_DONE, count - 2, plan)
        subtracted = finite(reference)
        weights = [cute.arch.exp2(score - subtracted) for score in scores]
        total = total * factor + store_weights(smem, weights, head_row, half, count % 2)
        if a.lse != 0:
            exact_total = exact_total * factor + sum_of(weights)
        prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        arrive(of_first_cta(barriers + (Barrier.P_READY + count % 2), plan))
    if a.lse != 0:  # the place is free since the last maxima were exchanged, and again after the next line
        exact_total = exact_total + exchanged(smem + Smem.EXCHANGE, thread, exact_total)
    total = total + exchanged(smem + Smem.SUMS, thread, total)
    return RowState(reference, total, exact_total)


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
    """Q of work item `index`, if there is such an item and it has tiles."""
    if index < a.num_items:
        item = item_of(index, a, plan)
        if item.num_tiles > 0:
            head = item.head_block * HEADS + thread % HEADS
            load_queries(a, barriers, tmem, warp, item.token, head, warp // 2, plan)


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
    """Q into tensor memory. The last item's S are complete (these warps have read them), so nobody reads Q now."""
    row = a.zeros
    if head < a.num_heads:
        row = a.q + 2 * (token * a.q_token_stride + head * a.q_head_stride + half * HALF_DIM)
    for quarter in cutlass.range_constexpr(4):
        words = []
        for piece in cutlass.range_constexpr(8):
            words += load_words(row, quarter * 128 + piece * 16, 4)
        target = tmem_columns(tmem, warp, Tmem.Q + quarter * 32, Int32)
        prims.tcgen05_st("32x32b", target, cutlass.Vector.from_elements(tuple(words), Int32))
    prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    arrive(of_first_cta(barriers + Barrier.Q_READY, plan))


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
    """Scores of this thread's head and 32 keys, in units of log2, -inf at holes.

    Each half of the lanes has a summand of all 64 keys' scores; it keeps those of its own 32 keys and gives the others
    to the other half through shared memory.
    """
    wait(barriers, Barrier.S_READY + count % 2, count // 2 & 1)
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
    wait_for_tile(barriers, Barrier.FULL, count, plan)  # has long happened; acquires the bits of its rows
    column = Tmem.S + count % 2 * Tmem.S_COLUMNS
    others = load_tmem(tmem_columns(tmem, warp, column + (1 - half) * HALF_KEYS, Int32), HALF_KEYS)
    own = load_tmem(tmem_columns(tmem, warp, column + half * HALF_KEYS, Int32), HALF_KEYS)
    prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
    exchange = typed(smem + Smem.EXCHANGE, Float32)
    for chunk in range(HALF_KEYS // 4):
        store_words(exchange + (chunk * GROUP_THREADS + thread) * 4, others[chunk * 4 : chunk * 4 + 4])
    softmax_barrier()
    rows = typed(smem + (Smem.ROWS + count % plan.stages * ROW_BITS_BYTES + half * (ROW_BITS_BYTES // 2)), Int32)
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
    """The scores of 32 keys, -inf at holes; `low` and `high` are the bits of 16 rows each, as in `ALL_ROWS`."""
    if (low & high) != ALL_ROWS:
        values = []
        for key in cutlass.range_constexpr(HALF_KEYS):
            bits = low if key < HALF_KEYS // 2 else high
            exists = (bits >> (key % 8 * 4 + key % 16 // 8)) & 1
            values.append(cutlass.select_(exists == 0, Float32(-math.inf), scores[key]))
        scores = cutlass.Vector.from_elements(tuple(values), Float32)
    return scores


def maximum(values: list[Float32]) -> Float32:
    """As a tree."""
    while len(values) > 1:
        values = [cute.arch.fmax(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def sum_of(values: list[Float32]) -> Float32:
    """As a tree, in a fixed order."""
    while len(values) > 1:
        values = [first + second for first, second in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def exchanged(place: cutlass.Pointer, thread: Int32, value: Float32) -> Float32:
    """The value of the thread that has the same head's other keys.

    The next write to the same place must come after another barrier, hence after this read.
    """
    place = typed(place, Float32)
    (place + thread).store(value)
    softmax_barrier()
    return (place + (thread ^ HEADS)).load()


def finite(reference: Float32) -> Float32:
    """What scores are subtracted from: 0 while all of them are -inf."""
    return cutlass.select_(reference == -math.inf, Float32(0.0), reference)


def store_weights(
    smem: cutlass.Pointer, weights: list[Float32], head_row: Int32, half: Int32, buffer: Int32
) -> Float32:
    """P in bf16 into shared memory; returns the sum of the rounded weights.

    O is divided by rounded weights' sum, so that a weight's rounding cancels where it dominates.
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


@cute.jit
def finish_item(
    a: Arguments,
    smem: cutlass.Pointer,
    tmem: prims.TmemAddr,
    item: Item,
    thread: Int32,
    warp: Int32,
    state: RowState,
    can_split: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """The output; or a partial result, and the merge if this was the last part."""
    half = warp // 2
    head = item.head_block * HEADS + thread % HEADS
    if cutlass.const_expr(can_split):
        if item.parts > 1:
            store_partial(a, tmem, item.slot, thread, warp, state)
            if is_last_part(a, smem, item, thread, plan):
                merge_parts(a, item, thread, head, half, plan)
        else:
            store_result(a, tmem, warp, item.token, head, half, state, plan)
    else:
        store_result(a, tmem, warp, item.token, head, half, state, plan)


@cute.jit
def inverse_of_sum(a: Arguments, head: Int32, state: RowState) -> Float32:
    """1 / (total + exp(sink)); 0 without any row."""
    denominator = state.total
    if a.sink != 0:
        if head < a.num_heads:
            sink = (gmem(a.sink, Float32) + head).load()
            denominator = denominator + cute.arch.exp2(sink * LOG2_E - finite(state.reference))
    inverse = Float32(0.0)
    if state.total > 0.0:
        inverse = cute.arch.rcp_approx(denominator)
    return inverse


@cute.jit
def store_lse(a: Arguments, token: Int32, head: Int32, state: RowState) -> None:
    """The log-sum-exp, if it is asked for."""
    if a.lse != 0:
        if head < a.num_heads:
            lse = (finite(state.reference) + cute.math.log2(state.exact_total, fastmath=True)) * math.log(2.0)
            (gmem(a.lse, Float32) + (token * Int64(a.num_heads) + head)).store(lse)


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
    """O, divided, and the log-sum-exp of a token that has one part."""
    inverse = inverse_of_sum(a, head, state)
    if half == 0:
        store_lse(a, token, head, state)
    for column in cutlass.range(0, HALF_DIM, CHUNK):
        words = load_tmem(tmem_columns(tmem, warp, Tmem.O + column, Int32), CHUNK)
        prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
        store_channels(a, token, head, half, column, [as_float(word) * inverse for word in words], plan)


@cute.jit
def store_channels(
    a: Arguments, token: Int32, head: Int32, half: Int32, column: Int32, values: list[Float32], plan: cutlass.Constexpr
) -> None:
    """Writes what stands in CHUNK columns of O in one lane to the output."""
    if head < a.num_heads:
        element = token * a.out_token_stride + head * a.out_head_stride + plan.channel(column, half)
        if a.out_is_fp32 != 0:
            store_fp32(gmem(a.out, Float32) + element, values)
        else:
            store_bf16(gmem(a.out, cutlass.BFloat16) + element, values)


def store_fp32(target: cutlass.Pointer, values: list[Float32]) -> None:
    """Values to adjacent elements, 16 bytes at a time."""
    for i in range(0, len(values), 4):
        (target + i).store(cutlass.Vector.from_elements(tuple(values[i : i + 4]), Float32), alignment=16)


def store_bf16(target: cutlass.Pointer, values: list[Float32]) -> None:
    """Values, rounded, to adjacent elements, 16 bytes at a time."""
    for i in range(0, len(values), 8):
        piece = cutlass.Vector.from_elements(tuple(values[i : i + 8]), Float32).to(cutlass.BFloat16)
        (target + i).store(piece, alignment=16)


# ---- parts of a token's keys


def partial_place(a: Arguments, slot: Int32, column: Int32, thread: Int32) -> cutlass.Pointer:
    """Where an item's thread keeps columns [column, column + 4) of its lane of O."""
    columns = slot * Int64(HALF_DIM // 4) + column // 4
    return gmem(a.partial_out, Float32) + (columns * GROUP_THREADS + thread) * 4


def partial_state(a: Arguments, slot: Int32, thread: Int32) -> cutlass.Pointer:
    """The first field of an item's RowState for a thread's head; the others follow HEADS further each."""
    return gmem(a.partial_state, Float32) + (slot * Int64(len(RowState._fields) * HEADS) + thread % HEADS)


@cute.jit
def store_partial(a: Arguments, tmem: prims.TmemAddr, slot: Int32, thread: Int32, warp: Int32, state: RowState) -> None:
    """O as it is, and the state of the softmax, into the item's place of global memory."""
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
def is_last_part(a: Arguments, smem: cutlass.Pointer, item: Item, thread: Int32, plan: cutlass.Constexpr) -> Boolean:
    """Publishes this item's partial result; True in the CTA that sees all parts published.

    The barriers hand all threads' stores to the first thread's fence, and to all threads what its second fence saw.
    """
    is_last = typed(smem + Smem.IS_LAST, Int32)
    softmax_barrier()
    if thread == 0:
        arrived = gmem(a.arrived, Int32) + (item.token * plan.ctas + item.head_block)
        prims.fence_acq_rel(prims.MemScope.GPU)
        # Relaxed: the fences around order it. The last one wraps to zero, for the next launch.
        before = prims.atomicrmw(prims.AtomicOp.INC, arrived, item.parts - 1)
        prims.fence_acq_rel(prims.MemScope.GPU)
        last = Int32(0)
        if before == item.parts - 1:
            last = Int32(1)
        is_last.store(last)
    softmax_barrier()
    return is_last.load() != 0


@cute.jit
def merge_parts(a: Arguments, item: Item, thread: Int32, head: Int32, half: Int32, plan: cutlass.Constexpr) -> None:
    """Sums the parts in their order, so that the result does not depend on who came last."""
    first = item.slot - item.part
    reference = Float32(-math.inf)
    for part in cutlass.range(item.parts):
        reference = cute.arch.fmax(reference, partial_state(a, first + part, thread).load())
    total, exact_total = Float32(0.0), Float32(0.0)
    for part in cutlass.range(item.parts):
        place = partial_state(a, first + part, thread)
        weight = cute.arch.exp2(place.load() - finite(reference))
        total = total + weight * (place + HEADS).load()
        exact_total = exact_total + weight * (place + 2 * HEADS).load()
    state = RowState(reference, total, exact_total)
    inverse = inverse_of_sum(a, head, state)
    if half == 0:
        store_lse(a, item.token, head, state)
    for column in cutlass.range(0, HALF_DIM, CHUNK):
        sums = cutlass.full([CHUNK], 0.0, dtype=Float32)
        for part in cutlass.range(item.parts):
            weight = cute.arch.exp2(partial_state(a, first + part, thread).load() - finite(reference))
            sums = weighted_sum(sums, weight, partial_place(a, first + part, column, thread))
        store_channels(a, item.token, head, half, column, [sums[i] * inverse for i in range(CHUNK)], plan)


def weighted_sum(sums: cutlass.Vector, weight: Float32, part: cutlass.Pointer) -> cutlass.Vector:
    """sums [CHUNK] + weight * the part's columns."""
    values = []
    for i in range(0, CHUNK, 4):
        piece = (part + i * GROUP_THREADS).load(count=4, alignment=16)
        values += [sums[i + j] + weight * piece[j] for j in range(4)]
    return cutlass.Vector.from_elements(tuple(values), Float32)
