"""What all parts of the Hopper kernel share: static plan, shared memory, arguments, copies (see persistent.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsv4_kernels.kv_layout import ROW_DIM as DIM
from dsv4_kernels.sparse_attention.split import STEP_KEYS as STEP

HEADS = 64
"""Heads of a work item: M of every wgmma."""
WARP_HEADS = 16
"""Rows of an accumulator in a warp."""
TILE = 64
"""Keys of a tile."""
GROUP = 64
"""Channels of a block of shared memory; those with one scale in FP8 rows."""
GROUPS = DIM // GROUP
HALF = DIM // 2
"""Channels of O in one consumer."""
HALF_GROUPS = GROUPS // 2
"""Groups of the channels of O in one consumer."""
ROW_STRIDE = GROUP * 2
"""Bytes of a row of a swizzled [64 x 64] bf16 block."""
BLOCK_BYTES = TILE * ROW_STRIDE
TILE_BYTES = GROUPS * BLOCK_BYTES

CONSUMER_THREADS = 256
PRODUCER_THREADS = 128

LOG2_E = 1.4426950408889634
RESCALE_ABOVE = 8.0
"""O follows a new maximum only if it exceeds the old one by this many powers of two, which weights may then be. (They
do not begin below one instead, as on Blackwell: what is folded into nothing must stay as it is.)"""
NO_MAXIMUM = -1.0e30
"""Maximum of no scores: finite, so that differences of maxima are never NaN."""


class Named(IntEnum):
    """Named barriers of the CTA."""

    CONSUMERS = 1
    """Both consumers wait."""
    P = 2
    """And 3: P of this consumer is in shared memory, it has read its keys and may go first; the other one waits."""
    PRODUCER = 4
    """And 5 to 7: the numbers of a step's rows are in this producer's shared memory."""
    MERGE = 8
    """And 9 to 11: sums of this warp's rows, of both consumers."""


class Entries(IntEnum):
    """How compressed entries are named."""

    NONE = 0
    LIST = 1
    """Rows in a list of the token (CSA)."""
    PAGES = 2
    """The first ones of the token's request, through a page table (HCA)."""


class Split(IntEnum):
    """How a token's keys are divided among CTAs."""

    NONE = 0
    PARTS = 1
    """By its parts, where tokens are many; not at all if that takes no longer."""
    PIECES = 2
    """By pieces of its parts, where tokens are few."""
    STEPS = 3
    """By steps, a CTA each, where tokens and steps are so few that all of them are resident at once (cluster.py)."""


SHARES_OF = {Split.NONE: (1, 2), Split.PARTS: (1,), Split.PIECES: (1, 2, 4), Split.STEPS: (2, 4)}
"""Into how many shares the channels of O may be divided."""


