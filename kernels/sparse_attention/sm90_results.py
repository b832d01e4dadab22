"""Results of the Hopper kernel: a whole query's, or parts that several CTAs merge (see sm90.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from dsv4_kernels.sparse_attention import sm90_ptx as ptx
from dsv4_kernels.sparse_attention.sm90_plan import (
    CONSUMER_THREADS,
    HALF,
    HEADS,
    LOG2_E,
    MERGE_GROUPS,
    MERGE_PARTS,
    NO_MAXIMUM,
    ROW_STRIDE,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    STATISTICS_BYTES,
    TILE,
    Arguments,
    Item,
    Named,
    WorkItems,
)


class Results(WorkItems):
    """What the consumers do with O."""

    def sync(self, barrier: Named) -> None:
        """Waits until both consumers have come to a barrier."""
        cute.arch.barrier(barrier_id=int(barrier), number_of_threads=CONSUMER_THREADS)

    def arrive(self, barrier: Named) -> None:
        """Comes to a barrier at which the other consumer waits."""
        cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=CONSUMER_THREADS)

    def store_p(self, block: Int32, words: cute.Tensor, warp: Int32, lane: Int32) -> None:
        """The warp's 16 rows of an accumulator of 64 columns, as bf16 pairs, to a swizzled block."""
        row = warp * 16 + lane % 16
        for j in range(TILE // 16):
            chunk = (2 * j + lane // 16) ^ (row & 7)
            matrices = (words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3])
            ptx.store_matrices(block + row * ROW_STRIDE + chunk * 16, matrices)

    @cute.jit
    def sink(self, args: Arguments, head: Int32) -> Float32:
        """A head's sink in units of log2; -inf without one."""
        sink = -Float32.inf
        if args.sink != 0:
            if head < args.num_heads:
                sink = ptx.load_f32(args.sink + head * 4) * LOG2_E
        return sink

    @cute.jit
    def inverse(self, sink: Float32, maximum: Float32, total: Float32) -> Float32:
        """1 / (sum + the sink's share), 0 where there is nothing at all."""
        total += ptx.exp2(sink - maximum)
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
    def store_out(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        item: Item,
        which: cutlass.Constexpr,
        staging: Int32,
        warp: Int32,
        row: Int32,
        lane: Int32,
        out: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> None:
        """Normalises O and writes it; bf16 by way of shared memory, in whole lines."""
        inverse = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            inverse[i] = self.inverse((shared.sinks.data_ptr() + row + 8 * i).load(), maximum[i], total[i])
        if const_expr(which == 0):
            if lane % 4 == 0:
                for i in cutlass.range_constexpr(2):
                    self.store_lse(args, item.token, item.head_block * HEADS + row + 8 * i, maximum[i], total[2 + i])
        base = Int64(item.token) * args.out_token_stride + which * HALF
        if const_expr(self.configuration.fp32_out):
            for i in cutlass.range_constexpr(2):
                head = item.head_block * HEADS + row + 8 * i
                if head < args.num_heads:
                    address = args.out + (base + Int64(head) * args.out_head_stride + (lane % 4) * 2) * 4
                    for j in cutlass.range_constexpr(HALF // 8):
                        pair = (out[4 * j + 2 * i] * inverse[i], out[4 * j + 2 * i + 1] * inverse[i])
                        ptx.store_f32x2(address + j * 32, pair)
        else:
            words = cute.make_rmem_tensor((16,), Uint32)
            for block in cutlass.range_constexpr(HALF // TILE):
                for j in cutlass.range_constexpr(TILE // 8):
                    for i in cutlass.range_constexpr(2):
                        at = block * 32 + 4 * j + 2 * i
                        words[2 * j + i] = ptx.pack_bf16(out[at] * inverse[i], out[at + 1] * inverse[i])
                self.store_p(staging, words, warp, lane)
                cute.arch.sync_warp()
                for i in cutlass.range_constexpr(4):
                    line = warp * 16 + i * 4 + lane // 8
                    head = item.head_block * HEADS + line
                    if head < args.num_heads:
                        piece = ptx.load_shared(staging + line * ROW_STRIDE + ((lane % 8) ^ (line & 7)) * 16)
                        element = base + Int64(head) * args.out_head_stride + block * TILE + (lane % 8) * 8
                        ptx.store_16_bytes(args.out + element * 2, piece)
                cute.arch.sync_warp()

    def slot(self, args: Arguments, index: Int32) -> Int64:
        """Address of the scratch slot of an item: its CTA's, by its number there."""
        ctas, _, _ = cute.arch.grid_dim()
        number = (index % ctas) * SCRATCH_SLOTS + (index // ctas) % SCRATCH_SLOTS
        return args.scratch + Int64(number) * (SLOT_BYTES + STATISTICS_BYTES)

    @cute.jit
    def store_partial(
        self,
        args: Arguments,
        index: Int32,
        which: cutlass.Constexpr,
        thread: Int32,
        out: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> None:
        """O (not normalised), maxima and sums of a part, in the order of the registers.

        [32][256 threads][4], then [256][4]: maximum and sum, of two rows; for the lse [256][2]: sums before rounding.
        """
        slot = self.slot(args, index) + thread * 16
        for j in cutlass.range_constexpr(HALF // 8):
            ptx.store_f32x4(slot + j * CONSUMER_THREADS * 16, tuple(out[4 * j + i] for i in range(4)))
        ptx.store_f32x4(slot + SLOT_BYTES, (maximum[0], total[0], maximum[1], total[1]))
        if const_expr(self.configuration.lse):
            ptx.store_f32x2(slot + SLOT_BYTES + (CONSUMER_THREADS * 16 - thread * 8), (total[2], total[3]))

    def arrived(self, args: Arguments, item: Item) -> Int64:
        """Address of the count of parts that are written, of an item's group."""
        return args.counters + Int64(item.token * self.head_blocks(args) + item.head_block) * 4

    def merged(self, args: Arguments, item: Item) -> Int64:
        """Address of the count of shares that are merged."""
        return self.arrived(args, item) + Int64(args.num_tokens * self.head_blocks(args)) * 4

    @cute.jit
    def wait_for_slot(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, oldest: Int32) -> None:
        """Waits until the merge that reads this CTA's oldest slot is over. A barrier must follow."""
        if thread == 0:
            if oldest >= 0:
                item = self.item(args, shared, oldest)
                self.wait_for_count(self.merged(args, item), item.parts)

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
    def merge(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, index: Int32, num_items: Int32) -> None:
        """This CTA's share of a query, once all its parts are there: sum_i 2**(m_i - m) O_i / total, i in order."""
        item = self.item(args, shared, index)
        stride = self.head_blocks(args)
        first = index - item.part * stride
        row = thread % 128 // 32 * 16 + thread % 32 // 4
        head = item.head_block * HEADS + row
        sinks = (self.sink(args, head), self.sink(args, head + 8))
        begin, end = item.part * (HALF // 8) // item.parts, (item.part + 1) * (HALF // 8) // item.parts
        if thread == 0:
            self.wait_for_count(self.arrived(args, item), item.parts)
        self.sync(Named.CONSUMERS)
        newest, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
        merged = cute.make_rmem_tensor((4 * MERGE_GROUPS,), Float32)
        for base in cutlass.range(begin, end, MERGE_GROUPS):
            newest.fill(NO_MAXIMUM)
            total.fill(0.0)
            merged.fill(0.0)
            for some in cutlass.range(0, item.parts, MERGE_PARTS):
                statistics, exact, words = [], [], []
                for i in cutlass.range_constexpr(MERGE_PARTS):
                    slot = self.slot(args, first + ptx.imin(some + i, item.parts - 1) * stride) + thread * 16
                    statistics.append(ptx.load_f32x4(slot + SLOT_BYTES))
                    if const_expr(self.configuration.lse):
                        exact.append(ptx.load_f32x2(slot + SLOT_BYTES + (CONSUMER_THREADS * 16 - thread * 8)))
                    for u in cutlass.range_constexpr(MERGE_GROUPS):
                        words.append(ptx.load_f32x4(slot + ptx.imin(base + u, end - 1) * (CONSUMER_THREADS * 16)))
                for i in cutlass.range_constexpr(MERGE_PARTS):
                    if some + i < item.parts:
                        for k in cutlass.range_constexpr(2):
                            maximum = ptx.fmax(newest[k], statistics[i][2 * k])
                            before, weight = ptx.exp2(newest[k] - maximum), ptx.exp2(statistics[i][2 * k] - maximum)
                            newest[k] = maximum
                            total[k] = total[k] * before + statistics[i][2 * k + 1] * weight
                            if const_expr(self.configuration.lse):
                                total[2 + k] = total[2 + k] * before + exact[i][k] * weight
                            for u in cutlass.range_constexpr(MERGE_GROUPS):
                                for j in cutlass.range_constexpr(2):
                                    at = 4 * u + 2 * k + j
                                    word = words[i * MERGE_GROUPS + u][2 * k + j]
                                    merged[at] = ptx.fma(word, weight, merged[at] * before)
            for k in cutlass.range_constexpr(2):
                inverse = self.inverse(sinks[k], newest[k], total[k])
                if head + 8 * k < args.num_heads:
                    at = Int64(item.token) * args.out_token_stride + Int64(head + 8 * k) * args.out_head_stride
                    for u in cutlass.range_constexpr(MERGE_GROUPS):
                        if base + u < end:
                            column = thread // 128 * HALF + (base + u) * 8 + thread % 4 * 2
                            low, high = merged[4 * u + 2 * k] * inverse, merged[4 * u + 2 * k + 1] * inverse
                            if const_expr(self.configuration.fp32_out):
                                ptx.store_f32x2(args.out + (at + column) * 4, (low, high))
                            else:
                                ptx.store_u32(args.out + (at + column) * 2, ptx.pack_bf16(low, high))
        # Whoever has the first columns: with more parts than column groups that is not part 0, which then has none.
        if (begin == 0) & (end > 0) & (thread < 128) & (thread % 4 == 0):
            for k in cutlass.range_constexpr(2):
                self.store_lse(args, item.token, head + 8 * k, newest[k], total[2 + k])
        self.sync(Named.CONSUMERS)
        if thread == 0:
            if self.slots_are_reused(num_items):
                ptx.add_release(self.merged(args, item))
            elif ptx.count_out(self.merged(args, item)) == item.parts - 1:  # the last: clears for the next launch
                ptx.store_i32(self.merged(args, item), Int32(0))
                ptx.store_i32(self.arrived(args, item), Int32(0))

    @cute.jit
    def leave(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32) -> None:
        """The last CTA to leave clears the counters for the next launch."""
        ctas, _, _ = cute.arch.grid_dim()
        groups = args.num_tokens * self.head_blocks(args)
        last = shared.scan.data_ptr()
        if thread == 0:
            last.store(ptx.count_out(args.counters + Int64(2 * groups) * 4))
        self.sync(Named.CONSUMERS)
        if last.load() == ctas - 1:
            place = thread
            while place <= 2 * groups:
                ptx.store_i32(args.counters + Int64(place) * 4, Int32(0))
                place += CONSUMER_THREADS
