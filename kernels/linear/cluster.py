"""The products of `kernel` for a tile that a cluster computes, with a CTA for each segment of K: for few tokens.

A tile of a single CTA has all of K, so a CTA reads its rows and tokens from beginning to end: with few tokens that
takes longer than the weight takes from memory. Here a CTA has a quarter of the channels, and may have four times as
many rows and tokens, which others then need not read. Instructions and the order of sums are those of `kernel`, and so
are the bits.

    weight    stages of 64 channels by cp.async, the first ones before the launch before has ended
              (`Configuration.reads_ahead`, rule 1 of `dependent_launch`)
    tokens    the same stages, after that
    sum       a warp has a part of the rows and tokens: four instructions to every accumulator of a stage
    exchange  a quad's lane q has the sums of tokens 2 q and 2 q + 1 of eight: they go to CTA q, by st.async
    finish    CTA q adds the four segments' sums in order and writes the result

Who waits for whom: a CTA's threads for each other at every stage; senders until all CTAs of the cluster have started
(the cluster's barrier); finishing warps for the bytes of all four CTAs (`received`). No CTA waits for another cluster.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import dependent_launch, pipeline, ptx
from dsv4_kernels.device.bf16_rows import add
from dsv4_kernels.linear.kernel import (
    CHUNK,
    MMA_ROWS,
    MMA_TOKENS,
    ROW_BYTES,
    SEGMENTS,
    UNITS,
    WARP,
    Arguments,
    Configuration,
    Place,
    Tile,
    begin_of,
    copy_rows,
    store_element,
    sum_chunk,
)

QUADS = 8
"""Lanes of a warp with sums of the same tokens: a row each, and the row 8 after it."""
SUM_BYTES = 16
"""Bytes of a lane's sums of an instruction: two rows, two tokens."""


