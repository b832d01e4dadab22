"""Entries of HCA layers on Hopper and Blackwell: a cluster of eight CTAs a group, 64 channels each.

A group has 128 rows of 4 KB, and in a decode batch few groups close in a step: a single CTA would be bound by the bytes
that one multiprocessor can have in flight. So a CTA has the channels of one FP8 scale, 16 threads a row, eight rows a
thread. Each warp computes a partial softmax of its 16 rows (maximum, sum of weights, weighted sum), and the first warp
merges them in the order of the warps. The CTAs of a cluster exchange one number, the sum of squares for the norm.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4_kernels.compressor import entries, rows
from dsv4_kernels.compressor.csa import load_four
from dsv4_kernels.compressor.rows import CHUNK, Arguments, Batch, Problem
from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import WARP, add, sum_of_squares, sum_over_lanes
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch, sync_threads
from dsv4_kernels.kv_layout import ROW_DIM, SCALE_GROUP

RATIO = 128
CLUSTER = ROW_DIM // SCALE_GROUP
CHUNKS = SCALE_GROUP // CHUNK
"""Threads of a row in one CTA: half a warp."""
ROWS_A_THREAD = 8
ROW_THREADS = RATIO // ROWS_A_THREAD
THREADS = ROW_THREADS * CHUNKS
WARPS = THREADS // WARP
PARTIAL_BYTES = SCALE_GROUP * 4
"""Bytes of one quantity of one warp: maxima, sums of weights or weighted sums of 64 channels."""
QUANTITIES = 3


@cute.jit
def launch(arguments: Arguments, num_groups: Int32, stream: cuda.CUstream) -> None:
    """Launches one cluster for each group."""
    kernel(arguments).launch(
        grid=[num_groups * CLUSTER, 1, 1],
        cluster=[CLUSTER, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments) -> None:
    """The kernel of a launch of its own."""
    body(args, None, (), cta_of_launch())


@cute.jit
def body(
    args: Arguments, configuration: cutlass.Constexpr[None], prepared: tuple, place: cutlass.Constexpr[Cta]
) -> None:
    """Makes 64 channels of an entry, if its group is closed, and keeps these channels of the request's raw rows."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta = place.number
    memory = cutlass.utils.SmemAllocator()
    partials = Int32(memory.allocate_array(Float32, num_elems=WARPS * QUANTITIES * SCALE_GROUP).toint())
    squares = Int32(memory.allocate_array(Float32, num_elems=1).toint())
    batch, p = args.batch, args.first
    group, rank = cta // CLUSTER, cta % CLUSTER
    warp, lane = thread // WARP, thread % WARP
    row_thread = thread // CHUNKS
    channel = rank * SCALE_GROUP + thread % CHUNKS * CHUNK
    sources = batch.sources + Int64(group) * (RATIO * 4)
    newest = Int32(-1)
    for source in load_four(sources + lane * 16):
        newest = ptx.imax(newest, source)
    newest = cute.arch.warp_redux_sync(newest, "max")
    request = group // batch.groups_per_request
    keeps = (batch.tokens_per_request > 0) & (request * batch.groups_per_request == group)
    first_token = request * batch.tokens_per_request
    if newest >= 0:
        make_partial(batch, p, sources, row_thread, channel, partials + warp * (QUANTITIES * PARTIAL_BYTES), lane)
        sync_threads(place.threads)
        if warp == 0:
            values = merged(partials + lane % CHUNKS * 16)
            total = sum_over_lanes(sum_of_squares(values), CHUNKS)
            if lane == 0:
                ptx.store_shared_f32(squares, total)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            total = sum_over_lanes(load_remote(ptx.remote(squares, lane % CLUSTER)), CLUSTER)
            cute.arch.cluster_arrive()
            made = entries.normed_and_rotated(batch, p, group, values, total, ROW_DIM, channel)
            entries.store_main(batch, p, group, made, channel)
        else:
            cute.arch.cluster_arrive()
            keep(batch, p, first_token, keeps, row_thread, channel)
            cute.arch.cluster_wait()
            cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # until the other CTAs have read the sum of squares
    else:
        keep(batch, p, first_token, keeps, row_thread, channel)


@cute.jit
def keep(
    batch: Batch, p: Problem, first_token: Int32, keeps: cutlass.Boolean, row_thread: Int32, channel: Int32
) -> None:
    """Keeps raw rows of a request, half a warp a row; the first warp keeps none. Rows are stored after the group's rows
    were read: see rows.py."""
    if keeps & (row_thread >= WARP // CHUNKS):
        for i in cutlass.range(
            ROW_THREADS - 1 - row_thread, batch.tokens_per_request, ROW_THREADS - WARP // CHUNKS, unroll=1
        ):
            raw = rows.load_raw(batch, p, first_token + i, Int32(1), ROW_DIM, 1, RATIO, channel)
            rows.store_raw(p, raw, ROW_DIM, channel)


@cute.jit
def make_partial(
    batch: Batch, p: Problem, sources: Int64, row_thread: Int32, channel: Int32, partial: Int32, lane: Int32
) -> None:
    """Stores the maximum, sum of weights and weighted sum of a warp's rows to shared memory."""
    first = row_thread * ROWS_A_THREAD
    numbers = [*load_four(sources + first * 4), *load_four(sources + first * 4 + 16)]
    loaded = []
    for i in cutlass.range_constexpr(ROWS_A_THREAD):
        loaded.append(rows.load_row(batch, p, numbers[i], first + i, ROW_DIM, channel))
    scores = [rows.scores_of(row) for row in loaded]
    maxima = [ptx.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=CHUNKS)) for x in rows.largest(scores)]
    totals, sums = rows.weighted(loaded, scores, maxima)
    totals = [add(x, cute.arch.shuffle_sync_bfly(x, offset=CHUNKS)) for x in totals]
    sums = [add(x, cute.arch.shuffle_sync_bfly(x, offset=CHUNKS)) for x in sums]
    if lane < CHUNKS:
        for i, values in enumerate((maxima, totals, sums)):
            ptx.store_shared_f32x4(partial + i * PARTIAL_BYTES + lane * 16, tuple(values))


def merged(partials: Int32) -> list:
    """Four channels of the entry, rounded to bf16, from the partial softmaxes of all warps."""
    parts = [
        [ptx.load_shared_f32x4(partials + (warp * QUANTITIES + i) * PARTIAL_BYTES) for i in range(QUANTITIES)]
        for warp in range(WARPS)
    ]
    maxima = [rows.finite(x) for x in rows.largest([maximum for maximum, _, _ in parts])]
    totals, sums = [Float32(0.0)] * CHUNK, [Float32(0.0)] * CHUNK
    for maximum, total, weighted_sum in parts:
        scales = [rows.weight_of(a, b) for a, b in zip(maximum, maxima, strict=True)]
        totals = [ptx.fma(scale, x, into) for scale, x, into in zip(scales, total, totals, strict=True)]
        sums = [ptx.fma(scale, x, into) for scale, x, into in zip(scales, weighted_sum, sums, strict=True)]
    return entries.rounded(sums, totals)


def load_remote(address: Int32) -> Float32:
    """An fp32 from the shared memory of another CTA of the cluster."""
    return ptx.asm("ld.shared::cluster.f32 {$w0}, [{$r0}];", [Float32], address)
