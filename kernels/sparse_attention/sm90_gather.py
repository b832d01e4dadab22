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
        """Fills the halves of both tiles in the order in which the consumers want them: 0 left, 1 right, 0 right, 1 left.

        Four threads share a row of each tile. A quarter has 16 channels of every group of 64, so it meets all scales of
        its row. FP8 rows wait in registers: each half buffer's loads are issued when the registers' last content has been
        converted, and the rows of the next step are called into L2 half a step ahead.
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
        address0, address1, valid0, valid1 = Int64(0), Int64(0), Int32(0), Int32(0)
        number0, number1 = Int32(-1), Int32(-1)
        current, following = Int32(0), Int32(0)  # whether there is such a step
        if index < num_items:
            item = self.item(args, shared, index)
            token, step, last, visible = item.token, item.first, item.last, item.visible
            number0, number1 = self.row_numbers(args, token, visible, step, row)
            address0, valid0 = self.locate(args, step, number0)
            address1, valid1 = self.locate(args, step, number1)
            if const_expr(fp8):
                self.load_scales(args, step, number0, scales, 0)
                self.load_scales(args, step, number1, scales, 1)
                self.load_groups(address0, valid0, quarter, left, 0)
                self.load_groups(address1, valid1, quarter, right, 4)
            current = Int32(1)
            index, token, step, last, visible = self.advance(args, shared, index, num_items, token, step, last, visible)
            number0, number1 = Int32(-1), Int32(-1)
            if index < num_items:
                number0, number1 = self.row_numbers(args, token, visible, step, row)
                following = Int32(1)
        phase = Int32(1)
        while current != 0:
            cute.arch.mbarrier_wait(free + 0, phase)
            self.write_row_bits(rows, lane, valid0)
            if const_expr(fp8):
                self.write_groups(keys, 0, row, quarter, left, scales, 0)
            else:
                self.copy_half(keys, 0, 0, row, quarter, address0, valid0)
            self.publish(full + 0, lane, 0)
            if const_expr(fp8):
                self.load_groups(address1, valid1, quarter, left, 0)

            cute.arch.mbarrier_wait(free + 3, phase)
            self.write_row_bits(rows + TILE // 8, lane, valid1)
            if const_expr(fp8):
                self.write_groups(keys, 1, row, quarter, right, scales, 4)
                self.copy_rotated(keys, 1, row, quarter, address1, valid1)
            else:
                self.copy_half(keys, 1, 1, row, quarter, address1, valid1)
            self.publish(full + 3, lane, 1)
            if const_expr(fp8):
                self.load_groups(address0, valid0, quarter, right, 4)

            next_step, next_number0, next_number1 = step, number0, number1
            next0, next_valid0 = self.locate(args, next_step, next_number0)
            next1, next_valid1 = self.locate(args, next_step, next_number1)
            self.prefetch_row(next0, quarter, next_valid0)
            self.prefetch_row(next1, quarter, next_valid1)
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
                self.write_groups(keys, 0, row, quarter, right, scales, 4)
                self.copy_rotated(keys, 0, row, quarter, address0, valid0)
            else:
                self.copy_half(keys, 0, 1, row, quarter, address0, valid0)
            self.publish(full + 1, lane, 1)
            if const_expr(fp8):
                self.load_scales(args, next_step, next_number0, scales, 0)
                self.load_groups(next1, next_valid1, quarter, right, 4)

            cute.arch.mbarrier_wait(free + 2, phase)
            if const_expr(fp8):
                self.write_groups(keys, 1, row, quarter, left, scales, 0)
            else:
                self.copy_half(keys, 1, 0, row, quarter, address1, valid1)
            self.publish(full + 2, lane, 0)
            if const_expr(fp8):
                self.load_scales(args, next_step, next_number1, scales, 1)
                self.load_groups(next0, next_valid0, quarter, left, 0)
            address0, valid0, address1, valid1 = next0, next_valid0, next1, next_valid1
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
        """The step after this one: of the same item, or the first of this CTA's next item (index >= num_items: none)."""
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

    def load_groups(
        self, address: Int64, valid: Int32, quarter: Int32, words: cute.Tensor, first: cutlass.Constexpr
    ) -> None:
        """This quarter's 16 e4m3 of each group from `first` on, as many as `words` holds."""
        for i in range(cute.size(words) // 4):
            loaded = ptx.load_16_bytes(address + ((first + i) * SCALE_GROUP + quarter * 16), valid)
            for j in range(4):
                words[4 * i + j] = loaded[j]

    @cute.jit
    def write_groups(
        self,
        keys: Int32,
        tile: cutlass.Constexpr,
        row: Int32,
        quarter: Int32,
        words: cute.Tensor,
        scales: cute.Tensor,
        first: cutlass.Constexpr,
    ) -> None:
        """Converts the groups from `first` on to bf16 into their swizzled blocks of a tile."""
        for i in cutlass.range_constexpr(cute.size(words) // 4):
            group = first + i
            byte = (scales[2 * tile + group // 4] >> (8 * (group % 4))) & 0xFF
            scale = byte << 7
            if scale < 0x40:
                scale = Uint32(0x40)  # byte 0 is 2**-127, a subnormal bf16
            scale = scale * 0x00010001
            block = keys + tile * 2 * HALF_BYTES + group * BLOCK_BYTES + row * ROW_STRIDE
            for half in cutlass.range_constexpr(2):
                chunk = (quarter * 2 + half) ^ (row & 7)
                pairs = ptx.dequantise(words[4 * i + 2 * half], scale) + ptx.dequantise(
                    words[4 * i + 2 * half + 1], scale
                )
                ptx.store_shared(block + chunk * 16, pairs)

    def copy_rotated(
        self, keys: Int32, tile: cutlass.Constexpr, row: Int32, quarter: Int32, address: Int64, valid: Int32
    ) -> None:
        """The bf16 channels of an FP8 row into the last block of a tile."""
        block = keys + tile * 2 * HALF_BYTES + NUM_SCALES * BLOCK_BYTES + row * ROW_STRIDE
        for i in range(2):
            chunk = quarter * 2 + i
            ptx.copy_async(block + (chunk ^ (row & 7)) * 16, address + NOPE_DIM + chunk * 16, valid * 16)

    def copy_half(
        self,
        keys: Int32,
        tile: cutlass.Constexpr,
        half: cutlass.Constexpr,
        row: Int32,
        quarter: Int32,
        address: Int64,
        valid: Int32,
    ) -> None:
        """Half of a bf16 row: 8 pieces of 16 bytes a thread, four threads side by side."""
        for i in range(8):
            piece = i * 4 + quarter  # of the half's 32
            chunk = (piece % 8) ^ (row & 7)
            block = keys + (tile * 2 + half) * HALF_BYTES + (i // 2) * BLOCK_BYTES + row * ROW_STRIDE
            ptx.copy_async(block + chunk * 16, address + half * HALF * 2 + piece * 16, valid * 16)

    def prefetch_row(self, address: Int64, quarter: Int32, valid: Int32) -> None:
        """Calls a row into L2, the four threads of a row a part each."""
        lines = 1 if self.configuration.fp8_rows else 2
        for i in range(lines):
            ptx.prefetch(address + (i * 4 + quarter) * 128, valid)
        if const_expr(self.configuration.fp8_rows):
            ptx.prefetch(address + ROW_DATA_BYTES - 1, valid)

    @cute.jit
    def write_row_bits(self, rows: cute.Pointer, lane: Int32, valid: Int32) -> None:
        """One bit for each of the warp's eight rows, of which four lanes each know the same."""
        bits = cute.arch.vote_ballot_sync(valid != 0) & 0x11111111
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
