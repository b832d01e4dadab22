"""The static plan of the Blackwell kernel: sizes, tensor and shared memory, barriers, warps, arguments (kernel.py)."""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES
from dsv4_kernels.kv_layout import ROW_DIM
from dsv4_kernels.sparse_attention.split import STEP_KEYS

HEADS = 64
"""Heads of a CTA; missing heads are rows of zeros."""
TILE_KEYS = 64
"""Keys of a key tile."""
CHUNK = 32
"""Columns of O that a thread holds in registers at a time."""
RESCALE_LOG2 = 8.0
"""Lazy rescaling: O follows a row max that has grown by 2**8. Weights begin at 2**-8, with the same relative precision
in bf16, and never exceed 1: otherwise O would overflow for values near fp32's limits."""
FEW_TILES = 4
"""Work tiles of at most this many key tiles rescale O whenever a row max has grown."""
SWIZZLE_CHANNELS = 64
CHANNEL_BLOCKS = ROW_DIM // SWIZZLE_CHANNELS
BLOCK_BYTES = TILE_KEYS * SWIZZLE_ROW_BYTES
KV_BYTES = 3 * CHANNEL_BLOCKS * BLOCK_BYTES
"""All stages: 3 key tiles of one CTA, or 6 of which each CTA of a pair holds half of the channels."""
MAX_STAGES = 6
P_BYTES = HEADS * SWIZZLE_ROW_BYTES
ROW_BITS_BYTES = 16
"""Bytes of a key tile's row bits: a word for the 16 rows of each warp of a gather group."""
EIGHT_ROWS = 0x11111111
"""A bit for each of eight rows; four lanes of a warp share a row."""
ALL_ROWS = EIGHT_ROWS | EIGHT_ROWS << 1
"""Bits of 16 rows without a hole: bit 4 i is for row i, bit 4 i + 1 for row i + 8."""
MMA_K = 16
STEPS_PER_BLOCK = SWIZZLE_CHANNELS // MMA_K
HALF_DIM = ROW_DIM // 2
HALF_KEYS = TILE_KEYS // 2
TILES_PER_STEP = STEP_KEYS // TILE_KEYS
BUFFERS = 2
"""Buffers of S, and of P, which successive key tiles use in turns."""


class Tmem:
    """First columns of the buffers in tensor memory: 128 lanes by 512 columns of 32 bits, all of them used.

    Lane l holds head l % 64. Columns: O 0-255, Q 256-383, S 384-447 and 448-511.
    """

    O = 0  # noqa: E741 - fp32; Plan.channel says which channels
    Q = 256  # bf16 pairs; channels 256 * (l // 64) + 2 * column
    S = 384  # fp32, BUFFERS of 64 keys; lanes 0-63 and 64-127 are summands
    S_COLUMNS = TILE_KEYS
    COLUMNS = 512


class Smem:
    """Byte offsets in shared memory."""

    KV = 0  # [Plan.stages][Plan.blocks][64 keys][64 channels] bf16, swizzled; Plan.block_offset
    P = KV + KV_BYTES  # [BUFFERS][64 heads][64 keys] bf16, swizzled
    EXCHANGE = P + BUFFERS * P_BYTES  # [8][128 threads][4] fp32: summands of S
    ROWS = (
        EXCHANGE + 128 * HALF_KEYS * 4
    )  # [Plan.stages][4 warps] int32: a bit for each of 16 rows, 0 for a hole: `row_bits`
    ROW_MAX = (
        ROWS + MAX_STAGES * ROW_BITS_BYTES
    )  # [128 threads] fp32: row maxima for the threads of the other half of the keys
    ROW_SUMS = ROW_MAX + 128 * 4  # [128 threads] fp32
    IS_LAST = ROW_SUMS + 128 * 4  # int32: whether this CTA was the last to finish a KV split of its token
    BARRIERS = IS_LAST + 16
    TMEM_ADDRESS = BARRIERS + 24 * 8
    BYTES = TMEM_ADDRESS + 16


assert Smem.BYTES <= 227 * 1024, Smem.BYTES


@dataclass(frozen=True)
class Plan:
    """The differences between one CTA and a pair, whose CTA r has heads from 64 r on and key channels from 256 r on.

    Rows of B (N) come from both CTAs of a pair, the lower half from the first. In the product for S they are the halves
    of the channels; in product p for O, channels 128 p to 128 p + 127 of either CTA's 256.
    """

    ctas: int

    @property
    def stages(self) -> int:
        """Pipeline stages: key tiles in shared memory."""
        return 3 * self.ctas

    @property
    def blocks(self) -> int:
        """Blocks of 64 channels that a stage holds."""
        return CHANNEL_BLOCKS // self.ctas

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in a CTA."""
        return self.blocks * BLOCK_BYTES

    def block_offset(self, block: int) -> int:
        """Offset of a channel block in its stage.

        With one CTA, block b + 4 follows block b, so that both halves of the channels are one operand B of S.
        """
        place = block if self.ctas == 2 else block % 4 * 2 + block // 4
        return place * BLOCK_BYTES

    def first_block_of_out(self, product: int) -> int:
        """First channel block of operand B in product 0 or 1 of the two products for O."""
        return product * self.blocks // 2

    def channel(self, column: Int32, half: Int32) -> Int32:
        """Channel of O that is in column `column` of lanes [64 * half, 64 * half + 64)."""
        if self.ctas == 2:
            return half * HALF_DIM + column
        return column // (HALF_DIM // 2) * HALF_DIM + half * (HALF_DIM // 2) + column % (HALF_DIM // 2)


class Barrier(IntEnum):
    """First index of each group of mbarriers."""

    FULL = 0  # [stages] a key tile is in this CTA's stage
    ALL_FULL = 6  # [stages] a key tile is in the stages of both CTAs of a pair: the first CTA's barrier
    PV_DONE = 12  # [stages] P V of the stage's key tile is in O; the stage and P's buffer are free
    S_READY = 18  # [BUFFERS] S of a key tile is in tensor memory
    P_READY = 20  # [BUFFERS] P of all CTAs is in shared memory: the first CTA's barrier
    Q_READY = 22  # Q of all CTAs is in tensor memory: the first CTA's barrier
    COUNT = 23


assert Barrier.COUNT * 8 <= Smem.TMEM_ADDRESS - Smem.BARRIERS


class NamedBarrier(IntEnum):
    """Named barriers; 0 is the barrier of the whole CTA."""

    SOFTMAX = 1


class Warp(IntEnum):
    """First warp of each role."""

    SOFTMAX = 0  # 4: warp w accesses lanes 32 w to 32 w + 31
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
    entry_indices: Int64  # int32; 0: dense addressing
    entry_indices_stride: Int64
    entry_slots: Int32  # K; dense: any upper bound of visible
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
    num_heads: Int32
    steps_per_kv_split: Int32  # at most this many; 0: no limit
    max_kv_splits: Int32
    num_work_tiles: Int32  # T * max_kv_splits
    partial_out: Int64  # fp32 [slots, 64, 128, 4]: O of every thread, in groups of 4 columns, not normalised
    partial_state: Int64  # fp32 [slots, 2, 64 heads]: softmax.RowState
    arrived: Int64  # int32 [T, CTAs of a token], zero between launches
    zeros: Int64  # ROW_DIM bf16 zeros, read in place of a hole or a missing head
