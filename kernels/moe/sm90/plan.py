"""Static plan of the experts on Hopper: tiles, stages, shared memory, and what the kernels are told (see kernel.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from dsv4_kernels.moe.sm90.weights import CODE_BYTES, SHIFT_BYTES, STEP, TILE_ROWS
from dsv4_kernels.moe.sm90.workspace import GROUP

GROUP_BYTES = GROUP * STEP
"""Of a group in a step."""
WARP = 32
WARPGROUP = 128
CONSUMER_WARPS = TILE_ROWS // 64 * WARPGROUP // WARP
"""64 rows for each four."""
CHANNELS = TILE_ROWS // 2
"""Of h in a work tile of gate and up."""


class Product(IntEnum):
    """Which of the two launches."""

    GATE_UP = 0
    """h = routing weight * SwiGLU(w1 x, w3 x) of every slot, in bf16."""
    DOWN = 1
    """w2 h of every slot, rounded to bf16."""


@dataclass(frozen=True)
class Shape:
    """Widths of a work tile, and what the stages leave room for."""

    widths: tuple[int, ...]
    """The N that there is code for, ascending; a work tile takes the least that holds it."""
    stages: int
    ctas_per_sm: int
    paired: bool = False
    """Whether the widest tiles' steps take two neighbouring stages, each with room for half of their slots."""
    ahead: bool = False
    """Whether the next step's codes are converted while this step's products run; takes registers."""
    registers: tuple[int, int] | None = None
    """Of a thread of the consumers, and of the producer, which then has a warpgroup of its own: where a partition has a
    third warp, all of them have 168 otherwise."""

    @property
    def threads(self) -> int:
        """Consumers, and a producer warp, in a warpgroup of its own where registers are handed over."""
        return CONSUMER_WARPS * WARP + (WARPGROUP if self.registers else WARP)

    @property
    def slots(self) -> int:
        """Of the widest work tile."""
        return self.widths[-1]

    @property
    def room(self) -> int:
        """Slots of a stage."""
        return self.slots // 2 if self.paired else self.slots

    def stages_of(self, slots: int) -> int:
        """Stages of a step with so many slots."""
        return 2 if slots > self.room else 1


NARROW = Shape((8, 16, 32), 8, 2)
"""Decode, bound by memory: two CTAs convert codes in turns."""
PAIRED = Shape((8, 16, 32, 64), 8, 2, paired=True)
"""Decode of so many tokens that an expert may have more than NARROW's slots: then its codes are read and converted once
for 64 of them. The stages, and what is in flight for others, stay as they are."""
WIDE = Shape((16, 32, 64, 96, 112, 128, 160, 192, 224), 8, 1, paired=True, ahead=True, registers=(240, 24))
"""Prefill: the more slots share a step's codes the better, as far as registers hold their sums."""


@dataclass(frozen=True)
class Plan:
    """What a compiled kernel is specialised for."""

    product: Product
    shape: Shape

    @property
    def token_bytes(self) -> int:
        """Of a stage."""
        return self.shape.room * STEP

    # Shared memory: the stages' tokens, then their tokens' scales, then codes, then shifts of the weights.

    @property
    def scales_offset(self) -> int:
        """Of the stages' fp32 scales of the tokens."""
        return self.shape.stages * self.token_bytes

    @property
    def codes_offset(self) -> int:
        """Of the stages' codes."""
        return self.scales_offset + self.shape.stages * 4 * self.shape.room

    @property
    def shifts_offset(self) -> int:
        """Of the stages' shifts."""
        return self.codes_offset + self.shape.stages * CODE_BYTES

    @property
    def smem_bytes(self) -> int:
        """Without the barriers."""
        return self.shifts_offset + self.shape.stages * SHIFT_BYTES


class Arguments(NamedTuple):
    """A product's arguments as the kernel sees them: device addresses, sizes and counts."""

    codes: Int64  # uint8 [E, row_tiles, steps, CODE_BYTES]
    shifts: Int64  # uint8 [E, row_tiles, steps, SHIFT_BYTES]
    shift_expert_bytes: Int64
    factors: Int64  # fp32 [E, row_tiles * 128]
    factor_expert_bytes: Int64
    tokens: Int64  # e4m3, see `dispatch`: of a work tile [steps, groups, 8, 128], swizzled
    token_scales: Int64  # fp32, of a work tile [steps, groups * 8]
    tiles: Int64  # int32 [tiles, workspace.TILE_WORDS], see `TileField`
    num_tiles: Int64  # int32 [1]
    row_tiles: Int32
    steps: Int32  # K / 128
    routing: Int64  # fp32 [slots]: GATE_UP
    limit: Float32  # GATE_UP
    out: Int64  # bf16 [slots, I] or [slots, d]


class TileField(IntEnum):
    """int32 of a work tile."""

    EXPERT = 0
    FIRST_GROUP = 1
    GROUPS = 2
    RUN_FIRST = 3
    """First tile of the same expert."""
    RUN_TILES = 4
    """Tiles of the same expert."""
