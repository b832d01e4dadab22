"""Products whose bits depend on a row and the weight alone, whatever the number of rows: the kernel (sm_90a, sm_100a).

In every tile the order of summation is the same and depends on K alone, which fixes the bits:

* an instruction (mma.m16n8k16, weights on the left, tokens on the right) sums 16 consecutive channels, from a multiple
  of 16 on. The hardware decides in which order it adds them: on an H200 the same 16 channels gave the same bits in any
  order, and by `wgmma` as well;
* the instructions of a segment, a quarter of K in whole chunks of 64 channels, follow each other in one accumulator;
* the four segments' sums are added in fp32, in order.

A tile of few tokens has four warp groups, one for each segment, so that a short product keeps many warps busy; a tile
of many tokens processes the segments one after the other; and a tile of a cluster has a CTA for each segment, so that a
CTA loads a quarter of the channels (`cluster`). All add the same numbers in the same order. `gpu.chosen` chooses
the tile of a call.

A tile of few tokens reads its weight before the previous launch has ended (`Configuration.reads_ahead`, rule 1 of
`dependent_launch`): cp.async copies the first stages, and the rest is fetched into L2.

Tiles of weights and tokens are copied by cp.async into a ring of stages, with zeros for rows, tokens and channels that
do not exist. A row of a stage is 128 bytes, with units of 16 bytes in the order of the 128-byte swizzle: unit u of row
r at u ^ (r & 7). So the eight rows of a matrix that `ldmatrix` reads lie in different banks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import dependent_launch, pipeline, ptx
from dsv4_kernels.device.bf16_rows import add
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch, sync_threads
from dsv4_kernels.device.mma import multiply_bf16

SEGMENTS = 4
"""Parts of K with separate sums; their number determines the bits."""
CHUNK = 64
"""Channels of a stage, of each segment in it."""
ROW_BYTES = 2 * CHUNK
UNITS = ROW_BYTES // 16
"""Units of 16 bytes in a row of a stage; also the number of rows after which the swizzle repeats."""
WARP = 32
MMA_ROWS, MMA_TOKENS = 16, 8
MOST_FETCHED = 24 << 20
"""Most bytes of a weight that is fetched into L2 ahead, about half of a Hopper's L2: parts of a larger weight could be
evicted before they are read."""


@dataclass(frozen=True)
class Tile:
    """The part of the result that a CTA computes, and how its warps share it."""

    rows: int
    """Rows of the weight."""
    tokens: int
    at_once: int
    """Segments that are computed in parallel, each by a warp group: all, or one."""
    row_warps: int
    """Warps of a warp group along the rows."""
    token_warps: int
    stages: int
    ctas: int = 1
    """CTAs that share a tile: one, or a cluster of SEGMENTS with a segment each (`cluster`), whose `at_once` is 1."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.at_once * self.row_warps * self.token_warps * WARP

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self.rows // self.row_warps

    @property
    def warp_tokens(self) -> int:
        """Tokens of a warp."""
        return self.tokens // self.token_warps

    @property
    def accumulators(self) -> int:
        """Accumulators of a lane."""
        return self.warp_rows * self.warp_tokens // WARP

    @property
    def fragments(self) -> int:
        """Tiles of 16 rows and 8 tokens of a warp, the result of an instruction."""
        return self.accumulators // 4

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment in a stage."""
        return (self.rows + self.tokens) * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.at_once * self.segment_bytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of one segment's sums, and of those of all segments that a CTA of a cluster finishes."""
        return self.rows * self.tokens * 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: its stages, whose memory later holds the segments' sums; sums of a cluster, which
        arrive while a CTA still reads its stages, come after these."""
        if self.ctas > 1:
            return self.stages * self.stage_bytes + self.sums_bytes
        return max(self.stages * self.stage_bytes, (self.at_once - 1) * self.sums_bytes)


@dataclass(frozen=True)
class Configuration:
    """Compile-time parameters besides the architecture."""

    tile: Tile
    fp32: bool
    """Whether the result is fp32; otherwise bf16."""

    @property
    def reads_ahead(self) -> bool:
        """Whether the weight is read before the kernel before has ended. No kernel writes the weights of `linear_fp32`;
        the kernel before may have expanded the weight of `grouped_linear`. Tiles of many tokens wait first: their time
        does not depend on the first copies."""
        of_few_tokens = self.tile.ctas > 1 or self.tile.at_once == SEGMENTS
        return self.fp32 and of_few_tokens and dependent_launch.is_on()


class Arguments(NamedTuple):
    """Dynamic arguments; addresses are Int64. Strides in bytes, channels contiguous, all at multiples of 16 bytes."""

    x: Int64  # [T, G, K] bf16
    x_token_bytes: Int64
    x_group_bytes: Int64
    weight: Int64  # [G, N, K] bf16
    weight_row_bytes: Int64
    weight_group_bytes: Int64
    out: Int64  # [T, G, N] fp32 or bf16, contiguous in N
    out_token_bytes: Int64
    out_group_bytes: Int64
    num_tokens: Int32
    num_rows: Int32  # N
    channels: Int32  # K, a multiple of 8
    num_row_tiles: Int32


@cute.jit
def launch(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    row_and_token_tiles: Int32,
    groups: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches one CTA for each tile of a group."""
    kernel(args, configuration).launch(
        grid=[row_and_token_tiles, groups, 1],
        block=[configuration.tile.threads, 1, 1],
        stream=stream,
        use_pdl=dependent_launch.is_on(),
    )


