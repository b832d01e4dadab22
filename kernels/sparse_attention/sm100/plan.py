"""What all warps of the Blackwell kernel share: static plan, arguments, work items, waiting (see kernel.py)."""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives as prims

from dsv4_kernels.kv_layout import ROW_DIM
from dsv4_kernels.sparse_attention.split import STEP_KEYS

HEADS = 64
"""Heads of a CTA; missing ones are zero rows."""
TILE_KEYS = 64
CHUNK = 32
"""Columns of O that a thread holds in registers at a time."""
RESCALE_LOG2 = 8.0
"""O is rescaled when a maximum has grown by 2**8. Weights begin that much below 1, which bf16 holds as precisely, and
never exceed it: with values near fp32's limits O would overflow."""
FEW_TILES = 4
"""Up to so many tiles O is rescaled whenever a maximum has grown."""
SWIZZLE_ROW_BYTES = 128  # 64 channels (or keys) of bf16: the span of the 128-byte swizzle
SWIZZLE_CHANNELS = 64
CHANNEL_BLOCKS = ROW_DIM // SWIZZLE_CHANNELS
BLOCK_BYTES = TILE_KEYS * SWIZZLE_ROW_BYTES
KV_BYTES = 3 * CHANNEL_BLOCKS * BLOCK_BYTES
"""All stages: 3 tiles of one CTA, or 6 of which each CTA of a pair holds half of the channels."""
MAX_STAGES = 6
P_BYTES = HEADS * SWIZZLE_ROW_BYTES
ROW_BITS_BYTES = 16
"""Of a tile: a word for the 16 rows of each gather warp of a group."""
EIGHT_ROWS = 0x11111111
"""A bit for each of eight rows, which four lanes of a warp share."""
ALL_ROWS = EIGHT_ROWS | EIGHT_ROWS << 1
"""Bits of 16 rows, none of them a hole: bit 4 i is that of row i, bit 4 i + 1 that of row i + 8."""
MMA_K = 16
STEPS_PER_BLOCK = SWIZZLE_CHANNELS // MMA_K
HALF_DIM = ROW_DIM // 2
HALF_KEYS = TILE_KEYS // 2
TILES_PER_STEP = STEP_KEYS // TILE_KEYS


class Tmem:
    """First column of everything in tensor memory; 128 lanes by 512 columns of 32 bits, all of them used.

    Lane l holds head l % 64. Nothing overlaps: O 0-255, Q 256-383, S 384-447 and 448-511.
    """

    O = 0  # noqa: E741 - fp32; Plan.channel says which channels
    Q = 256  # bf16 pairs; channels 256 * (l // 64) + 2 * column
    S = 384  # fp32, 2 buffers of 64 keys; lanes 0-63 and 64-127 are summands
    S_COLUMNS = TILE_KEYS
    COLUMNS = 512


class Smem:
    """Byte offsets in shared memory."""

    KV = 0  # [Plan.stages][Plan.blocks][64 keys][64 channels] bf16, swizzled; Plan.block_offset
    P = KV + KV_BYTES  # [2][64 heads][64 keys] bf16, swizzled
    EXCHANGE = P + 2 * P_BYTES  # [8][128 threads][4] fp32: summands of S
    ROWS = EXCHANGE + 128 * HALF_KEYS * 4  # [Plan.stages][4 warps] int32: which of 16 rows are no holes, `row_bits`
    MAXIMA = ROWS + MAX_STAGES * ROW_BITS_BYTES  # [128 threads] fp32: rows' maxima on their way to the other half
    SUMS = MAXIMA + 128 * 4  # [128 threads] fp32
    IS_LAST = SUMS + 128 * 4  # int32: whether this CTA was the last to finish a part of its token
    BARRIERS = IS_LAST + 16
    TMEM_ADDRESS = BARRIERS + 24 * 8
    BYTES = TMEM_ADDRESS + 16


assert Smem.BYTES <= 227 * 1024, Smem.BYTES


