"""Results of the Hopper kernel: a whole query's, or parts that several CTAs merge (see sm90_persistent.py)."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from dsv4_kernels.sparse_attention import sm90_ptx as ptx
from dsv4_kernels.sparse_attention.sm90_items import Item, WorkItems
from dsv4_kernels.sparse_attention.sm90_plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    GROUP,
    HALF,
    HALF_GROUPS,
    HEADS,
    LOG2_E,
    NO_MAXIMUM,
    RESCALE_ABOVE,
    ROW_STRIDE,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    SLOTS_PER_CTA,
    STATISTICS_BYTES,
    TILE,
    WARP_HEADS,
    Arguments,
    Copy,
    Named,
    layout,
    partition,
    swizzled_atom,
)


class Results(WorkItems):
    """What the consumers do with O."""

    def clear(self, maximum: cute.Tensor, total: cute.Tensor, values: cute.Tensor) -> None:
        """A result of no keys."""
        maximum.fill(NO_MAXIMUM)
        total.fill(0.0)
        values.fill(0.0)

    def sync(self, barrier: Named | Int32, threads: int = CONSUMER_THREADS) -> None:
        """Waits until both consumers, or so many of their threads, have come to a barrier."""
        cute.arch.barrier(barrier_id=int(barrier) if isinstance(barrier, int) else barrier, number_of_threads=threads)

    def arrive(self, barrier: Named | Int32) -> None:
        """Comes to a barrier at which the other consumer waits."""
        cute.arch.barrier_arrive(
            barrier_id=int(barrier) if isinstance(barrier, int) else barrier, number_of_threads=CONSUMER_THREADS
        )

    def store_p(self, block: Int32, words: cute.Tensor, warp: Int32, lane: Int32) -> None:
        """The warp's 16 rows of an accumulator of 64 columns, as bf16 pairs, to a swizzled block."""
        for j, address in enumerate(self.p_addresses(block, warp, lane)):
            ptx.store_matrices(address, (words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]))

    def load_p(self, block: Int32, words: cute.Tensor, warp: Int32, lane: Int32) -> None:
        """What the same warp of the other consumer gave `store_p`."""
        for j, address in enumerate(self.p_addresses(block, warp, lane)):
            words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = ptx.load_matrices(address)

    def p_addresses(self, block: Int32, warp: Int32, lane: Int32) -> list[Int32]:
        """Of this lane's rows of matrices: four each time, of 16 columns."""
        row = warp * WARP_HEADS + lane % 16
        chunks = [(2 * j + lane // 16) ^ (row & 7) for j in range(TILE // 16)]
        return [block + row * ROW_STRIDE + chunk * 16 for chunk in chunks]

    def first_channel(self, item: Item, which: Int32) -> Int32:
        """Of this consumer's O."""
        return which * HALF + item.share * (self.configuration.share_groups * GROUP)

    @cute.jit
    def sink(self, args: Arguments, head: Int32) -> Float32:
        """A head's; -inf without one."""
        sink = -Float32.inf
        if args.sink != 0:
            if head < args.num_heads:
                sink = ptx.load_f32(args.sink + head * 4)
        return sink

    @cute.jit
    def inverse(self, sink: Float32, maximum: Float32, total: Float32) -> Float32:
        """1 / (sum + the sink's share), 0 where there is nothing at all."""
        total += ptx.exp2(ptx.fma(sink, Float32(LOG2_E), -maximum))  # one rounding, whoever calls
        inverse = Float32(0.0)
        if total != 0.0:
            inverse = cute.arch.rcp_approx(total)
        return inverse

    @cute.jit
    def store_lse(self, args: Arguments, token: Int32, head: Int32, maximum: Float32, total: Float32) -> None:
        """Natural logarithm of the sum of exponentials, without the sink."""
        if const_expr(self.configuration.lse):
            if head < args.num_heads:
                lse = (maximum + cute.math.log2(total, fastmath=True)) * (1.0 / LOG2_E)
                if total == 0.0:
                    lse = -Float32.inf
                ptx.store_f32(args.lse + (Int64(token) * args.num_heads + head) * 4, lse)

    @cute.jit
    def normalise(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        item: Item,
        which: Int32,
        row: Int32,
        lane: Int32,
        maximum: cute.Tensor,
        total: cute.Tensor,
        inverse: cute.Tensor,
    ) -> None:
        """What O is to be multiplied with, of two rows; writes the log-sum-exp."""
        self.sum_up(shared, which, row, lane, total)
        for i in cutlass.range_constexpr(2):
            sink = (shared.sinks.data_ptr() + item.head_block * HEADS + row + 8 * i).load()
            inverse[i] = self.inverse(sink, maximum[i], total[i])
        self.store_lse_of_rows(args, item, (which == 0) & (item.share == 0), row, lane, maximum, total)

    @cute.jit
    def store_lse_of_rows(
        self,
        args: Arguments,
        item: Item,
        wanted: Boolean,
        row: Int32,
        lane: Int32,
        maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> None:
        """Of two rows, which four lanes share."""
        if wanted:
            if lane % 4 == 0:
                for i in cutlass.range_constexpr(2):
                    self.store_lse(args, item.token, item.head_block * HEADS + row + 8 * i, maximum[i], total[2 + i])

    @cute.jit
    def store_out(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        copy_out: Copy | None,
        item: Item,
        which: Int32,
        warp: Int32,
        lane: Int32,
        out: cute.Tensor,
        inverse: cute.Tensor,
        part: cutlass.Constexpr,
    ) -> None:
        """Writes 64 channels of O, if there are so many, and clears them.

        In bf16 a warp puts its rows where its P was, for the copy engine. `finish_store` must follow.
        """
        if const_expr(part < self.configuration.share_groups):
            first = part * (HEADS * GROUP // 128)
            if const_expr(self.configuration.fp32_out):
                base = Int64(item.token) * args.out_token_stride + self.first_channel(item, which) + part * GROUP
                for i in cutlass.range_constexpr(2):
                    head = item.head_block * HEADS + warp * WARP_HEADS + lane // 4 + 8 * i
                    if head < args.num_heads:
                        address = args.out + (base + Int64(head) * args.out_head_stride + (lane % 4) * 2) * 4
                        for j in cutlass.range_constexpr(GROUP // 8):
                            at = first + 4 * j + 2 * i
                            ptx.store_f32x2(address + j * 32, (out[at] * inverse[i], out[at + 1] * inverse[i]))
            else:
                words = []
                for j in cutlass.range_constexpr(GROUP // 8):
                    for i in cutlass.range_constexpr(2):
                        at = first + 4 * j + 2 * i
                        words.append(ptx.pack_bf16(out[at] * inverse[i], out[at + 1] * inverse[i]))
                if const_expr(part > 0):
                    self.finish_store()
                self.store_p(Int32(shared.p.data_ptr().toint()) + which * BLOCK_BYTES, words, warp, lane)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                places = shared.p.get_tensor(*layout(swizzled_atom(), (WARP_HEADS, GROUP, HEADS // WARP_HEADS, 2)))
                sources, targets = partition(copy_out, places)
                heads = item.head_block * (HEADS // WARP_HEADS) + warp
                group = which * HALF_GROUPS + item.share * self.configuration.share_groups + part
                with cute.arch.elect_one():
                    cute.copy(copy_out.atom, sources[None, warp, which], targets[None, heads, group, item.token])
                    cute.arch.cp_async_bulk_commit_group()
            for j in cutlass.range_constexpr(first, first + HEADS * GROUP // 128):
                out[j] = Float32(0.0)

    def store_all(self, store: Callable[[int], None]) -> None:
        """Writes all channels of O that this consumer has; `store` is `store_out` of a part."""
        for part in range(HALF_GROUPS):
            store(part)
        self.finish_store()

    def finish_store(self) -> None:
        """Waits until the copy engine has read what this warp gave it."""
        if not self.configuration.fp32_out:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()

    @cute.jit
    def factors(self, maximum: cute.Tensor, other: Float32, i: cutlass.Constexpr) -> tuple:
        """Of what is there (with maximum[i]) and of what joins it (with its own maximum); maximum[i] becomes theirs.

        This and `fma(joining, factor, present * factor)` is how results are folded, whoever does it.
        """
        newest = maximum[i]
        if other > newest + RESCALE_ABOVE:
            newest = other
        factors = ptx.exp2(maximum[i] - newest), ptx.exp2(other - newest)
        maximum[i] = newest
        return factors

    @cute.jit
    def sum_up(
        self,
        shared: cutlass.Constexpr,
        which: Int32,
        row: Int32,
        lane: Int32,
        total: cute.Tensor,
        barrier: Named | Int32 = Named.CONSUMERS,
        threads: cutlass.Constexpr = CONSUMER_THREADS,
    ) -> None:
        """Sums of two rows over the threads that share them, of both consumers, which meet at a barrier."""
        sums = Int32(shared.sums.data_ptr().toint()) + row * 4
        for i in cutlass.range_constexpr(4 if self.configuration.lse else 2):
            total[i] += cute.arch.shuffle_sync_bfly(total[i], offset=1)
            total[i] += cute.arch.shuffle_sync_bfly(total[i], offset=2)
            if lane % 4 == 0:
                ptx.store_shared_f32(sums + ((i // 2 * 2 + which) * HEADS + i % 2 * 8) * 4, total[i])
        self.sync(barrier, threads)
        for i in cutlass.range_constexpr(4 if self.configuration.lse else 2):
            total[i] += ptx.load_shared_f32(sums + ((i // 2 * 2 + 1 - which) * HEADS + i % 2 * 8) * 4)

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
        number = self.first_slot(block, turn) + place
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
    def wait_for_count(self, address: Int64, count: Int32) -> None:
        """Until a counter has come to `count`."""
        while ptx.load_acquire(address) < count:
            pass

    def slots_are_reused(self, num_items: Int32) -> Boolean:
        """Whether some CTA has more items than slots. If not, nobody waits for slots, and counting is simpler."""
        ctas, _, _ = cute.arch.grid_dim()
        return num_items > ctas * SCRATCH_SLOTS

    @cute.jit
    def list_partials(self, args: Arguments, shared: cutlass.Constexpr, lane: Int32, item: Item, index: Int32) -> None:
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
        """This CTA's share of a token's output, once all its partial results are there.

        What is shared are columns of eight channels of either consumer, each of 16 rows of one warp.
        """
        lane, warp = thread % 32, thread % 128 // 32
        row = warp * WARP_HEADS + lane // 4
        head = item.head_block * HEADS + row
        sinks = (self.sink(args, head), self.sink(args, head + 8))
        units = self.configuration.share_groups * GROUP // 8 * 4
        begin = (ptx.divide(item.piece * units, item.pieces) + 3 - warp) // 4
        end = (ptx.divide((item.piece + 1) * units, item.pieces) + 3 - warp) // 4
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
            if merged_before == item.pieces - 1:  # nobody waits any more: clears for the next launch
                ptx.reset(self.merged(args, item))
                ptx.reset(self.arrived(args, item))
        self.sync(Named.CONSUMERS)  # nobody reads the list or the slots any more
        if reused & (thread == 0):
            ptx.add_release(self.merged(args, item))

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
                        slot = args.scratch + Int64(entry >> 1) * (SLOT_BYTES + STATISTICS_BYTES) + thread * 16
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
                self.sum_up(shared, which, warp * WARP_HEADS + lane // 4, lane, all_total, Named.MERGE + warp, 64)
                for k in cutlass.range_constexpr(2):
                    inverse[k] = self.inverse(sinks[k], all_maximum[k], all_total[k])
                    # Whoever has the first columns: if the pieces are more than the columns, that is not the first one.
                    if (which == 0) & (item.share == 0) & (begin == 0) & (lane % 4 == 0):
                        self.store_lse(args, item.token, head + 8 * k, all_maximum[k], all_total[2 + k])
            for k in cutlass.range_constexpr(2):
                if head + 8 * k < args.num_heads:
                    at = Int64(item.token) * args.out_token_stride + Int64(head + 8 * k) * args.out_head_stride
                    for u in cutlass.range_constexpr(groups):
                        if base + u < end:
                            column = self.first_channel(item, which) + (base + u) * 8 + lane % 4 * 2
                            low, high = (
                                all_values[4 * u + 2 * k] * inverse[k],
                                all_values[4 * u + 2 * k + 1] * inverse[k],
                            )
                            if const_expr(self.configuration.fp32_out):
                                ptx.store_f32x2(args.out + (at + column) * 4, (low, high))
                            else:
                                ptx.store_u32(args.out + (at + column) * 2, ptx.pack_bf16(low, high))

    def fold(
        self,
        maximum: cute.Tensor,
        total: cute.Tensor,
        values: cute.Tensor,
        other_maximum: cute.Tensor | tuple,
        other_total: cute.Tensor | tuple,
        other_values: cute.Tensor | list,
    ) -> None:
        """Lets a result join the first one, for two rows."""
        for k in range(2):
            factors = self.fold_statistics(maximum, total, other_maximum[k], other_total, k)
            self.fold_values(values, other_values, factors, k)

    def fold_statistics(
        self, maximum: cute.Tensor, total: cute.Tensor, other: Float32, other_total: cute.Tensor | tuple, k: int
    ) -> tuple:
        """Of row k its maximum and sums; returns the factors of its values, of those there and of those that join."""
        before, weight = self.factors(maximum, other, k)
        for i in (k, 2 + k):
            total[i] = ptx.fma(Float32(other_total[i]), weight, total[i] * before)
        return before, weight

    def fold_values(self, values: cute.Tensor, other_values: cute.Tensor | list, factors: tuple, k: int) -> None:
        """Of row k."""
        before, weight = factors
        for u in range(cute.size(values) // 4):
            for j in range(2):
                at = 4 * u + 2 * k + j
                values[at] = ptx.fma(other_values[at], weight, values[at] * before)

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
