"""The FP8 product on Blackwell (sm_100a): e4m3 times e4m3 by block-scaled `tcgen05.mma`, for any number of tokens.

A work tile is 32, 64 or 128 rows of the weight times up to N tokens. Weights are the left operand, tokens the narrow
right one, so a decode step streams the weight once. Persistent CTAs compute work tiles in order, tiles of rows fastest:
tokens stay in L2. An instruction always has M = 128, since block scales allow no less: in a tile of 32 rows the other
96 rows are codes of what lies behind the tile's in the stage, and their lanes of tensor memory are never read.
Warps of a CTA, and their waits:

    CODES (1 thread)       TMA: the codes of weight and tokens; rows after the end are zeros
        waits empty[stage]; the bytes arrive at codes[stage]
    SCALES (4 warps)       the scales of both by `cp.async`, some stages ahead, packed in shared memory
        waits empty[stage], arrives at scales[stage]
    MMA (1 thread)         scales into tensor memory, four products of K = 32 a block of 128 channels
        waits free[buffer] once a work tile, codes[stage] and scales[stage]; commits empty[stage], done[buffer]
    EPILOGUE (4 warps)     lane r of tensor memory is row r of the tile; a column is a token
        waits done[buffer], arrives at free[buffer]

A scale of 128 channels, fp32 and a power of two in global memory, becomes a ue8m0, byte b of a word for block b of the
stage; the four products of a block name that byte. A weight's scale is that of 128 rows. All of K is summed in tensor
memory in one order, so a token's bits depend neither on the other tokens nor on the work tile.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as experimental_cuda
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx, tcgen05
from dsv4_kernels.device.mbarrier import arrive, wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.device.pointers import typed
from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES, as_float, load_tmem, swizzled, tmem_columns, unswizzled

BLOCK = 128
"""Channels of K that share a scale; rows of a weight's scale."""
LANES = 128
"""The M of an instruction, and the lanes of tensor memory."""
ROWS = (32, 64, 128)
"""Weight rows of a work tile."""
WIDTHS = (16, 32, 64, 128, 192)
"""Tokens of a work tile: the N of an instruction."""
PRODUCTS_PER_BLOCK = 4
PRODUCT_BYTES = SWIZZLE_ROW_BYTES // PRODUCTS_PER_BLOCK
SCALE_ROWS = 128
SCALE_TILE_BYTES = SCALE_ROWS * 4
"""Bytes of four scales of each of 128 rows, in the order of `tcgen05.cp.32x128b.warpx4`."""
SCALE_COLUMNS = 4
CHUNK = 16
ACCUMULATORS = 2
MAX_STAGES = 8
MAX_SMEM = 227 * 1024
AHEAD = 3
"""Most stages whose scales a thread loads ahead."""


class Barrier(IntEnum):
    """First index of each group of mbarriers."""

    CODES = 0  # [stages] codes are in shared memory
    SCALES = MAX_STAGES  # [stages] scales are in shared memory
    EMPTY = 2 * MAX_STAGES  # [stages] the products of the stage are done
    DONE = 3 * MAX_STAGES  # [ACCUMULATORS] a work tile's sums are in the accumulator buffer
    FREE = DONE + ACCUMULATORS  # [ACCUMULATORS] the epilogue has read the accumulator buffer
    COUNT = FREE + ACCUMULATORS


class Warp(IntEnum):
    """First warp of each role."""

    EPILOGUE = 0  # 4: warp w accesses lanes 32 w to 32 w + 31
    SCALES = 4  # 4
    CODES = 8
    MMA = 9
    COUNT = 10


THREADS = Warp.COUNT * 32
GROUP_THREADS = 128
WARPS_OF_GROUP = 4


