"""The static plan of the kernel for few heads: sizes, configurations, shared memory (kernel.py)."""

import functools
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint8

from dsv4_kernels.sparse_attention.sm90.plan import DIM, GROUPS, KEY_TILE, KEY_TILE_BYTES, STEP, Entries

COLUMNS = 16
"""Columns of the products; heads that are not there are zeros."""
PIECES = 4
"""Elements of a token that has a single KV split."""
MAX_ELEMENTS = 2
"""Of a CTA that does not have the token's first one: one in registers beside the one that is computed."""
PARTS = (1, 2, 4, 8)
"""Among how many CTAs a token's elements may be divided, or its tiles if they are more than its pieces; a cluster."""
MICROSECONDS = {1: (7.8, 2.2), 2: (11.5, 3.0)}
"""What a launch and what each tile of a CTA takes by the number of CTAs a multiprocessor: measured on an H200, and
enough to choose among PARTS. So the CTAs of clusters that divide a token into four or eight rather have a
multiprocessor each, and large parts are computed one after the other rather than whole tokens by a CTA each."""
WARPGROUP = 128
WARPS = WARPGROUP // 32
ROWS = 2
"""Rows of a tile that a thread has, 8 apart."""
TILE_BARRIER = 1
"""Named barrier of the meetings within a tile, all threads of a CTA."""
CTAS = 2
"""Of a multiprocessor, at once."""
TILES_OF_STEP = STEP // KEY_TILE
"""How many tiles a step has (split.py)."""
PRODUCTS = 2
"""Of 64 channels, that a CTA has under way."""
STATISTICS = COLUMNS // 4
"""Heads whose scores a thread has, two adjacent ones of every 8."""
SCORES = COLUMNS * KEY_TILE // WARPGROUP
"""That a thread has of a tile."""
ELEMENT_BYTES = DIM * COLUMNS * 4
"""Of an element in shared memory: O^T [512 channels, heads] in fp32."""
STAGE_BYTES = WARPGROUP * 16
"""Of e4m3 that is on its way: 16 bytes of every thread, of one row and channel group."""
EARLY_GROUPS = 4
"""First channel groups of FP8 rows. The next tile's are asked for, all at once, when this tile's have been read; those
of the others beside the products with P. Not all early: what is under way when P is written may hold up the fence
behind it (the compiler makes it a memory barrier), and these have arrived by then. The bits do not depend on it."""


@dataclass(frozen=True)
class FewHeads:
    """What a compiled kernel is specialised for."""

    fp8_rows: bool
    entries: Entries

    @property
    def early_groups(self) -> int:
        """How many of the staged groups are early."""
        return min(EARLY_GROUPS, self.staged_groups)

    @property
    def staged_groups(self) -> int:
        """Channel groups of a row that are e4m3, so that they come to a place of their own; the others are bf16."""
        return GROUPS - 1 if self.fp8_rows else 0


@functools.cache
def shared_memory(config: FewHeads) -> type:
    """Shared memory of a CTA: 111 KiB of 113 with FP8 rows, 83 with bf16."""
    values_bytes = max(KEY_TILE_BYTES, MAX_ELEMENTS * ELEMENT_BYTES)
    stages_bytes = max(16, config.staged_groups * ROWS * STAGE_BYTES)

    @cute.struct
    class Shared:
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, COLUMNS * DIM], 1024]
        # q: [channel group][heads x 64 channels], swizzled, channels in the order of `store_q`
        values: cute.struct.Align[cute.struct.MemRange[BFloat16, values_bytes // 2], 1024]
        # values: [channel group][64 keys x 64 channels], swizzled; then elements, fp32 (`elements.place_of`)
        p: cute.struct.Align[cute.struct.MemRange[BFloat16, COLUMNS * KEY_TILE], 1024]
        # p: [heads x 64 keys], swizzled
        stages: cute.struct.Align[cute.struct.MemRange[Uint8, stages_bytes], 16]
        # stages: [channel group][row of a thread][thread], 16 e4m3 that the thread itself has asked for
        row_max: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16]
        # row_max, row_sums: [warp][thread of a quad][its heads], of the warp's 16 keys
        row_sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, MAX_ELEMENTS * COLUMNS * 2], 16]
        # stats: [element][head], row max and row sum

    return Shared
