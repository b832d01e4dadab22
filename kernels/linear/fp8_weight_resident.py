"""The product of `fp8_weight` for few tokens and few output groups: a CTA's part of the weight fits shared memory.

A cluster of `fp8_weight` has four CTAs, so with few output groups half of the multiprocessors have none, and the ring
of stages is filled anew in every step. Here a cluster has eight CTAs: a CTA has half of the 128 rows and a segment of
K, and shared memory for all of it. Instructions and the order of sums are those of `fp8_weight`, and so are the bits.

    weight    all of it by cp.async, before the launch before has ended (rule 1 of `dependent_launch`)
    tokens    all channels of the segment by cp.async, after that; then rotated
    sum       a warp has 16 rows: eight instructions for each step, without a barrier between steps
    exchange  as in `fp8_weight`, to the four CTAs of the upper half of the rows
    finish    these wait for the bytes of all eight CTAs (`received`)

Senders wait until all CTAs of the cluster have started (the cluster's barrier). No CTA waits for another cluster.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import dependent_launch, ptx
from dsv4_kernels.linear.fp8_weight import (
    ROWS,
    STEP,
    SUM_TILE_BYTES,
    TOKEN_BYTES,
    TOKEN_UNITS,
    WEIGHT_ROW_BYTES,
    Arguments,
    Configuration,
    Place,
    Tile,
    compute_turns,
    finish,
    passes_of_tokens,
    rotate,
    send,
    sum_stage,
    token_unit,
    tokens_a_pass,
)
from dsv4_kernels.linear.kernel import SEGMENTS, UNITS, WARP

PARTS = 2
"""CTAs among which the rows of a cluster are divided."""
CLUSTER = PARTS * SEGMENTS


@cute.jit
def launch(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    row_and_token_tiles: Int32,
    groups: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches one cluster for 128 rows of an output group and a tile of tokens."""
    kernel(args, configuration).launch(
        grid=[CLUSTER, row_and_token_tiles, groups],
        cluster=[CLUSTER, 1, 1],
        block=[configuration.tile.threads, 1, 1],
        stream=stream,
        preferred_smem_carveout=100,  # percent, so that a CTA fits beside those of the kernel before
        use_pdl=dependent_launch.is_on(),
    )


@cute.kernel
def kernel(args: Arguments, configuration: cutlass.Constexpr[Configuration]) -> None:
    """Computes half of the rows of one segment; CTAs of the first half finish a quarter of the tokens."""
    tile = configuration.tile
    thread, _, _ = cute.arch.thread_idx()
    number_in_cluster, number, group = cute.arch.block_idx()
    segment, part = number_in_cluster % SEGMENTS, number_in_cluster // SEGMENTS
    memory = cutlass.utils.SmemAllocator()
    shared = Int32(memory.allocate_array(Uint32, num_elems=tile.shared_bytes // 4, byte_alignment=128).toint())
    received = memory.allocate_array(Int64, num_elems=1, byte_alignment=8)
    if thread == 0:
        cute.arch.mbarrier_init(received, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(received, tile.sums_bytes // SUM_TILE_BYTES * (SUM_TILE_BYTES - 16))
    cute.arch.cluster_arrive_relaxed(aligned=False)  # thread 0 arrives later
    row_tile = number // args.num_token_tiles
    first_token = (number - row_tile * args.num_token_tiles) * tile.tokens
    first_channel = segment * (tile.stages * STEP)
    place = Place(
        segment=segment,
        first_token=first_token,
        tokens=ptx.imin(args.num_tokens - first_token, Int32(tile.tokens)),
        x=args.x
        + Int64(group) * args.x_group_bytes
        + Int64(first_token) * args.x_token_bytes
        + Int64(first_channel) * 2,
        codes=args.codes
        + Int64(group) * args.code_group_bytes
        + Int64(row_tile * ROWS + part * tile.rows) * args.code_row_bytes
        + Int64(first_channel),
        scales=args.scales
        + Int64(group) * args.scale_group_bytes
        + Int64(row_tile) * args.scale_row_bytes
        + Int64(segment * tile.stages) * 4,
    )
    load_weight(args, tile, place, thread, shared)
    dependent_launch.begin()
    load_tokens(args, tile, place, thread, shared)
    turns = shared + tile.turns_offset
    if cutlass.const_expr(configuration.rotates):
        compute_turns(args, tile, place, thread, turns)
        cute.arch.sync_threads()
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(configuration.rotates):
        for step in cutlass.range_constexpr(tile.stages):  # a thread rotates channels that it has copied itself
            rotate(tile, place, Int32(step), Int32(tile.stages), thread, shared + step * tile.stage_bytes, turns)
    cute.arch.sync_threads()
    warp, lane = thread // WARP, thread % WARP
    sums = cute.make_rmem_tensor((tile.row_tiles * tile.token_tiles * 4,), Float32)
    sums.fill(0.0)
    for step in cutlass.range(tile.stages, unroll=1):
        factor = ptx.load_shared_f32(shared + tile.scales_offset + step * 4)
        sum_stage(tile, shared + step * tile.stage_bytes, ptx.pack_bf16(factor, factor), warp, lane, sums)
    cute.arch.cluster_wait()  # all CTAs of the cluster have started and set up their barriers
    to = shared + tile.sums_offset
    send(tile, segment, part * tile.warps + warp, lane, to, Int32(received.toint()), sums)
    if part == 0:
        ptx.wait_cluster(Int32(received.toint()), Int32(0))
        for j in cutlass.range(warp, tile.token_tiles, tile.warps, unroll=1):
            finish(args, configuration, place, row_tile, group, lane, j, to)


@cute.jit
def load_weight(args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, thread: Int32, shared: Int32) -> None:
    """Starts the copies of the CTA's weight and scales: no kernel writes them, so the kernel before may still run."""
    unit, first = thread % UNITS, thread // UNITS
    a_pass = tile.threads // UNITS  # a multiple of UNITS: all rows of a thread are swizzled alike
    to = shared + first * WEIGHT_ROW_BYTES + ((unit ^ (first % UNITS)) * 16)
    address = place.codes + Int64(first) * args.code_row_bytes + Int64(unit * 16)
    for i in cutlass.range_constexpr(tile.rows // a_pass):
        for step in cutlass.range_constexpr(tile.stages):
            at = to + step * tile.stage_bytes + i * (a_pass * WEIGHT_ROW_BYTES)
            ptx.copy_async(at, address + step * WEIGHT_ROW_BYTES, Int32(16))
        address += a_pass * args.code_row_bytes
    if thread < tile.stages:
        ptx.copy_4_bytes_async(shared + tile.scales_offset + thread * 4, place.scales + Int64(thread) * 4, Int32(4))


@cute.jit
def load_tokens(args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, thread: Int32, shared: Int32) -> None:
    """Starts the copies of all tokens' channels of the segment, with zeros for tokens that do not exist."""
    unit, first = thread % TOKEN_UNITS, thread // TOKEN_UNITS
    for i in cutlass.range_constexpr(passes_of_tokens(tile)):
        token = first + i * tokens_a_pass(tile)
        address, num_bytes = place.x, Int32(0)
        if token < place.tokens:
            address = place.x + Int64(token) * args.x_token_bytes + Int64(unit * 16)
            num_bytes = Int32(16)
        for step in cutlass.range_constexpr(tile.stages):
            at = token_unit(tile, shared + step * tile.stage_bytes, token, unit)
            ptx.copy_async(at, address + step * TOKEN_BYTES, num_bytes)
    cute.arch.cp_async_commit_group()
