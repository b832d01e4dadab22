"""Attention on Hopper for few tokens: every step of a token has its own CTA, and a token's CTAs are a cluster.

The bits are those of persistent.py: a step is computed with the same products in the same order, and steps are merged
in the same order. But a CTA waits for less. It needs no knowledge of other tokens: its position in the grid is
its step, channel split, token and block of heads. No stage is used twice, so none is given back. And partial results
do not go through global memory: every CTA of the cluster receives its columns of all partial results by `st.async`.

    who             does                                                        waits for
    one warp        loads Q, by TMA, group by group
    producers       gather rows: e4m3 -> bf16, st.shared; cp.async              row indices, rows
    consumers       S = Q K^T, group by group as they arrive                    full[group], keys and Q
                    P; its row sums go to all CTAs while products run           the other consumer's P
                    P V of their channels; sends columns to the merging CTAs    ready: all CTAs have read Q (or keys)
                    combine: merge the columns of all steps in order; write O   received, all bytes

Four lanes share a row in all groups, so that the groups complete in the order in which the scores need them.

CTAs beyond a token's steps only take part in the waits. A cluster waits for no other cluster, so correctness does not
depend on how many clusters are resident at once; but the kernel is only faster than persistent.py if all of them are
(`launch._channel_splits_of_clusters`).
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.tma import TmaTensor, swizzled_layout, tma_partition
from dsv4_kernels.kv_layout import NOPE_DIM
from dsv4_kernels.sparse_attention.sm90 import epilogue, gather, q_and_out, softmax
from dsv4_kernels.sparse_attention.sm90 import tile_scheduler as scheduler
from dsv4_kernels.sparse_attention.sm90.barriers import arrive_for_warp, sync
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    DIM,
    GROUP,
    GROUPS,
    HALF_GROUPS,
    HEADS,
    KEY_TILE,
    KEY_TILE_BYTES,
    NO_ROW_MAX,
    ROW_STATS_BYTES,
    ROW_STRIDE,
    STEP,
    WARP_HEADS,
    Arguments,
    Configuration,
    NamedBarrier,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import WorkTile

MAX_CLUSTER = 9
"""Steps of a token at most: a CTA's shared memory has room for its columns of this many steps."""
ROW_LANES = 4
"""Producer threads that share a row, 16 bytes of a group each."""
PREFETCH_DEPTH = 4
"""Channel groups of FP8 rows that a producer's thread loads ahead."""
SPARE_BYTES = 12 * 1024
"""Bytes before Q; with Q, which is not read after the scores, they hold all that a CTA receives in most clusters."""
COLUMN_BYTES = CONSUMER_THREADS * 16
"""Bytes of a column of 8 channels of both consumers: 16 a thread."""


