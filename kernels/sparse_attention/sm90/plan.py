"""The static plan of the Hopper kernels: sizes, configurations, barriers, shared memory, arguments (persistent.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8

from dsv4_kernels.kv_layout import ROW_DIM as DIM
from dsv4_kernels.sparse_attention.split import STEP_KEYS as STEP

HEADS = 64
"""Heads of a work tile: M of every wgmma."""
WARP_HEADS = 16
"""Rows of an accumulator in a warp."""
KEY_TILE = 64
"""Keys of a key tile; a step has two, one for each consumer."""
GROUP = 64
"""Channels of a block of shared memory; in FP8 rows they share a scale."""
GROUPS = DIM // GROUP
HALF_DIM = DIM // 2
"""Channels of O in one consumer."""
HALF_GROUPS = GROUPS // 2
"""Channel groups of O in one consumer."""
ROW_STRIDE = GROUP * 2
"""Bytes of a row of a swizzled [64 x 64] bf16 block."""
BLOCK_BYTES = KEY_TILE * ROW_STRIDE
KEY_TILE_BYTES = GROUPS * BLOCK_BYTES

CONSUMER_THREADS = 256
PRODUCER_THREADS = 128

LOG2_E = 1.4426950408889634
RESCALE_LOG2 = 8.0
"""Lazy rescaling: O follows a new row max only if it exceeds the old row max by this many powers of two, so weights may
reach 2**8. (Unlike on Blackwell, weights do not begin below one: a partial result that is merged into an empty one must
not change.)"""
NO_ROW_MAX = -1.0e30
"""Row max of no scores: finite, so that differences of row maxima are never NaN."""


class NamedBarrier(IntEnum):
    """Named barriers of the CTA."""

    CONSUMERS = 1
    """Both consumers meet."""
    P = 2
    """2 and 3, one a consumer: its P is in shared memory and its keys are read; the other consumer waits for it."""
    PRODUCER = 4
    """4 to 7, one a producer: the row indices of a step are in this producer's shared memory."""
    COMBINE = 8
    """8 to 11, one for the same warp of both consumers: their row sums of its rows are in shared memory."""


class Entries(IntEnum):
    """How compressed entries are named."""

    NONE = 0
    LIST = 1
    """A list of entry rows per token (CSA)."""
    PAGES = 2
    """The first entries of the token's request, through a page table (HCA)."""


class Split(IntEnum):
    """The division of a token's keys among CTAs."""

    NONE = 0
    KV_SPLITS = 1
    """By KV splits, for many tokens; tokens stay whole if that takes no longer."""
    SUB_SPLITS = 2
    """By sub-splits of KV splits, for few tokens."""
    STEPS = 3
    """By steps, a CTA each, where tokens and steps are so few that all CTAs are resident at once (cluster.py)."""


CHANNEL_SPLITS = {Split.NONE: (1, 2), Split.KV_SPLITS: (1,), Split.SUB_SPLITS: (1, 2, 4), Split.STEPS: (2, 4)}
"""Numbers of CTAs among which the channels of O may be divided."""