class Place(NamedTuple):
    """A CTA's first row and token, and the addresses of its group's tensors."""

    first_row: Int32
    first_token: Int32
    x: Int64
    weight: Int64
    out: Int64


@cute.kernel
def kernel(args: Arguments, configuration: cutlass.Constexpr[Configuration]) -> None:
    """The kernel of a launch of its own."""
    _, group, _ = cute.arch.block_idx()
    tile_of_group(args, configuration, group, cta_of_launch())


def body(args: Arguments, configuration: Configuration, prepared: tuple, cta: Cta) -> None:
    """The kernel as a part of a joint launch, of a product with one group."""
    tile_of_group(args, configuration, Int32(0), cta)


@cute.jit
def tile_of_group(
    args: Arguments, configuration: cutlass.Constexpr[Configuration], group: Int32, cta: cutlass.Constexpr[Cta]
) -> None:
    """Computes one tile."""
    if cutlass.const_expr(not configuration.reads_ahead):
        dependent_launch.begin()
    tile = configuration.tile
    thread, _, _ = cute.arch.thread_idx()
    number = cta.number
    memory = cutlass.utils.SmemAllocator()
    shared = memory.allocate_array(Uint32, num_elems=tile.shared_bytes // 4, byte_alignment=128)
    stages = Int32(shared.toint())
    # CTAs that run at the same time share their tile of tokens, which is then read from L2.
    token_tile = number // args.num_row_tiles
    place = Place(
        first_row=(number - token_tile * args.num_row_tiles) * tile.rows,
        first_token=token_tile * tile.tokens,
        x=args.x + Int64(group) * args.x_group_bytes,
        weight=args.weight + Int64(group) * args.weight_group_bytes,
        out=args.out + Int64(group) * args.out_group_bytes,
    )
    warp, lane = thread // WARP, thread % WARP
    warps_a_segment = tile.row_warps * tile.token_warps
    segment, within = warp // warps_a_segment, warp % warps_a_segment
    first = (within // tile.token_warps) * tile.warp_rows, (within % tile.token_warps) * tile.warp_tokens
    total = cute.make_rmem_tensor((tile.accumulators,), Float32)
    total.fill(0.0)
    chunks = (args.channels + (CHUNK - 1)) // CHUNK
    if cutlass.const_expr(configuration.reads_ahead):
        fetch_weight(args, tile, place, thread)
        for i in cutlass.range_constexpr(tile.stages - 1):
            load_segments(args, tile, place, Int32(i), chunks, thread, stages + i * tile.stage_bytes, tokens=False)
        dependent_launch.begin()
    if cutlass.const_expr(tile.at_once == 1):
        one_after_the_other(args, tile, cta.threads, place, chunks, thread, first, lane, stages, total)
        store(args, configuration, place, first, lane, total)
    else:
        side_by_side(
            args, tile, cta.threads, place, chunks, thread, segment, first, lane, stages, total,
            weight_is_loaded=configuration.reads_ahead,
        )  # fmt: skip
        if segment > 0:
            ours = sums_address(tile, stages, segment, within, lane)
            for i in cutlass.range_constexpr(tile.accumulators):
                ptx.store_shared_f32(ours + i * (4 * WARP), total[i])
        sync_threads(cta.threads)
        if segment == 0:
            for i in cutlass.range_constexpr(tile.accumulators):
                total[i] = add(Float32(0.0), total[i])
            for other in cutlass.range_constexpr(1, SEGMENTS):
                theirs = sums_address(tile, stages, Int32(other), within, lane)
                for i in cutlass.range_constexpr(tile.accumulators):
                    total[i] = add(total[i], ptx.load_shared_f32(theirs + i * (4 * WARP)))
            store(args, configuration, place, first, lane, total)


def sums_address(tile: Tile, shared: Int32, segment: Int32, warp: Int32, lane: Int32) -> Int32:
    """The address at which a lane stores its sums of a segment above 0; consecutive sums are 128 bytes apart."""
    place = (segment - 1) * (tile.row_warps * tile.token_warps) + warp
    return shared + place * (tile.accumulators * 4 * WARP) + lane * 4


def begin_of(segment: Int32 | int, chunks: Int32) -> Int32:
    """The first chunk of a segment; for SEGMENTS the number of chunks."""
    return Int32(segment) * chunks // SEGMENTS


@cute.jit
def one_after_the_other(
    args: Arguments,
    tile: cutlass.Constexpr[Tile],
    threads: cutlass.Constexpr[int | None],
    place: Place,
    chunks: Int32,
    thread: Int32,
    first: tuple,
    lane: Int32,
    stages: Int32,
    total: cute.Tensor,
) -> None:
    """Adds all segments' sums into `total`, in every warp."""
    for i in cutlass.range_constexpr(tile.stages - 1):
        load(args, tile, place, Int32(i), chunks, thread, stages + i * tile.stage_bytes)
        cute.arch.cp_async_commit_group()
    stage = Int32(0)
    for segment in cutlass.range(SEGMENTS, unroll=1):
        sums = cute.make_rmem_tensor((tile.accumulators,), Float32)
        sums.fill(0.0)
        for i in cutlass.range(begin_of(segment, chunks), begin_of(segment + 1, chunks), unroll=1):
            cute.arch.cp_async_wait_group(tile.stages - 2)
            sync_threads(threads)  # all threads' copies have arrived, and all have read the stage before
            following = pipeline.index_after(stage, tile.stages, tile.stages - 1)
            load(args, tile, place, i + (tile.stages - 1), chunks, thread, stages + following * tile.stage_bytes)
            cute.arch.cp_async_commit_group()
            sum_chunk(tile, stages + stage * tile.stage_bytes, first, lane, sums)
            stage = pipeline.index_after(stage, tile.stages)
        for i in cutlass.range_constexpr(tile.accumulators):
            total[i] = add(total[i], sums[i])
    cute.arch.cp_async_wait_group(0)


@cute.jit
def side_by_side(
    args: Arguments,
    tile: cutlass.Constexpr[Tile],
    threads: cutlass.Constexpr[int | None],
    place: Place,
    chunks: Int32,
    thread: Int32,
    segment: Int32,
    first: tuple,
    lane: Int32,
    stages: Int32,
    sums: cute.Tensor,
    weight_is_loaded: cutlass.Constexpr[bool],
) -> None:
    """Computes the sum of the warp's own segment. A stage has one chunk of each segment; the last segment is the
    longest. With `weight_is_loaded` the copies of the first stages' weight have been started, but not committed: they
    complete with the first group."""
    longest = chunks - begin_of(SEGMENTS - 1, chunks)
    begin, end = begin_of(segment, chunks), begin_of(segment + 1, chunks)
    for i in cutlass.range_constexpr(tile.stages - 1):
        at = stages + i * tile.stage_bytes
        load_segments(args, tile, place, Int32(i), chunks, thread, at, weight=not weight_is_loaded)
        cute.arch.cp_async_commit_group()
    stage = Int32(0)
    for i in cutlass.range(longest, unroll=1):
        cute.arch.cp_async_wait_group(tile.stages - 2)
        sync_threads(threads)
        following = pipeline.index_after(stage, tile.stages, tile.stages - 1)
        load_segments(args, tile, place, i + (tile.stages - 1), chunks, thread, stages + following * tile.stage_bytes)
        cute.arch.cp_async_commit_group()
        if begin + i < end:  # adding zeros would turn a sum of -0 into +0
            at = stages + stage * tile.stage_bytes + segment * tile.segment_bytes
            sum_chunk(tile, at, first, lane, sums)
        stage = pipeline.index_after(stage, tile.stages)
    cute.arch.cp_async_wait_group(0)
    sync_threads(threads)  # no thread reads the stages any more: the segments' sums overwrite them


@cute.jit
def load_segments(
    args: Arguments,
    tile: cutlass.Constexpr[Tile],
    place: Place,
    number: Int32,
    chunks: Int32,
    thread: Int32,
    stage: Int32,
    weight: cutlass.Constexpr[bool] = True,
    tokens: cutlass.Constexpr[bool] = True,
) -> None:
    """Starts the copies of a stage: from each segment that has so many, the chunk with this number."""
    for segment in cutlass.range_constexpr(SEGMENTS):
        chunk, end = begin_of(segment, chunks) + number, begin_of(segment + 1, chunks)
        load(args, tile, place, chunk, end, thread, stage + segment * tile.segment_bytes, weight, tokens)


@cute.jit
def load(
    args: Arguments,
    tile: cutlass.Constexpr[Tile],
    place: Place,
    chunk: Int32,
    end: Int32,
    thread: Int32,
    shared: Int32,
    weight: cutlass.Constexpr[bool] = True,
    tokens: cutlass.Constexpr[bool] = True,
) -> None:
    """Starts the copies of a chunk of the tile's rows, of its tokens, or of both; no copies from chunk `end` on."""
    unit, row = thread % UNITS, thread // UNITS
    channel = chunk * CHUNK + unit * 8
    if chunk < end:
        if cutlass.const_expr(weight):
            copy_rows(
                tile.rows, tile.threads, place.weight, args.weight_row_bytes, place.first_row, args.num_rows,
                channel, args.channels, row, unit, shared,
            )  # fmt: skip
        if cutlass.const_expr(tokens):
            copy_rows(
                tile.tokens, tile.threads, place.x, args.x_token_bytes, place.first_token, args.num_tokens,
                channel, args.channels, row, unit, shared + tile.rows * ROW_BYTES,
            )  # fmt: skip


@cute.jit
def fetch_weight(args: Arguments, tile: cutlass.Constexpr[Tile], place: Place, thread: Int32) -> None:
    """Fetches the tile's rows into L2, a row a thread, if the whole weight has at most MOST_FETCHED bytes."""
    fits = Int64(args.num_rows) * Int64(args.channels) * 2 <= MOST_FETCHED
    row = place.first_row + thread
    if fits & (thread < tile.rows) & (row < args.num_rows):
        ptx.fetch_into_l2(place.weight + Int64(row) * args.weight_row_bytes, args.channels * 2)


@cute.jit
def copy_rows(
    rows: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    begin: Int64,
    row_bytes: Int64,
    first: Int32,
    count: Int32,
    channel: Int32,
    channels: Int32,
    row: Int32,
    unit: Int32,
    shared: Int32,
) -> None:
    """Starts the copies of a chunk of `rows` rows from `first` on; zeros from row `count` and channel `channels` on."""
    a_pass = threads // UNITS  # a multiple of UNITS: all rows of a thread are swizzled alike
    swizzled = unit ^ (row % UNITS)
    for i in cutlass.range_constexpr(-(-rows // a_pass)):
        local = row + i * a_pass
        if (rows % a_pass == 0) | (local < rows):
            at = shared + local * ROW_BYTES + swizzled * 16
            exists = (first + local < count) & (channel < channels)
            address, num_bytes = begin, Int32(0)
            if exists:
                address = begin + Int64(first + local) * row_bytes + Int64(channel) * 2
                num_bytes = Int32(16)
            ptx.copy_async(at, address, num_bytes)


@cute.jit
def sum_chunk(tile: cutlass.Constexpr[Tile], shared: Int32, first: tuple, lane: Int32, sums: cute.Tensor) -> None:
    """Adds the products of a chunk: four instructions to every accumulator, in the order of the channels."""
    weights = left_matrices(shared + first[0] * ROW_BYTES, lane)
    # Four units of 16 bytes of eight tokens: the channels of two instructions.
    token = lane % MMA_TOKENS
    tokens = shared + (tile.rows + first[1] + token) * ROW_BYTES + ((lane // MMA_TOKENS) ^ token) * 16
    row_tiles, token_tiles = tile.warp_rows // MMA_ROWS, tile.warp_tokens // MMA_TOKENS
    for half in cutlass.range_constexpr(2):
        # Rows begin at multiples of 128 bytes, so ^ gives the swizzled address of a row's other units.
        at = tokens ^ (half * 4 * 16)
        right = [ptx.load_matrices(at + j * (MMA_TOKENS * ROW_BYTES)) for j in range(token_tiles)]
        for i in cutlass.range_constexpr(row_tiles):
            for step in cutlass.range_constexpr(2):
                left = ptx.load_matrices((weights ^ ((half * 2 + step) * 2 * 16)) + i * (MMA_ROWS * ROW_BYTES))
                for j in cutlass.range_constexpr(token_tiles):
                    place = (i * token_tiles + j) * 4
                    before = tuple(sums[place + n] for n in range(4))
                    after = multiply_bf16(left, (right[j][2 * step], right[j][2 * step + 1]), before)
                    for n in cutlass.range_constexpr(4):
                        sums[place + n] = after[n]


def left_matrices(rows: Int32, lane: Int32) -> Int32:
    """The address that a lane passes to `ldmatrix` for units 0 and 1 of 16 rows of 128 bytes, swizzled.

    The matrices are rows 0 to 7 and 8 to 15 of unit 0, then of unit 1: in bf16 the order of the left operand's words.
    """
    row = lane % MMA_ROWS
    return rows + row * ROW_BYTES + ((lane // MMA_ROWS) ^ (row % UNITS)) * 16


@cute.jit
def store(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    place: Place,
    first: tuple,
    lane: Int32,
    total: cute.Tensor,
) -> None:
    """Writes a warp's part of the result: two of a lane's four numbers belong to a row, two to the row 8 after it."""
    tile = configuration.tile
    token_tiles = tile.warp_tokens // MMA_TOKENS
    for i in cutlass.range_constexpr(tile.warp_rows // MMA_ROWS):
        for j in cutlass.range_constexpr(token_tiles):
            for n in cutlass.range_constexpr(4):
                row = place.first_row + first[0] + i * MMA_ROWS + lane // 4 + (n // 2) * 8
                token = place.first_token + first[1] + j * MMA_TOKENS + (lane % 4) * 2 + n % 2
                store_element(args, configuration, place, row, token, total[(i * token_tiles + j) * 4 + n])


@cute.jit
def store_element(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    place: Place,
    row: Int32,
    token: Int32,
    value: Float32,
) -> None:
    """Writes one number of the result, if its row and token exist."""
    if (row < args.num_rows) & (token < args.num_tokens):
        element = 4 if configuration.fp32 else 2
        address = place.out + Int64(token) * args.out_token_bytes + Int64(row) * element
        if cutlass.const_expr(configuration.fp32):
            ptx.store_f32(address, value)
        else:
            ptx.store_bf16(address, value)
