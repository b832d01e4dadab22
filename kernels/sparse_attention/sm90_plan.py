"""What all parts of the Hopper kernel share: static plan, shared memory, arguments, work items (see sm90.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr

from dsv4_kernels.kv_layout import ROW_DIM as DIM
from dsv4_kernels.sparse_attention import sm90_ptx as ptx
from dsv4_kernels.sparse_attention.split import STEP_KEYS as STEP

HEADS = 64
"""Heads of a work item: M of every wgmma."""
TILE = 64
"""Keys of a tile."""
HALF = DIM // 2
"""Channels of a half buffer, and of O in one consumer."""
ROW_STRIDE = 128
"""Bytes of a row of a swizzled [64 x 64] bf16 block."""
BLOCK_BYTES = TILE * ROW_STRIDE
HALF_BYTES = TILE * HALF * 2

CONSUMER_THREADS = 256
PRODUCER_THREADS = 256
THREADS = CONSUMER_THREADS + PRODUCER_THREADS
CONSUMER_REGISTERS = 192
PRODUCER_REGISTERS = 64

LOG2_E = 1.4426950408889634
RESCALE_ABOVE = 40.0
"""O follows a new maximum only if it exceeds the old one by this many powers of two. Until then P, in bf16 with the
range of fp32, is as precise above 1 as below."""
NO_MAXIMUM = -1.0e30
"""Maximum of no scores: finite, so that differences of maxima are never NaN."""


class Named(IntEnum):
    """Named barriers of the CTA, all of both consumers: on the first four one arrives and the other one waits."""

    MAX0 = 1
    """Consumer 0's maxima are in shared memory: consumer 1 waits."""
    MAX1 = 2
    """Consumer 1's maxima are there: consumer 0 waits."""
    P0 = 3
    """P0 is in shared memory, and consumer 0 has read K0: consumer 1 waits."""
    P1 = 4
    """P1 is in shared memory, and consumer 1 has read K1: consumer 0 waits."""
    CONSUMERS = 5
    """Both wait, between items."""


class Entries(IntEnum):
    """How compressed entries are named."""

    NONE = 0
    LIST = 1
    """Rows in a list of the token (CSA)."""
    PAGES = 2
    """The first ones of the token's request, through a page table (HCA)."""


@dataclass(frozen=True)
class Configuration:
    """What a compiled kernel is specialised for."""

    fp8_rows: bool
    entries: Entries
    fp32_out: bool
    lse: bool
    split: bool
    """Tokens may have several parts: partial results go through global memory and are merged."""


SCRATCH_SLOTS = 3
"""Partial results that a CTA keeps: one being written, one whose merge is pending, one that others may still read."""
SLOT_BYTES = HEADS * DIM * 4
STATISTICS_BYTES = CONSUMER_THREADS * 32
"""Maxima and sums of a slot, as every thread has them."""
MERGE_PARTS = 4
MERGE_GROUPS = 4
"""Parts, and groups of four values of each, that a thread loads at a time when it merges."""
MAX_SPLIT_TOKENS = 2048
"""Tokens of a launch that may divide their keys: `Shared.starts` holds a number for each."""


