"""The static plan of the kernel for few heads: sizes, configurations, shared memory (kernel.py)."""

import functools
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint8

from dsv4_kernels.sparse_attention.sm90.plan import DIM, GROUP, GROUPS, KEY_TILE, KEY_TILE_BYTES, STEP, Entries

COLUMNS = 16
"""Columns of the products; missing heads are zeros."""
PIECES = 4
"""Elements of a token that has a single KV split and at least this many tiles."""
MAX_ELEMENTS = 2
"""Elements at most of a CTA without the token's first element: registers hold one while the next is computed."""
PARTS = (1, 2, 4, 8)
"""CTAs of a cluster, which divide a token's elements, or its tiles if there are more CTAs than pieces."""
MICROSECONDS = {1: (7.8, 2.2), 2: (11.5, 3.0)}
"""Times of (a launch, each tile of a CTA) by the number of CTAs on a multiprocessor; measured on an H200, precise
enough to choose among PARTS. It follows that clusters of four or eight CTAs get a multiprocessor for each CTA, and that
large parts run one after the other rather than whole tokens with a CTA each."""
WARPGROUP = 128
WARPS = WARPGROUP // 32
ROWS = 2
"""Rows of a tile that a thread loads, 8 apart."""
TILE_BARRIER = 1
"""Named barrier of all threads of a CTA within a tile."""
CTAS = 2
"""CTAs of a multiprocessor at once."""
TILES_OF_STEP = STEP // KEY_TILE
"""Tiles of a key step (split.py)."""
PRODUCTS = 2
"""Products of 64 channels that a CTA has under way."""
STATISTICS = COLUMNS // 4
"""Heads whose scores a thread has, two adjacent heads of every 8."""
SCORES = COLUMNS * KEY_TILE // WARPGROUP
"""Scores of a tile that a thread has."""
ELEMENT_BYTES = DIM * COLUMNS * 4
"""Bytes of an element in shared memory: O^T [512 channels, heads] fp32."""
GROUP_BYTES = GROUP * COLUMNS * 4
"""Bytes of a channel group of an element."""
FEW_TOKENS = 16
"""Tokens of a call at most whose tiles have a CTA each."""
MOST_TILES = 16
"""Tiles of a token that have a CTA each at most: the CTAs of a cluster on Hopper (the portable limit is 8)."""
STAGE_BYTES = WARPGROUP * 16
"""Bytes of e4m3 under way for one row and channel group: 16 a thread."""
EARLY_GROUPS = 4
"""Channel groups of FP8 rows, from the first on, that are copied early: their copies for the next tile are issued
together, once this tile's groups have been read; the copies of the later groups are issued during the products with P.
Not all groups are early, because copies under way when P is written may delay the fence after that (the compiler makes
the fence a memory barrier); the early groups have arrived by then. The bits do not depend on this number."""


@dataclass(frozen=True)
class FewHeads:
    """Compile-time parameters of the kernel."""

    fp8_rows: bool
    entries: Entries

    @property
    def early_groups(self) -> int:
        """Staged groups that are copied early."""
        return min(EARLY_GROUPS, self.staged_groups)

    @property
    def staged_groups(self) -> int:
        """Channel groups of a row that are e4m3 and copied to a thread's own buffer; the others are bf16."""
        return GROUPS - 1 if self.fp8_rows else 0


@dataclass(frozen=True)
class TileOfFewHeads(FewHeads):
    """Compile-time parameters of the kernel with a CTA for each tile (tile.py)."""


@functools.cache
def shared_memory(config: FewHeads) -> type:
    """Shared memory of a CTA: 111 KiB of 113 with FP8 rows, 83 with bf16."""
    values_bytes = max(KEY_TILE_BYTES, MAX_ELEMENTS * ELEMENT_BYTES)
    num_stats, num_barriers = MAX_ELEMENTS, 0
    if isinstance(config, TileOfFewHeads):
        values_bytes, num_stats = max(KEY_TILE_BYTES, MOST_TILES * GROUP_BYTES), MOST_TILES
        num_barriers = 2
    stages_bytes = max(16, config.staged_groups * ROWS * STAGE_BYTES)

    @cute.struct
    class Shared:
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, COLUMNS * DIM], 1024]
        # q: [channel group][heads x 64 channels], swizzled, channels permuted as by `store_q`
        values: cute.struct.Align[cute.struct.MemRange[BFloat16, values_bytes // 2], 1024]
        # values: [channel group][64 keys x 64 channels], swizzled; later results, fp32 (`elements.place_of`)
        p: cute.struct.Align[cute.struct.MemRange[BFloat16, COLUMNS * KEY_TILE], 1024]
        # p: [heads x 64 keys], swizzled
        stages: cute.struct.Align[cute.struct.MemRange[Uint8, stages_bytes], 16]
        # stages: [channel group][row of a thread][thread], 16 e4m3 that the thread itself copies and reads
        row_max: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16]
        # row_max, row_sums: [warp][thread of a quad][its heads], over the warp's 16 keys
        row_sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, num_stats * COLUMNS * 2], 16]
        # stats: [element, or tile][head], row max and row sum
        barriers: cute.struct.Align[cute.struct.MemRange[Int64, num_barriers], 8]
        # barriers: of tile.py, `ready` and `received`

    return Shared