@cute.jit
def launch(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    row_and_token_tiles: Int32,
    groups: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches one cluster for each tile of a group."""
    kernel(args, configuration).launch(
        grid=[row_and_token_tiles * SEGMENTS, groups, 1],
        cluster=[SEGMENTS, 1, 1],
        block=[configuration.tile.threads, 1, 1],
        stream=stream,
        preferred_smem_carveout=100,  # percent, so that a CTA fits beside those of the kernel before
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, configuration: cutlass.Constexpr[Configuration]) -> None:
    """Computes one segment of a tile, and finishes a quarter of its tokens."""
    tile = configuration.tile
    thread, _, _ = cute.arch.thread_idx()
    number, group, _ = cute.arch.block_idx()
    segment, number = number % SEGMENTS, number // SEGMENTS
    memory = cutlass.utils.SmemAllocator()
    stages = Int32(memory.allocate_array(Uint32, num_elems=tile.shared_bytes // 4, byte_alignment=128).toint())
    received = memory.allocate_array(Int64, num_elems=1, byte_alignment=8)
    if thread == 0:
        cute.arch.mbarrier_init(received, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(received, tile.sums_bytes)
    cute.arch.cluster_arrive_relaxed(aligned=False)  # thread 0 arrives later
    # Clusters that run at the same time share their tile of tokens, which is then read from L2.
    token_tile = number // args.num_row_tiles
    place = Place(
        first_row=(number - token_tile * args.num_row_tiles) * tile.rows,
        first_token=token_tile * tile.tokens,
        x=args.x + Int64(group) * args.x_group_bytes,
        weight=args.weight + Int64(group) * args.weight_group_bytes,
        out=args.out + Int64(group) * args.out_group_bytes,
    )
    warp, lane = thread // WARP, thread % WARP
    first = (warp // tile.token_warps) * tile.warp_rows, (warp % tile.token_warps) * tile.warp_tokens
    chunks = (args.channels + (CHUNK - 1)) // CHUNK
    begin, end = begin_of(segment, chunks), begin_of(segment + 1, chunks)
    if cutlass.const_expr(configuration.reads_ahead):
        for i in cutlass.range_constexpr(tile.stages - 1):
            load_weight(args, tile, place, begin + i, end, thread, stages + i * tile.stage_bytes)
    dependent_launch.begin()
    for i in cutlass.range_constexpr(tile.stages - 1):
        if cutlass.const_expr(not configuration.reads_ahead):
            load_weight(args, tile, place, begin + i, end, thread, stages + i * tile.stage_bytes)
        load_tokens(args, tile, place, begin + i, end, thread, stages + i * tile.stage_bytes)
        cute.arch.cp_async_commit_group()  # the first group has what was read ahead, too
    sums = cute.make_rmem_tensor((tile.accumulators,), Float32)
    sums.fill(0.0)
    stage = Int32(0)
    for i in cutlass.range(begin, end, unroll=1):
        cute.arch.cp_async_wait_group(tile.stages - 2)
        cute.arch.sync_threads()  # all threads' copies have arrived, and all have read the stage before
        following = stages + pipeline.index_after(stage, tile.stages, tile.stages - 1) * tile.stage_bytes
        load_weight(args, tile, place, i + (tile.stages - 1), end, thread, following)
        load_tokens(args, tile, place, i + (tile.stages - 1), end, thread, following)
        cute.arch.cp_async_commit_group()
        sum_chunk(tile, stages + stage * tile.stage_bytes, first, lane, sums)
        stage = pipeline.index_after(stage, tile.stages)
    cute.arch.cluster_wait()  # all CTAs of the cluster have started and set up their barriers
    to = stages + tile.stages * tile.stage_bytes
    send(tile, segment, warp, lane, to, Int32(received.toint()), sums)
    ptx.wait_cluster(Int32(received.toint()), Int32(0))
    finish(args, configuration, place, segment, first, warp, lane, to)


@cute.jit
def load_weight(
    args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, chunk: Int32, end: Int32, thread: Int32, stage: Int32
) -> None:
    """Starts the copies of a chunk of the tile's rows; none from chunk `end` on."""
    unit, row = thread % UNITS, thread // UNITS
    if chunk < end:
        copy_rows(
            tile.rows, tile.threads, place.weight, args.weight_row_bytes, place.first_row, args.num_rows,
            chunk * CHUNK + unit * 8, args.channels, row, unit, stage,
        )  # fmt: skip


@cute.jit
def load_tokens(
    args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, chunk: Int32, end: Int32, thread: Int32, stage: Int32
) -> None:
    """Starts the copies of a chunk of the tile's tokens; none from chunk `end` on."""
    unit, row = thread % UNITS, thread // UNITS
    if chunk < end:
        copy_rows(
            tile.tokens, tile.threads, place.x, args.x_token_bytes, place.first_token, args.num_tokens,
            chunk * CHUNK + unit * 8, args.channels, row, unit, stage + tile.rows * ROW_BYTES,
        )  # fmt: skip


@cute.jit
def send(
    tile: cutlass.Constexpr[Tile],
    segment: Int32,
    warp: Int32,
    lane: Int32,
    to: Int32,
    received: Int32,
    sums: cute.Tensor,
) -> None:
    """Sends a segment's sums to the CTAs that finish them: two tokens of eight to each."""
    quad = lane % 4
    barrier = ptx.remote(received, quad)
    target = ptx.remote(to + of_warp(tile, segment, warp) + lane // 4 * SUM_BYTES, quad)
    for fragment in cutlass.range_constexpr(tile.fragments):
        words = tuple(sums[fragment * 4 + n] for n in range(4))
        ptx.store_async_f32x4(target + fragment * (QUADS * SUM_BYTES), words, barrier)


def of_warp(tile: Tile, segment: Int32 | int, warp: Int32) -> Int32:
    """Offset of the sums that a CTA gets from the warps of this number in the CTA of a segment."""
    return (segment * (tile.row_warps * tile.token_warps) + warp) * (tile.fragments * QUADS * SUM_BYTES)


@cute.jit
def finish(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    place: Place,
    segment: Int32,
    first: tuple,
    warp: Int32,
    lane: Int32,
    sums: Int32,
) -> None:
    """Adds the segments' sums that this warp's lanes have in all CTAs, of the tokens of this CTA, and writes them."""
    tile = configuration.tile
    token_tiles, items = tile.warp_tokens // MMA_TOKENS, tile.fragments * QUADS
    for k in cutlass.range_constexpr(-(-items // WARP)):
        item = lane + k * WARP
        if (items % WARP == 0) | (item < items):
            total = [Float32(0.0) for _ in range(4)]
            for other in cutlass.range_constexpr(SEGMENTS):
                theirs = ptx.load_shared_f32x4(sums + of_warp(tile, other, warp) + item * SUM_BYTES)
                for n in cutlass.range_constexpr(4):
                    total[n] = add(total[n], theirs[n])
            fragment = item // QUADS
            i = fragment // token_tiles
            row = place.first_row + first[0] + i * MMA_ROWS + item % QUADS
            token = place.first_token + first[1] + (fragment - i * token_tiles) * MMA_TOKENS + segment * 2
            for n in cutlass.range_constexpr(4):
                store_element(args, configuration, place, row + n // 2 * 8, token + n % 2, total[n])
