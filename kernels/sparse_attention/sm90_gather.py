"""The producers of the Hopper kernel: rows of keys from global to shared memory, in bf16 (see sm90.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr

from dsv4_kernels.kv_layout import NOPE_DIM, NUM_SCALES, PAGE_ROWS, ROW_DATA_BYTES, ROW_SCALE_BYTES, SCALE_GROUP
from dsv4_kernels.sparse_attention import sm90_ptx as ptx
from dsv4_kernels.sparse_attention.sm90_plan import (
    BLOCK_BYTES,
    HALF,
    HALF_BYTES,
    PRODUCER_THREADS,
    ROW_STRIDE,
    STEP,
    TILE,
    Arguments,
    Entries,
    WorkItems,
)


class Producers(WorkItems):
    """Two warpgroups that fill the halves of both tiles."""

    @cute.jit
    def produce(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32) -> None:
        """Fills the halves of both tiles as the consumers want them: 0 left, 1 right, 0 right, 1 left.

        Four threads share a row of each tile. A quarter has 16 channels of every group of 64, so it meets all scales of
        its row. FP8 rows wait in registers: each half buffer's loads are issued when the registers' last content has
        been converted, and the rows of the next step are called into L2 half a step ahead.
        """
        fp8 = self.configuration.fp8_rows
        row = thread // 4
        quarter = thread % 4
        lane = thread % 32
        full, free = shared.full.data_ptr(), shared.free.data_ptr()
        keys = Int32(shared.keys.data_ptr().toint())
        rows = shared.rows.data_ptr() + thread // 32
        left, right = cute.make_rmem_tensor((16,), Uint32), cute.make_rmem_tensor((12,), Uint32)
        scales = cute.make_rmem_tensor((4,), Uint32)

        num_items = self.num_items(args, shared)
        index, _, _ = cute.arch.block_idx()
        # Three steps are under way: the current one, whose rows are being written; the next one, whose row numbers are
        # known and whose rows are being called into L2; and the leading one, whose row numbers are being loaded.
        token, step, last, visible = Int32(0), Int32(0), Int32(0), Int32(0)
        row0, row1, number0, number1 = Int32(-1), Int32(-1), Int32(-1), Int32(-1)
        current, following, current_step = Int32(0), Int32(0), Int32(0)  # the first two: is there such a step?
        if index < num_items:
            item = self.item(args, shared, index)
            token, step, last, visible = item.token, item.first, item.last, item.visible
            row0, row1 = self.row_numbers(args, token, visible, step, row)
            if const_expr(fp8):
                self.load_scales(args, step, row0, scales, 0)
                self.load_scales(args, step, row1, scales, 1)
                self.load_groups(args, step, row0, quarter, left, 0)
                self.load_groups(args, step, row1, quarter, right, 4)
            current, current_step = Int32(1), step
            index, token, step, last, visible = self.advance(args, shared, index, num_items, token, step, last, visible)
            if index < num_items:
                number0, number1 = self.row_numbers(args, token, visible, step, row)
                following = Int32(1)
        phase = Int32(1)
        while current != 0:
            cute.arch.mbarrier_wait(free + 0, phase)
            if const_expr(fp8):
                converted = self.convert_groups(left, scales, 0, 0)
            self.write_row_bits(rows, lane, row0)
            if const_expr(fp8):
                self.store_groups(keys, 0, row, quarter, converted, 0)
            else:
                self.copy_half(args, current_step, keys, 0, 0, row, quarter, row0)
            self.publish(full + 0, lane, 0)
            if const_expr(fp8):
                self.load_groups(args, current_step, row1, quarter, left, 0)

            cute.arch.mbarrier_wait(free + 3, phase)
            self.write_row_bits(rows + TILE // 8, lane, row1)
            if const_expr(fp8):
                converted = self.convert_groups(right, scales, 1, 4)
                self.store_groups(keys, 1, row, quarter, converted, 4)
                self.copy_rotated(args, current_step, keys, 1, row, quarter, row1)
            else:
                self.copy_half(args, current_step, keys, 1, 1, row, quarter, row1)
            self.publish(full + 3, lane, 1)
            if const_expr(fp8):
                self.load_groups(args, current_step, row0, quarter, right, 4)

            next_step, next0, next1 = step, number0, number1
            self.prefetch_row(args, next_step, quarter, next0)
            self.prefetch_row(args, next_step, quarter, next1)
            current = following
            if following != 0:
                index, token, step, last, visible = self.advance(
                    args, shared, index, num_items, token, step, last, visible
                )
                number0, number1, following = Int32(-1), Int32(-1), Int32(0)
                if index < num_items:
                    number0, number1 = self.row_numbers(args, token, visible, step, row)
                    following = Int32(1)

            cute.arch.mbarrier_wait(free + 1, phase)
            if const_expr(fp8):
                converted = self.convert_groups(right, scales, 0, 4)
                self.store_groups(keys, 0, row, quarter, converted, 4)
                self.copy_rotated(args, current_step, keys, 0, row, quarter, row0)
            else:
                self.copy_half(args, current_step, keys, 0, 1, row, quarter, row0)
            self.publish(full + 1, lane, 1)
            if const_expr(fp8):
                self.load_scales(args, next_step, next0, scales, 0)
                self.load_groups(args, next_step, next1, quarter, right, 4)

            cute.arch.mbarrier_wait(free + 2, phase)
            if const_expr(fp8):
                converted = self.convert_groups(left, scales, 1, 0)
                self.store_groups(keys, 1, row, quarter, converted, 0)
            else:
                self.copy_half(args, current_step, keys, 1, 0, row, quarter, row1)
            self.publish(full + 2, lane, 0)
            if const_expr(fp8):
                self.load_scales(args, next_step, next1, scales, 1)
                self.load_groups(args, next_step, next0, quarter, left, 0)
            row0, row1, current_step = next0, next1, next_step
            phase ^= 1

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
                item = self.item(args, shared, index)
                token, step, last, visible = item.token, item.first, item.last, item.visible
        return index, token, step, last, visible

    @cute.jit
    def row_numbers(self, args: Arguments, token: Int32, visible: Int32, step: Int32, row: Int32) -> tuple:
        """The rows of this thread's place in both tiles, -1 for a hole."""
        window_steps = (args.window_width + STEP - 1) // STEP
        number0, number1 = Int32(-1), Int32(-1)
        slot = step * STEP + row
        if step < window_steps:
            base = args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4
            if slot < args.window_width:
                number0 = ptx.load_i32(base)
            if slot + TILE < args.window_width:
                number1 = ptx.load_i32(base + TILE * 4)
        elif const_expr(self.configuration.entries == Entries.LIST):
            entry = slot - window_steps * STEP
            base = args.entry_list + (Int64(token) * args.entry_list_stride + entry) * 4
            if entry < visible:
                number0 = ptx.load_i32(base)
            if entry + TILE < visible:
                number1 = ptx.load_i32(base + TILE * 4)
        elif const_expr(self.configuration.entries == Entries.PAGES):
            entry = slot - window_steps * STEP
            request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
            base = args.entry_list + Int64(request) * args.entry_list_stride * 4
            size = args.entries_per_page
            if entry < visible:
                number0 = ptx.load_i32(base + Int64(entry // size) * 4) * size + entry % size
            entry += TILE
            if entry < visible:
                number1 = ptx.load_i32(base + Int64(entry // size) * 4) * size + entry % size
        return number0, number1

    @cute.jit
    def table(self, args: Arguments, step: Int32) -> tuple:
        """Address of the table that a step's rows are in, and the bytes of its page (FP8) or row (bf16)."""
        address, page_bytes = args.window, args.window_page_bytes
        if const_expr(self.configuration.entries != Entries.NONE):
            if step >= (args.window_width + STEP - 1) // STEP:
                address, page_bytes = args.entries, args.entries_page_bytes
        return address, page_bytes

    @cute.jit
    def locate(self, args: Arguments, step: Int32, number: Int32) -> tuple:
        """Address of a row's channels, and 1 if the row exists, else 0."""
        address, page_bytes = self.table(args, step)
        valid = Int32(1)
        if number < 0:
            valid, number = Int32(0), Int32(0)
        if const_expr(self.configuration.fp8_rows):
            address += Int64(number // PAGE_ROWS) * page_bytes + (number % PAGE_ROWS) * ROW_DATA_BYTES
        else:
            address += Int64(number) * page_bytes
        return address, valid

    @cute.jit
    def load_scales(
        self, args: Arguments, step: Int32, number: Int32, scales: cute.Tensor, tile: cutlass.Constexpr
    ) -> None:
        """The eight scale bytes of a row, 1 (2**-126) in holes."""
        address, page_bytes = self.table(args, step)
        valid = Int32(1)
        if number < 0:
            valid, number = Int32(0), Int32(0)
        address += Int64(number // PAGE_ROWS) * page_bytes
        address += PAGE_ROWS * ROW_DATA_BYTES + (number % PAGE_ROWS) * ROW_SCALE_BYTES
        scales[2 * tile], scales[2 * tile + 1] = ptx.load_8_bytes(address, valid)

    @cute.jit
    def load_groups(
        self,
        args: Arguments,
        step: Int32,
        number: Int32,
        quarter: Int32,
        words: cute.Tensor,
        first: cutlass.Constexpr,
    ) -> None:
        """This quarter's 16 e4m3 of each group from `first` on, as many as `words` holds."""
        address, valid = self.locate(args, step, number)
        for i in cutlass.range_constexpr(cute.size(words) // 4):
            loaded = ptx.load_16_bytes(address + ((first + i) * SCALE_GROUP + quarter * 16), valid)
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = loaded[j]

    @cute.jit
    def convert_groups(
        self, words: cute.Tensor, scales: cute.Tensor, tile: cutlass.Constexpr, first: cutlass.Constexpr
    ) -> cute.Tensor:
        """The loaded e4m3 of the groups from `first` on as bf16, twice as many words."""
        converted = cute.make_rmem_tensor((2 * cute.size(words),), Uint32)
        for i in cutlass.range_constexpr(cute.size(words) // 4):
            group = first + i
            byte = (scales[2 * tile + group // 4] >> (8 * (group % 4))) & 0xFF
            scale = byte << 7
            if scale < 0x40:
                scale = Uint32(0x40)  # byte 0 is 2**-127, a subnormal bf16
            scale = scale * 0x00010001
            for j in cutlass.range_constexpr(4):
                converted[8 * i + 2 * j], converted[8 * i + 2 * j + 1] = ptx.dequantise(words[4 * i + j], scale)
        return converted

    def store_groups(
        self,
        keys: Int32,
        tile: cutlass.Constexpr,
        row: Int32,
        quarter: Int32,
        converted: cute.Tensor,
        first: cutlass.Constexpr,
    ) -> None:
        """Converted groups, from `first` on, into their swizzled blocks of a tile."""
        for i in range(cute.size(converted) // 8):
            block = keys + tile * 2 * HALF_BYTES + (first + i) * BLOCK_BYTES + row * ROW_STRIDE
            for half in range(2):
                chunk = (quarter * 2 + half) ^ (row & 7)
                ptx.store_shared(block + chunk * 16, tuple(converted[8 * i + 4 * half + j] for j in range(4)))

    @cute.jit
    def copy_rotated(
        self,
        args: Arguments,
        step: Int32,
        keys: Int32,
        tile: cutlass.Constexpr,
        row: Int32,
        quarter: Int32,
        number: Int32,
    ) -> None:
        """The bf16 channels of an FP8 row into the last block of a tile."""
        address, valid = self.locate(args, step, number)
        block = keys + tile * 2 * HALF_BYTES + NUM_SCALES * BLOCK_BYTES + row * ROW_STRIDE
        for i in cutlass.range_constexpr(2):
            chunk = quarter * 2 + i
            ptx.copy_async(block + (chunk ^ (row & 7)) * 16, address + NOPE_DIM + chunk * 16, valid * 16)

    @cute.jit
    def copy_half(
        self,
        args: Arguments,
        step: Int32,
        keys: Int32,
        tile: cutlass.Constexpr,
        half: cutlass.Constexpr,
        row: Int32,
        quarter: Int32,
        number: Int32,
    ) -> None:
        """Half of a bf16 row: 8 pieces of 16 bytes a thread, four threads side by side."""
        address, valid = self.locate(args, step, number)
        for i in cutlass.range_constexpr(8):
            piece = i * 4 + quarter  # of the half's 32
            chunk = (piece % 8) ^ (row & 7)
            block = keys + (tile * 2 + half) * HALF_BYTES + (i // 2) * BLOCK_BYTES + row * ROW_STRIDE
            ptx.copy_async(block + chunk * 16, address + half * HALF * 2 + piece * 16, valid * 16)

    @cute.jit
    def prefetch_row(self, args: Arguments, step: Int32, quarter: Int32, number: Int32) -> None:
        """Calls a row into L2, the four threads of a row a part each."""
        address, valid = self.locate(args, step, number)
        for i in cutlass.range_constexpr(1 if self.configuration.fp8_rows else 2):
            ptx.prefetch(address + (i * 4 + quarter) * 128, valid)
        if const_expr(self.configuration.fp8_rows):
            ptx.prefetch(address + ROW_DATA_BYTES - 1, valid)

    @cute.jit
    def write_row_bits(self, rows: cute.Pointer, lane: Int32, number: Int32) -> None:
        """One bit for each of the warp's eight rows, of which four lanes each know the same."""
        bits = cute.arch.vote_ballot_sync(number >= 0) & 0x11111111
        bits = (bits | (bits >> 3)) & 0x03030303
        bits = (bits | (bits >> 6)) & 0x000F000F
        bits = (bits | (bits >> 12)) & 0xFF
        if lane == 0:
            rows.store(Uint8(bits))

    @cute.jit
    def publish(self, barrier: cute.Pointer, lane: Int32, half: cutlass.Constexpr) -> None:
        """Tells the consumers that this warp's part of a half buffer is written."""
        cute.arch.fence_view_async_shared()  # generic stores, read by wgmma
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
        if const_expr(self.asynchronous(half) > 0):
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    def asynchronous(self, half: int) -> int:
        """Arrivals at full[.][half] by completed cp.async: bf16 rows, and the rotated channels of FP8 rows."""
        return PRODUCER_THREADS if half == 1 or not self.configuration.fp8_rows else 0