@cute.struct
class ClusterShared:
    """Shared memory of a CTA: 222 KiB. Columns that the CTA receives overwrite it from its beginning."""

    spare: cute.struct.Align[cute.struct.MemRange[Uint8, SPARE_BYTES], 1024]
    q: cute.struct.Align[cute.struct.MemRange[BFloat16, HEADS * DIM], 1024]
    keys: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * KEY_TILE * DIM], 1024]
    # keys, p, rows, row_max, row_sums: as in `plan.Shared`
    p: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * HEADS * KEY_TILE], 1024]
    rows: cute.struct.MemRange[Uint8, 2 * KEY_TILE // 8]
    row_max: cute.struct.MemRange[Float32, 2 * HEADS]
    row_sums: cute.struct.MemRange[Float32, 2 * HEADS]
    full: cute.struct.MemRange[Int64, GROUPS]
    # full: [channel group], for both key tiles and Q
    ready: cute.struct.MemRange[Int64, 1]
    # ready: other CTAs may send columns to this CTA
    received: cute.struct.MemRange[Int64, 1]
    # received: the columns of all steps have arrived


@cute.jit
def launch(config: cutlass.Constexpr, arguments: Arguments, num_steps: Int32, stream: cuda.CUstream) -> None:
    """Launches clusters of `num_steps` CTAs, the most steps of a token."""
    tma_out = q_and_out.tma_of_out(arguments)
    kernel(config, arguments, q_and_out.tma_of_q(arguments), tma_out).launch(
        grid=[num_steps, config.channel_splits, arguments.num_tokens * scheduler.count_head_blocks(arguments)],
        cluster=[num_steps, 1, 1],
        block=[config.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(config: cutlass.Constexpr, args: Arguments, tma_q: TmaTensor, tma_out: TmaTensor) -> None:
    """Sets up barriers and sends every warp to its role with its number of registers."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cutlass.utils.SmemAllocator().allocate(ClusterShared)
    step, channel_split, index = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    token = index >> (scheduler.count_head_blocks(args) - 1)
    head_block = index & (scheduler.count_head_blocks(args) - 1)
    if warp == 0:
        with cute.arch.elect_one():
            for group in cutlass.range_constexpr(GROUPS):
                arrivals = 1 + STEP * ROW_LANES // 32 + async_arrivals(config, group)
                cute.arch.mbarrier_init(shared.full.data_ptr() + group, arrivals)
            cute.arch.mbarrier_init(shared.ready.data_ptr(), num_ctas)
            cute.arch.mbarrier_init(shared.received.data_ptr(), 1)
            cute.arch.mbarrier_init_fence()
        dependent_launch.wait()
        load_q(shared, tma_q, token, head_block)
    cute.arch.sync_warp()
    cute.arch.cluster_arrive_relaxed(aligned=True)
    dependent_launch.begin()
    visible, row_index = scheduler.visible_entries(config, args, token), Int32(-1)
    gathering = thread - CONSUMER_THREADS
    if gathering >= 0:
        row_index = gather.load_listed_row(config, args, token, step, gathering // ROW_LANES)
    cute.arch.barrier()
    if warp < CONSUMER_THREADS // 32:
        cute.arch.setmaxregister_increase(config.registers[0])
        steps = scheduler.count_steps(args, visible)
        work_tile = WorkTile(token, head_block, step, steps, channel_split, step, steps, True, visible)
        consume(config, args, shared, tma_out, thread, warp // 4, work_tile)
    else:
        cute.arch.setmaxregister_decrease(config.registers[1])
        row_index = gather.hide_invisible(args, visible, step, gathering // ROW_LANES, row_index)
        produce(config, args, shared, gathering, step, row_index)
        cute.arch.cluster_wait()


@cute.jit
def load_q(shared: cutlass.Constexpr, tma_q: TmaTensor, token: Int32, head_block: Int32) -> None:
    """Starts copying Q; its bytes of a channel group arrive at full[group], like the keys of that group."""
    places = shared.q.get_tensor(*swizzled_layout((HEADS, GROUP, GROUPS)))
    targets, sources = tma_partition(tma_q, places)
    for group in scheduler.groups_in_order():
        full = shared.full.data_ptr() + group
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, BLOCK_BYTES)
        cute.copy(tma_q.atom, sources[None, head_block, group, token], targets[None, group], tma_bar_ptr=full)


# Producer warps


@cute.jit
def produce(
    config: cutlass.Constexpr, args: Arguments, shared: cutlass.Constexpr, thread: Int32, step: Int32, row_index: Int32
) -> None:
    """Fills all groups with the rows of a step; `row_index` is the index of this thread's row.

    FP8 rows wait in registers: loads are issued PREFETCH_DEPTH groups before their conversion. More loads would fill
    the load queue and stall the warp, and with it the conversion of groups that have arrived.
    """
    lane, warp, row, row_lane = thread % 32, thread // 32, thread // ROW_LANES, thread % ROW_LANES
    address = gather.row_address(config, args, step, row_index) + row_lane * 16
    order, words, scales = scheduler.groups_in_order(), {}, None
    if const_expr(config.fp8_rows):
        scales = ptx.load_8_bytes(gather.scales_address(config, args, step, row_index), row_index)
        for group in order[:PREFETCH_DEPTH]:
            words[group] = load_words(config, address, group)
    bits = gather.bits_of_rows(row_index >= 0)
    if lane == 0:
        (shared.rows.data_ptr() + warp).store(Uint8(bits))
    place = Int32(shared.keys.data_ptr().toint()) + row // KEY_TILE * KEY_TILE_BYTES + row % KEY_TILE * ROW_STRIDE
    fill_groups(config, shared, place, row, row_lane, lane, address, order, words, scales)


def fill_groups(
    config: Configuration,
    shared: cutlass.Constexpr,
    place: Int32,
    row: Int32,
    row_lane: Int32,
    lane: Int32,
    address: Int64,
    order: list,
    words: dict,
    scales: tuple | None,
) -> None:
    """Fills the groups in the order in which the scores need them."""
    for i, group in enumerate(order):
        block, barrier = place + group * BLOCK_BYTES, shared.full.data_ptr() + group
        if async_arrivals(config, group):
            offset = NOPE_DIM if config.fp8_rows else group * GROUP * 2
            for j in range(ROW_STRIDE // 16 // ROW_LANES):
                target = block + ((j * ROW_LANES + row_lane) ^ (row & 7)) * 16
                ptx.copy_row_async(target, address, offset + j * ROW_LANES * 16)
        else:
            scale = ptx.scale_pair((scales[group // 4] >> (8 * (group % 4))) & 0xFF)
            gather.store_16_channels(block, 0, row, row_lane, words.pop(group), scale)
            cute.arch.fence_view_async_shared()  # generic stores, read by wgmma
            cute.arch.sync_warp()
        arrive_for_warp(barrier, lane)
        if async_arrivals(config, group):
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
        if config.fp8_rows and i + PREFETCH_DEPTH < GROUPS:
            words[order[i + PREFETCH_DEPTH]] = load_words(config, address, order[i + PREFETCH_DEPTH])


def load_words(config: Configuration, address: Int64, group: int) -> tuple:
    """A lane's e4m3 of a group of its row; empty for groups that are copied as bf16."""
    return () if async_arrivals(config, group) else ptx.load_16_bytes(address, group * GROUP)


def async_arrivals(config: Configuration, group: int) -> int:
    """Arrivals at full[group] by completed cp.async: for bf16 rows, and the last channels of FP8 rows."""
    return STEP * ROW_LANES if group == GROUPS - 1 or not config.fp8_rows else 0


# Consumer warps


@cute.jit
def consume(
    config: cutlass.Constexpr,
    args: Arguments,
    shared: cutlass.Constexpr,
    tma_out: TmaTensor,
    thread: Int32,
    consumer: Int32,
    work_tile: WorkTile,
) -> None:
    """One consumer warpgroup: scores of key tile `consumer`, and this channel split's part of channels
    [consumer * 256, + 256) of O."""
    in_group = thread % 128
    lane, warp = thread % 32, in_group // 32
    row = warp * WARP_HEADS + lane // 4
    full = shared.full.data_ptr()
    p_address = Int32(shared.p.data_ptr().toint())
    rows = cute.recast_ptr(shared.rows.data_ptr() + consumer * KEY_TILE // 8, dtype=Uint32)
    shared_max = Int32(shared.row_max.data_ptr().toint()) + row * 4

    mma = softmax.products_of(shared, in_group)
    scores = cute.make_rmem_tensor(mma.scores.partition_shape_C((HEADS, KEY_TILE)), Float32)
    shape = mma.own.partition_shape_C((HEADS, GROUP))
    products = [cute.make_rmem_tensor(shape, Float32) for _ in range(config.groups_per_split)]
    own_p = cute.make_rmem_tensor(mma.own.partition_shape_A((HEADS, KEY_TILE)), BFloat16)
    packed_p = cute.recast_tensor(own_p, Uint32)
    row_sum = cute.make_rmem_tensor((2,), Float32)
    row_sum.fill(0.0)

    first_head, step, steps = work_tile.head_block * HEADS, work_tile.first_step, work_tile.end_step
    sinks = epilogue.load_sink(args, first_head + row), epilogue.load_sink(args, first_head + row + 8)
    holes = softmax.compute_scores(full, Int32(0), consumer, rows, mma, scores)
    softmax.mask_scores(scores, holes, lane)
    step_max = softmax.find_step_max(args, scores, shared_max, consumer, lane)
    cute.arch.cluster_wait()  # all CTAs of the cluster have started
    if fits_before_keys(config, steps):
        announce_ready(shared, thread, steps)
    softmax.exponentiate(args, scores, step_max, packed_p, row_sum)
    softmax.store_p(p_address + consumer * BLOCK_BYTES, packed_p, warp, lane)
    cute.arch.fence_view_async_shared()
    sync(NamedBarrier.CONSUMERS)
    for i in cutlass.range_constexpr(config.groups_per_split):
        group = consumer * HALF_GROUPS + work_tile.channel_split * config.groups_per_split + i
        own_values = mma.values[None, None, None, consumer * GROUPS + group]
        softmax.multiply(mma.own, products[i], own_p, own_values, 0, False)
        other_p = mma.p[None, None, None, 1 - consumer]
        other_values = mma.values[None, None, None, (1 - consumer) * GROUPS + group]
        softmax.multiply(mma.other, products[i], other_p, other_values, 0, True)
    warpgroup.commit_group()
    row_max = cute.make_rmem_tensor((2,), Float32)
    for k in cutlass.range_constexpr(2):
        row_max[k] = step_max[k]
    if fits_before_keys(config, steps):
        send_row_stats(config, shared, thread, step, steps, row_max, row_sum)  # while products run
    warpgroup.wait_group(0)
    if not fits_before_keys(config, steps):
        sync(NamedBarrier.CONSUMERS)  # both consumers have read the operands of their products
        announce_ready(shared, thread, steps)
        send_row_stats(config, shared, thread, step, steps, row_max, row_sum)
    inverse_sums = functools.partial(
        epilogue.inverse_sums_of_warp, shared, consumer, row // WARP_HEADS, row, lane, sinks
    )
    if steps == 1:
        if step == 0:
            for product in products:
                for j in cutlass.range_constexpr(cute.size(product)):
                    product[j] = product[j] + 0.0  # -0 becomes +0, as in every merge of partial results
            inverse = inverse_sums(row_max, row_sum)
            store_by_tma(config, shared, tma_out, work_tile, consumer, warp, lane, inverse, products)
    elif step < steps:
        combine_columns(config, shared, thread, step, steps, row_max, row_sum, products)
        if first_column(config, step, steps) < first_column(config, step + 1, steps):
            inverse = inverse_sums(row_max, row_sum)
            write_columns(config, args, work_tile, consumer, row, lane, inverse, products)


# Combine, through the shared memory of the cluster


def count_columns(config: Configuration) -> int:
    """Columns of 8 channels of a consumer, which the CTAs of a token divide."""
    return config.groups_per_split * GROUP // 8


def first_column(config: Configuration, step: Int32, steps: Int32) -> Int32:
    """First column of the CTA that has `step`; the first CTA has at least one column."""
    return ptx.divide(step * count_columns(config) + steps - 1, steps)


def bytes_of_slot(config: Configuration, steps: Int32) -> Int32:
    """Bytes that a CTA receives from a step: row maxima and row sums of two rows, [256 threads][4]; then its columns,
    [columns][256][4]."""
    return first_column(config, Int32(1), steps) * COLUMN_BYTES + ROW_STATS_BYTES


def fits_before_keys(config: Configuration, steps: Int32) -> Boolean:
    """Whether a CTA's received columns fit into the spare bytes and Q, which is not read after the scores."""
    return steps * bytes_of_slot(config, steps) <= SPARE_BYTES + HEADS * DIM * 2


@cute.jit
def announce_ready(shared: cutlass.Constexpr, thread: Int32, steps: Int32) -> None:
    """Signals the other CTAs of the token that they may overwrite this CTA's memory."""
    cute.arch.sync_warp()
    if (thread < steps) & (steps > 1):
        ptx.arrive_remote(ptx.remote(Int32(shared.ready.data_ptr().toint()), thread))


@cute.jit
def send_row_stats(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    thread: Int32,
    step: Int32,
    steps: Int32,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
) -> None:
    """Sends the row maxima and row sums of this step to all CTAs of the token, after they have signalled ready."""
    if (step < steps) & (steps > 1):
        received = shared.received.data_ptr()
        columns = first_column(config, step + 1, steps) - first_column(config, step, steps)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(received, steps * (columns * COLUMN_BYTES + ROW_STATS_BYTES))
        slot = Int32(shared.spare.data_ptr().toint()) + thread * 16 + step * bytes_of_slot(config, steps)
        ptx.wait_cluster(Int32(shared.ready.data_ptr().toint()), Int32(0))
        for cta in cutlass.range(0, steps, 1, unroll=1):
            target, barrier = ptx.remote(slot, cta), ptx.remote(Int32(received.toint()), cta)
            ptx.store_async_f32x4(target, (row_max[0], row_sum[0], row_max[1], row_sum[1]), barrier)


@cute.jit
def combine_columns(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    thread: Int32,
    step: Int32,
    steps: Int32,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    products: list,
) -> None:
    """Sends every CTA its columns of this step's product; merges the columns that this CTA receives, of all steps."""
    received, columns = Int32(shared.received.data_ptr().toint()), count_columns(config)
    begin, end = first_column(config, step, steps), first_column(config, step + 1, steps)
    slot_bytes = bytes_of_slot(config, steps)
    base = Int32(shared.spare.data_ptr().toint()) + thread * 16
    slot = base + step * slot_bytes
    place, before = Int32(0), Int32(-1)
    for u in cutlass.range_constexpr(columns):
        owner = u * steps // columns
        place = (place + 1) if owner == before else Int32(0)
        before = owner
        words = tuple(products[u // 8][4 * (u % 8) + j] for j in range(4))
        target = ptx.remote(slot + (ROW_STATS_BYTES + place * COLUMN_BYTES), owner)
        ptx.store_async_f32x4(target, words, ptx.remote(received, owner))
    for product in products:
        product.fill(0.0)
    row_max.fill(NO_ROW_MAX)
    row_sum.fill(0.0)
    ptx.wait_cluster(received, Int32(0))
    if end > begin:
        for from_step in cutlass.range(0, steps, 1, unroll=1):
            merge_slot(config, base + from_step * slot_bytes, end - begin, row_max, row_sum, products)


def merge_slot(
    config: Configuration, slot: Int32, mine: Int32, row_max: cute.Tensor, row_sum: cute.Tensor, products: list
) -> None:
    """Merges the `mine` columns that a step sent into the merged columns of the earlier steps."""
    columns = count_columns(config) // 2
    row_stats = ptx.load_shared_f32x4(slot)
    words = []
    for u in range(columns):
        existing = ptx.imin(Int32(u), mine - 1)  # clamped: the result of columns beyond `mine` is unused
        words.append(ptx.load_shared_f32x4(slot + (ROW_STATS_BYTES + existing * COLUMN_BYTES)))
    for k in range(2):
        sums = row_stats[1], row_stats[3]
        before, weight = softmax.merge_row_stats(row_max, row_sum, row_stats[2 * k], sums, k)
        for u in range(columns):
            product = products[u // 8]
            for at in range(4 * (u % 8) + 2 * k, 4 * (u % 8) + 2 * k + 2):
                product[at] = ptx.fma(words[u][at % 4], weight, product[at] * before)


# Epilogue


@cute.jit
def write_columns(
    config: cutlass.Constexpr,
    args: Arguments,
    work_tile: WorkTile,
    consumer: Int32,
    row: Int32,
    lane: Int32,
    inverse: tuple,
    products: list,
) -> None:
    """Writes this CTA's columns of O, at most half of all columns."""
    begin = first_column(config, work_tile.first_step, work_tile.end_step)
    end = first_column(config, work_tile.first_step + 1, work_tile.end_step)
    for k in cutlass.range_constexpr(2):
        head = work_tile.head_block * HEADS + row + 8 * k
        if head < args.num_heads:
            at = Int64(work_tile.token) * args.out_token_stride + Int64(head) * args.out_head_stride
            at += epilogue.first_channel(config, work_tile, consumer) + begin * 8 + lane % 4 * 2
            for u in cutlass.range_constexpr(count_columns(config) // 2):
                if u < end - begin:
                    first = 4 * (u % 8) + 2 * k
                    low, high = products[u // 8][first] * inverse[k], products[u // 8][first + 1] * inverse[k]
                    ptx.store_u32(args.out + (at + u * 8) * 2, ptx.pack_bf16(low, high))


@cute.jit
def store_by_tma(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    tma_out: TmaTensor,
    work_tile: WorkTile,
    consumer: Int32,
    warp: Int32,
    lane: Int32,
    inverse: tuple,
    products: list,
) -> None:
    """Writes all columns of O of a token with a single step, by TMA from the shared memory of Q."""
    q = Int32(shared.q.data_ptr().toint())
    places = shared.q.get_tensor(*swizzled_layout((WARP_HEADS, GROUP, HEADS // WARP_HEADS, GROUPS)))
    sources, targets = tma_partition(tma_out, places)
    heads = work_tile.head_block * (HEADS // WARP_HEADS) + warp
    for i in cutlass.range_constexpr(len(products)):
        words = output_words(products[i], inverse)
        block = consumer * HALF_GROUPS + i
        softmax.store_p(q + block * BLOCK_BYTES, words, warp, lane)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        group = consumer * HALF_GROUPS + work_tile.channel_split * config.groups_per_split + i
        if lane == 0:
            cute.copy(tma_out.atom, sources[None, warp, block], targets[None, heads, group, work_tile.token])
    if lane == 0:
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def output_words(product: cute.Tensor, inverse: tuple) -> list[Uint32]:
    """64 channels of O, normalised, as pairs of bf16."""
    pairs = range(cute.size(product) // 2)
    return [ptx.pack_bf16(*(product[2 * i + j] * inverse[i % 2] for j in range(2))) for i in pairs]
