"""The static plan of the kernel for few heads: sizes, configurations, shared memory (kernel.py)."""

import functools
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint8

from dsv4_kernels.sparse_attention.sm90.plan import DIM, GROUPS, KEY_TILE, KEY_TILE_BYTES, STEP, Entries

COLUMNS = (16, 32)
"""Columns of the products, the fewest that hold the heads; heads that are not there are zeros."""
PIECES = 4
"""Elements of a token that has a single KV split."""
MAX_ELEMENTS = 2
"""Of a CTA that does not have the token's first one: one in registers beside the one that is computed."""
PARTS = (1, 2, 4, 8)
"""Among how many CTAs a token's elements may be divided, or its tiles if they are more than its pieces; a cluster."""
MICROSECONDS = {1: (7.8, 2.2), 2: (11.5, 3.0)}
"""What a launch and what each tile of a CTA takes by the number of CTAs a multiprocessor, with up to 16 heads: measured
on an H200, and enough to choose among PARTS. So the CTAs of clusters that divide a token into four or eight rather have
a multiprocessor each, and large parts are computed one after the other rather than whole tokens by a CTA each."""
WARPGROUP = 128
WARPS = WARPGROUP // 32
ROWS = 2
"""Rows of a tile that a thread has, 8 apart."""
TEAM = 1
"""Named barrier of the teams, all threads of a CTA."""
PRODUCTS = 2
"""Of 64 channels, that a team has under way."""
EARLY_GROUPS = 4
"""First channel groups of FP8 rows. The next tile's are asked for, all at once, when this tile's have been read; those
of the others beside the products with P. Not all early: what is under way when P is written may hold up the fence
behind it (the compiler makes it a memory barrier), and these have arrived by then. The bits do not depend on it."""


@dataclass(frozen=True)
class FewHeads:
    """What a compiled kernel is specialised for."""

    fp8_rows: bool
    entries: Entries
    early_groups: int = EARLY_GROUPS
    columns: int = COLUMNS[0]

    @property
    def teams(self) -> int:
        """Warpgroups of a CTA: with 32 columns two, so that each has registers for its half of O. And CTAs of a
        multiprocessor are the fewer."""
        return self.columns // COLUMNS[0]

    @property
    def ctas(self) -> int:
        """Of a multiprocessor, at once."""
        return 2 // self.teams

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.teams * WARPGROUP

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return self.teams * WARPS

    @property
    def tile_keys(self) -> int:
        """Of a tile, KEY_TILE for each team."""
        return self.teams * KEY_TILE

    @property
    def tiles_of_step(self) -> int:
        """How many tiles a step has (split.py)."""
        return STEP // self.tile_keys

    @property
    def out_groups(self) -> int:
        """Channel groups of O that a team has."""
        return GROUPS // self.teams

    @property
    def statistics(self) -> int:
        """Heads whose scores a thread has, two adjacent ones of every 8."""
        return self.columns // 4

    @property
    def scores(self) -> int:
        """That a thread has of a tile."""
        return self.columns * KEY_TILE // WARPGROUP

    @property
    def element_bytes(self) -> int:
        """Of an element in shared memory: O^T [512 channels, heads] in fp32."""
        return DIM * self.columns * 4

    @property
    def stage_bytes(self) -> int:
        """Of e4m3 that is on its way: 16 bytes of every thread, of one row and channel group."""
        return self.threads * 16

    @property
    def staged_groups(self) -> int:
        """Channel groups of a row that are e4m3, so that they come to a place of their own; the others are bf16."""
        return GROUPS - 1 if self.fp8_rows else 0


@functools.cache
def shared_memory(config: FewHeads) -> type:
    """Shared memory of a CTA: 111 KiB of 113 with FP8 rows, 83 with bf16; with 32 columns 226.5 of 227, 170."""
    columns, teams = config.columns, config.teams
    values_bytes = max(teams * KEY_TILE_BYTES, MAX_ELEMENTS * config.element_bytes)
    stages_bytes = max(16, config.staged_groups * ROWS * config.stage_bytes)

    @cute.struct
    class Shared:
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, columns * DIM], 1024]
        # q: [channel group][heads x 64 channels], swizzled, channels in the order of `store_q`
        values: cute.struct.Align[cute.struct.MemRange[BFloat16, values_bytes // 2], 1024]
        # values: [team][channel group][64 keys x 64 channels], swizzled; then elements, fp32 (`elements.place_of`)
        p: cute.struct.Align[cute.struct.MemRange[BFloat16, teams * columns * KEY_TILE], 1024]
        # p: [team][heads x 64 keys], swizzled
        stages: cute.struct.Align[cute.struct.MemRange[Uint8, stages_bytes], 16]
        # stages: [channel group][row of a thread][thread], 16 e4m3 that the thread itself has asked for
        row_max: cute.struct.Align[cute.struct.MemRange[Float32, config.warps * columns], 16]
        # row_max, row_sums: [warp][thread of a quad][its heads], of the warp's 16 keys
        row_sums: cute.struct.Align[cute.struct.MemRange[Float32, config.warps * columns], 16]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, MAX_ELEMENTS * columns * 2], 16]
        # stats: [element][head], row max and row sum

    return Shared