@dataclass(frozen=True)
class Configuration:
    """What a compiled kernel is specialised for."""

    fp8_rows: bool
    entries: Entries
    fp32_out: bool
    lse: bool
    split: Split
    """If several CTAs may work on a token's keys, partial results go through global memory and are merged."""
    shares: int
    """CTAs that divide the channels of O among them, after each has computed all scores: 1, 2 or 4."""

    @property
    def overlaps(self) -> bool:
        """Whether O of an item is written while the scores of the next one are computed."""
        return not self.split and not self.fp32_out

    @property
    def share_groups(self) -> int:
        """Groups of O in a consumer."""
        return HALF_GROUPS // self.shares

    @property
    def producers(self) -> int:
        """Warpgroups that fill groups: one of each half of the channels, or two that take turns, where O leaves room
        for their registers. To copy bf16 rows one of both halves is enough, unless items are single steps."""
        if self.shares > 1:
            return 4
        return 2 if self.fp8_rows or self.entries == Entries.NONE else 1

    @property
    def takers(self) -> int:
        """Producers that take turns at the groups of a half."""
        return max(self.producers // 2, 1)

    @property
    def p_in_registers(self) -> bool:
        """Whether consumers have registers for the other one's P."""
        return self.producers == 1

    @property
    def ahead(self) -> int:
        """Groups whose FP8 rows a producer holds in registers."""
        return 2 // self.takers

    @property
    def rows(self) -> int:
        """Rows of a step that a producer's thread has 16 bytes of, in every group."""
        return 4 if self.fp8_rows else 8

    @property
    def row_step(self) -> int:
        """From one of them to the next."""
        return STEP // self.rows

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return CONSUMER_THREADS + self.producers * PRODUCER_THREADS

    def merge_loads(self, single: bool) -> tuple[int, int]:
        """Partial results, and columns of each, that a thread loads at a time when it merges one column or several."""
        fewer = int(self.lse)
        if single:
            return {1: 12, 2: 10 - 2 * fewer, 4: 8 - 2 * fewer}[self.shares], 1
        return {1: (5, 4), 2: (5 - fewer, 3), 4: (5 - fewer, 2)}[self.shares]

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's thread and of a producer's; all together no more than a CTA is launched with."""
        of = {(1, 1): (224, 56), (2, 1): (192, 64), (4, 2): (128, 56), (4, 4): (112, 64)}
        return of[self.producers, self.shares]


WHOLE_TOKENS = 1 << 20
"""Instead of the steps of a piece: all parts of a token are one."""
MAX_PIECE_STEPS = 3
"""Where tokens differ in length, parts are divided into pieces of up to so many steps (or one more), if all of a launch
fit on the GPU at once."""
MIN_CTAS_PER_TOKEN = 2
"""And if there are so many CTAs for every token, block of heads and share of the channels."""
SCRATCH_SLOTS = 3
"""Partial results that a CTA keeps if it has several items: one being written, one whose merge is pending, one that
others may still read."""
SLOTS_PER_CTA = max(SCRATCH_SLOTS, MAX_PIECE_STEPS + 1)
"""A CTA with a single piece may leave one for every step, of which there may be one more than MAX_PIECE_STEPS."""
FIRST_PIECE = 1 << 16
"""What a written first piece of a token counts for, if the others get results before it (`merge_behind_first`)."""
EARLY_COLUMNS = 6
"""Columns that they fold at a time."""
EARLY_CELLS = (HEADS * DIM * 2 + 2 * TILE_BYTES + 2 * BLOCK_BYTES) // (CONSUMER_THREADS * 16)
"""16 bytes of every thread, of a column or of statistics, for which there is room where Q, keys and P were."""
SLOT_BYTES = HEADS * DIM * 4
STATISTICS_BYTES = CONSUMER_THREADS * 32
"""Maxima and sums of a slot, as every thread has them."""
KNOWN_ITEMS = 8
"""Of a CTA: the next one, the present one, and those whose slots are still needed."""
ITEM_NUMBERS = 8
"""Int32 of a known item: an `Item` but for what is the same for all items of a CTA."""
MAX_SPLIT_TOKENS = 2048
"""Tokens of a launch that may divide their keys: `Shared.starts` holds a number for each."""
MAX_CTAS = 144
"""Of a launch, as many as a full chip has multiprocessors: `Shared.partials` has room for all that they leave."""


@cute.struct
class Shared:
    """Shared memory of a CTA: 225 KiB of 227."""

    q: cute.struct.Align[cute.struct.MemRange[BFloat16, HEADS * DIM], 1024]
    keys: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * TILE * DIM], 1024]
    # keys: [tile][group][64 keys x 64 channels], swizzled
    p: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * HEADS * TILE], 1024]
    # p: [consumer][64 heads x 64 keys], swizzled; or 64 channels of O on their way out
    rows: cute.struct.MemRange[Uint8, 2 * TILE // 8]
    # rows: [tile], a bit for every key that is no hole
    numbers: cute.struct.MemRange[Int32, 4 * 2 * STEP]
    # numbers: [producer][step % 2], of the rows, -1 for holes
    maxima: cute.struct.MemRange[Float32, 2 * HEADS]
    # maxima: [consumer], of its tile
    sums: cute.struct.MemRange[Float32, 4 * HEADS]
    sinks: cute.struct.MemRange[Float32, 2 * HEADS]
    # sinks: of all heads
    partials: cute.struct.MemRange[Int32, MAX_CTAS * SLOTS_PER_CTA + 2]
    # partials: what is to be merged (`Merging.list_partials`)
    starts: cute.struct.MemRange[Int32, MAX_SPLIT_TOKENS + 1]
    # starts: [token], pieces of all tokens before it; unless all tokens have the same number
    piece_steps: cute.struct.MemRange[Int32, 1]
    # piece_steps: of `WorkItems.division`
    pieces_of_all: cute.struct.MemRange[Int32, 1]
    # pieces_of_all: pieces of every token, 0 if they differ
    num_items: cute.struct.MemRange[Int32, 1]
    # num_items: work items of the launch
    items: cute.struct.MemRange[Int32, KNOWN_ITEMS * ITEM_NUMBERS]
    # items: [turn % KNOWN_ITEMS], of this CTA, where keys are divided
    gets_early: cute.struct.MemRange[Int32, 1]
    # gets_early: whether a token's pieces get their results before the first one is written
    is_last: cute.struct.MemRange[Int32, 1]
    # is_last: what `leave` counted
    full: cute.struct.MemRange[Int64, GROUPS]
    # full, free: [group], of both tiles
    free: cute.struct.MemRange[Int64, GROUPS]
    q_full: cute.struct.MemRange[Int64, 1]
    # q_full: Q of an item is there


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
    ctas_per_token: Int32
    """For every block of heads and share of the channels, too; 0 if they are too few to divide parts into pieces."""
    scratch: Int64
    counters: Int64


class Copy(NamedTuple):
    """What the copy engine moves tiles of."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def swizzled_atom() -> cute.ComposedLayout:
    """Rows of 128 bytes, swizzled."""
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)


