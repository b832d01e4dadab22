"""Static plan of the experts on Hopper: tiles, stages, shared memory, arguments (kernel.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from dsv4_kernels.moe.sm90.weights import CODE_BYTES, SHIFT_BYTES, STEP, TILE_ROWS
from dsv4_kernels.moe.workspace import GROUP

GROUP_BYTES = GROUP * STEP
"""Bytes of the codes of a group of slots in a step of K."""
WARP = 32
WARPGROUP = 128
CONSUMER_WARPS = TILE_ROWS // 64 * WARPGROUP // WARP
"""Four warps for each 64 rows."""
CHANNELS = TILE_ROWS // 2
"""Channels of h in a work tile of gate and up."""
HALF_ROWS = TILE_ROWS // 2
"""Rows of a work tile of `FewPlan`: an upper or lower half of 128 rows of the weights' layout."""
HALF_CODE_BYTES, HALF_SHIFT_BYTES, FACTOR_BYTES = CODE_BYTES // 2, SHIFT_BYTES // 2, 4 * HALF_ROWS
SLOTS_BYTES = 4 * GROUP
"""Bytes of a number for each slot of a group."""


class Product(IntEnum):
    """The two products of the experts, a launch each."""

    GATE_UP = 0
    """h = routing weight * SwiGLU(w1 x, w3 x) of every slot, in bf16."""
    DOWN = 1
    """w2 h of every slot, rounded to bf16."""


@dataclass(frozen=True)
class Shape:
    """Widths of a work tile, and the number of stages and CTAs that fit."""

    widths: tuple[int, ...]
    """The compiled values of N, ascending; a work tile uses the smallest that holds its slots."""
    stages: int
    ctas_per_sm: int
    paired: bool = False
    """Whether a step of the widest tiles uses two adjacent stages, each with room for half of the slots."""
    ahead: bool = False
    """Whether the next step's codes are converted while this step's products run; costs registers."""
    registers: tuple[int, int] | None = None
    """(registers of a consumer thread, of a producer thread), moved by `setmaxnreg`; the producer then is a warpgroup.
    Without `setmaxnreg`, the three warps of an SM partition would have 168 registers a thread."""

    @property
    def threads(self) -> int:
        """Threads of a CTA: consumers and a producer warp, or a producer warpgroup if registers are moved."""
        return CONSUMER_WARPS * WARP + (WARPGROUP if self.registers else WARP)

    @property
    def slots(self) -> int:
        """Slots of the widest work tile."""
        return self.widths[-1]

    @property
    def room(self) -> int:
        """Slots that a stage has room for."""
        return self.slots // 2 if self.paired else self.slots

    def stages_of(self, slots: int) -> int:
        """Stages that a step of a work tile of `slots` slots uses."""
        return 2 if slots > self.room else 1


NARROW = Shape((8, 16, 32), 8, 2)
"""Decode, bound by memory: two CTAs a multiprocessor convert codes alternately."""
PAIRED = Shape((8, 16, 32, 64), 8, 2, paired=True)
"""Decode with so many tokens that an expert may have more than NARROW's slots: then its codes are read and converted
once for 64 slots. The number of stages, and the bytes in flight, stay the same."""
FEW = Shape((8,), 24, 1)
"""Decode of few tokens: each group of slots is a work tile. Work tiles have half as many rows, so that more
multiprocessors read weights, and K is divided within a CTA (few_kernel.py, `FewPlan`)."""
WIDE = Shape((16, 32, 64, 96, 112, 128, 160, 192, 224), 8, 1, paired=True, ahead=True, registers=(240, 24))
"""Prefill: as many slots share the codes of a step as registers have room for their sums."""


