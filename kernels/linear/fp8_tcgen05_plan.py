"""Static plan of the FP8 product on Blackwell: work tiles, stages, shared memory, roles of warps, and the choice for a
call (see fp8_tcgen05.py)."""

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cutlass import Int32, Int64

from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES, TensorMemoryPlan

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
ROOM = 24 * 1024
"""Shared memory left for a CTA of the kernel before, such as a norm: without it no CTA of this kernel starts before
that one has ended, and no weight is read ahead."""
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
class Plan(TensorMemoryPlan):
    """Compile-time parameters of the kernel. None of them changes a bit of a result."""

    num_barriers = Barrier.COUNT

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
        return min(MAX_STAGES, (MAX_SMEM - ROOM - 2048) // self.stage_bytes)

    @property
    def ahead(self) -> int:
        """Stages whose scales a thread loads ahead."""
        return min(AHEAD, self.stages - 1)

    @property
    def barriers_offset(self) -> int:
        """Offset of the [Barrier.COUNT] mbarriers, after the stages."""
        return self.stages * self.stage_bytes

    @property
    def scales_column(self) -> int:
        """First column of the scales in tensor memory, the weight's first, after the accumulators."""
        return ACCUMULATORS * self.tokens

    @property
    def used_columns(self) -> int:
        """Columns of accumulators and scales."""
        return self.scales_column + (1 + self.token_scale_tiles) * SCALE_COLUMNS


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


def plans() -> list[Plan]:
    """Every plan. All give the same bits."""
    return [Plan(tokens, rows) for rows in ROWS for tokens in WIDTHS if tokens <= 2 * rows]


def num_tiles(plan: Plan, num_tokens: int, num_rows: int) -> int:
    """Work tiles of a call."""
    return -(-num_rows // plan.rows) * -(-num_tokens // plan.tokens)


@functools.cache
def plan_for(num_tokens: int, num_rows: int, multiprocessors: int) -> Plan:
    """The plan whose work tiles have the fewest bytes, of those with as few work tiles one after the other on a
    multiprocessor as the largest tiles that are worth it: 128 rows, and the tokens in the fewest tiles.

    A multiprocessor's time is that of loading its operands, so the work tiles of a narrow weight are small enough to
    give a tile to most multiprocessors (docs/step_model.md).
    """
    tiles = -(-num_tokens // WIDTHS[-1])
    widest = next(width for width in WIDTHS if -(-num_tokens // tiles) <= width)

    def rounds(plan: Plan) -> int:
        return -(-num_tiles(plan, num_tokens, num_rows) // multiprocessors)

    most = rounds(Plan(widest))
    return min(
        (plan for plan in plans() if plan.tokens <= widest and rounds(plan) <= most),
        key=lambda plan: (plan.rows + min(plan.tokens, num_tokens), plan.rows),
    )
