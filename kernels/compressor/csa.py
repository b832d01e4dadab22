"""Entries of CSA layers on Hopper and Blackwell: one CTA a compression group, four warps for the entry and one for the
indexer's key.

A thread computes four channels of one of the two. It loads them from the group's eight rows at once; the softmax of a
channel needs no other thread, and only the norm's sum of squares goes through shared memory. The four warps wait for
each other once; no other thread waits.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4_kernels.compressor import entries, rows
from dsv4_kernels.compressor.entries import INDEX_DIM
from dsv4_kernels.compressor.rows import CHUNK, Arguments, Batch, Problem
from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import WARP, add, sum_of_squares, sum_over_lanes
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch
from dsv4_kernels.kv_layout import ROW_DIM

RATIO = 4
PARTS = 2
"""Compression groups whose raw rows an entry covers; also the number of parts (halves) of a raw row."""
MAIN_THREADS = ROW_DIM // CHUNK
MAIN_BARRIER = 1


@cute.jit
def launch(arguments: Arguments, dims: cutlass.Constexpr[tuple], num_groups: Int32, stream: cuda.CUstream) -> None:
    """Launches one CTA for each group. dims: channels of the compressions, (512,), (128,) or (512, 128)."""
    kernel(arguments, dims).launch(
        grid=[num_groups, 1, 1], block=[sum(dims) // CHUNK, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, dims: cutlass.Constexpr[tuple]) -> None:
    """The kernel of a launch of its own."""
    body(args, dims, (), cta_of_launch())


@cute.jit
def body(args: Arguments, dims: cutlass.Constexpr[tuple], prepared: tuple, cta: cutlass.Constexpr[Cta]) -> None:
    """Makes the entries of one group, if it is closed, and keeps the raw rows of its request, if it is the request's
    first group."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    group, batch = cta.number, args.batch
    if cutlass.const_expr(len(dims) == 2):
        is_index = thread >= MAIN_THREADS
        dim = cutlass.select_(is_index, Int32(INDEX_DIM), Int32(ROW_DIM))
        p = Problem(*(cutlass.select_(is_index, b, a) for a, b in zip(args.first, args.second, strict=True)))
        channel = thread % MAIN_THREADS * CHUNK
    else:
        is_index, dim, p, channel = dims[0] == INDEX_DIM, Int32(dims[0]), args.first, thread * CHUNK
    sources = []
    for part in cutlass.range_constexpr(PARTS):
        sources += load_four(batch.sources + (Int64(group) * PARTS + part) * (RATIO * 4))
    newest = sources[0]
    for source in sources[1:]:
        newest = ptx.imax(newest, source)
    loaded = []
    for j in cutlass.range_constexpr(PARTS * RATIO):
        offset = channel + j // RATIO * dim
        loaded.append(rows.load_row(batch, p, sources[j], j % RATIO, PARTS * dim, offset))
    request = group // batch.groups_per_request
    keeps = (batch.tokens_per_request > 0) & (request * batch.groups_per_request == group)
    first_token = request * batch.tokens_per_request
    raw = rows.load_raw(batch, p, first_token, Int32(keeps), dim, PARTS, RATIO, channel)
    if newest >= 0:
        memory = cutlass.utils.SmemAllocator()
        shared = Int32(memory.allocate_array(Float32, num_elems=MAIN_THREADS // WARP).toint())
        scores = [rows.scores_of(row) for row in loaded]
        totals, sums = rows.weighted(loaded, scores, rows.largest(scores))
        values = entries.rounded(sums, totals)
        total = sum_over_lanes(sum_of_squares(values))
        if cutlass.const_expr(len(dims) == 2):
            if is_index:
                finish_index(batch, p, group, values, total, channel)
            else:
                finish_main(batch, p, group, values, total, channel, shared)
        elif cutlass.const_expr(is_index):
            finish_index(batch, p, group, values, total, channel)
        else:
            finish_main(batch, p, group, values, total, channel, shared)
    # Kept rows are stored after the group's rows were read: see rows.py.
    if keeps:
        rows.store_raw(p, raw, dim, channel)
        for i in cutlass.range(1, batch.tokens_per_request, 1, unroll=1):
            more = rows.load_raw(batch, p, first_token + i, Int32(1), dim, PARTS, RATIO, channel)
            rows.store_raw(p, more, dim, channel)


@cute.jit
def finish_index(batch: Batch, p: Problem, group: Int32, values: list, total: Float32, channel: Int32) -> None:
    """Norms, rotates and stores an indexer's key, with one warp; total: sum of the squares of its channels."""
    made = entries.normed_and_rotated(batch, p, group, values, total, INDEX_DIM, channel)
    entries.store_index(batch, p, group, made, channel // CHUNK)


@cute.jit
def finish_main(
    batch: Batch, p: Problem, group: Int32, values: list, total: Float32, channel: Int32, shared: Int32
) -> None:
    """Norms, rotates and stores an entry, with four warps; total: sum of the squares of a warp's channels."""
    warp = channel // (CHUNK * WARP)
    if channel % (CHUNK * WARP) == 0:
        ptx.store_shared_f32(shared + warp * 4, total)
    cute.arch.barrier(barrier_id=MAIN_BARRIER, number_of_threads=MAIN_THREADS)
    parts = ptx.load_shared_f32x4(shared)
    total = add(add(parts[0], parts[1]), add(parts[2], parts[3]))
    made = entries.normed_and_rotated(batch, p, group, values, total, ROW_DIM, channel)
    entries.store_main(batch, p, group, made, channel)


def load_four(address: Int64) -> tuple:
    """Four int32 that all threads of a CTA load."""
    return ptx.asm("ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Int32] * 4, address)
