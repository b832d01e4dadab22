"""Static plan of the experts on Blackwell: tiles, shared and tensor memory, barriers, warps (kernel.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from dsv4_kernels.device.tcgen05 import SWIZZLE_ROW_BYTES, TensorMemoryPlan

TILE_ROWS = 128
"""Weight rows of a CTA's product: its share of the M of an instruction, and the lanes of tensor memory."""
PRODUCTS_PER_STEP = 4
"""Instructions of a stage and matrix, each for 32 bytes of a row."""
SCALES_PER_TILE = 4
SCALE_TILE_BYTES = TILE_ROWS * SCALES_PER_TILE
"""Bytes of four scales of each of 128 rows, in the order of `tcgen05.cp.32x128b.warpx4`."""
WEIGHT_TILE_BYTES = TILE_ROWS * SWIZZLE_ROW_BYTES
"""Bytes of a weight tile in shared memory."""
CHUNK = 16
"""Bytes of a copy, and columns of tensor memory that the epilogue loads at once."""
MAX_SMEM = 227 * 1024
TMEM_COLUMNS = 512
SCALE_COLUMNS = 4
ACCUMULATORS = 2
"""Accumulator buffers, which successive work tiles use in turns."""
MAX_STAGES = 8


class Numbers(IntEnum):
    """Number formats of the operands."""

    MXFP8_MXFP4 = 0
    """e4m3 with a ue8m0 scale for 128 channels, times e2m1 with a ue8m0 scale for 32 (a byte each in shared memory)."""
    NVFP4 = 1
    """e2m1 with an e4m3 scale for 16 channels in both operands, and an fp32 factor of the matrix."""


class Product(IntEnum):
    """The two products of the experts, a launch each."""

    GATE_UP = 0
    """h = quantised(routing weight * SwiGLU(w1 x, w3 x)), a row for each pair of token and expert."""
    DOWN = 1
    """w2 h of each pair, rounded to bf16."""


class Barrier(IntEnum):
    """First index of each group of mbarriers."""

    WEIGHTS = 0  # [stages] weight tiles and their scales are in shared memory
    TOKENS = MAX_STAGES  # [stages] activations and their scales are in shared memory; in a pair those of both CTAs, and
    # the second CTA's weights
    EMPTY = 2 * MAX_STAGES  # [stages] the products of the stage are done
    DONE = 3 * MAX_STAGES  # [ACCUMULATORS] a work tile's sums are in the accumulator buffer
    FREE = DONE + ACCUMULATORS  # [ACCUMULATORS] the epilogues of all CTAs have read the accumulator buffer
    COUNT = FREE + ACCUMULATORS


