"""The epilogue of the Hopper kernels: normalises O by the row sums and the sink, and writes it (persistent.py)."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsv4_kernels.device import ptx
from dsv4_kernels.device.tma import TmaTensor, swizzled_layout, tma_partition
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    GROUP,
    HALF_DIM,
    HALF_GROUPS,
    HEADS,
    LOG2_E,
    WARP_HEADS,
    Arguments,
    Configuration,
    NamedBarrier,
)
from dsv4_kernels.sparse_attention.sm90.softmax import store_p
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import WorkTile

# Normalisation


@cute.jit
def load_sink(args: Arguments, head: Int32) -> Float32:
    """The sink of a head; -inf if there is none."""
    sink = -Float32.inf
    if args.sink != 0:
        if head < args.num_heads:
            sink = ptx.load_f32(args.sink + head * 4)
    return sink


@cute.jit
def inverse_sum(sink: Float32, row_max: Float32, row_sum: Float32) -> Float32:
    """1 / (row sum + weight of the sink); 0 where that sum is 0."""
    row_sum += ptx.exp2(ptx.fma(sink, Float32(LOG2_E), -row_max))  # rounded once, the same in every kernel
    inverse = Float32(0.0)
    if row_sum != 0.0:
        inverse = cute.arch.rcp_approx(row_sum)
    return inverse


@cute.jit
def reduce_row_sums(
    shared: cutlass.Constexpr,
    consumer: Int32,
    row: Int32,
    lane: Int32,
    row_sum: cute.Tensor,
    barrier: NamedBarrier | Int32 = NamedBarrier.CONSUMERS,
    threads: cutlass.Constexpr = CONSUMER_THREADS,
) -> None:
    """Sums `row_sum` of two rows over the threads of both consumers that share them; waits for them at `barrier`."""
    place = Int32(shared.row_sums.data_ptr().toint()) + row * 4
    for i in cutlass.range_constexpr(2):
        row_sum[i] += cute.arch.shuffle_sync_bfly(row_sum[i], offset=1)
        row_sum[i] += cute.arch.shuffle_sync_bfly(row_sum[i], offset=2)
        if lane % 4 == 0:
            ptx.store_shared_f32(place + (consumer * HEADS + i * 8) * 4, row_sum[i])
    sync(barrier, threads)
    for i in cutlass.range_constexpr(2):
        row_sum[i] += ptx.load_shared_f32(place + ((1 - consumer) * HEADS + i * 8) * 4)


@cute.jit
def inverse_sums(
    shared: cutlass.Constexpr,
    work_tile: WorkTile,
    consumer: Int32,
    row: Int32,
    lane: Int32,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    inverse: cute.Tensor,
) -> None:
    """Writes to `inverse` the factors that normalise O of two rows; both consumers of the CTA take part."""
    reduce_row_sums(shared, consumer, row, lane, row_sum)
    for i in cutlass.range_constexpr(2):
        sink = (shared.sinks.data_ptr() + work_tile.head_block * HEADS + row + 8 * i).load()
        inverse[i] = inverse_sum(sink, row_max[i], row_sum[i])


def inverse_sums_of_warp(
    shared: cutlass.Constexpr,
    consumer: Int32,
    warp: Int32,
    row: Int32,
    lane: Int32,
    sinks: tuple,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
) -> tuple:
    """The factors that normalise O of two rows, by one warp and the same warp of the other consumer."""
    reduce_row_sums(shared, consumer, row, lane, row_sum, NamedBarrier.COMBINE + warp, 64)
    return tuple(inverse_sum(sinks[k], row_max[k], row_sum[k]) for k in range(2))


# Stores of O


def first_channel(config: Configuration, work_tile: WorkTile, consumer: Int32) -> Int32:
    """The first channel of O that this consumer has."""
    return consumer * HALF_DIM + work_tile.channel_split * (config.groups_per_split * GROUP)


@cute.jit
def store_group_of_out(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    tma_out: TmaTensor,
    work_tile: WorkTile,
    consumer: Int32,
    warp: Int32,
    lane: Int32,
    out: cute.Tensor,
    inverse: cute.Tensor,
    i: cutlass.Constexpr,
) -> None:
    """Writes the i-th 64 channels of O, if this consumer has them, and clears them in registers.

    A warp stores its rows to the shared memory of its P, for TMA. `wait_for_tma_store` must follow.
    """
    if const_expr(i < config.groups_per_split):
        first = i * (HEADS * GROUP // 128)
        words = []
        for j in cutlass.range_constexpr(GROUP // 8):
            for k in cutlass.range_constexpr(2):
                at = first + 4 * j + 2 * k
                words.append(ptx.pack_bf16(out[at] * inverse[k], out[at + 1] * inverse[k]))
        if const_expr(i > 0):
            wait_for_tma_store()
        store_p(Int32(shared.p.data_ptr().toint()) + consumer * BLOCK_BYTES, words, warp, lane)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        places = shared.p.get_tensor(*swizzled_layout((WARP_HEADS, GROUP, HEADS // WARP_HEADS, 2)))
        sources, targets = tma_partition(tma_out, places)
        heads = work_tile.head_block * (HEADS // WARP_HEADS) + warp
        group = consumer * HALF_GROUPS + work_tile.channel_split * config.groups_per_split + i
        with cute.arch.elect_one():
            cute.copy(tma_out.atom, sources[None, warp, consumer], targets[None, heads, group, work_tile.token])
            cute.arch.cp_async_bulk_commit_group()
        for j in cutlass.range_constexpr(first, first + HEADS * GROUP // 128):
            out[j] = Float32(0.0)


def store_out(store_group: Callable[[int], None]) -> None:
    """Writes all channels of O that this consumer has, 64 at a time by `store_group_of_out`."""
    for i in range(HALF_GROUPS):
        store_group(i)
    wait_for_tma_store()


def wait_for_tma_store() -> None:
    """Waits until TMA has read the shared memory of this warp's stores."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
