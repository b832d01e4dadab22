"""The static plan of the kernel for few heads: sizes, configurations, shared memory (kernel.py)."""

import functools
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float32

from dsv4_kernels.sparse_attention.sm90.plan import BLOCK_BYTES, DIM, GROUPS, KEY_TILE, Entries

COLUMNS = (16, 32)
"""Columns of the products; heads that are not there are zeros."""
PIECES = 4
"""Elements of a token that has a single KV split."""
MAX_ELEMENTS = 2
"""Of a CTA that does not have the token's first one: one in registers beside the one that is computed."""
PARTS = (1, 2, 4, 8)
"""Among how many CTAs a token's elements may be divided; they are a cluster."""
WARPGROUP = 128
WARPS = WARPGROUP // 32
ROWS = 2
"""Rows of a tile that a thread has, 8 apart."""
TEAM = 1
"""Named barrier of a warpgroup; of the second one TEAM + 1."""
BOTH = 3
"""Named barrier of both warpgroups."""


@dataclass(frozen=True)
class FewHeads:
    """What a compiled kernel is specialised for."""

    fp8_rows: bool
    entries: Entries
    heads: int
    """16 or 32: columns of the products."""

    @property
    def warpgroups(self) -> int:
        """Of a CTA; they divide the channels."""
        return self.heads // 16

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.warpgroups * WARPGROUP

    @property
    def ctas(self) -> int:
        """Of a multiprocessor, at once."""
        return 2 // self.warpgroups

    @property
    def groups(self) -> int:
        """Channel groups of a warpgroup."""
        return GROUPS // self.warpgroups

    @property
    def depth(self) -> int:
        """Channel groups that a thread has asked for: 32 registers of them, and 8 for FP8 rows' last one."""
        return 4 if self.fp8_rows else 2

    @property
    def products(self) -> int:
        """Of 64 channels, that a warpgroup has under way; with 32 heads there are no registers for two."""
        return 2 // self.warpgroups

    @property
    def columns(self) -> int:
        """Heads whose scores a thread has, two adjacent ones of every 8."""
        return self.heads // 4

    @property
    def registers_of_scores(self) -> int:
        """Of those that a thread has the softmax of: a warpgroup has that of 16 heads."""
        return self.heads // self.warpgroups * KEY_TILE // WARPGROUP

    @property
    def element_bytes(self) -> int:
        """Of an element in shared memory: O^T [512 channels, heads] in fp32."""
        return DIM * self.heads * 4


@functools.cache
def shared_memory(config: FewHeads) -> type:
    """Shared memory of a CTA: 87 KiB with 16 heads, of 113; 174 KiB with 32, of 227."""
    values_bytes = max(GROUPS * BLOCK_BYTES, MAX_ELEMENTS * config.element_bytes)

    @cute.struct
    class Shared:
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, config.heads * DIM], 1024]
        # q: [channel group][heads x 64 channels], swizzled, channels in the order of `load_q`
        values: cute.struct.Align[cute.struct.MemRange[BFloat16, values_bytes // 2], 1024]
        # values: [channel group][64 keys x 64 channels], swizzled; then elements, [512 channels][heads] fp32 each
        p: cute.struct.Align[cute.struct.MemRange[BFloat16, config.heads * KEY_TILE], 1024]
        # p: [heads x 64 keys], swizzled
        scores: cute.struct.Align[cute.struct.MemRange[Float32, KEY_TILE * config.heads], 16]
        # scores: [warpgroup that wants them][64 keys x 16 heads] in the order of the registers, if there are two
        row_max: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * config.heads], 16]
        # row_max, row_sums: [warp][head], of the warp's 16 keys
        row_sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * config.heads], 16]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, MAX_ELEMENTS * config.heads * 2], 16]
        # stats: [element][head], row max and row sum

    return Shared