@dataclass(frozen=True)
class Plan:
    """Compile-time parameters of the kernel. None of them changes a bit of a result."""

    tokens: int
    """Tokens of a work tile, of WIDTHS."""
    rows: int = ROWS[-1]
    """Weight rows of a work tile, of ROWS; at least half as many as tokens."""

    def __post_init__(self) -> None:
        if self.tokens not in WIDTHS:
            raise ValueError(f"tokens of a tile is {self.tokens}; expected one of {WIDTHS}")
        if self.rows not in ROWS or self.tokens > 2 * self.rows:
            raise ValueError(
                f"rows of a tile is {self.rows}; expected one of {ROWS}, and at least {self.tokens // 2} for "
                f"{self.tokens} tokens"
            )

    @property
    def blocks(self) -> int:
        """Blocks of 128 channels in a stage. The warps' work of a stage besides copies and products (waits, fences, the
        scales of a thread) takes longer than a small block's copies."""
        return 4 if self.rows + self.tokens <= 80 else 2 if self.rows + self.tokens <= 128 else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight's codes in a block of a stage."""
        return self.rows * SWIZZLE_ROW_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of the tokens' codes in a block of a stage."""
        return self.tokens * SWIZZLE_ROW_BYTES

    @property
    def epilogue_warps(self) -> int:
        """Warps whose lanes of tensor memory have rows of the tile."""
        return self.rows // 32

    @property
    def token_scale_tiles(self) -> int:
        """Scale tiles of the tokens in a block."""
        return -(-self.tokens // SCALE_ROWS)

    @property
    def scales_offset(self) -> int:
        """Offset of the scales in a stage, after the codes of weight and tokens: a scale tile of the weight for each
        block, then those of the tokens. The first of them becomes that of all blocks."""
        return self.blocks * (self.weight_bytes + self.token_bytes)

    @property
    def codes_bytes(self) -> int:
        """Bytes whose arrival completes a stage's CODES barrier."""
        return self.scales_offset

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, a multiple of the swizzle's period of 1,024."""
        scales = (1 + self.token_scale_tiles) * self.blocks * SCALE_TILE_BYTES
        return -(-(self.scales_offset + scales) // 1024) * 1024

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return min(MAX_STAGES, (MAX_SMEM - 2048) // self.stage_bytes)

    @property
    def ahead(self) -> int:
        """Stages whose scales a thread loads ahead."""
        return min(AHEAD, self.stages - 1)

    @property
    def barriers_offset(self) -> int:
        """Offset of the [Barrier.COUNT] mbarriers, after the stages."""
        return self.stages * self.stage_bytes

    @property
    def tmem_address_offset(self) -> int:
        """Offset of the word to which the allocation of tensor memory writes its address."""
        return self.barriers_offset + 8 * Barrier.COUNT

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.tmem_address_offset + 16

    @property
    def scales_column(self) -> int:
        """First column of the scales in tensor memory, the weight's first, after the accumulators."""
        return ACCUMULATORS * self.tokens

    @property
    def tmem_columns(self) -> int:
        """Allocated columns, a power of two."""
        used = self.scales_column + (1 + self.token_scale_tiles) * SCALE_COLUMNS
        return 1 << max(used - 1, 31).bit_length()


class Arguments(NamedTuple):
    """A launch's arguments: device addresses, sizes and strides in bytes."""

    codes: Int64  # e4m3 [tokens, k]
    codes_row_bytes: Int64
    scales: Int64  # fp32 [tokens, k / 128]
    scales_row_bytes: Int64
    scales_block_bytes: Int64
    weight: Int64  # e4m3 [rows, k]
    weight_row_bytes: Int64
    weight_scale: Int64  # fp32 [rows / 128, k / 128], contiguous rows
    weight_scale_row_bytes: Int64
    out: Int64  # bf16 [tokens, rows]
    out_row_bytes: Int64
    num_tokens: Int32
    num_rows: Int32
    num_blocks: Int32  # k / 128
    row_tiles: Int32
    num_tiles: Int32


@cute.jit
def launch(a: Arguments, num_ctas: Int32, plan: cutlass.Constexpr, stream: cuda.CUstream) -> None:
    """Launches the persistent kernel; num_ctas is at most the number of multiprocessors."""
    weight = tensor_map(a.weight, a.num_blocks * BLOCK, a.num_rows, a.weight_row_bytes, plan.rows)
    codes = tensor_map(a.codes, a.num_blocks * BLOCK, a.num_tokens, a.codes_row_bytes, plan.tokens)
    kernel(a, weight, codes, plan).launch(
        grid=(num_ctas, 1, 1),
        block=(THREADS, 1, 1),
        smem=plan.smem_bytes,
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=dependent_launch.is_on(),
    )


def tensor_map(address: Int64, k: Int32, rows: Int32, row_bytes: Int64, box_rows: int) -> experimental_cuda.TensorMap:
    """The TMA descriptor of rows of codes, of which a copy takes BLOCK channels of `box_rows` rows."""
    return experimental_cuda.create_tensor_map_tiled(
        global_address=address,
        dtype=cutlass.Uint8,
        global_dims=[k, rows],
        global_strides=[row_bytes // 16],
        box_dims=[BLOCK, box_rows],
        swizzle=experimental_cuda.TensorMapSwizzle.s128b,
    )


@cute.kernel
def kernel(
    a: Arguments,
    weight: cutlass.GridConstant[experimental_cuda.TensorMap],
    codes: cutlass.GridConstant[experimental_cuda.TensorMap],
    plan: cutlass.Constexpr,
) -> None:
    """Sets up barriers and tensor memory, and sends every warp to its role."""
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).raw_ptr()
    barriers = typed(smem + plan.barriers_offset, Int64)
    tmem_address = typed(smem + plan.tmem_address_offset, Int32)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == Warp.MMA:
        groups = [
            (Barrier.CODES, plan.stages, 1),
            (Barrier.SCALES, plan.stages, WARPS_OF_GROUP),
            (Barrier.EMPTY, plan.stages, 1),
            (Barrier.DONE, ACCUMULATORS, 1),
            (Barrier.FREE, ACCUMULATORS, plan.epilogue_warps),
        ]
        tcgen05.set_up(barriers, groups, tmem_address, plan.tmem_columns)
    prims.barrier_cta_sync_aligned(0)  # barriers and tensor memory are set up
    dependent_launch.begin()  # the next kernel may start: tensor memory is allocated
    tmem = prims.TmemAddr(tmem_address.load())

    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    if warp < Warp.SCALES:
        if warp < plan.epilogue_warps:
            finish_tiles(a, barriers, tmem, warp, first, stride, plan)
    elif warp < Warp.CODES:
        load_scales(a, smem, barriers, first, stride, plan)
    elif warp == Warp.CODES:
        if prims.elect_sync():
            load_codes(a, weight, codes, smem, barriers, first, stride, plan)
    else:
        if prims.elect_sync():
            multiply(a, smem, barriers, tmem, first, stride, plan)

    prims.barrier_cta_sync_aligned(0)  # the epilogue has completed its last loads of tensor memory
    if warp == Warp.MMA:
        tcgen05.free(tmem, plan.tmem_columns)


@cute.jit
def wait_until_empty(barriers: cutlass.Pointer, count: Int32, plan: cutlass.Constexpr) -> None:
    """Waits until the products of the previous step in the stage of step `count` are done."""
    if count >= plan.stages:
        stage = stage_of(count, plan.stages)
        wait(barriers, Barrier.EMPTY + stage.index, stage.phase ^ 1)


@cute.jit
def load_codes(
    a: Arguments,
    weight: experimental_cuda.TensorMap,
    codes: experimental_cuda.TensorMap,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread loads the codes of both operands, stage after stage."""
    count = Int32(0)
    for index in cutlass.range(first, a.num_tiles, stride):
        row = index % a.row_tiles * plan.rows
        token = index // a.row_tiles * plan.tokens
        for block in cutlass.range(0, a.num_blocks, plan.blocks):
            wait_until_empty(barriers, count, plan)
            stage = stage_of(count, plan.stages).index
            target = smem + stage * plan.stage_bytes
            full = barriers + (Barrier.CODES + stage)
            prims.mbarrier_arrive_expect_tx(full, plan.codes_bytes)
            for i in cutlass.range_constexpr(plan.blocks):  # zeros after the last block
                channel = (block + i) * BLOCK
                prims.cp_async_bulk_tensor_shared_cta_global(
                    target + i * plan.weight_bytes, weight.get_ptr(), (channel, row), full
                )
                prims.cp_async_bulk_tensor_shared_cta_global(
                    target + (plan.blocks * plan.weight_bytes + i * plan.token_bytes),
                    codes.get_ptr(),
                    (channel, token),
                    full,
                )
            count = count + 1


@cute.jit
def load_scales(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Thread i loads the scales of lane i of the weight, and of tokens i and 128 + i, of every block of a stage. Tokens
    and blocks that do not exist get zeros."""
    thread = cute.arch.thread_idx()[0] % GROUP_THREADS
    place = Int32(smem.toint()) + plan.scales_offset + thread % 32 * CHUNK + thread // 32 * 4
    for stage in cutlass.range_constexpr(plan.stages):  # tcgen05.cp also copies the scales of columns beyond N
        for tile in cutlass.range_constexpr(plan.token_scale_tiles * plan.blocks):
            at = place + stage * plan.stage_bytes + (plan.blocks + tile) * SCALE_TILE_BYTES
            ptx.store_shared_u32(at, Int32(0))
    count = Int32(0)
    for index in cutlass.range(first, a.num_tiles, stride):
        row = index % a.row_tiles * plan.rows
        of_weight = a.weight_scale + Int64(row // BLOCK) * a.weight_scale_row_bytes
        token = index // a.row_tiles * plan.tokens + thread
        sources = [(of_weight, Int64(4), Int32(4))]
        for tile in cutlass.range_constexpr(plan.token_scale_tiles):
            exists = (token + tile * SCALE_ROWS < a.num_tokens) & (thread + tile * SCALE_ROWS < plan.tokens)
            number = cutlass.select_(exists, token + tile * SCALE_ROWS, Int32(0))
            num_bytes = cutlass.select_(exists, Int32(4), Int32(0))
            sources.append((a.scales + Int64(number) * a.scales_row_bytes, a.scales_block_bytes, num_bytes))
        for block in cutlass.range(0, a.num_blocks, plan.blocks):
            wait_until_empty(barriers, count, plan)
            target = place + stage_of(count, plan.stages).index * plan.stage_bytes
            for tile in cutlass.range_constexpr(1 + plan.token_scale_tiles):
                address, block_bytes, num_bytes = sources[tile]
                address = address + Int64(block) * block_bytes
                for i in cutlass.range_constexpr(plan.blocks):
                    of_block = num_bytes
                    if i > 0:
                        of_block = cutlass.select_(block + i < a.num_blocks, num_bytes, Int32(0))
                        address = address + block_bytes
                    to = target + (tile * plan.blocks + i) * SCALE_TILE_BYTES
                    ptx.copy_4_bytes_async(to, address, of_block)
            cute.arch.cp_async_commit_group()
            if count >= plan.ahead:
                cute.arch.cp_async_wait_group(plan.ahead)
                publish_scales(barriers, count - plan.ahead, place, plan)
            count = count + 1
    cute.arch.cp_async_wait_group(0)
    for late in cutlass.range(cutlass.max(count - plan.ahead, 0), count):
        publish_scales(barriers, late, place, plan)


@cute.jit
def publish_scales(barriers: cutlass.Pointer, count: Int32, place: Int32, plan: cutlass.Constexpr) -> None:
    """Packs the exponents of this thread's fp32 scales, a byte for each block of the stage, and signals that the
    stage's scales are complete."""
    stage = stage_of(count, plan.stages).index
    for tile in cutlass.range_constexpr(1 + plan.token_scale_tiles):
        address = place + stage * plan.stage_bytes + tile * plan.blocks * SCALE_TILE_BYTES
        word = ptx.as_u32(ptx.load_shared_f32(address)) >> 23
        for i in cutlass.range_constexpr(1, plan.blocks):
            exponent = ptx.as_u32(ptx.load_shared_f32(address + i * SCALE_TILE_BYTES)) >> 23
            word = word | exponent << 8 * i
        ptx.store_shared_u32(address, word)
    prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
    arrive(barriers + (Barrier.SCALES + stage))


@cute.jit
def multiply(
    a: Arguments,
    smem: cutlass.Pointer,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One thread issues all products. One scale buffer suffices: the tensor pipe keeps copies and products in order."""
    count, tiles = Int32(0), Int32(0)
    zero = Int32(0)
    for _ in cutlass.range(first, a.num_tiles, stride):
        buffer = stage_of(tiles, ACCUMULATORS)
        if tiles >= ACCUMULATORS:
            wait(barriers, Barrier.FREE + buffer.index, buffer.phase ^ 1)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        out = tmem_columns(tmem, zero, buffer.index * plan.tokens, Float32)
        for block in cutlass.range(0, a.num_blocks, plan.blocks):
            stage, phase = stage_of(count, plan.stages)
            wait(barriers, Barrier.CODES + stage, phase)
            wait(barriers, Barrier.SCALES + stage, phase)
            start = smem + stage * plan.stage_bytes
            for tile in cutlass.range_constexpr(1 + plan.token_scale_tiles):
                prims.tcgen05_cp(
                    prims.Tcgen05CpShape.SHAPE_32X128B,
                    tmem_columns(tmem, zero, plan.scales_column + tile * SCALE_COLUMNS, Float32),
                    unswizzled(start + (plan.scales_offset + tile * plan.blocks * SCALE_TILE_BYTES)),
                    group=prims.CTAGroup.CTA_1,
                    multicast=prims.Tcgen05CpMulticast.WARPX4,
                )
            for i in cutlass.range_constexpr(plan.blocks):
                if cutlass.const_expr(i == 0) or block + i < a.num_blocks:
                    multiply_block(start, tmem, out, i, (block > 0) if i == 0 else True, plan)
            prims.tcgen05_commit(barriers + (Barrier.EMPTY + stage), group=prims.CTAGroup.CTA_1)
            count = count + 1
        prims.tcgen05_commit(barriers + (Barrier.DONE + buffer.index), group=prims.CTAGroup.CTA_1)
        tiles = tiles + 1


@cute.jit
def multiply_block(
    stage: cutlass.Pointer,
    tmem: prims.TmemAddr,
    out: cutlass.Array,
    number: cutlass.Constexpr,
    adds: bool,
    plan: cutlass.Constexpr,
) -> None:
    """Issues the products of block `number` of a stage; the first one overwrites `out` unless `adds`. The left operand
    is LANES rows from the tile's first on; they end within the stage."""
    zero = Int32(0)
    weights = swizzled(stage + number * plan.weight_bytes)
    tokens = swizzled(stage + (plan.blocks * plan.weight_bytes + number * plan.token_bytes))
    for part in cutlass.range_constexpr(PRODUCTS_PER_BLOCK):
        prims.tcgen05_mma_block_scale(
            prims.Tcgen05MMAKind.MXF8F6F4,
            prims.CTAGroup.CTA_1,
            out,
            weights.advance_start_address(part * PRODUCT_BYTES),
            tokens.advance_start_address(part * PRODUCT_BYTES),
            prims.Tcgen05MxInstrDesc.build(
                a_dtype=cutlass.Float8E4M3FN,
                b_dtype=cutlass.Float8E4M3FN,
                n_dim=plan.tokens,
                m_dim=LANES,
                a_sf_id=number,
                b_sf_id=number,
            ),
            adds if part == 0 else True,
            tmem_columns(tmem, zero, plan.scales_column, Float32),
            tmem_columns(tmem, zero, plan.scales_column + SCALE_COLUMNS, Float32),
            scale_vec_size=None,
        )


@cute.jit
def finish_tiles(
    a: Arguments,
    barriers: cutlass.Pointer,
    tmem: prims.TmemAddr,
    warp: Int32,
    first: Int32,
    stride: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Stores all work tiles of a CTA in bf16. Thread r has row r of the tile, for all tokens, 16 at a time."""
    thread = cute.arch.thread_idx()[0]
    tiles = Int32(0)
    for index in cutlass.range(first, a.num_tiles, stride):
        row = index % a.row_tiles * plan.rows + thread
        token = index // a.row_tiles * plan.tokens
        buffer = stage_of(tiles, ACCUMULATORS)
        wait(barriers, Barrier.DONE + buffer.index, buffer.phase)
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        for column in cutlass.range(0, plan.tokens, CHUNK):
            words = load_tmem(tmem_columns(tmem, warp, buffer.index * plan.tokens + column, Int32), CHUNK)
            prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
            pairs = bf16_rows.packed([as_float(word) for word in words])
            left = cutlass.select_(row < a.num_rows, a.num_tokens - token - column, Int32(0))
            address = a.out + Int64(token + column) * a.out_row_bytes + Int64(row) * 2
            for i in cutlass.range_constexpr(CHUNK):
                if i < left:
                    half = pairs[i // 2] if i % 2 == 0 else pairs[i // 2] >> 16
                    ptx.asm("st.global.b16 [{$r0}], {$r1};", [], address + i * a.out_row_bytes, Uint32(half))
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        arrive(barriers + (Barrier.FREE + buffer.index))
        tiles = tiles + 1
