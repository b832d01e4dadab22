"""Partial results of the Hopper kernel: scratch slots in global memory, and counters of the written slots.

A CTA has SLOTS_PER_CTA scratch slots. Each combination of token, block of heads and channel split has two counters:
written sub-splits, and CTAs that have combined their columns. All counters are zero between launches.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.plan import (
    CONSUMER_THREADS,
    FIRST_SUB_SPLIT,
    ROW_STATS_BYTES,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    SLOTS_PER_CTA,
    Arguments,
    Configuration,
    NamedBarrier,
    Split,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import (
    WorkTile,
    count_head_blocks,
    published_tile,
    tiles_per_sub_split,
)

# Scratch slots


def first_slot_of(cta: Int32, iteration: Int32) -> Int32:
    """Number of the first scratch slot of a CTA for its work tile of an iteration."""
    return cta * SLOTS_PER_CTA + iteration % SCRATCH_SLOTS


@cute.jit
def slot_of_tile(index: Int32) -> Int32:
    """Number of a work tile's first scratch slot, from the work tile's number."""
    ctas, _, _ = cute.arch.grid_dim()
    number = index * SLOTS_PER_CTA
    if index >= ctas:
        iteration = ptx.divide(index, ctas)
        number = first_slot_of(index - iteration * ctas, iteration)
    return number


def slot_address(args: Arguments, number: Int32) -> Int64:
    """Address of a scratch slot by its number."""
    return args.scratch + Int64(number) * (SLOT_BYTES + ROW_STATS_BYTES)


def own_slot(args: Arguments, iteration: Int32, place: Int32) -> Int64:
    """Address of a scratch slot of this CTA: slot `place` of an iteration's work tile.

    A slot holds the partial result of one or more steps, in the order of the registers: O, not normalised,
    [32 / channel splits][256 threads][4]; and, after room for 32 columns, [256][4]: row max and row sum of two rows.
    """
    block, _, _ = cute.arch.block_idx()
    return slot_address(args, first_slot_of(block, iteration) + place)


def store_columns(slot: Int64, out: cute.Tensor, first: int, count: int) -> None:
    """Stores columns of O to a scratch slot; `slot` is the thread's own address in it."""
    for j in range(first, first + count):
        ptx.store_f32x4(slot + j * CONSUMER_THREADS * 16, tuple(out[4 * j + i] for i in range(4)))


def store_row_stats(address: Int64, thread: Int32, row_max: cute.Tensor, row_sum: cute.Tensor) -> None:
    """Stores row maxima and row sums of a thread."""
    ptx.store_f32x4(address + thread * 16, (row_max[0], row_sum[0], row_max[1], row_sum[1]))


def load_row_stats(slot: Int64, wanted: Boolean) -> tuple:
    """(row maxima, row sums) of a thread in a scratch slot; zeros unless `wanted`. `slot` is the thread's address."""
    loaded = ptx.load_f32x4_if(wanted, slot + SLOT_BYTES)
    return (loaded[0], loaded[2]), (loaded[1], loaded[3])


# Counters of a token and its heads


def arrived_counter(config: Configuration, args: Arguments, work_tile: WorkTile) -> Int64:
    """Address of the counter of written sub-splits."""
    block = work_tile.token * count_head_blocks(args) + work_tile.head_block
    return args.counters + Int64(block * config.channel_splits + work_tile.channel_split) * 4


def combined_counter(config: Configuration, args: Arguments, work_tile: WorkTile) -> Int64:
    """Address of the counter of CTAs that have combined their columns."""
    return arrived_counter(config, args, work_tile) + Int64(args.num_tokens * tiles_per_sub_split(config, args)) * 4


@cute.jit
def wait_for_counter(address: Int64, count: Int32, bits: cutlass.Constexpr = -1) -> None:
    """Waits until a counter, masked by `bits`, is at least `count`."""
    while (ptx.load_acquire(address) & bits) < count:
        pass


@cute.jit
def signal_sub_split(config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, tile: WorkTile) -> None:
    """Signals the CTAs of a token that a sub-split is written; called by one thread, after a barrier."""
    count = Int32(1)
    if const_expr(may_prefetch(config)):
        if (tile.sub_split == 0) & (shared.prefetches.data_ptr().load() != 0):
            count = Int32(FIRST_SUB_SPLIT)
    ptx.add_release(arrived_counter(config, args, tile), count)


@cute.jit
def wait_for_slot(
    config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, thread: Int32, oldest: Int32
) -> None:
    """Waits until all CTAs that read the scratch slot of iteration `oldest` have read it. A barrier must follow."""
    if (oldest >= 0) & (thread == 0):
        work_tile = published_tile(config, shared, oldest)
        if work_tile.sub_splits > 1:
            wait_for_counter(combined_counter(config, args, work_tile), work_tile.sub_splits)


def slots_are_reused(num_tiles: Int32) -> Boolean:
    """Whether some CTA has more work tiles than scratch slots. If not, no CTA waits for a slot."""
    ctas, _, _ = cute.arch.grid_dim()
    return num_tiles > ctas * SCRATCH_SLOTS


@cute.jit
def reset_counters(config: cutlass.Constexpr, args: Arguments, work_tile: WorkTile, combined_before: Int32) -> None:
    """Resets a token's counters for the next launch, in its last CTA; used where scratch slots are not reused."""
    if combined_before == work_tile.sub_splits - 1:
        ptx.reset(combined_counter(config, args, work_tile))
        ptx.reset(arrived_counter(config, args, work_tile))


@cute.jit
def reset_counters_by_last_cta(
    config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, thread: Int32
) -> None:
    """Resets all counters in the last CTA of the launch; used where scratch slots are reused."""
    ctas, _, _ = cute.arch.grid_dim()
    counters = args.num_tokens * tiles_per_sub_split(config, args)
    exit_order = shared.exit_order.data_ptr()
    if thread == 0:
        exit_order.store(ptx.count_out(args.counters + Int64(2 * counters) * 4))
    sync(NamedBarrier.CONSUMERS)
    if exit_order.load() == ctas - 1:
        place = thread
        while place <= 2 * counters:
            ptx.store_i32(args.counters + Int64(place) * 4, Int32(0))
            place += CONSUMER_THREADS


def may_prefetch(config: Configuration) -> bool:
    """Whether a token of one KV split may have several sub-splits, each in a CTA without a second work tile."""
    return config.split == Split.SUB_SPLITS
