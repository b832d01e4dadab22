"""The producers of the Hopper kernel: rows of keys from global to shared memory, in bf16 (see persistent.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, const_expr

from dsv4_kernels import ptx
from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    GROUP,
    GROUPS,
    HALF_GROUPS,
    PRODUCER_THREADS,
    ROW_STRIDE,
    STEP,
    TILE,
    TILE_BYTES,
    Arguments,
    Entries,
    Named,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import WorkItems


class Producers(WorkItems):
    """One, two or four warpgroups that fill both tiles, each groups of the channels of one consumer or of both."""

    @cute.jit
    def produce(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, which: Int32, turn: Int32) -> None:
        """Fills groups of the channels of consumer `which`, each as soon as it is free: all, or every second one. One
        that is alone fills those of both.

        As many threads side by side as a thread has rows share those rows, which are as far apart as they can be, and
        read a row's bytes of a group together. FP8 rows wait in registers: loads are issued `ahead` groups before their
        conversion. Row numbers come a step before that: a thread loads one, calls its FP8 row into L2 and hands the
        number to the others of its warpgroup.
        """
        fp8 = self.configuration.fp8_rows
        lane, warp = thread % 32, thread // 32
        row, part = thread // self.configuration.rows, thread % self.configuration.rows
        takers = self.configuration.takers
        if const_expr(takers == 1):
            turn = 0
        # To one that fills both halves, in turns, groups of the second are groups of the first, numbered on.
        halves = 2 if self.configuration.producers == 1 else 1
        numbers = shared.numbers.data_ptr() + (turn * 2 + which) * 2 * STEP
        ahead = self.configuration.ahead
        words = [cute.make_rmem_tensor((4 * self.configuration.rows,), Uint32) for _ in range(ahead)]
        scales = cute.make_rmem_tensor((self.configuration.rows,), Uint32)
        address = cute.make_rmem_tensor((self.configuration.rows,), Int64)
        turns = HALF_GROUPS // takers * halves

        num_items = self.num_items(args, shared)
        index, _, _ = cute.arch.block_idx()
        # Three steps are under way: the one that is written, the one after it, whose rows are called into L2, and a
        # leading one, whose numbers are being loaded: there is one while index < num_items.
        token, leading, last, visible = Int32(0), Int32(0), Int32(0), Int32(0)
        step, next_step = Int32(-1), Int32(-1)  # if there are such steps
        number, phase = Int32(-1), Int32(1)
        if index < num_items:
            item = self.item(args, shared, index, Int32(0))
            token, leading, last, visible = item.token, item.first, item.last, item.visible
            step = leading
            (numbers + thread).store(self.row_number(args, token, visible, step, thread))
            self.sync_producer(turn * 2 + which)
            self.locate(args, step, numbers + row, self.first_byte(which, part), address)
            if const_expr(fp8):
                for i in cutlass.range_constexpr(ahead):
                    self.load_group(address, which, self.place(i * takers + turn), words[i])
            index, token, leading, last, visible = self.advance(
                args, shared, index, num_items, token, leading, last, visible
            )
            if index < num_items:
                next_step = leading
                number = self.row_number(args, token, visible, leading, thread)
        while step >= 0:
            which = cute.arch.make_warp_uniform(which)  # what is computed from it needs no registers meanwhile
            full, free = shared.full.data_ptr() + which * HALF_GROUPS, shared.free.data_ptr() + which * HALF_GROUPS
            place = Int32(shared.keys.data_ptr().toint()) + which * HALF_GROUPS * BLOCK_BYTES + row * ROW_STRIDE
            numbers = shared.numbers.data_ptr() + (turn * 2 + which) * 2 * STEP
            next_numbers = numbers + phase * STEP
            # The first groups of this step are on their way, and the consumers are busy with the step before.
            if const_expr(fp8):
                self.load_scales(args, step, numbers + ((phase ^ 1) * STEP + row), scales, which)
            (next_numbers + thread).store(number)
            if const_expr(fp8 and self.configuration.entries != Entries.NONE):  # of single steps it gains nothing
                self.prefetch_half_row(args, next_step, number, which)
            self.sync_producer(turn * 2 + which)
            number = Int32(-1)
            if index < num_items:
                index, token, leading, last, visible = self.advance(
                    args, shared, index, num_items, token, leading, last, visible
                )
                if index < num_items:
                    number = self.row_number(args, token, visible, leading, thread)
            for i in cutlass.range_constexpr(turns):
                group = self.place(i // halves * takers + turn) + i % halves * HALF_GROUPS
                cute.arch.mbarrier_wait(free + group, phase)
                if const_expr(i == 0):
                    if (which == 0) & (turn == 0):
                        self.write_row_bits(shared, numbers + ((phase ^ 1) * STEP + thread), warp, lane, address)
                if const_expr(not fp8):
                    self.copy_group(place + group * BLOCK_BYTES, row, part, address, group * (GROUP * 2))
                elif (which == 0) | (group < HALF_GROUPS - 1):
                    self.store_group(place + group * BLOCK_BYTES, row, part, group, words[i % ahead], scales)
                else:
                    self.copy_group(place + group * BLOCK_BYTES, row, part, address, NOPE_DIM - HALF_GROUPS * GROUP)
                self.publish(full + group, lane, which, group)
                if const_expr(fp8 and i + ahead < turns):
                    coming_group = self.place((i + ahead) * takers + turn)
                    self.load_group(address, which, coming_group, words[i % ahead])
            # Only now: within a step the consumers wait for every group, and then nobody waits for a while.
            self.locate(args, next_step, next_numbers + row, self.first_byte(which, part), address)
            if const_expr(fp8):
                for i in cutlass.range_constexpr(ahead):
                    self.load_group(address, which, self.place(i * takers + turn), words[i])
            step, next_step = next_step, leading
            if index >= num_items:
                next_step = Int32(-1)
            phase ^= 1

    def sync_producer(self, producer: Int32) -> None:
        """Waits for all threads of a producer."""
        cute.arch.barrier(barrier_id=int(Named.PRODUCER) + producer, number_of_threads=PRODUCER_THREADS)

    @cute.jit
    def advance(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        index: Int32,
        num_items: Int32,
        token: Int32,
        step: Int32,
        last: Int32,
        visible: Int32,
    ) -> tuple:
        """The step after this one: of the same item, or the first of this CTA's next (none if index >= num_items)."""
        step += 1
        if step == last:
            ctas, _, _ = cute.arch.grid_dim()
            index += ctas
            if index < num_items:
                item = self.computed_item(args, shared, index)
                token, step, last, visible = item.token, item.first, item.last, item.visible
        return index, token, step, last, visible

    @cute.jit
    def row_number(self, args: Arguments, token: Int32, visible: Int32, step: Int32, place: Int32) -> Int32:
        """The row at a place of a step, -1 for a hole."""
        window_steps = (args.window_width + STEP - 1) // STEP
        number = Int32(-1)
        slot = step * STEP + place
        if step < window_steps:
            if slot < args.window_width:
                number = ptx.load_i32(args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4)
        elif const_expr(self.configuration.entries == Entries.LIST):
            entry = slot - window_steps * STEP
            if entry < visible:
                number = ptx.load_i32(args.entry_list + (Int64(token) * args.entry_list_stride + entry) * 4)
        elif const_expr(self.configuration.entries == Entries.PAGES):
            entry = slot - window_steps * STEP
            if entry < visible:
                request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
                page = args.entry_list + (Int64(request) * args.entry_list_stride + entry // args.entries_per_page) * 4
                number = ptx.load_i32(page) * args.entries_per_page + entry % args.entries_per_page
        return number

    @cute.jit
    def table(self, args: Arguments, step: Int32) -> tuple:
        """Address of the table that a step's rows are in, and the bytes of its page (FP8) or row (bf16)."""
        address, page_bytes = args.window, args.window_page_bytes
        if const_expr(self.configuration.entries != Entries.NONE):
            if step >= (args.window_width + STEP - 1) // STEP:
                address, page_bytes = args.entries, args.entries_page_bytes
        return address, page_bytes

    @cute.jit
    def row_address(self, args: Arguments, step: Int32, number: Int32) -> Int64:
        """Address of a row's channels, HOLE for a hole."""
        table, page_bytes = self.table(args, step)
        address = Int64(ptx.HOLE)
        if number >= 0:
            if const_expr(self.configuration.fp8_rows):
                address = table + (Int64(number // PAGE_ROWS) * page_bytes + number % PAGE_ROWS * ROW_DATA_BYTES)
            else:
                address = table + Int64(number) * page_bytes
        return address

    def first_byte(self, which: Int32, part: Int32) -> Int32:
        """Where a thread's bytes of this half of the channels begin in a row."""
        channel_bytes = 1 if self.configuration.fp8_rows else 2
        return which * (HALF_GROUPS * GROUP * channel_bytes) + part * 16

    @cute.jit
    def locate(self, args: Arguments, step: Int32, numbers: cute.Pointer, first: Int32, addresses: cute.Tensor) -> None:
        """Addresses of this thread's first bytes of its rows: groups are immediate offsets from there."""
        for i in cutlass.range_constexpr(self.configuration.rows):
            addresses[i] = self.row_address(args, step, (numbers + i * self.configuration.row_step).load()) + first

    @cute.jit
    def load_scales(
        self, args: Arguments, step: Int32, numbers: cute.Pointer, scales: cute.Tensor, which: Int32
    ) -> None:
        """The four scale bytes of each row for this half of the channels, 0 in holes."""
        for i in cutlass.range_constexpr(self.configuration.rows):
            number = (numbers + i * self.configuration.row_step).load()
            scales[i] = ptx.load_4_bytes(self.scales_address(args, step, number, which * 4), number)

    @cute.jit
    def scales_address(self, args: Arguments, step: Int32, number: Int32, first: Int32 | int = 0) -> Int64:
        """Address of a row's scale bytes from one on; of a hole, of another row's."""
        table, page_bytes = self.table(args, step)
        existing = number
        if number < 0:
            existing = Int32(0)
        offset = PAGE_ROWS * ROW_DATA_BYTES + first + existing % PAGE_ROWS * ROW_SCALE_BYTES
        return table + (Int64(existing // PAGE_ROWS) * page_bytes + offset)

    @cute.jit
    def prefetch_lists(self, args: Arguments, thread: Int32) -> None:
        """Calls the first lines of all tokens' lists into L2, before it is known who needs them."""
        for i in cutlass.range_constexpr(2):
            place = thread * 32 + i * 32 * (self.configuration.producers * PRODUCER_THREADS - 32)
            if place < (args.num_tokens - 1) * args.window_rows_stride + args.window_width:
                ptx.prefetch(args.window_rows, place * 4)
            if const_expr(self.configuration.entries == Entries.LIST):
                if place < (args.num_tokens - 1) * args.entry_list_stride + args.num_entries:
                    ptx.prefetch(args.entry_list, place * 4)

    @cute.jit
    def prefetch_half_row(self, args: Arguments, step: Int32, number: Int32, which: Int32) -> None:
        """Calls this half of the channels into L2."""
        address, half = self.row_address(args, step, number), ROW_DATA_BYTES // 2
        for i in cutlass.range_constexpr(3):
            ptx.prefetch(address, which * half + min(128 * i, half - 1))

    @cute.jit
    def load_group(self, addresses: cute.Tensor, which: Int32, group: Int32 | int, words: cute.Tensor) -> None:
        """This thread's e4m3 of a group of the rows; nothing of the group that is no e4m3."""
        for i in cutlass.range_constexpr(self.configuration.rows):
            row = addresses[i]
            if const_expr(not isinstance(group, int) or group == HALF_GROUPS - 1):
                if (which == 1) & (group == HALF_GROUPS - 1):
                    row = Int64(ptx.HOLE)
            loaded = ptx.load_16_bytes(row, group * GROUP)
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = loaded[j]

    @cute.jit
    def store_group(
        self,
        place: Int32,
        row: Int32,
        part: Int32,
        group: Int32 | int,
        words: cute.Tensor,
        scales: cute.Tensor,
    ) -> None:
        """The loaded e4m3 as bf16 to the rows' places in swizzled blocks."""
        for i in cutlass.range_constexpr(self.configuration.rows):
            scale = ptx.scale_pair((scales[i] >> (8 * group)) & 0xFF)
            self.store_16_channels(place, self.offset(i), row, part, [words[4 * i + j] for j in range(4)], scale)

    def store_16_channels(
        self, place: Int32, offset: int, row: Int32, part: Int32, words: list | tuple, scale: Uint32
    ) -> None:
        """e4m3 of a row as bf16, `offset` bytes behind a place."""
        for j in range(2):
            low, high = (ptx.dequantise(words[2 * j + k], scale) for k in range(2))
            ptx.store_shared(place + (offset + ((part * 2 + j) ^ (row & 7)) * 16), (*low, *high))

    @cute.jit
    def copy_group(self, place: Int32, row: Int32, part: Int32, addresses: cute.Tensor, offset: Int32 | int) -> None:
        """A group's channels that are bf16 already, `offset` bytes behind the first ones; zeros for holes."""
        side_by_side = self.configuration.rows
        for i in cutlass.range_constexpr(self.configuration.rows):
            for j in cutlass.range_constexpr(ROW_STRIDE // 16 // side_by_side):
                target = place + (self.offset(i) + ((j * side_by_side + part) ^ (row & 7)) * 16)
                ptx.copy_row_async(target, addresses[i], offset + j * side_by_side * 16)

    def offset(self, i: int) -> int:
        """Of a thread's row i from its first one in shared memory."""
        row = i * self.configuration.row_step
        return row // TILE * TILE_BYTES + row % TILE * ROW_STRIDE

    @cute.jit
    def write_row_bits(
        self, shared: cutlass.Constexpr, number: cute.Pointer, warp: Int32, lane: Int32, addresses: cute.Tensor
    ) -> None:
        """A bit for each of the warp's rows that is no hole; `number` is this lane's."""
        if const_expr(self.configuration.fp8_rows):
            # From the addresses, which needs less registers: of rows side by side, four lanes each know the same.
            rows = shared.rows.data_ptr() + warp
            for i in cutlass.range_constexpr(self.configuration.rows):
                bits = self.bits_of_rows(addresses[i] >= 0)
                if lane == 0:
                    (rows + i * self.configuration.row_step // 8).store(Uint8(bits))
        else:
            bits = cute.arch.vote_ballot_sync(number.load() >= 0)
            if lane == 0:
                (cute.recast_ptr(shared.rows.data_ptr(), dtype=Uint32) + warp).store(Uint32(bits))

    def bits_of_rows(self, exists: Boolean) -> Uint32:
        """A bit for each of the warp's eight rows, which four lanes know of."""
        bits = cute.arch.vote_ballot_sync(exists) & 0x11111111
        bits = (bits | (bits >> 3)) & 0x03030303
        bits = (bits | (bits >> 6)) & 0x000F000F
        return (bits | (bits >> 12)) & 0xFF

    @cute.jit
    def publish(self, barrier: cute.Pointer, lane: Int32, which: Int32, group: Int32 | int) -> None:
        """Tells the consumers that this warp's part of a group is written, or will be when its copies are complete."""
        if const_expr(self.configuration.fp8_rows):
            cute.arch.fence_view_async_shared()  # generic stores, read by wgmma
            cute.arch.sync_warp()
        self.arrive_for_warp(barrier, lane)
        if const_expr(not self.configuration.fp8_rows):
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
        elif const_expr(not isinstance(group, int) or group == HALF_GROUPS - 1):
            if (which == 1) & (group == HALF_GROUPS - 1):
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    def asynchronous(self, group: int) -> int:
        """Arrivals at full[group] by completed cp.async: bf16 rows, and the last channels of FP8 rows."""
        return PRODUCER_THREADS if group == GROUPS - 1 or not self.configuration.fp8_rows else 0
