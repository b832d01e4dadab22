"""Partial results of the Hopper kernel: where they wait, and how the CTAs of a query merge them (see
persistent.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from dsv4_kernels import ptx
from dsv4_kernels.sparse_attention.sm90.epilogue import Results
from dsv4_kernels.sparse_attention.sm90.plan import (
    CONSUMER_THREADS,
    EARLY_CELLS,
    EARLY_COLUMNS,
    FIRST_PIECE,
    GROUP,
    HEADS,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    SLOTS_PER_CTA,
    STATISTICS_BYTES,
    WARP_HEADS,
    Arguments,
    Named,
    Split,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import Division, Item


class Merging(Results):
    """What the consumers do with partial results."""

    def first_slot(self, cta: Int32, turn: Int32) -> Int32:
        """Number of the first scratch slot of a CTA's item."""
        return cta * SLOTS_PER_CTA + turn % SCRATCH_SLOTS

    @cute.jit
    def slot_number(self, args: Arguments, index: Int32) -> Int32:
        """Of an item's first scratch slot: its CTA's, by its turn there."""
        ctas, _, _ = cute.arch.grid_dim()
        number = index * SLOTS_PER_CTA
        if index >= ctas:
            turn = ptx.divide(index, ctas)
            number = self.first_slot(index - turn * ctas, turn)
        return number

    def slot(self, args: Arguments, turn: Int32, place: Int32) -> Int64:
        """Address of a scratch slot of this CTA: of its item of a turn the first one, or one `place` behind it.

        A slot holds what a step or more have yielded, in the order of the registers. O, not normalised:
        [32 / shares][256 threads][4]. Behind room for 32, [256][4]: maximum and sum, of two rows; for the lse [256][2]:
        sums before rounding.
        """
        block, _, _ = cute.arch.block_idx()
        return self.slot_by_number(args, self.first_slot(block, turn) + place)

    def slot_by_number(self, args: Arguments, number: Int32) -> Int64:
        """Address of a scratch slot of any CTA."""
        return args.scratch + Int64(number) * (SLOT_BYTES + STATISTICS_BYTES)

    def store_columns(self, slot: Int64, out: cute.Tensor, first: int, count: int) -> None:
        """Columns of O; `slot` is that of a thread."""
        for j in range(first, first + count):
            ptx.store_f32x4(slot + j * CONSUMER_THREADS * 16, tuple(out[4 * j + i] for i in range(4)))

    def store_statistics(self, address: Int64, thread: Int32, maximum: cute.Tensor, total: cute.Tensor) -> None:
        """Maxima and sums of a thread."""
        ptx.store_f32x4(address + thread * 16, (maximum[0], total[0], maximum[1], total[1]))
        if self.configuration.lse:
            ptx.store_f32x2(address + CONSUMER_THREADS * 16 + thread * 8, (total[2], total[3]))

    def load_statistics(self, slot: Int64, thread: Int32, wanted: Boolean) -> tuple:
        """(maxima, sums) that a thread stored in a slot, or zeros; `slot` is that of the thread."""
        loaded, exact = ptx.load_f32x4_if(wanted, slot + SLOT_BYTES), (0.0, 0.0)
        if self.configuration.lse:
            exact = ptx.load_f32x2_if(wanted, slot + SLOT_BYTES + (CONSUMER_THREADS * 16 - thread * 8))
        return (loaded[0], loaded[2]), (loaded[1], loaded[3], *exact)

    @cute.jit
    def set_aside(
        self,
        args: Arguments,
        turn: Int32,
        thread: Int32,
        end: Int32,
        last: Int32,
        maximum: cute.Tensor,
        total: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Folds a part of an item that has several, which ends in front of step `end`, into those before it, which wait
        in this CTA's scratch slot. The last one's result stays in registers. It is what a merge does, in its order."""
        is_later, is_last = end > args.steps_per_part, end == last
        slot = self.slot(args, turn, Int32(0)) + thread * 16
        columns = 2 if self.configuration.lse else 4  # at a time; more of them spill
        before_maximum, before_total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
        values = cute.make_rmem_tensor((4 * columns,), Float32)
        self.clear(before_maximum, before_total, values)
        if is_later:
            maxima, sums = self.load_statistics(slot, thread, Boolean(True))
            for k in cutlass.range_constexpr(2):
                before_maximum[k] = maxima[k]
            for i in cutlass.range_constexpr(4):
                before_total[i] = Float32(sums[i])
        factors = [self.fold_statistics(before_maximum, before_total, maximum[k], total, k) for k in range(2)]
        maximum.store(before_maximum.load())
        total.store(before_total.load())
        for first in cutlass.range_constexpr(0, cute.size(out) // 4, columns):
            for j in cutlass.range_constexpr(columns):
                words = ptx.load_f32x4_if(is_later, slot + (first + j) * CONSUMER_THREADS * 16)
                for i in cutlass.range_constexpr(4):
                    values[4 * j + i] = words[i]
            mine = [out[4 * first + i] for i in range(4 * columns)]
            for k in cutlass.range_constexpr(2):
                self.fold_values(values, mine, factors[k], k)
            for i in cutlass.range_constexpr(4 * columns):
                out[4 * first + i] = values[i]
            if not is_last:
                self.store_columns(slot, out, first, columns)
        if not is_last:
            self.store_statistics(slot - thread * 16 + SLOT_BYTES, thread, maximum, total)
            self.clear(maximum, total, out)

    def arrived(self, args: Arguments, item: Item) -> Int64:
        """Address of the count of pieces that are written, of an item's token and heads."""
        group = (item.token * self.head_blocks(args) + item.head_block) * self.configuration.shares + item.share
        return args.counters + Int64(group) * 4

    def merged(self, args: Arguments, item: Item) -> Int64:
        """Address of the count of shares that are merged."""
        return self.arrived(args, item) + Int64(args.num_tokens * self.item_stride(args)) * 4

    @cute.jit
    def wait_for_slot(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, oldest: Int32) -> None:
        """Waits until the merge that reads the slot of turn `oldest` is over. A barrier must follow."""
        if (oldest >= 0) & (thread == 0):
            item = self.known_item(shared, oldest)
            if item.pieces > 1:
                self.wait_for_count(self.merged(args, item), item.pieces)

    @cute.jit
    def wait_for_count(self, address: Int64, count: Int32, bits: cutlass.Constexpr = -1) -> None:
        """Until a counter, or these bits of it, have come to `count`."""
        while (ptx.load_acquire(address) & bits) < count:
            pass

    def slots_are_reused(self, num_items: Int32) -> Boolean:
        """Whether some CTA has more items than slots. If not, nobody waits for slots, and counting is simpler."""
        ctas, _, _ = cute.arch.grid_dim()
        return num_items > ctas * SCRATCH_SLOTS

    @cute.jit
    def list_partials(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        lane: Int32,
        item: Item,
        index: Int32,
        chooses: cutlass.Constexpr = False,
    ) -> None:
        """Writes the slots of the partial results of an item's token in order, one warp for all; a barrier must follow.

        partials[0] is their number; then (number of the slot) * 2 + (does a part begin with it), and an end that begins
        one.
        """
        partials = shared.partials.data_ptr()
        first = index - item.piece * self.item_stride(args)  # of the token's items for these heads
        division = self.division(args, self.steps(args, item.visible), shared.piece_steps.data_ptr().load())
        count, base = Int32(0), Int32(0)
        while base < item.pieces:
            piece = base + lane
            begin, end, begins = self.steps_of_piece(division, piece)
            mine = end - begin
            if const_expr(chooses and self.may_get_early()):
                if base == 0:
                    self.choose_early(shared, division, lane, mine)
            if begins:
                mine = Int32(1)
            if piece >= item.pieces:
                mine = Int32(0)
            # Folding whole parts one after the other is folding them into nothing first and then together.
            marks = begins & ((division.pieces != 1) | (piece == 0))
            total = self.sum_of_lanes_up_to(mine, lane)
            number = self.slot_number(args, first + piece * self.item_stride(args))
            place = Int32(0)
            while place < mine:
                (partials + (1 + count + total - mine + place)).store((number + place) * 2 + Int32(marks))
                place += 1
            count += cute.arch.shuffle_sync(total, 31)
            base += 32
        if lane == 0:
            partials.store(count)
            (partials + 1 + count).store(Int32(1))

    @cute.jit
    def choose_early(self, shared: cutlass.Constexpr, division: Division, lane: Int32, steps: Int32) -> None:
        """Writes whether a token's pieces, `steps` of which this lane's has, get their results before the first one is
        written: if that one is the only longer one, and there is room for all that they share."""
        first_one, second_one = cute.arch.shuffle_sync(steps, 0), cute.arch.shuffle_sync(steps, 1)
        results, others = division.steps - first_one, ptx.imax(division.all_pieces - 1, Int32(1))
        columns = ptx.divide(self.configuration.share_groups * GROUP // 8 + others - 1, others)
        room = results * (columns + self.statistics_cells()) <= EARLY_CELLS
        if lane == 0:
            early = (division.parts == 1) & (first_one > second_one) & room
            shared.gets_early.data_ptr().store(Int32(early))

    def may_get_early(self) -> bool:
        """Whether there may be tokens of one part and several pieces: their CTAs have no other item."""
        return self.configuration.split == Split.PIECES

    def statistics_cells(self) -> int:
        """Of a result in shared memory: 16 bytes a thread."""
        return 2 if self.configuration.lse else 1

    @cute.jit
    def count_piece(self, args: Arguments, shared: cutlass.Constexpr, item: Item) -> None:
        """Tells the CTAs of a token that a piece is written; one thread does, behind a barrier."""
        count = Int32(1)
        if const_expr(self.may_get_early()):
            if (item.piece == 0) & (shared.gets_early.data_ptr().load() != 0):
                count = Int32(FIRST_PIECE)
        ptx.add_release(self.arrived(args, item), count)

    @cute.jit
    def merge(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        thread: Int32,
        which: Int32,
        item: Item,
        index: Int32,
        turn: Int32,
        num_items: Int32,
    ) -> None:
        """This CTA's share of a token's output, once all its partial results are there."""
        gets_early = Boolean(False)
        if const_expr(self.may_get_early()):
            gets_early = shared.gets_early.data_ptr().load() != 0
        if gets_early:
            self.merge_behind_first(args, shared, thread, which, item)
        else:
            lane, warp = thread % 32, thread % 128 // 32
            row = warp * WARP_HEADS + lane // 4
            head = item.head_block * HEADS + row
            sinks = (self.sink(args, head), self.sink(args, head + 8))
            begin, end = self.columns(warp, item.piece, item.pieces), self.columns(warp, item.piece + 1, item.pieces)
            if (turn > 0) & (thread < 32):  # that of the first item is there already
                self.list_partials(args, shared, lane, item, index)
            if thread == 0:
                self.wait_for_count(self.arrived(args, item), item.pieces)
            self.sync(Named.CONSUMERS)
            reused, merged_before = self.slots_are_reused(num_items), Int32(0)
            if thread == 0:
                if not reused:
                    merged_before = ptx.count(self.merged(args, item))
            if end - begin == 1:
                self.merge_columns(args, shared, item, which, lane, warp, head, sinks, begin, end, True)
            elif end > begin:
                self.merge_columns(args, shared, item, which, lane, warp, head, sinks, begin, end, False)
            if thread == 0:
                self.clear_counts(args, item, merged_before)
            self.sync(Named.CONSUMERS)  # nobody reads the list or the slots any more
            if reused & (thread == 0):
                ptx.add_release(self.merged(args, item))

    @cute.jit
    def merge_behind_first(
        self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, which: Int32, item: Item
    ) -> None:
        """A merge where the first piece has a step more than the others: these share the columns among them.

        They get all results but the first one while they wait for it, to where Q, keys and P were: statistics,
        [results][1, or 2 with the lse][256][4], and columns, [results][columns][256][4]. Every thread gets and reads
        its own.
        """
        lane, warp = thread % 32, thread % 128 // 32
        merged_before = Int32(0)
        if item.piece == 0:
            if thread == 0:
                merged_before = ptx.count(self.merged(args, item))
        else:
            row = warp * WARP_HEADS + lane // 4
            head = item.head_block * HEADS + row
            sinks = (self.sink(args, head), self.sink(args, head + 8))
            others, partials = item.pieces - 1, shared.partials.data_ptr()
            begin, end = self.columns(warp, item.piece - 1, others), self.columns(warp, item.piece, others)
            results, columns, column_bytes = partials.load() - 1, end - begin, CONSUMER_THREADS * 16
            statistics_bytes = self.statistics_cells() * column_bytes
            statistics = Int32(shared.q.data_ptr().toint()) + thread * 16
            place = statistics + results * statistics_bytes
            if thread == 0:
                self.wait_for_count(self.arrived(args, item), others, FIRST_PIECE - 1)
            self.sync(Named.CONSUMERS)
            self.get_results(args, partials, thread, results, begin, columns, statistics, place)
            if thread == 0:
                self.wait_for_count(self.arrived(args, item), FIRST_PIECE + others)
                merged_before = ptx.count(self.merged(args, item))
            self.sync(Named.CONSUMERS)

            slot = self.slot_of_result(args, partials, Int32(0), thread)
            of_first = self.load_statistics(slot, thread, Boolean(True))
            inverse = cute.make_rmem_tensor((2,), Float32)
            maximum, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
            values = cute.make_rmem_tensor((4 * EARLY_COLUMNS,), Float32)
            inverse.fill(0.0)
            for base in cutlass.range(begin, end, EARLY_COLUMNS, unroll=1):
                words = []
                for u in cutlass.range_constexpr(EARLY_COLUMNS):
                    words.extend(ptx.load_f32x4_if(base + u < end, slot + (base + u) * column_bytes))
                self.clear(maximum, total, values)
                self.fold(maximum, total, values, *of_first, words)
                cute.arch.cp_async_wait_group(0)
                for i in cutlass.range(results, unroll=1):
                    known, exact = ptx.load_shared_f32x4(statistics + i * statistics_bytes), (0.0, 0.0)
                    if const_expr(self.configuration.lse):
                        of_two = statistics + i * statistics_bytes + column_bytes
                        exact = ptx.load_shared_f32x2(of_two + thread % 2 * 8)
                    joining = []
                    for u in cutlass.range_constexpr(EARLY_COLUMNS):
                        existing = ptx.imin(base - begin + u, columns - 1)
                        joining.extend(ptx.load_shared_f32x4(place + (i * columns + existing) * column_bytes))
                    self.fold(maximum, total, values, (known[0], known[2]), (known[1], known[3], *exact), joining)
                if base == begin:
                    inverses = self.inverses(
                        args, shared, item, which, warp, row, lane, begin == 0, sinks, maximum, total
                    )
                    for k in cutlass.range_constexpr(2):
                        inverse[k] = inverses[k]
                self.write_columns(args, item, which, lane, head, base, end, values, inverse)
        if thread == 0:
            self.clear_counts(args, item, merged_before)

    @cute.jit
    def get_results(
        self,
        args: Arguments,
        partials: cute.Pointer,
        thread: Int32,
        results: Int32,
        begin: Int32,
        columns: Int32,
        statistics: Int32,
        place: Int32,
    ) -> None:
        """Starts copying a thread's statistics, and columns from `begin` on, of all results but the first one."""
        column_bytes = CONSUMER_THREADS * 16
        for i in cutlass.range(results, unroll=1):
            slot = self.slot_of_result(args, partials, i + 1, thread)
            target = statistics + i * (self.statistics_cells() * column_bytes)
            ptx.copy_async(target, slot + SLOT_BYTES, Int32(16))
            if const_expr(self.configuration.lse):  # with those of the thread beside this one
                exact = slot + SLOT_BYTES + (column_bytes - thread * 16 + thread // 2 * 16)
                ptx.copy_async(target + column_bytes, exact, Int32(16))
            for u in cutlass.range(columns, unroll=4):
                target = place + (i * columns + u) * column_bytes
                ptx.copy_async(target, slot + (begin + u) * column_bytes, Int32(16))
        cute.arch.cp_async_commit_group()

    def slot_of_result(self, args: Arguments, partials: cute.Pointer, i: Int32, thread: Int32) -> Int64:
        """A thread's address in the slot of a token's i-th partial result."""
        entry = (partials + (1 + i)).load()
        return self.slot_by_number(args, entry >> 1) + thread * 16

    @cute.jit
    def clear_counts(self, args: Arguments, item: Item, merged_before: Int32) -> None:
        """For the next launch, if nobody waits any more: all other shares of a token were counted before."""
        if merged_before == item.pieces - 1:
            ptx.reset(self.merged(args, item))
            ptx.reset(self.arrived(args, item))

    def columns(self, warp: Int32, share: Int32, shares: Int32) -> Int32:
        """Where a share begins, for a warp: what is shared are columns of eight channels of either consumer, each of 16
        rows of one warp."""
        units = self.configuration.share_groups * GROUP // 8 * 4
        return (ptx.divide(share * units, shares) + 3 - warp) // 4

    @cute.jit
    def merge_columns(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        item: Item,
        which: Int32,
        lane: Int32,
        warp: Int32,
        head: Int32,
        sinks: tuple,
        begin: Int32,
        end: Int32,
        single: cutlass.Constexpr,
    ) -> None:
        """Columns [begin, end) of a warp's rows.

        Partial results are folded in order: those of a part into one, as if one CTA had done all its steps, and then
        the parts.
        """
        parts_at_once, groups = self.configuration.merge_loads(single)
        partials = shared.partials.data_ptr()
        count = partials.load()
        size = 4 * groups
        thread = which * 128 + warp * 32 + lane  # whose values these are
        # Of the part at hand, and of the parts before it.
        maximum, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
        values = cute.make_rmem_tensor((size,), Float32)
        all_maximum, all_total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
        all_values = cute.make_rmem_tensor((size,), Float32)
        inverse = cute.make_rmem_tensor((2,), Float32)
        for base in cutlass.range(begin, end, groups, unroll=1):
            self.clear(all_maximum, all_total, all_values)
            done = Int32(0)
            while done < count:
                self.clear(maximum, total, values)
                more = Boolean(True)
                while more:
                    belongs, statistics, words = [], [], []
                    for i in cutlass.range_constexpr(parts_at_once):
                        exists = done + i < count
                        entry = (partials + (1 + ptx.imin(done + i, count - 1))).load()
                        if const_expr(i == 0):
                            belongs.append(Boolean(True))
                        else:
                            belongs.append(belongs[-1] & exists & ((entry & 1) == 0))
                        slot = self.slot_by_number(args, entry >> 1) + thread * 16
                        statistics.append(self.load_statistics(slot, thread, exists))
                        for u in cutlass.range_constexpr(groups):
                            wanted = exists if const_expr(u == 0) else exists & (base + u < end)
                            words.extend(ptx.load_f32x4_if(wanted, slot + (base + u) * (CONSUMER_THREADS * 16)))
                    for i in cutlass.range_constexpr(parts_at_once):
                        if belongs[i]:
                            mine = words[size * i : size * (i + 1)]
                            self.fold(maximum, total, values, *statistics[i], mine)
                            done += 1
                    more = ((partials + (1 + done)).load() & 1) == 0
                self.fold(all_maximum, all_total, all_values, maximum, total, values)
            if base == begin:
                # Whoever has the first columns: if the pieces are more than the columns, that is not the first one.
                row, is_first = warp * WARP_HEADS + lane // 4, begin == 0
                inverses = self.inverses(
                    args, shared, item, which, warp, row, lane, is_first, sinks, all_maximum, all_total
                )
                for k in cutlass.range_constexpr(2):
                    inverse[k] = inverses[k]
            self.write_columns(args, item, which, lane, head, base, end, all_values, inverse)

    @cute.jit
    def write_columns(
        self,
        args: Arguments,
        item: Item,
        which: Int32,
        lane: Int32,
        head: Int32,
        base: Int32,
        end: Int32,
        values: cute.Tensor,
        inverse: cute.Tensor,
    ) -> None:
        """O of columns from `base` on, as many as there are values, but none from `end` on."""
        for k in cutlass.range_constexpr(2):
            if head + 8 * k < args.num_heads:
                at = Int64(item.token) * args.out_token_stride + Int64(head + 8 * k) * args.out_head_stride
                for u in cutlass.range_constexpr(cute.size(values) // 4):
                    if base + u < end:
                        column = self.first_channel(item, which) + (base + u) * 8 + lane % 4 * 2
                        low, high = (values[4 * u + 2 * k + i] * inverse[k] for i in range(2))
                        if const_expr(self.configuration.fp32_out):
                            ptx.store_f32x2(args.out + (at + column) * 4, (low, high))
                        else:
                            ptx.store_u32(args.out + (at + column) * 2, ptx.pack_bf16(low, high))

    @cute.jit
    def leave(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32) -> None:
        """The last CTA to leave clears the counters for the next launch."""
        ctas, _, _ = cute.arch.grid_dim()
        groups = args.num_tokens * self.item_stride(args)
        last = shared.is_last.data_ptr()
        if thread == 0:
            last.store(ptx.count_out(args.counters + Int64(2 * groups) * 4))
        self.sync(Named.CONSUMERS)
        if last.load() == ctas - 1:
            place = thread
            while place <= 2 * groups:
                ptx.store_i32(args.counters + Int64(place) * 4, Int32(0))
                place += CONSUMER_THREADS