@cute.struct
class Shared:
    """Shared memory of a CTA: 218 KiB of 227."""

    q: cute.struct.Align[cute.struct.MemRange[BFloat16, HEADS * DIM], 1024]
    keys: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * TILE * DIM], 1024]
    # keys: [tile][half][64 keys x 256 channels], swizzled
    p: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * HEADS * TILE], 1024]
    # p: [consumer][64 heads x 64 keys], swizzled; then staging of the output
    rows: cute.struct.MemRange[Uint8, 2 * TILE // 8]
    # rows: [tile], a bit for every key that is no hole
    maxima: cute.struct.MemRange[Float32, HEADS]
    sums: cute.struct.MemRange[Float32, 4 * HEADS]
    sinks: cute.struct.MemRange[Float32, HEADS]
    # sinks: of the item's heads, in units of log2
    starts: cute.struct.MemRange[Int32, MAX_SPLIT_TOKENS + 1]
    # starts: [token], parts of all tokens before it
    scan: cute.struct.MemRange[Int32, THREADS // 32]
    # scan: [warp], sums while parts are counted; then who is the last to leave
    full: cute.struct.MemRange[Int64, 4]
    # full, free: [tile][half]
    free: cute.struct.MemRange[Int64, 4]


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel: addresses (Int64, 0 where absent), sizes and strides in elements unless said."""

    q: Int64
    q_token_stride: Int32
    q_head_stride: Int32
    num_tokens: Int32
    num_heads: Int32
    window: Int64
    window_page_bytes: Int32
    window_rows: Int64
    window_rows_stride: Int32
    window_width: Int32
    entries: Int64
    entries_page_bytes: Int32
    entry_list: Int64
    entry_list_stride: Int32
    num_entries: Int32
    entries_per_page: Int32
    token_to_request: Int64
    visible: Int64
    sink: Int64
    out: Int64
    out_token_stride: Int32
    out_head_stride: Int32
    lse: Int64
    scale_log2: Float32
    steps_per_part: Int32
    scratch: Int64
    counters: Int64


class Item(NamedTuple):
    """A work item: steps [first, last) of a token's keys for a block of heads."""

    token: Int32
    head_block: Int32
    first: Int32
    last: Int32
    part: Int32
    parts: Int32
    visible: Int32


class WorkItems:
    """Work items by number."""

    configuration: Configuration

    @cute.jit
    def visible_entries(self, args: Arguments, token: Int32) -> Int32:
        """Entries that a token may read: of a list, its first slots."""
        visible = args.num_entries
        if args.visible != 0:
            visible = ptx.imin(ptx.load_i32(args.visible + Int64(token) * 4), visible)
        return visible

    @cute.jit
    def item(self, args: Arguments, shared: cutlass.Constexpr, index: Int32) -> Item:
        """An item by its number; beyond the last one, something harmless."""
        two_blocks = self.head_blocks(args) - 1
        token = index >> two_blocks
        head_block = index & two_blocks
        part, parts = Int32(0), Int32(1)
        if const_expr(self.configuration.split):
            starts = shared.starts.data_ptr()
            wanted = token
            token = Int32(0)
            jump = Int32(MAX_SPLIT_TOKENS)
            while jump > 0:
                candidate = token + jump
                if candidate < args.num_tokens:
                    if (starts + candidate).load() <= wanted:
                        token = candidate
                jump = jump // 2
            part = wanted - (starts + token).load()
            parts = (starts + token + 1).load() - (starts + token).load()
        if token >= args.num_tokens:
            token = args.num_tokens - 1
        visible = Int32(0)
        if const_expr(self.configuration.entries != Entries.NONE):
            visible = self.visible_entries(args, token)
        first, last = Int32(0), self.steps(args, visible)
        if const_expr(self.configuration.split):
            first, last = part * last // parts, (part + 1) * last // parts
        return Item(token, head_block, first, last, part, parts, visible)

    @cute.jit
    def steps(self, args: Arguments, visible: Int32) -> Int32:
        """Steps of a token, at least one: those of its window, then those of its entries."""
        steps = (args.window_width + STEP - 1) // STEP + (visible + STEP - 1) // STEP
        if steps < 1:
            steps = Int32(1)
        return steps

    @cute.jit
    def count_parts(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32) -> None:
        """starts[t] = parts of the tokens before t, by all threads; a barrier must follow."""
        starts, scan = shared.starts.data_ptr(), shared.scan.data_ptr()
        lane, warp = thread % 32, thread // 32
        before = Int32(0)
        base = Int32(0)
        while base < args.num_tokens:
            token = base + thread
            parts = Int32(0)
            if token < args.num_tokens:
                visible = Int32(0)
                if const_expr(self.configuration.entries != Entries.NONE):
                    visible = self.visible_entries(args, token)
                parts = (self.steps(args, visible) + args.steps_per_part - 1) // args.steps_per_part
                if parts < 1:
                    parts = Int32(1)
            total = parts
            for i in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(total, offset=1 << i, mask_and_clamp=0)
                if lane >= (1 << i):
                    total += other
            if lane == 31:
                (scan + warp).store(total)
            cute.arch.barrier()
            ahead, everything = Int32(0), Int32(0)
            for i in cutlass.range_constexpr(THREADS // 32):
                count = (scan + i).load()
                everything += count
                if i < warp:
                    ahead += count
            if token < args.num_tokens:
                (starts + token + 1).store(before + ahead + total)
            before += everything
            base += THREADS
            cute.arch.barrier()
        if thread == 0:
            starts.store(Int32(0))

    @cute.jit
    def num_items(self, args: Arguments, shared: cutlass.Constexpr) -> Int32:
        """Work items of the launch."""
        rows = args.num_tokens
        if const_expr(self.configuration.split):
            rows = (shared.starts.data_ptr() + args.num_tokens).load()
        return rows * self.head_blocks(args)

    def head_blocks(self, args: Arguments) -> Int32:
        """1 or 2: there are at most 128 heads."""
        return (args.num_heads + HEADS - 1) // HEADS