@dataclass(frozen=True)
class Configuration:
    """Compile-time parameters of the kernel."""

    fp8_rows: bool
    entries: Entries
    split: Split
    """If several CTAs may work on a token's keys, partial results go through global memory and are combined."""
    channel_splits: int
    """CTAs that divide the channels of O, after each has computed all scores: 1, 2 or 4."""

    @property
    def groups_per_split(self) -> int:
        """Channel groups of O in a consumer."""
        return HALF_GROUPS // self.channel_splits

    @property
    def producers(self) -> int:
        """Producer warpgroups: one for each half of the channels, or two for each half, which alternate, if channel
        splits leave enough registers. One for both halves suffices for bf16 rows, unless tokens are single steps."""
        if self.channel_splits > 1:
            return 4
        return 2 if self.fp8_rows or self.entries == Entries.NONE else 1

    @property
    def producers_per_half(self) -> int:
        """Producers that alternate over the channel groups of a half."""
        return max(self.producers // 2, 1)

    @property
    def p_in_registers(self) -> bool:
        """Whether a consumer has registers for the other consumer's P."""
        return self.producers == 1

    @property
    def prefetch_depth(self) -> int:
        """Channel groups whose FP8 rows a producer holds in registers."""
        return 2 // self.producers_per_half

    @property
    def rows(self) -> int:
        """Rows of a step of which a producer's thread has 16 bytes, in every channel group."""
        return 4 if self.fp8_rows else 8

    @property
    def row_step(self) -> int:
        """Distance between consecutive rows of a thread."""
        return STEP // self.rows

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return CONSUMER_THREADS + self.producers * PRODUCER_THREADS

    def combine_loads(self, single: bool) -> tuple[int, int]:
        """(partial results, columns of each) that a thread loads at a time, to combine one column or several."""
        if single:
            return {1: 12, 2: 10, 4: 8}[self.channel_splits], 1
        return {1: (5, 4), 2: (5, 3), 4: (5, 2)}[self.channel_splits]

    @property
    def registers(self) -> tuple[int, int]:
        """(registers of a consumer's thread, of a producer's); in total at most what the CTA is launched with."""
        of = {(1, 1): (224, 56), (2, 1): (192, 64), (4, 2): (128, 56), (4, 4): (112, 64)}
        return of[self.producers, self.channel_splits]


WHOLE_TOKENS = 1 << 20
"""Value of `sub_split_steps` that makes all KV splits of a token one work tile."""
MAX_SUB_SPLIT_STEPS = 3
"""The most steps of a sub-split (sometimes one more) where tokens differ in length. KV splits are divided if all
sub-splits of a launch fit on the GPU at once."""
MIN_CTAS_PER_TOKEN = 2
"""KV splits are divided only if each token, block of heads and channel split can have this many CTAs."""
SCRATCH_SLOTS = 3
"""Partial results that a CTA keeps if it has several work tiles: one is being written, one is not combined yet, and one
may still be read by other CTAs."""
SLOTS_PER_CTA = max(SCRATCH_SLOTS, MAX_SUB_SPLIT_STEPS + 1)
"""A CTA with a single sub-split may export one for each of its up to MAX_SUB_SPLIT_STEPS + 1 steps."""
FIRST_SUB_SPLIT = 1 << 16
"""Increment of the counter by the first sub-split, if other partial results are prefetched (combine_prefetched)."""
PREFETCH_COLUMNS = 6
"""Columns that `combine_prefetched` merges at a time."""
PREFETCH_CELLS = (HEADS * DIM * 2 + 2 * KEY_TILE_BYTES + 2 * BLOCK_BYTES) // (CONSUMER_THREADS * 16)
"""Columns or row statistics (16 bytes a thread) that fit in the shared memory of Q, keys and P."""
SLOT_BYTES = HEADS * DIM * 4
ROW_STATS_BYTES = CONSUMER_THREADS * 16
"""Row maxima and row sums of a scratch slot, two of each per thread."""
PUBLISHED_TILES = 8
"""Work tiles of a CTA in shared memory: the next, the current, and those whose scratch slots are still in use."""
TILE_WORDS = 8
"""Int32 of a published work tile: the fields of `WorkTile` that differ between work tiles of a CTA."""
MAX_SPLIT_TOKENS = 2048
"""Tokens of a launch that may divide their keys: `Shared.starts` holds a number for each."""
MAX_CTAS = 144
"""CTAs of a launch, the multiprocessors of a full chip: `Shared.partials` has room for all their partial results."""


@cute.struct
class Shared:
    """Shared memory of a CTA: 225 KiB of 227."""

    q: cute.struct.Align[cute.struct.MemRange[BFloat16, HEADS * DIM], 1024]
    keys: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * KEY_TILE * DIM], 1024]
    # keys: [key tile][channel group][64 keys x 64 channels], swizzled
    p: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * HEADS * KEY_TILE], 1024]
    # p: [consumer][64 heads x 64 keys], swizzled; or 64 channels of O that TMA stores
    rows: cute.struct.MemRange[Uint8, 2 * KEY_TILE // 8]
    # rows: [key tile], a bit for every key that is not a hole
    row_indices: cute.struct.MemRange[Int32, 4 * 2 * STEP]
    # row_indices: [producer][step % 2], -1 for holes
    row_max: cute.struct.MemRange[Float32, 2 * HEADS]
    # row_max: [consumer], over its key tile
    row_sums: cute.struct.MemRange[Float32, 2 * HEADS]
    sinks: cute.struct.MemRange[Float32, 2 * HEADS]
    # sinks: of all heads
    partials: cute.struct.MemRange[Int32, MAX_CTAS * SLOTS_PER_CTA + 2]
    # partials: the partial results to combine (`combine.list_partials`)
    starts: cute.struct.MemRange[Int32, MAX_SPLIT_TOKENS + 1]
    # starts: [token], sub-splits of all tokens before it; unused if all tokens have the same number
    sub_split_steps: cute.struct.MemRange[Int32, 1]
    # sub_split_steps: argument of `tile_scheduler.divide_token`
    sub_splits_of_all: cute.struct.MemRange[Int32, 1]
    # sub_splits_of_all: sub-splits of every token, 0 if they differ
    num_tiles: cute.struct.MemRange[Int32, 1]
    # num_tiles: work tiles of the launch
    tiles: cute.struct.MemRange[Int32, PUBLISHED_TILES * TILE_WORDS]
    # tiles: [iteration % PUBLISHED_TILES], work tiles of this CTA, where keys are divided
    prefetches: cute.struct.MemRange[Int32, 1]
    # prefetches: whether partial results are loaded before the token's first one is written
    exit_order: cute.struct.MemRange[Int32, 1]
    # exit_order: CTAs that finished before this one
    full: cute.struct.MemRange[Int64, GROUPS]
    # full, free: [channel group], for both key tiles
    free: cute.struct.MemRange[Int64, GROUPS]
    q_full: cute.struct.MemRange[Int64, 1]
    # q_full: Q of a work tile is in shared memory


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel: addresses (Int64, 0 for none), sizes, strides in elements unless named bytes."""

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
    """Entry indices [T, K], or the page table [B, P]."""
    entry_list_stride: Int32
    num_entries: Int32
    entries_per_page: Int32
    token_to_request: Int64
    visible: Int64
    sink: Int64
    out: Int64
    out_token_stride: Int32
    out_head_stride: Int32
    scale_log2: Float32
    steps_per_kv_split: Int32
    ctas_per_token: Int32
    """CTAs of a token for each block of heads and channel split; 0 if too few to divide KV splits into sub-splits."""
    scratch: Int64
    counters: Int64
