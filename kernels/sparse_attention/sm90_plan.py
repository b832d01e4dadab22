"""What all parts of the Hopper kernel share: static plan, shared memory, arguments, work items (see sm90.py)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, const_expr

from dsv4_kernels.kv_layout import ROW_DIM as DIM
from dsv4_kernels.sparse_attention import sm90_ptx as ptx
from dsv4_kernels.sparse_attention.split import STEP_KEYS as STEP

HEADS = 64
"""Heads of a work item: M of every wgmma."""
TILE = 64
"""Keys of a tile."""
GROUP = 64
"""Channels of a block of shared memory; those with one scale in FP8 rows."""
GROUPS = DIM // GROUP
HALF = DIM // 2
"""Channels of O in one consumer."""
SHARES = (1, 2, 4)
"""Into how many shares the channels of O may be divided."""
HALF_GROUPS = GROUPS // 2
"""Groups of the channels of O in one consumer."""
ROW_STRIDE = GROUP * 2
"""Bytes of a row of a swizzled [64 x 64] bf16 block."""
BLOCK_BYTES = TILE * ROW_STRIDE
TILE_BYTES = GROUPS * BLOCK_BYTES

CONSUMER_THREADS = 256
PRODUCER_THREADS = 128

LOG2_E = 1.4426950408889634
RESCALE_ABOVE = 40.0
"""O follows a new maximum only if it exceeds the old one by this many powers of two."""
NO_MAXIMUM = -1.0e30
"""Maximum of no scores: finite, so that differences of maxima are never NaN."""


class Named(IntEnum):
    """Named barriers of the CTA."""

    CONSUMERS = 1
    """Both consumers wait."""
    P = 2
    """And 3: P of this consumer is in shared memory, and it has read its keys; the other one waits."""
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


@dataclass(frozen=True)
class Configuration:
    """What a compiled kernel is specialised for."""

    fp8_rows: bool
    entries: Entries
    fp32_out: bool
    lse: bool
    split: bool
    """Several CTAs may work on a token's keys: partial results go through global memory and are merged."""
    shares: int
    """CTAs that divide the channels of O among them, after each has computed all scores: 1, 2 or 4."""

    @property
    def share_groups(self) -> int:
        """Groups of O in a consumer."""
        return HALF_GROUPS // self.shares

    @property
    def producers(self) -> int:
        """Of each half of the channels: where O leaves room for their registers, two take turns."""
        return 1 if self.shares == 1 else 2

    @property
    def ahead(self) -> int:
        """Groups whose FP8 rows a producer holds in registers."""
        return 2 // self.producers

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
        return CONSUMER_THREADS + 2 * self.producers * PRODUCER_THREADS

    def merge_loads(self, single: bool) -> tuple[int, int]:
        """Partial results, and columns of each, that a thread loads at a time when it merges one column or several."""
        fewer = int(self.lse)
        if single:
            return {1: 12, 2: 10 - 2 * fewer, 4: 8 - 2 * fewer}[self.shares], 1
        return {1: (5, 4), 2: (5 - fewer, 3), 4: (5 - fewer, 2)}[self.shares]

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's thread and of a producer's; all together no more than a CTA is launched with."""
        return {1: (192, 64), 2: (128, 56), 4: (112, 64)}[self.shares]


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
    # p: [consumer][64 heads x 64 keys], swizzled
    rows: cute.struct.MemRange[Uint8, 2 * TILE // 8]
    # rows: [tile], a bit for every key that is no hole
    numbers: cute.struct.MemRange[Int32, 4 * 2 * STEP]
    # numbers: [producer][step % 2], of the rows, -1 for holes
    maxima: cute.struct.MemRange[Float32, 2 * HEADS]
    # maxima: [consumer], of its tile
    sums: cute.struct.MemRange[Float32, 4 * HEADS]
    sinks: cute.struct.MemRange[Float32, HEADS]
    # sinks: of the item's heads
    partials: cute.struct.MemRange[Int32, MAX_CTAS * SLOTS_PER_CTA + 2]
    # partials: what is to be merged (`Results.list_partials`)
    starts: cute.struct.MemRange[Int32, MAX_SPLIT_TOKENS + 1]
    # starts: [token], pieces of all tokens before it; unless all tokens have the same number
    plan: cute.struct.MemRange[Int32, 3]
    # plan: `piece_steps` of `WorkItems.division`; pieces of every token, 0 if they differ; work items of the launch
    items: cute.struct.MemRange[Int32, KNOWN_ITEMS * ITEM_NUMBERS]
    # items: [turn % KNOWN_ITEMS], of this CTA, where keys are divided
    is_last: cute.struct.MemRange[Int32, 1]
    # is_last: what `leave` counted
    full: cute.struct.MemRange[Int64, GROUPS]
    # full, free: [group], of both tiles
    free: cute.struct.MemRange[Int64, GROUPS]


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


class Division(NamedTuple):
    """How a token's steps are divided: into `parts` (see split.py) of `pieces` each."""

    steps: Int32
    parts: Int32
    pieces: Int32
    """0 if every step of several parts is a piece."""
    all_pieces: Int32