@dataclass(frozen=True)
class Plan:
    """What differs between one CTA and a pair, whose CTA r has heads 64 r to 64 r + 63 and channels from 256 r of keys.

    Rows of B (N) come from both CTAs of a pair, the lower half from the first. Of S they are the halves of the
    channels; of O's product p, channels 128 p to 128 p + 127 of either CTA's 256.
    """

    ctas: int

    @property
    def stages(self) -> int:
        """Tiles of keys in shared memory."""
        return 3 * self.ctas

    @property
    def blocks(self) -> int:
        """Blocks of 64 channels that a stage holds."""
        return CHANNEL_BLOCKS // self.ctas

    @property
    def stage_bytes(self) -> int:
        """Bytes of one of them in a CTA."""
        return self.blocks * BLOCK_BYTES

    def block_offset(self, block: int) -> int:
        """Place in a stage of one of its blocks. With one CTA b is beside b + 4, so that both halves are one B of S."""
        place = block if self.ctas == 2 else block % 4 * 2 + block // 4
        return place * BLOCK_BYTES

    def first_block_of_out(self, product: int) -> int:
        """Of the blocks that are B of O's product 0 or 1."""
        return product * self.blocks // 2

    def channel(self, column: Int32, half: Int32) -> Int32:
        """Channel of O in a column of lanes [64 * half, 64 * half + 64)."""
        if self.ctas == 2:
            return half * HALF_DIM + column
        return column // (HALF_DIM // 2) * HALF_DIM + half * (HALF_DIM // 2) + column % (HALF_DIM // 2)


class Barrier(IntEnum):
    """First index of each group of mbarriers."""

    FULL = 0  # [stages] a tile lies in this CTA's stage
    ALL_FULL = 6  # [stages] in all CTAs' stages: the first CTA's barrier; FULL itself if there is one CTA
    PV_DONE = 12  # [stages] P V of the stage's tile is in O; the stage and P's buffer are free
    S_READY = 18  # [2]
    P_READY = 20  # [2] of all CTAs: the first CTA's barrier
    Q_READY = 22  # likewise
    COUNT = 23


assert Barrier.COUNT * 8 <= Smem.TMEM_ADDRESS - Smem.BARRIERS


class NamedBarrier(IntEnum):
    """Hardware barriers; 0 is the whole CTA's."""

    SOFTMAX = 1


class Warp(IntEnum):
    """First warp of each role."""

    SOFTMAX = 0  # 4: warp w reaches lanes 32 w to 32 w + 31
    GATHER = 4  # 2 groups of 4
    MMA = 12
    COUNT = 13


THREADS = Warp.COUNT * 32
GROUP_THREADS = 128
WARPS_OF_GROUP = 4
GATHER_GROUPS = 2
LOG2_E = math.log2(math.e)


class Arguments(NamedTuple):
    """A launch's arguments as the kernel sees them: device addresses (0: absent), strides and counts."""

    q: Int64  # bf16
    q_token_stride: Int64  # elements
    q_head_stride: Int64
    window: Int64
    window_page_bytes: Int64  # bytes from page to page (FP8) or from row to row (PLAIN)
    entries: Int64
    entry_page_bytes: Int64
    window_rows: Int64  # int32
    window_rows_stride: Int64
    window_slots: Int32
    entry_rows: Int64  # int32; 0: dense addressing
    entry_rows_stride: Int64
    entry_slots: Int32  # K; dense: anything that visible does not exceed
    page_table: Int64  # int32
    page_table_stride: Int64
    entries_per_page: Int32
    token_to_request: Int64  # int32
    visible: Int64  # int32; 0: all entry_slots
    sink: Int64  # fp32
    scale_log2: Float32  # of the scores, times log2(e)
    out: Int64
    out_token_stride: Int64
    out_head_stride: Int64
    out_is_fp32: Int32
    lse: Int64  # fp32 [T, H]
    num_heads: Int32
    split_steps: Int32  # steps that a part may have; 0: no limit
    max_parts: Int32
    num_items: Int32  # T * max_parts
    partial_out: Int64  # fp32 [slots, 64, 128, 4]: O of every thread, 4 columns at a time, not normalised
    partial_state: Int64  # fp32 [slots, 3, 64 heads]: RowState
    arrived: Int64  # int32 [T, CTAs of a token], zero between launches
    zeros: Int64  # ROW_DIM bf16 zeros: what is read in place of a hole or a missing head


class Item(NamedTuple):
    """One part of a token's keys for one block of heads: what a CTA does, alone or beside its pair's other CTA."""

    token: Int32
    head_block: Int32
    part: Int32
    parts: Int32
    slot: Int32  # of the partial result; those of a token and a block of heads are adjacent
    first_tile: Int32
    num_tiles: Int32  # 0: this part does not exist
    window_tiles: Int32  # the tiles before those of the entries
    num_entries: Int32


# ---- small device functions


def gmem(address: Int64, dtype: type) -> cutlass.Pointer:
    """A global pointer from a device address."""
    return cutlass.Pointer(
        llvm.inttoptr(llvm.PointerType.get(cutlass.AddressSpace.gmem.value), address.ir_value()), dtype=dtype
    )


@cute.jit
def wait(barriers: cutlass.Pointer, index: Int32, parity: Int32) -> None:
    """Until the phase of this parity is over."""
    while not prims.mbarrier_try_wait_parity(barriers + index, parity):
        pass


