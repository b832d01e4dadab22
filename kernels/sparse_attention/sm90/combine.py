"""Combine: the LSE merge of a token's partial results in scratch memory, by the CTAs that wrote them.

Every CTA of a token combines some of the columns (of eight channels) of all partial results of the token, one iteration
after it wrote its own: no CTA waits while it has work (persistent.py says why every wait ends). Steps are merged into
their KV split and KV splits with each other, in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.device.warp import prefix_sum
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.epilogue import first_channel, inverse_sums_of_warp, load_sink
from dsv4_kernels.sparse_attention.sm90.partials import (
    arrived_counter,
    combined_counter,
    load_row_stats,
    may_prefetch,
    own_slot,
    reset_counters,
    slot_address,
    slot_of_tile,
    slots_are_reused,
    store_columns,
    store_row_stats,
    wait_for_counter,
)
from dsv4_kernels.sparse_attention.sm90.plan import (
    CONSUMER_THREADS,
    FIRST_SUB_SPLIT,
    GROUP,
    HEADS,
    PREFETCH_CELLS,
    PREFETCH_COLUMNS,
    SLOT_BYTES,
    WARP_HEADS,
    Arguments,
    Configuration,
    NamedBarrier,
)
from dsv4_kernels.sparse_attention.sm90.softmax import clear_partial, merge_partial, merge_row_stats, merge_values
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import (
    TokenSplits,
    WorkTile,
    count_steps,
    divide_token,
    steps_of_sub_split,
    tiles_per_sub_split,
)

COLUMN_BYTES = CONSUMER_THREADS * 16
"""Bytes of a column of both consumers: 16 a thread."""

# The list of partial results


@cute.jit
def list_partials(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    lane: Int32,
    work_tile: WorkTile,
    index: Int32,
    chooses: cutlass.Constexpr = False,
) -> None:
    """Writes the scratch slots of a token's partial results to shared memory, in order; by one warp, a barrier must
    follow.

    partials[0] is their number; partials[1 + i] is 2 * (number of the slot) + (1 if it is the first of its KV split).
    The entry after the last is 1: it ends the last KV split.
    """
    partials = shared.partials.data_ptr()
    first = index - work_tile.sub_split * tiles_per_sub_split(config, args)  # of the token's work tiles for these heads
    splits = divide_token(args, count_steps(args, work_tile.visible), shared.sub_split_steps.data_ptr().load())
    count, base = Int32(0), Int32(0)
    while base < work_tile.sub_splits:
        sub_split = base + lane
        begin, end, begins = steps_of_sub_split(splits, sub_split)
        mine = end - begin
        if const_expr(chooses and may_prefetch(config)):
            if base == 0:
                choose_prefetch(config, shared, splits, lane, mine)
        if begins:
            mine = Int32(1)
        if sub_split >= work_tile.sub_splits:
            mine = Int32(0)
        # A KV split that is one partial result needs no mark: merging it into an empty result first changes no bit.
        marks = begins & ((splits.sub_splits != 1) | (sub_split == 0))
        total = prefix_sum(mine, lane)
        number = slot_of_tile(first + sub_split * tiles_per_sub_split(config, args))
        place = Int32(0)
        while place < mine:
            (partials + (1 + count + total - mine + place)).store((number + place) * 2 + Int32(marks))
            place += 1
        count += cute.arch.shuffle_sync(total, 31)
        base += 32
    if lane == 0:
        partials.store(count)
        (partials + 1 + count).store(Int32(1))


def partial_address(args: Arguments, partials: cute.Pointer, i: Int32, thread: Int32) -> Int64:
    """A thread's address in the scratch slot of a token's i-th partial result."""
    entry = (partials + (1 + i)).load()
    return slot_address(args, entry >> 1) + thread * 16


def first_column(config: Configuration, warp: Int32, cta: Int32, ctas: Int32) -> Int32:
    """The first column that CTA `cta` of a token's `ctas` combines, for a warp.

    The CTAs divide pairs of a column and a warp (16 rows), in the same way for both consumers.
    """
    columns = config.groups_per_split * GROUP // 8 * 4
    return (ptx.divide(cta * columns, ctas) + 3 - warp) // 4


# Combine


@cute.jit
def merge_kv_split(
    args: Arguments,
    iteration: Int32,
    thread: Int32,
    end: Int32,
    last: Int32,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Merges the KV split that ends before step `end` into the earlier KV splits of the same work tile.

    The earlier KV splits are in this CTA's scratch slot. The result of the last KV split stays in registers. The merges
    and their order are those of `combine_columns`.
    """
    is_later, is_last = end > args.steps_per_kv_split, end == last
    slot = own_slot(args, iteration, Int32(0)) + thread * 16
    columns = 4  # at a time; more would spill
    before_max, before_sum = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    values = cute.make_rmem_tensor((4 * columns,), Float32)
    clear_partial(before_max, before_sum, values)
    if is_later:
        stored_max, stored_sum = load_row_stats(slot, Boolean(True))
        for k in cutlass.range_constexpr(2):
            before_max[k] = stored_max[k]
        for k in cutlass.range_constexpr(2):
            before_sum[k] = Float32(stored_sum[k])
    factors = [merge_row_stats(before_max, before_sum, row_max[k], row_sum, k) for k in range(2)]
    row_max.store(before_max.load())
    row_sum.store(before_sum.load())
    for first in cutlass.range_constexpr(0, cute.size(out) // 4, columns):
        for j in cutlass.range_constexpr(columns):
            words = ptx.load_f32x4_if(is_later, slot + (first + j) * CONSUMER_THREADS * 16)
            for i in cutlass.range_constexpr(4):
                values[4 * j + i] = words[i]
        mine = [out[4 * first + i] for i in range(4 * columns)]
        for k in cutlass.range_constexpr(2):
            merge_values(values, mine, factors[k], k)
        for i in cutlass.range_constexpr(4 * columns):
            out[4 * first + i] = values[i]
        if not is_last:
            store_columns(slot, out, first, columns)
    if not is_last:
        store_row_stats(slot - thread * 16 + SLOT_BYTES, thread, row_max, row_sum)
        clear_partial(row_max, row_sum, out)


@cute.jit
def combine_token(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    consumer: Int32,
    work_tile: WorkTile,
    index: Int32,
    iteration: Int32,
    num_tiles: Int32,
) -> None:
    """Computes this CTA's columns of a token's output, after all partial results of the token are written."""
    prefetches = Boolean(False)
    if const_expr(may_prefetch(config)):
        prefetches = shared.prefetches.data_ptr().load() != 0
    if prefetches:
        combine_prefetched(config, args, shared, thread, consumer, work_tile)
    else:
        lane, warp = thread % 32, thread % 128 // 32
        row = warp * WARP_HEADS + lane // 4
        head = work_tile.head_block * HEADS + row
        sinks = (load_sink(args, head), load_sink(args, head + 8))
        begin = first_column(config, warp, work_tile.sub_split, work_tile.sub_splits)
        end = first_column(config, warp, work_tile.sub_split + 1, work_tile.sub_splits)
        if (iteration > 0) & (thread < 32):  # the list of the first work tile has been written already
            list_partials(config, args, shared, lane, work_tile, index)
        if thread == 0:
            wait_for_counter(arrived_counter(config, args, work_tile), work_tile.sub_splits)
        sync(NamedBarrier.CONSUMERS)
        reused, combined_before = slots_are_reused(num_tiles), Int32(0)
        if thread == 0:
            if not reused:
                combined_before = ptx.count(combined_counter(config, args, work_tile))
        if end - begin == 1:
            combine_columns(config, args, shared, work_tile, consumer, lane, warp, head, sinks, begin, end, True)
        elif end > begin:
            combine_columns(config, args, shared, work_tile, consumer, lane, warp, head, sinks, begin, end, False)
        if thread == 0:
            reset_counters(config, args, work_tile, combined_before)
        sync(NamedBarrier.CONSUMERS)  # all threads have read the list and the slots
        if reused & (thread == 0):
            ptx.add_release(combined_counter(config, args, work_tile))


@cute.jit
def combine_columns(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    work_tile: WorkTile,
    consumer: Int32,
    lane: Int32,
    warp: Int32,
    head: Int32,
    sinks: tuple,
    begin: Int32,
    end: Int32,
    single: cutlass.Constexpr,
) -> None:
    """Combines and writes columns [begin, end) of a warp's rows.

    Partial results are merged in order: first within each KV split, as one CTA would have merged its steps, then the KV
    splits.
    """
    partials_at_once, groups = config.combine_loads(single)
    partials = shared.partials.data_ptr()
    count = partials.load()
    size = 4 * groups
    thread = consumer * 128 + warp * 32 + lane  # the index of the thread that wrote these values
    # row_*: the current KV split; all_*: the earlier KV splits, then this one too.
    row_max, row_sum = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    values = cute.make_rmem_tensor((size,), Float32)
    all_max, all_sum = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    all_values = cute.make_rmem_tensor((size,), Float32)
    inverse = cute.make_rmem_tensor((2,), Float32)
    for base in cutlass.range(begin, end, groups, unroll=1):
        clear_partial(all_max, all_sum, all_values)
        done = Int32(0)
        while done < count:
            clear_partial(row_max, row_sum, values)
            more = Boolean(True)
            while more:
                belongs, row_stats, words = [], [], []
                for i in cutlass.range_constexpr(partials_at_once):
                    exists = done + i < count
                    entry = (partials + (1 + ptx.imin(done + i, count - 1))).load()
                    if const_expr(i == 0):
                        belongs.append(Boolean(True))
                    else:
                        belongs.append(belongs[-1] & exists & ((entry & 1) == 0))
                    slot = slot_address(args, entry >> 1) + thread * 16
                    row_stats.append(load_row_stats(slot, exists))
                    for u in cutlass.range_constexpr(groups):
                        wanted = exists if const_expr(u == 0) else exists & (base + u < end)
                        words.extend(ptx.load_f32x4_if(wanted, slot + (base + u) * COLUMN_BYTES))
                for i in cutlass.range_constexpr(partials_at_once):
                    if belongs[i]:
                        mine = words[size * i : size * (i + 1)]
                        merge_partial(row_max, row_sum, values, *row_stats[i], mine)
                        done += 1
                more = ((partials + (1 + done)).load() & 1) == 0
            merge_partial(all_max, all_sum, all_values, row_max, row_sum, values)
        if base == begin:
            row = warp * WARP_HEADS + lane // 4
            inverses = inverse_sums_of_warp(shared, consumer, warp, row, lane, sinks, all_max, all_sum)
            for k in cutlass.range_constexpr(2):
                inverse[k] = inverses[k]
        write_columns(config, args, work_tile, consumer, lane, head, base, end, all_values, inverse)


@cute.jit
def write_columns(
    config: cutlass.Constexpr,
    args: Arguments,
    work_tile: WorkTile,
    consumer: Int32,
    lane: Int32,
    head: Int32,
    base: Int32,
    end: Int32,
    values: cute.Tensor,
    inverse: cute.Tensor,
) -> None:
    """Writes O of the columns in `values`, from column `base` on; none from column `end` on."""
    for k in cutlass.range_constexpr(2):
        if head + 8 * k < args.num_heads:
            at = Int64(work_tile.token) * args.out_token_stride + Int64(head + 8 * k) * args.out_head_stride
            for u in cutlass.range_constexpr(cute.size(values) // 4):
                if base + u < end:
                    column = first_channel(config, work_tile, consumer) + (base + u) * 8 + lane % 4 * 2
                    low, high = (values[4 * u + 2 * k + i] * inverse[k] for i in range(2))
                    ptx.store_u32(args.out + (at + column) * 2, ptx.pack_bf16(low, high))


# Combine where the first sub-split is the longest: the CTAs of the others prefetch all partial results but the first


@cute.jit
def choose_prefetch(
    config: cutlass.Constexpr, shared: cutlass.Constexpr, splits: TokenSplits, lane: Int32, steps: Int32
) -> None:
    """Writes whether a token's sub-splits prefetch partial results before the first sub-split's is written.

    They do if the token has one KV split, only its first sub-split is longer than the others, and shared memory has
    room for all that they combine. `steps` are the steps of this lane's sub-split.
    """
    first_one, second_one = cute.arch.shuffle_sync(steps, 0), cute.arch.shuffle_sync(steps, 1)
    results, others = splits.steps - first_one, ptx.imax(splits.all_sub_splits - 1, Int32(1))
    columns = ptx.divide(config.groups_per_split * GROUP // 8 + others - 1, others)
    room = results * (columns + 1) <= PREFETCH_CELLS
    if lane == 0:
        prefetches = (splits.kv_splits == 1) & (first_one > second_one) & room
        shared.prefetches.data_ptr().store(Int32(prefetches))


@cute.jit
def combine_prefetched(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    thread: Int32,
    consumer: Int32,
    work_tile: WorkTile,
) -> None:
    """Combines where the first sub-split has a step more than the others: the CTAs of the others divide the columns.

    While they wait for the first partial result they load all others to the shared memory of Q, keys and P: row
    statistics [results][256][4] and columns [results][columns][256][4]. Every thread loads and reads its own values.
    """
    lane, warp = thread % 32, thread % 128 // 32
    combined_before = Int32(0)
    if work_tile.sub_split == 0:
        if thread == 0:
            combined_before = ptx.count(combined_counter(config, args, work_tile))
    else:
        row = warp * WARP_HEADS + lane // 4
        head = work_tile.head_block * HEADS + row
        sinks = (load_sink(args, head), load_sink(args, head + 8))
        others, partials = work_tile.sub_splits - 1, shared.partials.data_ptr()
        begin = first_column(config, warp, work_tile.sub_split - 1, others)
        end = first_column(config, warp, work_tile.sub_split, others)
        results, columns = partials.load() - 1, end - begin
        row_stats = Int32(shared.q.data_ptr().toint()) + thread * 16
        place = row_stats + results * COLUMN_BYTES
        if thread == 0:
            wait_for_counter(arrived_counter(config, args, work_tile), others, FIRST_SUB_SPLIT - 1)
        sync(NamedBarrier.CONSUMERS)
        prefetch_partials(args, partials, thread, results, begin, columns, row_stats, place)
        if thread == 0:
            wait_for_counter(arrived_counter(config, args, work_tile), FIRST_SUB_SPLIT + others)
            combined_before = ptx.count(combined_counter(config, args, work_tile))
        sync(NamedBarrier.CONSUMERS)

        slot = partial_address(args, partials, Int32(0), thread)
        of_first = load_row_stats(slot, Boolean(True))
        inverse = cute.make_rmem_tensor((2,), Float32)
        row_max, row_sum = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        values = cute.make_rmem_tensor((4 * PREFETCH_COLUMNS,), Float32)
        inverse.fill(0.0)
        for base in cutlass.range(begin, end, PREFETCH_COLUMNS, unroll=1):
            words = []
            for u in cutlass.range_constexpr(PREFETCH_COLUMNS):
                words.extend(ptx.load_f32x4_if(base + u < end, slot + (base + u) * COLUMN_BYTES))
            clear_partial(row_max, row_sum, values)
            merge_partial(row_max, row_sum, values, *of_first, words)
            cute.arch.cp_async_wait_group(0)
            for i in cutlass.range(results, unroll=1):
                known = ptx.load_shared_f32x4(row_stats + i * COLUMN_BYTES)
                joining = []
                for u in cutlass.range_constexpr(PREFETCH_COLUMNS):
                    existing = ptx.imin(base - begin + u, columns - 1)
                    joining.extend(ptx.load_shared_f32x4(place + (i * columns + existing) * COLUMN_BYTES))
                merge_partial(row_max, row_sum, values, (known[0], known[2]), (known[1], known[3]), joining)
            if base == begin:
                inverses = inverse_sums_of_warp(shared, consumer, warp, row, lane, sinks, row_max, row_sum)
                for k in cutlass.range_constexpr(2):
                    inverse[k] = inverses[k]
            write_columns(config, args, work_tile, consumer, lane, head, base, end, values, inverse)
    if thread == 0:
        reset_counters(config, args, work_tile, combined_before)


@cute.jit
def prefetch_partials(
    args: Arguments,
    partials: cute.Pointer,
    thread: Int32,
    results: Int32,
    begin: Int32,
    columns: Int32,
    row_stats: Int32,
    place: Int32,
) -> None:
    """Starts copying a thread's row statistics and columns, from `begin` on, of all partial results but the first."""
    for i in cutlass.range(results, unroll=1):
        slot = partial_address(args, partials, i + 1, thread)
        ptx.copy_async(row_stats + i * COLUMN_BYTES, slot + SLOT_BYTES, Int32(16))
        for u in cutlass.range(columns, unroll=4):
            target = place + (i * columns + u) * COLUMN_BYTES
            ptx.copy_async(target, slot + (begin + u) * COLUMN_BYTES, Int32(16))
    cute.arch.cp_async_commit_group()