class Item(NamedTuple):
    """A work item: a piece of a token's keys, steps [first, last), for a block of heads and a share of the channels."""

    token: Int32
    head_block: Int32
    first: Int32
    last: Int32
    share: Int32
    """Of the channels."""
    piece: Int32
    """Of all pieces of the token."""
    pieces: Int32
    begins: Boolean
    """Whether a part begins with this piece."""
    visible: Int32


class WorkItems:
    """Work items by number."""

    configuration: Configuration

    @cute.jit
    def visible_entries(self, args: Arguments, token: Int32) -> Int32:
        """Entries that a token may read: of a list, its first slots."""
        visible = Int32(0)
        if const_expr(self.configuration.entries != Entries.NONE):
            visible = args.num_entries
            if args.visible != 0:
                visible = ptx.imin(ptx.load_i32(args.visible + Int64(token) * 4), visible)
        return visible

    def item(self, args: Arguments, shared: cutlass.Constexpr, index: Int32, turn: Int32) -> Item:
        """An item by its number and its turn in this CTA; of several turns only where keys are divided.

        There it was computed once for all: finding out which keys it has takes a warp several hundred cycles.
        """
        return self.known_item(shared, turn) if self.configuration.split else self.computed_item(args, shared, index)

    @cute.jit
    def known_item(self, shared: cutlass.Constexpr, turn: Int32) -> Item:
        """What `know_item` wrote."""
        place = shared.items.data_ptr() + turn % KNOWN_ITEMS * ITEM_NUMBERS
        numbers = [(place + i).load() for i in range(ITEM_NUMBERS)]
        block, _, _ = cute.arch.block_idx()
        token, head_block, first, last, piece, pieces, begins, visible = numbers
        return Item(token, head_block, first, last, self.share(block), piece, pieces, begins != 0, visible)

    @cute.jit
    def know_item(self, args: Arguments, shared: cutlass.Constexpr, index: Int32, turn: Int32, lane: Int32) -> None:
        """Computes an item for all, by one warp; a barrier must follow."""
        item = self.computed_item(args, shared, index)
        place = shared.items.data_ptr() + turn % KNOWN_ITEMS * ITEM_NUMBERS
        if lane == 0:
            (place + 0).store(item.token)
            (place + 1).store(item.head_block)
            (place + 2).store(item.first)
            (place + 3).store(item.last)
            (place + 4).store(item.piece)
            (place + 5).store(item.pieces)
            (place + 6).store(Int32(item.begins))
            (place + 7).store(item.visible)

    @cute.jit
    def computed_item(self, args: Arguments, shared: cutlass.Constexpr, index: Int32) -> Item:
        """An item from its number and the plan."""
        share = self.share(index)
        token = index // self.configuration.shares >> (self.head_blocks(args) - 1)
        head_block = self.head_block(args, index)
        piece = Int32(0)
        if const_expr(self.configuration.split):
            wanted, pieces_of_all = token, (shared.plan.data_ptr() + 1).load()
            if pieces_of_all > 0:
                token = ptx.divide(wanted, pieces_of_all)
                piece = wanted - token * pieces_of_all
            else:
                token = self.token_of_piece(args, shared, wanted)
                piece = wanted - (shared.starts.data_ptr() + token).load()
        token = ptx.imin(token, args.num_tokens - 1)
        visible = self.visible_entries(args, token)
        # With a 0 that the compiler knows, it adds up addresses step by step, in registers that there are not.
        first, last = ptx.opaque(Int32(0)), self.steps(args, visible)
        pieces, begins = Int32(1), Boolean(True)
        if const_expr(self.configuration.split):
            division = self.division(args, last, shared.plan.data_ptr().load())
            first, last, begins = self.steps_of_piece(division, piece)
            pieces = division.all_pieces
        return Item(token, head_block, first, last, share, piece, pieces, begins, visible)

    @cute.jit
    def token_of_piece(self, args: Arguments, shared: cutlass.Constexpr, piece: Int32) -> Int32:
        """The token of a piece by its number in the launch. All lanes of a warp look for the same one."""
        starts, lane = shared.starts.data_ptr(), cute.arch.lane_idx()
        token, last, stride = Int32(0), args.num_tokens - 1, (args.num_tokens + 31) // 32
        while stride > 0:
            candidate = token + lane * stride
            is_before = Boolean(False)
            if candidate <= last:
                is_before = (starts + candidate).load() <= piece
            found = token + (cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) - 1) * stride
            last = ptx.imin(last, found + stride - 1)
            token = found
            stride = (stride + 31) // 32 - Int32(stride == 1)
        return token

    @cute.jit
    def steps(self, args: Arguments, visible: Int32) -> Int32:
        """Steps of a token, at least one: those of its window, then those of its entries."""
        steps = (args.window_width + STEP - 1) // STEP + (visible + STEP - 1) // STEP
        if steps < 1:
            steps = Int32(1)
        return steps

    @cute.jit
    def division(self, args: Arguments, steps: Int32, piece_steps: Int32) -> Division:
        """Of a token with so many steps.

        Parts are divided into pieces of `piece_steps`, unless they are little longer; or, if it is negative, into as
        many as a token with -piece_steps CTAs can have. They are left whole if it is 0.
        """
        parts, shortest, most = Int32(1), steps, -piece_steps
        if steps > args.steps_per_part:
            parts = ptx.divide(steps + args.steps_per_part - 1, args.steps_per_part)
            shortest = ptx.divide(steps, parts)
            most = ptx.divide(ptx.imax(most, Int32(0)), parts)
        pieces = Int32(1)
        if piece_steps > 0:
            if shortest > piece_steps + 1:
                pieces = ptx.divide(shortest + piece_steps - 1, piece_steps)
        elif most > 1:
            most = ptx.imin(most, shortest)
            if shortest <= most * SLOTS_PER_CTA + 1:  # every piece but a part's first leaves all of its steps
                pieces = most
        all_pieces = parts * pieces
        if (parts > 1) & (parts < steps) & (steps <= -piece_steps):
            pieces, all_pieces = Int32(0), steps  # no part of one more step than another holds up all
        return Division(steps, parts, pieces, all_pieces)

    @cute.jit
    def steps_of_piece(self, division: Division, piece: Int32) -> tuple:
        """[first, last) of a token's piece, and whether a part begins with it.

        A part's first pieces are the longer. If they are long, the first one has one more: it leaves a single partial
        result, the others one of every step.
        """
        place, pieces, begin, end = piece, division.pieces, Int32(0), division.steps
        begins = place == 0
        if pieces == 0:
            part = ptx.divide(piece * division.parts + division.steps - 1, division.steps)
            begins = ptx.divide(part * division.steps, division.parts) == piece
            place, pieces, begin, end = Int32(0), Int32(1), piece, piece + 1
        elif division.parts > 1:
            part = ptx.divide(piece, pieces)
            place = piece - part * pieces
            begins = place == 0
            begin = ptx.divide(part * division.steps, division.parts)
            if part + 1 < division.parts:
                end = ptx.divide((part + 1) * division.steps, division.parts)
        more = Int32(end - begin > (SLOTS_PER_CTA - 1) * pieces + 1)
        evenly, up = end - begin - more, pieces - 1
        first = begin
        if place > 0:
            first = begin + more + ptx.divide(place * evenly + up, pieces)
        last = begin + more + ptx.divide((place + 1) * evenly + up, pieces)
        return first, last, begins

    @cute.jit
    def steps_of_token(self, args: Arguments, token: Int32) -> Int32:
        """By its number."""
        return self.steps(args, self.visible_entries(args, token))

    @cute.jit
    def pieces(self, args: Arguments, steps: Int32, piece_steps: Int32) -> Int32:
        """Of a token with so many steps."""
        return self.division(args, steps, piece_steps).all_pieces

    @cute.jit
    def sum_of_lanes_up_to(self, x: Int32, lane: Int32) -> Int32:
        """x of the lanes of the warp from the first one to this one."""
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(x, offset=1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                x += other
        return x

    @cute.jit
    def choose_piece_steps(self, args: Arguments, longest: Int32, lane: Int32) -> Int32:
        """`piece_steps` of `division`, such that all pieces fit on the GPU at once. By one warp.

        The same number of CTAs for every token, or the shortest pieces of equal length, if that is shorter: where some
        tokens have less steps than others. This looks at the whole batch, and may: results do not depend on it.
        """
        chosen, each = Int32(0), args.ctas_per_token
        if each > 0:
            ctas, _, _ = cute.arch.grid_dim()
            slots = ptx.divide(ctas, self.item_stride(args))
            candidate = ptx.imin(ptx.divide(longest + each - 1, each) - 1, Int32(MAX_PIECE_STEPS))
            if self.total_pieces(args, lane, -each) <= slots:
                chosen = -each
            else:
                candidate = Int32(MAX_PIECE_STEPS)  # some tokens have more parts than that
            while candidate > 0:
                if self.total_pieces(args, lane, candidate) <= slots:
                    chosen = candidate
                candidate -= 1
        return chosen

    @cute.jit
    def total_pieces(self, args: Arguments, lane: Int32, piece_steps: Int32) -> Int32:
        """Of all tokens; by one warp."""
        total, base = Int32(0), Int32(0)
        while base < args.num_tokens:
            pieces = Int32(0)
            if base + lane < args.num_tokens:
                pieces = self.pieces(args, self.steps_of_token(args, base + lane), piece_steps)
            total += ptx.warp_sum(pieces)
            base += 32
        return total

    @cute.jit
    def count_pieces(self, args: Arguments, shared: cutlass.Constexpr, lane: Int32) -> None:
        """Writes the plan and this CTA's first item, by one warp; a barrier must follow.

        If all tokens have the same number of steps, they have the same number of pieces.
        """
        longest, least, base = Int32(0), Int32(-(1 << 20)), Int32(0)
        while base < args.num_tokens:
            steps = self.steps_of_token(args, ptx.imin(base + lane, args.num_tokens - 1))
            longest, least = ptx.imax(longest, steps), ptx.imax(least, -steps)
            base += 32
        longest, least = ptx.warp_max(longest), ptx.warp_max(least)
        piece_steps, rows = -args.ctas_per_token, Int32(0)
        pieces_of_all = Int32(0)
        if longest == -least:
            pieces_of_all = self.pieces(args, longest, piece_steps)
            rows = args.num_tokens * pieces_of_all
        else:
            piece_steps = self.choose_piece_steps(args, longest, lane)
            rows = self.count_before(args, shared.starts.data_ptr(), piece_steps, lane)
        block, _, _ = cute.arch.block_idx()
        if lane == 0:
            plan = shared.plan.data_ptr()
            plan.store(piece_steps)
            (plan + 1).store(pieces_of_all)
            (plan + 2).store(rows * self.item_stride(args))
        cute.arch.sync_warp()
        self.know_item(args, shared, block, Int32(0), lane)

    @cute.jit
    def count_before(self, args: Arguments, starts: cute.Pointer, piece_steps: Int32, lane: Int32) -> Int32:
        """starts[t] = pieces of the tokens before t, by one warp; returns those of all tokens."""
        before, base = Int32(0), Int32(0)
        while base < args.num_tokens:
            token = base + lane
            pieces = Int32(0)
            if token < args.num_tokens:
                pieces = self.pieces(args, self.steps_of_token(args, token), piece_steps)
            before += self.sum_of_lanes_up_to(pieces, lane)
            if token < args.num_tokens:
                (starts + token + 1).store(before)
            before = cute.arch.shuffle_sync(before, 31)
            base += 32
        if lane == 0:
            starts.store(Int32(0))
        return before

    @cute.jit
    def num_items(self, args: Arguments, shared: cutlass.Constexpr) -> Int32:
        """Work items of the launch."""
        num_items = args.num_tokens * self.item_stride(args)
        if const_expr(self.configuration.split):
            num_items = (shared.plan.data_ptr() + 2).load()
        return num_items

    def share(self, index: Int32) -> Int32 | int:
        """An item's share of the channels, the same for all items of a CTA."""
        return 0 if self.configuration.shares == 1 else index % self.configuration.shares

    def anew(self, share: Int32 | int) -> Int32 | int:
        """The same, such that what follows from it is computed where it is used, not kept in registers."""
        return 0 if self.configuration.shares == 1 else cute.arch.make_warp_uniform(share)

    def place(self, i: Int32 | int) -> Int32 | int:
        """The group of either half of the channels that is the i-th to be filled and read: first the one that is copied
        asynchronously, the last channels of FP8 rows. The scores are summed in this order, whatever a CTA's share."""
        return (HALF_GROUPS - 1 + i) % HALF_GROUPS

    def item_stride(self, args: Arguments) -> Int32:
        """Items side by side of the same keys: blocks of heads, and shares of the channels."""
        return self.head_blocks(args) * self.configuration.shares

    def head_blocks(self, args: Arguments) -> Int32:
        """1 or 2: there are at most 128 heads."""
        return (args.num_heads + HEADS - 1) // HEADS

    def head_block(self, args: Arguments, index: Int32) -> Int32:
        """Of an item."""
        return index // self.configuration.shares & (self.head_blocks(args) - 1)