@cute.jit
def wait_for_tile(barriers: cutlass.Pointer, first: cutlass.Constexpr, tile: Int32, plan: cutlass.Constexpr) -> None:
    """Waits for what happens once a tile at the barrier of the tile's stage."""
    wait(barriers, first + tile % plan.stages, tile // plan.stages & 1)


@cute.jit
def arrive(barrier: cutlass.Pointer) -> None:
    """One arrival for this warp, after what all its lanes did."""
    prims.bar_warp_sync(0xFFFFFFFF)
    if prims.elect_sync():
        prims.mbarrier_arrive(barrier)


def cta_rank(plan: Plan) -> Int32:
    """In the pair; 0 without one."""
    return cute.arch.block_idx()[0] % plan.ctas


def first_and_stride(plan: Plan) -> tuple[Int32, Int32]:
    """Of the indices of the work items that this CTA, or its pair, takes."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    return block // plan.ctas, grid // plan.ctas


def of_first_cta(barrier: cutlass.Pointer, plan: Plan) -> cutlass.Pointer:
    """The same barrier in the CTA whose MMA warp works for all."""
    return barrier if plan.ctas == 1 else prims.mapa(barrier, 0)


def typed(pointer: cutlass.Pointer, dtype: type) -> cutlass.Pointer:
    """The same address, counted in elements of dtype."""
    return cutlass.Pointer(pointer, dtype=dtype)


def store_words(target: cutlass.Pointer, words: list[Int32]) -> None:
    """16 bytes."""
    typed(target, Int32).store(cutlass.Vector.from_elements(tuple(words), Int32), alignment=16)


def load_tmem(columns: cutlass.Array, count: int) -> list[Int32]:
    """Words of this thread's lane; to be followed by a wait."""
    words = prims.tcgen05_ld("32x32b", columns, num=count)
    return [words[i] for i in range(count)]


def as_float(word: Int32) -> Float32:
    """The same bits. As PTX, since the compiler would pair words up between a load of tensor memory and its wait."""
    return prims.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def softmax_barrier() -> None:
    """All softmax warps meet."""
    prims.barrier_cta_sync_aligned(NamedBarrier.SOFTMAX, thread_count=GROUP_THREADS)


def tmem_columns(tmem: prims.TmemAddr, warp: Int32, column: Int32 | int, dtype: type) -> cutlass.Array:
    """Address of a column in the lanes that warp `warp` of a group of four reaches."""
    return prims.TmemAddr.from_row_col(tmem.row_id + warp % 4 * 32, tmem.col_id + column).as_ptr(dtype)


@cute.jit
def item_of(index: Int32, a: Arguments, plan: cutlass.Constexpr) -> Item:
    """Work item `index`; split.py says how a token's keys are divided."""
    part = index % a.max_parts
    token, head_block = index // a.max_parts, cta_rank(plan)
    slot = (token * plan.ctas + head_block) * a.max_parts + part
    num_entries = Int32(0)
    if a.entries != 0:
        num_entries = a.entry_slots
        if a.visible != 0:
            visible = (gmem(a.visible, Int32) + token).load()
            num_entries = cutlass.max(cutlass.min(num_entries, visible), Int32(0))
    window_steps = (a.window_slots + (STEP_KEYS - 1)) // STEP_KEYS
    steps = window_steps + (num_entries + (STEP_KEYS - 1)) // STEP_KEYS
    parts = Int32(1)
    if a.split_steps > 0:
        parts = cutlass.max((steps + a.split_steps - 1) // a.split_steps, Int32(1))
    window_tiles = window_steps * TILES_PER_STEP
    used_tiles = (a.window_slots + (TILE_KEYS - 1)) // TILE_KEYS
    if num_entries > 0:
        used_tiles = window_tiles + (num_entries + (TILE_KEYS - 1)) // TILE_KEYS
    first_tile = part * steps // parts * TILES_PER_STEP
    end_tile = cutlass.min((part + 1) * steps // parts * TILES_PER_STEP, used_tiles)
    num_tiles = cutlass.max(end_tile - first_tile, Int32(1))  # a tile of holes if there is nothing
    if part >= parts:
        num_tiles = Int32(0)
    return Item(token, head_block, part, parts, slot, first_tile, num_tiles, window_tiles, num_entries)


def load_words(address: Int64, offset: int, count: int) -> list[Int32]:
    """`count` (2 or 4) words, `offset` bytes further, of memory that nobody writes during the launch."""
    registers = ", ".join(f"{{$w{i}}}" for i in range(count))
    return list(
        prims.inline_ptx(
            f"ld.global.nc.v{count}.s32 {{{registers}}}, [{{$r0}}+{offset}];",
            write_only_types=[Int32] * count,
            read_only_args=[address],
        )
    )
