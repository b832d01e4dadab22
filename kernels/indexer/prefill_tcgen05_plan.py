"""Static plan of a prefill's index scores on Blackwell: tiles, shared and tensor memory, barriers, warps
(`prefill_tcgen05`)."""

from dataclasses import dataclass
from enum import IntEnum

from dsv4_kernels.device.tcgen05 import TensorMemoryPlan
from dsv4_kernels.indexer.scores import CODE_BYTES, KEY_DIM, STEPS
from dsv4_kernels.kv_layout import FP4_SCALE_GROUP, PAGE_ROWS

TOKENS = 12
"""Tokens of a CTA: 16 KiB of shared memory each, with 64 heads."""
HALF_KEYS = 128
"""Keys of a product: its M, and the lanes of tensor memory."""
HALVES = 2
TILE_KEYS = HALVES * HALF_KEYS
"""Keys of a stage."""
TILE_PAGES = TILE_KEYS // PAGE_ROWS
BLOCKS = KEY_DIM // FP4_SCALE_GROUP
CODE_WORDS = CODE_BYTES // 4
KEY_COLUMNS = KEY_DIM // 2
"""Columns of a half of a stage: two channels in each."""
STAGE_COLUMNS = HALVES * KEY_COLUMNS
STEP_COLUMNS = KEY_COLUMNS // STEPS
STAGES = 2
"""Stages of expanded keys, one for each group of EXPAND warps."""
ACCUMULATORS = 2
"""Accumulator buffers, one for each group of WEIGH warps."""
WEIGH_GROUPS = 2


class Barrier(IntEnum):
    """First index of each group of mbarriers."""

    KEYS = 0  # [STAGES] expanded keys are in tensor memory
    EMPTY = KEYS + STAGES  # [STAGES] all products with the stage's keys are done
    DONE = EMPTY + STAGES  # [ACCUMULATORS] a token's products are in the accumulator buffer
    FREE = DONE + ACCUMULATORS  # [ACCUMULATORS] the accumulator buffer has been read
    COUNT = FREE + ACCUMULATORS


class Warp(IntEnum):
    """First warp of each role."""

    WEIGH = 0  # 2 x 4: warp w accesses lanes 32 (w % 4) to 32 (w % 4) + 31
    EXPAND = 8  # 2 x 4
    MMA = 16
    COUNT = 17


WARPS_OF_GROUP = 4
GROUP_THREADS = 128
THREADS = Warp.COUNT * 32


@dataclass(frozen=True)
class Plan(TensorMemoryPlan):
    """Compile-time parameters of the kernel."""

    num_barriers = Barrier.COUNT

    heads: int

    @property
    def rows(self) -> int:
        """Rows of a token's query in shared memory, the N of a product: a multiple of 16."""
        return -(-self.heads // 16) * 16

    @property
    def query_bytes(self) -> int:
        """Bytes of a token's query in shared memory, a multiple of the swizzle's period of 1,024."""
        return self.rows * 2 * KEY_DIM

    @property
    def weights_offset(self) -> int:
        """Offset of the head weights [TOKENS][heads] fp32."""
        return TOKENS * self.query_bytes

    @property
    def tokens_offset(self) -> int:
        """Offset of [3][TOKENS] int32: the entries that a token sees, or 0 if it is not scored; its request; the most
        entries that a token of this request sees."""
        return self.weights_offset + TOKENS * self.heads * 4

    @property
    def barriers_offset(self) -> int:
        """Offset of the [Barrier.COUNT] mbarriers."""
        return self.tokens_offset + 3 * TOKENS * 4

    @property
    def keys_column(self) -> int:
        """First column of the stages in tensor memory, after the accumulators."""
        return ACCUMULATORS * HALVES * self.rows

    @property
    def used_columns(self) -> int:
        """Columns of accumulators and stages."""
        return self.keys_column + STAGES * STAGE_COLUMNS

    @property
    def chunk(self) -> int:
        """Columns of one load of tensor memory, of each half."""
        return min(32, self.heads & -self.heads)