def layout(atom: cute.ComposedLayout, shape: tuple) -> tuple:
    """(outer layout, swizzle) of `shape` tiled with a swizzled atom, first modes first."""
    layout = cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))
    return layout.outer, layout.inner


def partition(copy: Copy, places: cute.Tensor) -> tuple:
    """(shared memory, global memory) of a copy by the engine, a tile first: places, and coordinates of tiles."""
    tile = tuple(cute.size(places, mode=[mode]) for mode in (0, 1))
    tiles = cute.local_tile(copy.tensor, tile, (None, None, None))
    blocks = cute.group_modes(places, 0, 2), cute.group_modes(tiles, 0, 2)
    return cpasync.tma_partition(copy.atom, 0, cute.make_layout(1), *blocks)


def rows_of_heads(start: Int64, heads: Int32, tokens: Int32, head_stride: Int32, token_stride: Int32) -> cute.Tensor:
    """[heads, 512, tokens] bf16 in global memory, for the copy engine."""
    strides = (cute.assume(head_stride, 8), 1, cute.assume(token_stride, 8))
    pointer = cute.make_ptr(BFloat16, start, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((heads, DIM, tokens), stride=strides))


def copy_of_q(arguments: Arguments) -> Copy:
    """64 heads, 64 channels at a time."""
    rows = (arguments.num_heads, arguments.num_tokens, arguments.q_head_stride, arguments.q_token_stride)
    q = rows_of_heads(arguments.q, *rows)
    return Copy(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), q, *tile_of_heads(HEADS)))


def copy_of_out(arguments: Arguments) -> Copy:
    """A warp's rows, 64 channels at a time."""
    rows = (arguments.num_heads, arguments.num_tokens, arguments.out_head_stride, arguments.out_token_stride)
    out = rows_of_heads(arguments.out, *rows)
    return Copy(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, *tile_of_heads(WARP_HEADS)))


def tile_of_heads(heads: int) -> tuple:
    """(layout in shared memory, shape) of what is copied at a time: 64 channels of some heads, swizzled."""
    return cute.tile_to_shape(swizzled_atom(), (heads, GROUP), order=(0, 1)), (heads, GROUP)
