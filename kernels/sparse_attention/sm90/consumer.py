"""The consumer warpgroups of the persistent kernel on Hopper: S = Q K^T, softmax, O += P V (persistent.py)."""

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels.device import ptx
from dsv4_kernels.device.tma import TmaTensor
from dsv4_kernels.sparse_attention.sm90 import combine, epilogue, partials, q_and_out, softmax
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.barriers import arrive, arrive_for_warp, sync
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    GROUP,
    GROUPS,
    HALF_GROUPS,
    HEADS,
    KEY_TILE,
    NO_ROW_MAX,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    WARP_HEADS,
    Arguments,
    Configuration,
    NamedBarrier,
    Split,
)
from dsv4_kernels.sparse_attention.sm90.softmax import Products
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import WorkTile


class Thread(NamedTuple):
    """A thread of a consumer warpgroup."""

    number: Int32
    """Index of the thread in the CTA."""
    warp: Int32
    """Index of the warp in the warpgroup."""
    lane: Int32
    row: Int32
    """The first row of the accumulators that the thread has; the second is row + 8."""


class Memory(NamedTuple):
    """Shared memory that the consumers read and write in every step."""

    full: cute.Pointer
    free: cute.Pointer
    p: Int32
    rows: cute.Pointer
    """A bit for each row of this consumer's key tile, 0 for a hole."""
    step_max: Int32
    """Row maxima that the consumers exchange, from this thread's row on."""

    @staticmethod
    def of(shared: cutlass.Constexpr, consumer: Int32, row: Int32) -> "Memory":
        """Addresses for a consumer's thread that has `row`."""
        full, free = shared.full.data_ptr(), shared.free.data_ptr()
        p = Int32(shared.p.data_ptr().toint())
        rows = cute.recast_ptr(shared.rows.data_ptr() + consumer * KEY_TILE // 8, dtype=Uint32)
        return Memory(full, free, p, rows, Int32(shared.row_max.data_ptr().toint()) + row * 4)


class Registers(NamedTuple):
    """A thread's accumulators. Element 4 * j + 2 * i + k is row `row` + 8 i, column 8 j + 2 (lane % 4) + k."""

    out: cute.Tensor
    """O of this consumer's channels, fp32, not normalised."""
    scores: cute.Tensor
    product: cute.Tensor
    """64 channels of P V of a step."""
    own_p: cute.Tensor
    """P of this consumer's key tile, bf16."""
    other_p: cute.Tensor
    """P of the other key tile: in registers, or in shared memory."""
    # Each of the following has one value for each of the thread's two rows.
    weight: cute.Tensor
    """Factor of a step's product."""
    step_sum: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor

    @staticmethod
    def of(config: Configuration, mma: Products, other_p: cute.Tensor) -> "Registers":
        """New registers; `other_p` is P of the other key tile in shared memory, if it stays there."""
        out = cute.make_rmem_tensor((HEADS * GROUP // 128 * config.groups_per_split,), Float32)
        scores = cute.make_rmem_tensor(mma.scores.partition_shape_C((HEADS, KEY_TILE)), Float32)
        product = cute.make_rmem_tensor(mma.own.partition_shape_C((HEADS, GROUP)), Float32)
        own_p = cute.make_rmem_tensor(mma.own.partition_shape_A((HEADS, KEY_TILE)), BFloat16)
        if config.p_in_registers:
            other_p = cute.make_rmem_tensor(mma.own.partition_shape_A((HEADS, KEY_TILE)), BFloat16)
        of_rows = [cute.make_rmem_tensor((2,), Float32) for _ in range(4)]
        return Registers(out, scores, product, own_p, other_p, *of_rows)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    tma_q: TmaTensor | None,
    tma_out: TmaTensor,
    thread: Int32,
    consumer: Int32,
) -> None:
    """One consumer warpgroup: scores of key tile `consumer`, channels [consumer * 256, + 256) of O."""
    warp, lane = thread % 128 // 32, thread % 32
    at = Thread(thread, warp, lane, warp * WARP_HEADS + lane // 4)
    memory = Memory.of(shared, consumer, at.row)
    mma = softmax.products_of(shared, thread % 128)
    registers = Registers.of(config, mma, mma.p[None, None, None, 1 - consumer])
    row_max, row_sum, out = registers.row_max, registers.row_sum, registers.out

    num_tiles = scheduler.count_work_tiles(config, args, shared)
    ctas, _, _ = cute.arch.grid_dim()
    index, _, _ = cute.arch.block_idx()
    channel_split = scheduler.channel_split_of(config, index)
    phase = Int32(0)
    split = config.split
    iteration, stop = Int32(0), num_tiles
    if const_expr(split):
        stop += ctas  # a sub-split is combined one iteration later than it was written
    inverse = cute.make_rmem_tensor((2,), Float32)
    store_group = functools.partial(epilogue.store_group_of_out, config, shared, tma_out)
    steps = Int32(0)  # of the current work tile, if it is a whole token
    if index < num_tiles:
        q_and_out.load_q(config, args, shared, tma_q, thread, index, iteration)
        if thread < 2 * HEADS:
            (shared.sinks.data_ptr() + thread).store(epilogue.load_sink(args, thread))
        if const_expr(not split):
            steps = scheduler.steps_of_tile(config, args, index)
            softmax.clear_partial(row_max, row_sum, out)
    while index < stop:
        if index < num_tiles:
            work_tile = begin_tile(config, args, shared, at, index, iteration, num_tiles, steps, registers)
            step, first_export = work_tile.first_step, first_exported_step(config, work_tile)
            while step < work_tile.end_step:
                # Rematerialised in every step: descriptors are computed where they are used, not kept in registers.
                consumer = cute.arch.make_warp_uniform(consumer)
                compute_scores = functools.partial(
                    softmax.compute_scores, memory.full, phase, consumer, memory.rows, mma, registers.scores
                )
                holes = Uint32(0), Uint32(0)
                if const_expr(split):
                    holes = compute_scores()
                elif (step == work_tile.first_step) & (index >= ctas):
                    # The epilogue of the previous work tile, between the products.
                    before = scheduler.whole_token_tile(config, args, index - ctas, Int32(0))
                    holes = compute_scores(functools.partial(store_group, before, consumer, warp, lane, out, inverse))
                    epilogue.wait_for_tma_store()
                else:
                    holes = compute_scores()
                softmax.mask_scores(registers.scores, holes, lane)
                step_max = softmax.find_step_max(args, registers.scores, memory.step_max, consumer, lane)
                if const_expr(not split):
                    if (step == work_tile.end_step - 1) & (index + ctas < num_tiles):  # Q is not read any more
                        q_and_out.load_q(config, args, shared, tma_q, thread, index + ctas, iteration + 1)
                        steps = scheduler.steps_of_tile(config, args, index + ctas)
                if const_expr(config.channel_splits > 1):
                    release_other_channels(config, memory.free + consumer * HALF_GROUPS, channel_split, lane)
                exchange_p(config, args, memory, at, consumer, step_max, registers)
                export = functools.partial(export_columns, args, at, iteration, step, first_export, out)
                channel_split = multiply_values(config, memory, mma, consumer, channel_split, lane, registers, export)
                if const_expr(split):
                    finish_step(config, args, at, work_tile, iteration, step, first_export, registers)
                phase ^= 1
                step += 1
            if const_expr(split):
                load_next_q = functools.partial(q_and_out.load_q, config, args, shared, tma_q, thread)
                finish_sub_split(
                    *(config, args, shared, at, consumer, index, iteration, num_tiles),
                    *(registers, store_group, load_next_q),
                )
            else:
                finish_token(config, args, shared, at, consumer, index, num_tiles, registers, inverse, store_group)
        if const_expr(split):
            if iteration > 0:
                work_tile = scheduler.work_tile_at(config, args, shared, index - ctas, iteration - 1)
                if work_tile.sub_splits > 1:
                    combine.combine_token(
                        config, args, shared, thread, consumer, work_tile, index - ctas, iteration - 1, num_tiles
                    )
        iteration += 1
        index += ctas
    if const_expr(split):
        if partials.slots_are_reused(num_tiles):
            partials.reset_counters_by_last_cta(config, args, shared, thread)


# Work tiles


@cute.jit
def begin_tile(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    at: Thread,
    index: Int32,
    iteration: Int32,
    num_tiles: Int32,
    steps: Int32,
    registers: Registers,
) -> WorkTile:
    """The work tile of an iteration, once its Q is in shared memory. Where keys are divided, warp 0 publishes the next
    work tile while the first rows are loaded."""
    work_tile = scheduler.whole_token_tile(config, args, index, steps) if not config.split else None
    if const_expr(config.split):
        work_tile = scheduler.published_tile(config, shared, iteration)
        softmax.clear_partial(registers.row_max, registers.row_sum, registers.out)
        partials.wait_for_slot(config, args, shared, at.number, iteration - SCRATCH_SLOTS)
    q_and_out.wait_for_q(config, shared, iteration)
    if const_expr(config.split):
        ctas, _, _ = cute.arch.grid_dim()
        if at.number < 32:
            if (iteration == 0) & (work_tile.sub_splits > 1):
                combine.list_partials(config, args, shared, at.lane, work_tile, index, chooses=True)
            if index + ctas < num_tiles:
                scheduler.publish_tile(config, args, shared, index + ctas, iteration + 1, at.lane)
    return work_tile


@cute.jit
def first_exported_step(config: cutlass.Constexpr, work_tile: WorkTile) -> Int32:
    """The first step that the work tile exports as a partial result of its own.

    A sub-split that begins a KV split merges its steps and exports the result with its last step. Later sub-splits
    export every step: the running (max, sum, O) that they continue is in another CTA.
    """
    first_export = work_tile.end_step
    if const_expr(config.split):
        if work_tile.sub_splits > 1:
            first_export = work_tile.end_step - 1
            if not work_tile.begins_kv_split:
                first_export = work_tile.first_step
    return first_export


@cute.jit
def finish_sub_split(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    at: Thread,
    consumer: Int32,
    index: Int32,
    iteration: Int32,
    num_tiles: Int32,
    registers: Registers,
    store_group: cutlass.Constexpr,
    load_q: cutlass.Constexpr,
) -> None:
    """Ends a work tile where keys are divided: signals its partial results, or writes O if it is the only sub-split."""
    sync(NamedBarrier.CONSUMERS)  # Q is not read any more, and all exported partial results are stored
    ctas, _, _ = cute.arch.grid_dim()
    work_tile = scheduler.published_tile(config, shared, iteration)  # rematerialised
    if work_tile.sub_splits > 1:
        if at.number == 0:
            partials.signal_sub_split(config, args, shared, work_tile)
    if index + ctas < num_tiles:
        load_q(index + ctas, iteration + 1)
    if work_tile.sub_splits == 1:
        factors = cute.make_rmem_tensor((2,), Float32)
        epilogue.inverse_sums(
            shared, work_tile, consumer, at.row, at.lane, registers.row_max, registers.row_sum, factors
        )
        epilogue.store_out(
            functools.partial(store_group, work_tile, consumer, at.warp, at.lane, registers.out, factors)
        )


@cute.jit
def finish_token(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    at: Thread,
    consumer: Int32,
    index: Int32,
    num_tiles: Int32,
    registers: Registers,
    inverse: cute.Tensor,
    store_group: cutlass.Constexpr,
) -> None:
    """Ends a work tile that is a whole token: computes `inverse`, which normalises O.

    O is stored during the first scores of the next work tile; a CTA's last work tile stores it here.
    """
    ctas, _, _ = cute.arch.grid_dim()
    work_tile = scheduler.whole_token_tile(config, args, index, Int32(0))
    epilogue.inverse_sums(shared, work_tile, consumer, at.row, at.lane, registers.row_max, registers.row_sum, inverse)
    registers.row_max.fill(NO_ROW_MAX)
    registers.row_sum.fill(0.0)
    if index + ctas >= num_tiles:
        epilogue.store_out(
            functools.partial(store_group, work_tile, consumer, at.warp, at.lane, registers.out, inverse)
        )


# A step


@cute.jit
def exchange_p(
    config: cutlass.Constexpr,
    args: Arguments,
    memory: Memory,
    at: Thread,
    consumer: Int32,
    step_max: tuple,
    registers: Registers,
) -> None:
    """Computes P = 2**(S - step's row max) of this consumer's key tile and exchanges it for the other consumer's P;
    rescales O for the step's product."""
    packed_p = cute.recast_tensor(registers.own_p, Uint32)
    softmax.exponentiate(args, registers.scores, step_max, packed_p, registers.step_sum)
    softmax.store_p(memory.p + consumer * BLOCK_BYTES, packed_p, at.warp, at.lane)
    if const_expr(not config.p_in_registers):  # otherwise P is read by generic loads, not by wgmma
        cute.arch.fence_view_async_shared()
    if consumer == 1:  # consumer 0 arrives later, when it has issued its first product, to precede this one's
        arrive(NamedBarrier.P + 1)
    softmax.rescale_out(
        step_max, registers.step_sum, registers.row_max, registers.row_sum, registers.weight, registers.out
    )
    sync(NamedBarrier.P + 1 - consumer)
    if const_expr(config.p_in_registers):
        words = cute.recast_tensor(registers.other_p, Uint32)
        softmax.load_p(memory.p + (1 - consumer) * BLOCK_BYTES, words, at.warp, at.lane)


@cute.jit
def multiply_values(
    config: cutlass.Constexpr,
    memory: Memory,
    mma: Products,
    consumer: Int32,
    channel_split: Int32 | int,
    lane: Int32,
    registers: Registers,
    export: cutlass.Constexpr,
) -> Int32 | int:
    """O += weight * P V, 64 channels at a time; gives back each group of V and calls `export(first, count)` with the
    columns of O that are complete. Returns `channel_split`, rematerialised."""
    product, out = registers.product, registers.out
    other_mma = mma.own if config.p_in_registers else mma.other
    for i in cutlass.range_constexpr(config.groups_per_split):
        channel_split = scheduler.rematerialise(config, channel_split)
        place = channel_split * config.groups_per_split + i
        if const_expr(config.channel_splits == 1):
            place = scheduler.group_at(i)
        group = consumer * HALF_GROUPS + place
        own_values = mma.values[None, None, None, consumer * GROUPS + group]
        softmax.multiply(mma.own, product, registers.own_p, own_values, 0, False)
        other_values = mma.values[None, None, None, (1 - consumer) * GROUPS + group]
        softmax.multiply(other_mma, product, registers.other_p, other_values, 0, True)
        warpgroup.commit_group()
        if const_expr(i == 0):
            if consumer == 0:
                arrive(NamedBarrier.P)
        warpgroup.wait_group(0)
        arrive_for_warp(memory.free + group, lane)
        first = (place if const_expr(config.channel_splits == 1) else i) * cute.size(product)
        for j in cutlass.range_constexpr(cute.size(product)):
            out[first + j] = ptx.fma(product[j], registers.weight[j // 2 % 2], out[first + j])
        if const_expr(config.split):
            export(first // 4, cute.size(product) // 4)  # while the next product runs
    return channel_split


@cute.jit
def export_columns(
    args: Arguments,
    at: Thread,
    iteration: Int32,
    step: Int32,
    first_export: Int32,
    out: cute.Tensor,
    first: cutlass.Constexpr,
    count: cutlass.Constexpr,
) -> None:
    """Stores columns of O as a partial result, if this step is exported."""
    if step >= first_export:
        slot = partials.own_slot(args, iteration, step - first_export) + at.number * 16
        partials.store_columns(slot, out, first, count)


@cute.jit
def finish_step(
    config: cutlass.Constexpr,
    args: Arguments,
    at: Thread,
    work_tile: WorkTile,
    iteration: Int32,
    step: Int32,
    first_export: Int32,
    registers: Registers,
) -> None:
    """Completes the export of a step, or merges a KV split that ends with it into the KV splits before it."""
    row_max, row_sum, out = registers.row_max, registers.row_sum, registers.out
    if step >= first_export:
        slot = partials.own_slot(args, iteration, step - first_export)
        partials.store_row_stats(slot + SLOT_BYTES, at.number, row_max, row_sum)
        softmax.clear_partial(row_max, row_sum, out)
    elif const_expr(config.split == Split.KV_SPLITS):
        if scheduler.ends_kv_split(args, work_tile, step + 1):
            combine.merge_kv_split(args, iteration, at.number, step + 1, work_tile.end_step, row_max, row_sum, out)


@cute.jit
def release_other_channels(config: cutlass.Constexpr, free: cute.Pointer, channel_split: Int32, lane: Int32) -> None:
    """Gives back the groups in this consumer's half that belong to other channel splits: only the scores need them."""
    for place in cutlass.range_constexpr(HALF_GROUPS):
        if place // config.groups_per_split != channel_split:
            arrive_for_warp(free + place, lane)