@dataclass(frozen=True)
class Plan(TensorMemoryPlan):
    """Compile-time parameters of the kernel."""

    num_barriers = Barrier.COUNT

    product: Product
    tokens: int
    """Slots of a work tile, the N of an instruction."""
    numbers: Numbers = Numbers.MXFP8_MXFP4
    ctas: int = 1
    """CTAs that multiply together: 1, or 2 for two neighbouring tiles of 128 rows and the same slots.

    Each CTA of a pair holds the weights of its rows and half of the slots' codes.
    """

    def __post_init__(self) -> None:
        if self.ctas not in (1, 2):
            raise ValueError(f"CTAs of a product is {self.ctas}; expected 1 or 2")
        least = CHUNK * self.ctas
        if self.tokens % least or not least <= self.tokens <= 96:
            raise ValueError(f"tokens of a tile is {self.tokens}; expected a multiple of {least} from {least} to 96")

    @property
    def matrices(self) -> int:
        """Weight tiles of a work tile: two for gate and up, otherwise one."""
        return 2 if self.product is Product.GATE_UP else 1

    @property
    def step(self) -> int:
        """Channels of K in a stage."""
        return 256 if self.numbers is Numbers.NVFP4 else 128

    @property
    def scale_tiles(self) -> int:
        """Scale tiles of an operand in a stage.

        MX: four scales a row, one for each of the stage's four products. NVFP4: four scales a row for each product.
        """
        return 4 if self.numbers is Numbers.NVFP4 else 1

    @property
    def own_tokens(self) -> int:
        """Slots whose codes are in a CTA's shared memory."""
        return self.tokens // self.ctas

    @property
    def token_tile_bytes(self) -> int:
        """Bytes of the activations in a stage."""
        return self.own_tokens * SWIZZLE_ROW_BYTES

    @property
    def scales_offset(self) -> int:
        """Offset of the scales in a stage, after the weight tiles and the tokens; the weights' scales come first."""
        return self.matrices * WEIGHT_TILE_BYTES + self.token_tile_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, a multiple of the swizzle's period of 1,024."""
        return -(-(self.scales_offset + (self.matrices + 1) * self.scale_bytes) // 1024) * 1024

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a matrix, or of the tokens, in a stage."""
        return self.scale_tiles * SCALE_TILE_BYTES

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return min(MAX_STAGES, (MAX_SMEM - 4096) // self.stage_bytes)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of global memory whose arrival completes a stage's WEIGHTS barrier."""
        return self.matrices * (TILE_ROWS * self.step // 2 + self.scale_bytes)

    # Shared memory after the stages.

    @property
    def largest_offset(self) -> int:
        """Offset of [2][4 warps][16 columns] fp32: largest magnitudes of h, exchanged between warps."""
        return self.stages * self.stage_bytes

    @property
    def barriers_offset(self) -> int:
        """Offset of the [Barrier.COUNT] mbarriers."""
        return self.largest_offset + 2 * 4 * CHUNK * 4

    # Tensor memory: two buffers of accumulators, and the scales of one step.

    @property
    def accumulator_columns(self) -> int:
        """Columns of one accumulator buffer."""
        return self.matrices * self.tokens

    @property
    def scales_column(self) -> int:
        """First column of the scales: SCALE_COLUMNS for each scale tile, the weights' first, then the tokens'."""
        return ACCUMULATORS * self.accumulator_columns

    @property
    def used_columns(self) -> int:
        """Columns of accumulators and scales."""
        return self.scales_column + (self.matrices + 1) * self.scale_tiles * SCALE_COLUMNS


class NamedBarrier(IntEnum):
    """Named barriers; 0 is the barrier of the whole CTA."""

    EPILOGUE = 1


class Warp(IntEnum):
    """First warp of each role."""

    EPILOGUE = 0  # 4: warp w accesses lanes 32 w to 32 w + 31
    TOKENS = 4  # 4
    WEIGHTS = 8
    MMA = 9
    COUNT = 10


THREADS = Warp.COUNT * 32
GROUP_THREADS = 128
WARPS_OF_GROUP = 4


class Arguments(NamedTuple):
    """A launch's arguments as the kernel sees them: device addresses, sizes and counts."""

    weights: Int64  # e2m1 [E * rows, k / 2]: rows is 2 I (w1's, then w3's) or d
    weight_scales: Int64  # uint8 [E * rows / 128, k / 128 (NVFP4: k / 64), 512]
    weight_rows: Int32  # E * rows
    rows: Int32  # of an expert
    k: Int32
    x: Int64  # e4m3 [rows of x, k], or e2m1 [rows of x, k / 2]
    x_row_bytes: Int64
    x_scales: Int64  # fp32 powers of two [rows of x, k / 128]; NVFP4: e4m3 [rows of x, k / 16]
    scale_row_bytes: Int64
    scale_step_bytes: Int64  # from the scales of a stage to those of the next
    source: Int64  # int32 [slots]: the row of x, negative: zeros; unused by DOWN, whose rows are the slots
    routing: Int64  # fp32 [slots]: routing weight; unused by DOWN
    limit: Float32
    tiles: Int64  # int32 [tiles, workspace.TILE_WORDS], see `workspace.TileField`
    num_tiles: Int64  # int32 [1]
    row_tiles: Int32  # of 128 output rows: I / 128 or d / 128
    out: Int64  # GATE_UP: h, as x; DOWN: bf16 [slots, d]
    out_scales: Int64  # GATE_UP: scales of h, as x_scales, contiguous
    factors: Int64  # NVFP4: fp32 [E, 2]: an expert's factor times the input's, of gate and up; DOWN uses the first
    hidden_factor: Int64  # NVFP4, GATE_UP: fp32 [1], scale of h
