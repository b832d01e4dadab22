"""The products of many tokens on Hopper (sm_90a): a kernel with the bits of `kernel`, whose summation order it follows.

`wgmma` of bf16 sums 16 channels as `mma.m16n8k16` does, to the last bit (measured on an H200:
`bench_invariant_linear.py`). So here, too, the instructions of a segment follow each other in one accumulator, and the
segments' sums are added in order. That needs a second set of registers, which limits the tile: a warpgroup has 64 rows
of the weight, the left operand, and up to 192 tokens.

    PRODUCER (1 warp of a warpgroup)   waits empty[stage]; 64 channels of weights and tokens (TMA) arrive at full[stage]
    CONSUMER (1 or 2 warpgroups)       64 rows each: waits full[stage], multiplies; releases the stage before

CTAs are persistent: the next tile's operands are copied while a tile's result is stored.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from dsv4_kernels.device import dependent_launch, pipeline, ptx
from dsv4_kernels.device.bf16_rows import add
from dsv4_kernels.device.tma import TmaTensor, swizzled_atom, swizzled_layout, tma_partition
from dsv4_kernels.linear.kernel import CHUNK, ROW_BYTES, SEGMENTS, WARP, Arguments, begin_of

WARPGROUP = 128
MMA_ROWS = 64
"""Rows of the weight, of an instruction and of a warpgroup."""
MMA_CHANNELS = 16
REGISTERS = (240, 24)
"""Registers of a thread, if there are two consumers: of a consumer, and of the producer."""


@dataclass(frozen=True)
class Tile:
    """The part of the result that a CTA computes at a time."""

    rows: int
    """Rows of the weight: 64 for each consumer."""
    tokens: int
    stages: int

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.rows // MMA_ROWS

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.consumers + 1) * WARPGROUP

    @property
    def accumulators(self) -> int:
        """Accumulators of a lane."""
        return self.tokens // 2

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return (self.rows + self.tokens) * ROW_BYTES


@dataclass(frozen=True)
class Configuration:
    """Compile-time parameters."""

    tile: Tile
    fp32: bool
    """Whether the result is fp32; otherwise bf16."""


class Work(NamedTuple):
    """Tiles of a CTA: `number`, `number + stride`, ..., `turns` of them."""

    number: Int32
    stride: Int32
    turns: Int32
    token_tiles: Int32
    chunks: Int32


class Place(NamedTuple):
    """Position of a tile, counted in tiles."""

    row: Int32
    token: Int32
    group: Int32


class Ring(NamedTuple):
    """The stages in shared memory and their mbarriers."""

    weights: cute.Pointer  # [stages, rows, 64] bf16, swizzled by 128 bytes
    tokens: cute.Pointer  # [stages, tokens, 64]
    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def launch(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    num_tiles: Int32,
    groups: Int32,
    num_ctas: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches persistent CTAs; num_tiles counts the tiles of all groups."""
    tile = configuration.tile
    strides = args.weight_row_bytes, args.weight_group_bytes
    weights = tma_of(args.weight, args.num_rows, args.channels, groups, strides, tile.rows)
    strides = args.x_token_bytes, args.x_group_bytes
    tokens = tma_of(args.x, args.num_tokens, args.channels, groups, strides, tile.tokens)
    kernel(args, configuration, num_tiles, weights, tokens).launch(
        grid=[num_ctas, 1, 1],
        block=[tile.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


def tma_of(start: Int64, rows: Int32, channels: Int32, groups: Int32, strides: tuple, box_rows: int) -> TmaTensor:
    """TMA loads of 64 channels of some rows of [rows, channels, groups]; zeros outside the tensor."""
    pointer = cute.make_ptr(BFloat16, start, cute.AddressSpace.gmem, assumed_align=16)
    row, group = (cute.assume(stride // 2, 8) for stride in strides)
    tensor = cute.make_tensor(pointer, cute.make_layout((rows, channels, groups), stride=(row, 1, group)))
    box = (box_rows, CHUNK)
    layout = cute.tile_to_shape(swizzled_atom(), box, order=(0, 1))
    return TmaTensor(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box))


@cute.kernel
def kernel(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    num_tiles: Int32,
    tma_weights: TmaTensor,
    tma_tokens: TmaTensor,
) -> None:
    """Sets up barriers, and sends every warp to its role."""
    tile = configuration.tile
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.utils.SmemAllocator()
    weights = memory.allocate_array(BFloat16, num_elems=tile.stages * tile.rows * CHUNK, byte_alignment=1024)
    tokens = memory.allocate_array(BFloat16, num_elems=tile.stages * tile.tokens * CHUNK, byte_alignment=1024)
    full = memory.allocate_array(Int64, num_elems=tile.stages, byte_alignment=8)
    empty = memory.allocate_array(Int64, num_elems=tile.stages, byte_alignment=8)
    ring = Ring(weights, tokens, full, empty)
    if warp == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(tile.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, tile.consumers * WARPGROUP // WARP)
            cute.arch.mbarrier_init_fence()
    dependent_launch.begin()
    cute.arch.sync_threads()
    work = Work(
        number=cta,
        stride=ctas,
        turns=(num_tiles - cta + ctas - 1) // ctas,
        token_tiles=(args.num_tokens + (tile.tokens - 1)) // tile.tokens,
        chunks=(args.channels + (CHUNK - 1)) // CHUNK,
    )
    if warp < tile.consumers * WARPGROUP // WARP:
        if const_expr(tile.consumers > 1):
            cute.arch.setmaxregister_increase(REGISTERS[0])
        consume(args, configuration, work, ring, thread)
    else:
        if const_expr(tile.consumers > 1):
            cute.arch.setmaxregister_decrease(REGISTERS[1])
        if warp == tile.consumers * WARPGROUP // WARP:
            produce(args, tile, work, ring, tma_weights, tma_tokens)


def place_of(args: Arguments, work: Work, turn: Int32) -> Place:
    """The position of a tile. CTAs that run at the same time share their tokens, which are then read from L2."""
    number = work.number + turn * work.stride
    outer = number // args.num_row_tiles
    group = outer // work.token_tiles
    return Place(number - outer * args.num_row_tiles, outer - group * work.token_tiles, group)


@cute.jit
def produce(
    args: Arguments,
    tile: cutlass.Constexpr[Tile],
    work: Work,
    ring: Ring,
    tma_weights: TmaTensor,
    tma_tokens: TmaTensor,
) -> None:
    """The producer warp: copies one stage after the other."""
    of_weights = tma_partition(tma_weights, operand(ring.weights, tile.rows, tile.stages))
    of_tokens = tma_partition(tma_tokens, operand(ring.tokens, tile.tokens, tile.stages))
    stage = pipeline.first_to_fill()
    for turn in cutlass.range(work.turns, unroll=1):
        place = place_of(args, work, turn)
        for chunk in cutlass.range(work.chunks, unroll=1):
            cute.arch.mbarrier_wait(ring.empty + stage.index, stage.phase)
            full = ring.full + stage.index
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tile.stage_bytes)
            source = of_weights[1][None, place.row, chunk, place.group]
            cute.copy(tma_weights.atom, source, of_weights[0][None, stage.index], tma_bar_ptr=full)
            source = of_tokens[1][None, place.token, chunk, place.group]
            cute.copy(tma_tokens.atom, source, of_tokens[0][None, stage.index], tma_bar_ptr=full)
            stage = pipeline.following(stage, tile.stages)


@cute.jit
def consume(
    args: Arguments, configuration: cutlass.Constexpr[Configuration], work: Work, ring: Ring, thread: Int32
) -> None:
    """A consumer warpgroup: computes 64 rows of every tile."""
    tile = configuration.tile
    mma = hopper.make_trivial_tiled_mma(
        *(BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32),
        (tile.consumers, 1, 1),
        (MMA_ROWS, tile.tokens),
    )
    of_thread = mma.get_slice(thread)
    left = of_thread.make_fragment_A(of_thread.partition_A(operand(ring.weights, tile.rows, tile.stages)))
    right = of_thread.make_fragment_B(of_thread.partition_B(operand(ring.tokens, tile.tokens, tile.stages)))
    shape = mma.partition_shape_C((tile.rows, tile.tokens))
    sums, total = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
    lane = thread % WARP
    stage = pipeline.first_to_read()
    for turn in cutlass.range(work.turns, unroll=1):
        total.fill(0.0)
        for segment in cutlass.range(SEGMENTS, unroll=1):
            sums.fill(0.0)
            before = Int32(-1)  # the stage that `wgmma` may still read
            for _ in cutlass.range(begin_of(segment, work.chunks), begin_of(segment + 1, work.chunks), unroll=1):
                cute.arch.mbarrier_wait(ring.full + stage.index, stage.phase)
                multiply(mma, sums, left[None, None, None, stage.index], right[None, None, None, stage.index])
                warpgroup.wait_group(1)
                give_back(ring, before, lane)
                before = stage.index
                stage = pipeline.following(stage, tile.stages)
            warpgroup.wait_group(0)
            give_back(ring, before, lane)
            for i in cutlass.range_constexpr(tile.accumulators):
                total[i] = add(total[i], sums[i])
        store(args, configuration, place_of(args, work, turn), thread, total)


def operand(start: cute.Pointer, rows: int, stages: int) -> cute.Tensor:
    """[rows, 64, stages] in shared memory."""
    outer, swizzle = swizzled_layout((rows, CHUNK, stages))
    return cute.make_tensor(cute.recast_ptr(start, swizzle, dtype=BFloat16), outer)


def multiply(mma: cute.TiledMma, sums: cute.Tensor, left: cute.Tensor, right: cute.Tensor) -> None:
    """Adds a stage's products, in the order of the channels; does not wait for the `wgmma` group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in range(CHUNK // MMA_CHANNELS):
        cute.gemm(atom, sums, left[None, None, k], right[None, None, k], sums)
    warpgroup.commit_group()


@cute.jit
def give_back(ring: Ring, stage: Int32, lane: Int32) -> None:
    """Arrives at `empty` of a stage that this warp has read; no stage if negative."""
    if (lane == 0) & (stage >= 0):
        cute.arch.mbarrier_arrive(ring.empty + stage)


@cute.jit
def store(
    args: Arguments,
    configuration: cutlass.Constexpr[Configuration],
    place: Place,
    thread: Int32,
    total: cute.Tensor,
) -> None:
    """Writes a warp's 16 rows, two neighbouring rows of a token at a time.

    A lane has two tokens of a row, and of the row eight after it; the lane four further has the neighbouring row. After
    an exchange a lane of an even row has the first token of both rows, a lane of an odd row the second.
    """
    tile = configuration.tile
    lane = thread % WARP
    odd = lane // 4 % 2
    row = place.row * tile.rows + thread // WARP * 16 + lane // 4 - odd
    token = place.token * tile.tokens + lane % 4 * 2 + odd
    element = 4 if configuration.fp32 else 2
    at = args.out + Int64(place.group) * args.out_group_bytes + Int64(token) * args.out_token_bytes
    for j in cutlass.range_constexpr(tile.tokens // 8):
        for half in cutlass.range_constexpr(2):
            first, second = total[4 * j + 2 * half], total[4 * j + 2 * half + 1]
            given = second
            kept = first
            if odd == 1:
                given, kept = first, second
            got = cute.arch.shuffle_sync_bfly(given, offset=4)
            low, high = kept, got
            if odd == 1:
                low, high = got, kept
            if (row + 8 * half < args.num_rows) & (token + 8 * j < args.num_tokens):
                address = at + Int64(row + 8 * half) * element
                if const_expr(configuration.fp32):
                    ptx.store_f32x2(address, (low, high))
                else:
                    ptx.store_u32(address, ptx.pack_bf16(low, high))
        at += 8 * args.out_token_bytes
