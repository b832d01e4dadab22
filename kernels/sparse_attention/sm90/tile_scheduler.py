"""Work items of the Hopper kernel: which keys, heads and channels are whose (see persistent.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from dsv4_kernels import ptx
from dsv4_kernels.sparse_attention.sm90.plan import (
    HALF_GROUPS,
    HEADS,
    ITEM_NUMBERS,
    KNOWN_ITEMS,
    MAX_PIECE_STEPS,
    SLOTS_PER_CTA,
    STEP,
    WHOLE_TOKENS,
    Arguments,
    Configuration,
    Entries,
    Split,
)


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

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    @cute.jit
    def arrive_for_warp(self, barrier: cute.Pointer, lane: Int32) -> None:
        """One arrival for the warp."""
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

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
        span = (item.first, item.last, item.piece, item.pieces, item.begins)
        numbers = (item.token, item.head_block, *span, item.visible)
        if lane == 0:
            for i in cutlass.range_constexpr(ITEM_NUMBERS):
                (place + i).store(Int32(numbers[i]))

    def whole_token(self, args: Arguments, index: Int32, steps: Int32) -> Item:
        """An item by its number, as if keys were not divided."""
        token = index // self.configuration.shares >> (self.head_blocks(args) - 1)
        # With a 0 that the compiler knows, it adds up addresses step by step, in registers that there are not.
        first = ptx.opaque(Int32(0))
        head_block = self.head_block(args, index)
        return Item(token, head_block, first, steps, self.share(index), Int32(0), Int32(1), Boolean(True), Int32(0))

    @cute.jit
    def steps_of_item(self, args: Arguments, index: Int32) -> Int32:
        """Of an item, if keys are not divided."""
        return self.steps_of_token(args, self.whole_token(args, index, Int32(0)).token)

    @cute.jit
    def computed_item(self, args: Arguments, shared: cutlass.Constexpr, index: Int32) -> Item:
        """An item from its number and the plan."""
        token, head_block, first, _, share, *_ = self.whole_token(args, index, Int32(0))
        piece = Int32(0)
        if const_expr(self.configuration.split):
            wanted, pieces_of_all = token, shared.pieces_of_all.data_ptr().load()
            if pieces_of_all > 0:
                token = ptx.divide(wanted, pieces_of_all)
                piece = wanted - token * pieces_of_all
            else:
                token = self.token_of_piece(args, shared, wanted)
                piece = wanted - (shared.starts.data_ptr() + token).load()
        token = ptx.imin(token, args.num_tokens - 1)
        visible = self.visible_entries(args, token)
        last = self.steps(args, visible)
        pieces, begins = Int32(1), Boolean(True)
        if const_expr(self.configuration.split):
            division = self.division(args, last, shared.piece_steps.data_ptr().load())
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
        many as a token with -piece_steps CTAs can have. They are left whole if it is 0; and so are tokens, whose CTA
        then folds their parts, if it is WHOLE_TOKENS.
        """
        parts, shortest, most = Int32(1), steps, -piece_steps
        if (steps > args.steps_per_part) & (piece_steps != WHOLE_TOKENS):
            parts = self.num_parts(args, steps)
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
    def ends_part(self, args: Arguments, item: Item, step: Int32) -> Boolean:
        """Whether a part ends in front of a step, of an item that is a whole token of several parts."""
        ends = Boolean(False)
        if item.last - item.first > args.steps_per_part:
            ends = self.begins_part(item.last, self.num_parts(args, item.last), step)
        return ends

    def num_parts(self, args: Arguments, steps: Int32) -> Int32:
        """Of a token with more steps than a part may have."""
        return ptx.divide(steps + args.steps_per_part - 1, args.steps_per_part)

    def begins_part(self, steps: Int32, parts: Int32, step: Int32) -> Boolean:
        """Whether a part begins, or the last one ends, with a step of a token that is not its first."""
        part = ptx.divide(step * parts + steps - 1, steps)
        return ptx.divide(part * steps, parts) == step

    @cute.jit
    def steps_of_piece(self, division: Division, piece: Int32) -> tuple:
        """[first, last) of a token's piece, and whether a part begins with it.

        A part's first pieces are the longer. If they are long, the first one has one more: it leaves a single partial
        result, the others one of every step.
        """
        place, pieces, begin, end = piece, division.pieces, Int32(0), division.steps
        begins = place == 0
        if pieces == 0:
            begins = self.begins_part(division.steps, division.parts, piece)
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
    def pieces_of_token(self, args: Arguments, token: Int32, piece_steps: Int32) -> Int32:
        """0 beyond the last one."""
        pieces = Int32(0)
        if token < args.num_tokens:
            pieces = self.pieces(args, self.steps_of_token(args, token), piece_steps)
        return pieces

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
        if const_expr(self.configuration.split == Split.PARTS):
            each = 0  # as it is; what follows is not compiled
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
            total += ptx.warp_sum(self.pieces_of_token(args, base + lane, piece_steps))
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
            if const_expr(self.configuration.split == Split.PARTS):
                # Whole tokens, if no CTA has more parts then.
                ctas, _, _ = cute.arch.grid_dim()
                tokens, parts = args.num_tokens * self.item_stride(args), rows * self.item_stride(args)
                if ptx.divide(tokens + ctas - 1, ctas) * pieces_of_all <= ptx.divide(parts + ctas - 1, ctas):
                    piece_steps, pieces_of_all, rows = Int32(WHOLE_TOKENS), Int32(1), args.num_tokens
        else:
            piece_steps = self.choose_piece_steps(args, longest, lane)
            rows = self.count_before(args, shared.starts.data_ptr(), piece_steps, lane)
        block, _, _ = cute.arch.block_idx()
        if lane == 0:
            shared.piece_steps.data_ptr().store(piece_steps)
            shared.pieces_of_all.data_ptr().store(pieces_of_all)
            shared.num_items.data_ptr().store(rows * self.item_stride(args))
            shared.gets_early.data_ptr().store(Int32(0))
        cute.arch.sync_warp()
        self.know_item(args, shared, block, Int32(0), lane)

    @cute.jit
    def count_before(self, args: Arguments, starts: cute.Pointer, piece_steps: Int32, lane: Int32) -> Int32:
        """starts[t] = pieces of the tokens before t, by one warp; returns those of all tokens."""
        before, base = Int32(0), Int32(0)
        while base < args.num_tokens:
            token = base + lane
            before += self.sum_of_lanes_up_to(self.pieces_of_token(args, token, piece_steps), lane)
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
            num_items = shared.num_items.data_ptr().load()
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

    def groups_in_order(self) -> list[int]:
        """All groups as they are filled and read: of either half in turns."""
        return [i % 2 * HALF_GROUPS + self.place(i // 2) for i in range(2 * HALF_GROUPS)]

    def item_stride(self, args: Arguments) -> Int32:
        """Items side by side of the same keys: blocks of heads, and shares of the channels."""
        return self.head_blocks(args) * self.configuration.shares

    def head_blocks(self, args: Arguments) -> Int32:
        """1 or 2: there are at most 128 heads."""
        return (args.num_heads + HEADS - 1) // HEADS

    def head_block(self, args: Arguments, index: Int32) -> Int32:
        """Of an item."""
        return index // self.configuration.shares & (self.head_blocks(args) - 1)