@dataclass(frozen=True)
class Plan:
    """Compile-time parameters of the kernel."""

    product: Product
    shape: Shape
    gathers: bool = False
    """Whether the producer warp gathers the slots' codes and scales from rows of tokens; otherwise they lie in the
    order of the stages. For shapes that are not paired, with a producer warp."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a stage's token codes."""
        return self.shape.room * STEP

    # Shared memory: the stages' tokens, then their tokens' scales, then codes, then shifts of the weights.

    @property
    def scales_offset(self) -> int:
        """Offset of the stages' fp32 scales of the tokens."""
        return self.shape.stages * self.token_bytes

    @property
    def codes_offset(self) -> int:
        """Offset of the stages' weight codes."""
        return self.scales_offset + self.shape.stages * 4 * self.shape.room

    @property
    def shifts_offset(self) -> int:
        """Offset of the stages' weight shifts."""
        return self.codes_offset + self.shape.stages * CODE_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory without the barriers."""
        return self.shifts_offset + self.shape.stages * SHIFT_BYTES


MANY_ROUNDS = 8
"""Work tiles of a multiprocessor from which on the second product of few tokens has two CTAs on it."""


@dataclass(frozen=True)
class FewPlan:
    """Compile-time parameters of the kernel for few tokens (few_kernel.py).

    Work tiles have HALF_ROWS rows and one group of slots. K is divided into chunks, and chunk i is multiplied by
    warpgroup i % splits.
    """

    product: Product
    quantises: bool
    """Whether slots are read as bf16 and quantised on the way to shared memory; otherwise e4m3 codes are gathered."""
    chunk: int
    """Steps of a chunk: a thread holds the products of each in registers."""
    stages: int
    splits: int
    loading_warps: int = 2
    """Warps that load slots, and as many that load weights, each those of every `loading_warps`-th chunk."""

    @property
    def consumer_warps(self) -> int:
        """Warps of the warpgroups that multiply."""
        return self.splits * WARPGROUP // WARP

    @property
    def threads(self) -> int:
        """Threads of a CTA: warpgroups that multiply, warps that load slots, warps that load weights."""
        return WARP * (self.consumer_warps + 2 * self.loading_warps)

    # Shared memory: for all stages the slots' codes, weight codes, shifts, scales of the slots, the rows' factors, and
    # routing weights and sources of the slots (last step of a work tile only); sums on their way between warpgroups.

    @property
    def codes_offset(self) -> int:
        """Offset of the stages' weight codes; the slots' codes precede them."""
        return self.stages * GROUP_BYTES

    @property
    def shifts_offset(self) -> int:
        """Offset of the stages' weight shifts."""
        return self.codes_offset + self.stages * HALF_CODE_BYTES

    @property
    def scales_offset(self) -> int:
        """Offset of the stages' fp32 scales of the slots."""
        return self.shifts_offset + self.stages * HALF_SHIFT_BYTES

    @property
    def factors_offset(self) -> int:
        """Offset of the stages' factors of rows."""
        return self.scales_offset + self.stages * SLOTS_BYTES

    @property
    def routing_offset(self) -> int:
        """Offset of the stages' routing weights."""
        return self.factors_offset + self.stages * FACTOR_BYTES

    @property
    def source_offset(self) -> int:
        """Offset of the stages' sources of slots."""
        return self.routing_offset + self.stages * SLOTS_BYTES

    @property
    def sums_offset(self) -> int:
        """Offset of the sums that a warpgroup hands to the next, 16 bytes a thread."""
        return self.source_offset + self.stages * SLOTS_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory without the barriers."""
        return self.sums_offset + self.splits * WARPGROUP * 16


def few_plan(product: Product, steps: int = 0, quantises: bool = True) -> FewPlan:
    """The plan for few tokens. A CTA of either product fits a multiprocessor together, so that the second product's
    weights arrive while the first product still runs: registers are 16,384 for each fourth of the warps.

    Args:
        product: the product.
        steps: K / 128, for GATE_UP.
        quantises: see `FewPlan`, for GATE_UP.
    """
    if product is Product.DOWN:
        return FewPlan(product, True, chunk=1, stages=FEW.stages // 2, splits=2)
    splits = 4
    chunk = 2 if steps % 2 == 0 and steps // 2 >= splits else 1
    return FewPlan(product, quantises, chunk, FEW.stages, splits)


def few_ctas(plan: FewPlan, tiles: int, multiprocessors: int) -> int:
    """CTAs of a launch that has at most `tiles` work tiles.

    One a multiprocessor divides few work tiles evenly. With many, the second product has two: it has half of the first
    one's warps.
    """
    doubled = plan.product is Product.DOWN and tiles > MANY_ROUNDS * multiprocessors
    return min((2 if doubled else 1) * multiprocessors, tiles)


class Arguments(NamedTuple):
    """A product's arguments as the kernel sees them: device addresses, sizes and counts."""

    codes: Int64  # uint8 [E, row_tiles, steps, CODE_BYTES]
    shifts: Int64  # uint8 [E, row_tiles, steps, SHIFT_BYTES]
    shift_expert_bytes: Int64
    factors: Int64  # fp32 [E, row_tiles * 128]
    factor_expert_bytes: Int64
    tokens: Int64  # e4m3, for each work tile [steps, groups, 8, 128], swizzled (rows.py); if gathered [T, K]
    token_scales: Int64  # fp32, for each work tile [steps, groups * 8]; if gathered [T, K / 128]
    token_row_bytes: Int64  # this and the next two are read if tokens are gathered (FewPlan: bf16 rows, too)
    scale_row_bytes: Int64
    scale_step_bytes: Int64
    source: Int64  # int32 [slots]: row of tokens, negative: zeros; read if they are gathered
    tiles: Int64  # int32 [tiles, workspace.TILE_WORDS], see `workspace.TileField`
    num_tiles: Int64  # int32 [1]
    row_tiles: Int32
    steps: Int32  # K / 128
    routing: Int64  # fp32 [slots]: routing weights, read by GATE_UP
    limit: Float32  # swiglu_limit, read by GATE_UP
    out: Int64  # bf16 [slots, I] or [slots, d]
