"""Attention on Hopper for few tokens: every step of a token has a CTA of its own, and its CTAs are a cluster.

It has the bits of `persistent.SparseAttention`: a step is computed with the same products in the same order, and
steps are folded in theirs. But it waits for as little as it can. Nothing is found out about other tokens: a CTA's place
in the grid says which step, share of the channels, token and block of heads it has. Nothing is used twice, so nobody
gives anything back. And partial results take no way through global memory: every CTA of the cluster gets a share of the
columns of all of them, by `st.async`.

    who             does                                                        waits for
    one warp        asks for Q, by the copy engine, group by group
    producers       gather rows: e4m3 -> bf16, st.shared; cp.async              row numbers, rows
    consumers       S = Q K^T, group by group as they come                      full[group], keys and Q
                    P; its sums go to all CTAs while products run               the other one's P
                    P V of all their channels; columns go to their CTAs         ready: others read Q (or keys) no more
                    fold what came from all steps, in their order; write O      received, of all bytes

Four lanes have a row, of all groups, so that a group is there when the scores need it and not with others.

CTAs beyond a token's steps only take part in the waiting. A cluster waits for no other one, so nothing depends on how
many are resident at once; but this pays only if all are (`sm90._shares_of_clusters`).
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels import ptx
from dsv4_kernels.kv_layout import NOPE_DIM
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    DIM,
    GROUP,
    GROUPS,
    HALF_GROUPS,
    HEADS,
    NO_MAXIMUM,
    ROW_STRIDE,
    STEP,
    TILE,
    TILE_BYTES,
    WARP_HEADS,
    Arguments,
    Copy,
    Entries,
    Named,
    copy_of_out,
    copy_of_q,
    layout,
    partition,
    swizzled_atom,
)
from dsv4_kernels.sparse_attention.sm90.producers import Producers
from dsv4_kernels.sparse_attention.sm90.scores import Scores, multiply
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import Item

MAX_CLUSTER = 9
"""Steps of a token at most: the shared memory of a CTA has room for its columns of so many."""
LANES = 4
"""Producers' threads that have a row, 16 bytes of a group each."""
AHEAD = 4
"""Groups whose FP8 rows a producer's thread has asked for."""
SPARE_BYTES = 12 * 1024
"""In front of Q, where nobody reads after the scores: together there is room for what a CTA gets from most clusters."""


@cute.struct
class StepShared:
    """Shared memory of a CTA: 222 KiB. From the beginning on it later has what it gets from the CTAs of the cluster."""

    spare: cute.struct.Align[cute.struct.MemRange[Uint8, SPARE_BYTES], 1024]
    q: cute.struct.Align[cute.struct.MemRange[BFloat16, HEADS * DIM], 1024]
    keys: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * TILE * DIM], 1024]
    # keys: as in `plan.Shared`, and so are p, rows, maxima, sums
    p: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * HEADS * TILE], 1024]
    rows: cute.struct.MemRange[Uint8, 2 * TILE // 8]
    maxima: cute.struct.MemRange[Float32, 2 * HEADS]
    sums: cute.struct.MemRange[Float32, 4 * HEADS]
    full: cute.struct.MemRange[Int64, GROUPS]
    # full: [group], of both tiles and of Q
    ready: cute.struct.MemRange[Int64, 1]
    # ready: whoever has a step may send columns to this CTA
    received: cute.struct.MemRange[Int64, 1]
    # received: the columns of all steps


class StepAttention(Producers, Scores):
    """The kernel of one configuration. `launch` is what is compiled; its arguments are those of `Arguments`."""

    @cute.jit
    def launch(self, arguments: Arguments, num_steps: Int32, stream: cuda.CUstream) -> None:
        """As many CTAs as a token may have steps are a cluster."""
        copy_out = None
        if const_expr(not self.configuration.fp32_out):
            copy_out = copy_of_out(arguments)
        self.kernel(arguments, copy_of_q(arguments), copy_out).launch(
            grid=[num_steps, self.configuration.shares, arguments.num_tokens * self.head_blocks(arguments)],
            cluster=[num_steps, 1, 1],
            block=[self.configuration.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, args: Arguments, copy_q: Copy, copy_out: Copy | None) -> None:
        """Sets up barriers and sends every warp to its role with its share of registers."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.utils.SmemAllocator().allocate(StepShared)
        step, share, index = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        token = index >> (self.head_blocks(args) - 1)
        head_block = index & (self.head_blocks(args) - 1)
        if warp == 0:
            with cute.arch.elect_one():
                for group in cutlass.range_constexpr(GROUPS):
                    cute.arch.mbarrier_init(
                        shared.full.data_ptr() + group, 1 + STEP * LANES // 32 + self.asynchronous(group)
                    )
                cute.arch.mbarrier_init(shared.ready.data_ptr(), num_ctas)
                cute.arch.mbarrier_init(shared.received.data_ptr(), 1)
                cute.arch.mbarrier_init_fence()
            self.load_q(shared, copy_q, token, head_block)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed(aligned=True)
        visible, number = self.visible_entries(args, token), Int32(-1)
        gathering = thread - CONSUMER_THREADS
        if gathering >= 0:
            number = self.listed_row(args, token, step, gathering // LANES)
        cute.arch.barrier()
        if warp < CONSUMER_THREADS // 32:
            cute.arch.setmaxregister_increase(self.configuration.registers[0])
            steps = self.steps(args, visible)
            item = Item(token, head_block, step, steps, share, step, steps, True, visible)
            self.consume_step(args, shared, copy_out, thread, warp // 4, item)
        else:
            cute.arch.setmaxregister_decrease(self.configuration.registers[1])
            self.produce_step(
                args, shared, gathering, step, self.visible_row(args, visible, step, gathering // LANES, number)
            )
            cute.arch.cluster_wait()

    # Producers

    @cute.jit
    def listed_row(self, args: Arguments, token: Int32, step: Int32, place: Int32) -> Int32:
        """What a list has at a place of a step, whether the token may read it or not; -1 where there is no list.

        Unlike `Producers.row_number` it need not wait for what is visible, which is loaded at the same time.
        """
        window_steps = (args.window_width + STEP - 1) // STEP
        slot, number = step * STEP + place, Int32(-1)
        if step < window_steps:
            if slot < args.window_width:
                number = ptx.load_i32(args.window_rows + (Int64(token) * args.window_rows_stride + slot) * 4)
        else:
            entry = slot - window_steps * STEP
            if entry < args.num_entries:
                if const_expr(self.configuration.entries == Entries.LIST):
                    number = ptx.load_i32(args.entry_list + (Int64(token) * args.entry_list_stride + entry) * 4)
                elif const_expr(self.configuration.entries == Entries.PAGES):
                    request = ptx.load_i32(args.token_to_request + Int64(token) * 4)
                    page = Int64(request) * args.entry_list_stride + entry // args.entries_per_page
                    number = ptx.load_i32(args.entry_list + page * 4)
                    number = number * args.entries_per_page + entry % args.entries_per_page
        return number

    @cute.jit
    def visible_row(self, args: Arguments, visible: Int32, step: Int32, place: Int32, number: Int32) -> Int32:
        """The number, or -1 if the token must not read it."""
        slot = (step - (args.window_width + STEP - 1) // STEP) * STEP + place
        if slot >= visible:
            if slot >= 0:
                number = Int32(-1)
        return number

    @cute.jit
    def produce_step(
        self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, step: Int32, number: Int32
    ) -> None:
        """Fills all groups with the rows of a step; `number` is this thread's row.

        FP8 rows wait in registers: loads are issued AHEAD groups before their conversion. With more of them the warp
        would be held up by the queue of loads, and so would be the groups that have come.
        """
        lane, warp, row, part = thread % 32, thread // 32, thread // LANES, thread % LANES
        address = self.row_address(args, step, number) + part * 16
        order, words, scales = self.groups_in_order(), {}, None
        if const_expr(self.configuration.fp8_rows):
            scales = ptx.load_8_bytes(self.scales_address(args, step, number), number)
            for group in order[:AHEAD]:
                words[group] = self.load_words(address, group)
        bits = self.bits_of_rows(number >= 0)
        if lane == 0:
            (shared.rows.data_ptr() + warp).store(Uint8(bits))
        place = Int32(shared.keys.data_ptr().toint()) + row // TILE * TILE_BYTES + row % TILE * ROW_STRIDE
        self.fill_groups(shared, place, row, part, lane, address, order, words, scales)

    def fill_groups(
        self,
        shared: cutlass.Constexpr,
        place: Int32,
        row: Int32,
        part: Int32,
        lane: Int32,
        address: Int64,
        order: list,
        words: dict,
        scales: tuple | None,
    ) -> None:
        """One after the other, in the order in which the scores need them."""
        for i, group in enumerate(order):
            block, barrier = place + group * BLOCK_BYTES, shared.full.data_ptr() + group
            if self.asynchronous(group):
                offset = NOPE_DIM if self.configuration.fp8_rows else group * GROUP * 2
                for j in range(ROW_STRIDE // 16 // LANES):
                    target = block + ((j * LANES + part) ^ (row & 7)) * 16
                    ptx.copy_row_async(target, address, offset + j * LANES * 16)
            else:
                scale = ptx.scale_pair((scales[group // 4] >> (8 * (group % 4))) & 0xFF)
                self.store_16_channels(block, 0, row, part, words.pop(group), scale)
                cute.arch.fence_view_async_shared()  # generic stores, read by wgmma
                cute.arch.sync_warp()
            self.arrive_for_warp(barrier, lane)
            if self.asynchronous(group):
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
            if self.configuration.fp8_rows and i + AHEAD < GROUPS:
                words[order[i + AHEAD]] = self.load_words(address, order[i + AHEAD])

    def load_words(self, address: Int64, group: int) -> tuple:
        """A lane's e4m3 of a group of its row; nothing of the group that is no e4m3."""
        return () if self.asynchronous(group) else ptx.load_16_bytes(address, group * GROUP)

    def asynchronous(self, group: int) -> int:
        """Arrivals at full[group] by completed cp.async: bf16 rows, and the last channels of FP8 rows."""
        return STEP * LANES if group == GROUPS - 1 or not self.configuration.fp8_rows else 0

    @cute.jit
    def load_q(self, shared: cutlass.Constexpr, copy_q: Copy, token: Int32, head_block: Int32) -> None:
        """Starts copying Q; a group of its channels is part of that group of the keys'."""
        places = shared.q.get_tensor(*layout(swizzled_atom(), (HEADS, GROUP, GROUPS)))
        targets, sources = partition(copy_q, places)
        for group in self.groups_in_order():
            full = shared.full.data_ptr() + group
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, BLOCK_BYTES)
            cute.copy(copy_q.atom, sources[None, head_block, group, token], targets[None, group], tma_bar_ptr=full)

    @cute.jit
    def consume_step(
        self, args: Arguments, shared: cutlass.Constexpr, copy_out: Copy | None, thread: Int32, which: Int32, item: Item
    ) -> None:
        """One consumer warpgroup: scores of tile `which`, channels [which * 256, + 256) of O, or a share of them."""
        in_group = thread % 128
        lane, warp = thread % 32, in_group // 32
        row = warp * WARP_HEADS + lane // 4
        full = shared.full.data_ptr()
        p_address = Int32(shared.p.data_ptr().toint())
        rows = cute.recast_ptr(shared.rows.data_ptr() + which * TILE // 8, dtype=Uint32)
        maxima = Int32(shared.maxima.data_ptr().toint()) + row * 4

        scores_mma, own_mma, other_mma, q_operand, key_operand, p_operand, value_operand = self.operands(
            shared, in_group
        )
        scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((HEADS, TILE)), Float32)
        shape = own_mma.partition_shape_C((HEADS, GROUP))
        products = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.configuration.share_groups)]
        own_p = cute.make_rmem_tensor(own_mma.partition_shape_A((HEADS, TILE)), BFloat16)
        packed_p = cute.recast_tensor(own_p, Uint32)
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)

        first_head = item.head_block * HEADS
        sinks = self.sink(args, first_head + row), self.sink(args, first_head + row + 8)
        holes = self.multiply_keys(full, Int32(0), which, rows, scores_mma, scores, q_operand, key_operand)
        self.mask(scores, holes, lane)
        highest = self.highest(args, scores, maxima, which, lane)
        cute.arch.cluster_wait()  # all CTAs of the cluster have begun
        if self.fits_early(item.last):
            self.announce(shared, thread, item)
        self.exponentials(args, scores, highest, packed_p, total)
        self.store_p(p_address + which * BLOCK_BYTES, packed_p, warp, lane)
        cute.arch.fence_view_async_shared()
        self.sync(Named.CONSUMERS)
        for i in cutlass.range_constexpr(self.configuration.share_groups):
            group = which * HALF_GROUPS + item.share * self.configuration.share_groups + i
            own_values = value_operand[None, None, None, which * GROUPS + group]
            multiply(own_mma, products[i], own_p, own_values, 0, False)
            other_p = p_operand[None, None, None, 1 - which]
            other_values = value_operand[None, None, None, (1 - which) * GROUPS + group]
            multiply(other_mma, products[i], other_p, other_values, 0, True)
        warpgroup.commit_group()
        maximum = cute.make_rmem_tensor((2,), Float32)
        for k in cutlass.range_constexpr(2):
            maximum[k] = highest[k]
        if self.fits_early(item.last):
            self.send_statistics(shared, thread, item, maximum, total)  # while products run
        warpgroup.wait_group(0)
        if not self.fits_early(item.last):
            self.sync(Named.CONSUMERS)  # both have read what they multiplied
            self.announce(shared, thread, item)
            self.send_statistics(shared, thread, item, maximum, total)
        write = functools.partial(self.write, args, item, which, row, lane)
        inverses = functools.partial(
            self.inverses, args, shared, item, which, row // WARP_HEADS, row, lane, item.first == 0, sinks
        )
        if item.last == 1:
            if item.first == 0:
                for product in products:
                    for j in cutlass.range_constexpr(cute.size(product)):
                        product[j] = product[j] + 0.0  # a zero's sign is lost wherever results are folded
                inverse = inverses(maximum, total)
                if const_expr(self.configuration.fp32_out):
                    write(inverse, products, self.units())
                else:
                    self.copy_whole(shared, copy_out, item, which, warp, lane, inverse, products)
        elif item.first < item.last:
            self.exchange(shared, thread, item, maximum, total, products)
            if self.first_unit(item.first, item.last) < self.first_unit(item.first + 1, item.last):
                inverse = inverses(maximum, total)
                write(inverse, products, self.units() // 2)

    def units(self) -> int:
        """What is shared out: columns of 8 channels of either consumer."""
        return self.configuration.share_groups * GROUP // 8

    def first_unit(self, step: Int32, steps: Int32) -> Int32:
        """Of the CTA that has a step; the first one has at least one."""
        return ptx.divide(step * self.units() + steps - 1, steps)

    def slot_bytes(self, steps: Int32) -> Int32:
        """Of what a CTA gets from a step: maxima and sums of two rows, [256 threads][4]; for the lse, sums before
        rounding, [256][2]; then its columns, [units][256][4]."""
        return self.first_unit(Int32(1), steps) * (CONSUMER_THREADS * 16) + self.statistics_bytes()

    def fits_early(self, steps: Int32) -> Boolean:
        """Whether what a CTA gets fits where Q was, which nobody reads after the scores, and in front of it."""
        return steps * self.slot_bytes(steps) <= SPARE_BYTES + HEADS * DIM * 2

    def statistics_bytes(self) -> int:
        """Of a slot: what is in front of the columns."""
        return CONSUMER_THREADS * (24 if self.configuration.lse else 16)

    @cute.jit
    def announce(self, shared: cutlass.Constexpr, thread: Int32, item: Item) -> None:
        """Tells the CTAs of the token, if several, that nobody reads any more what they will overwrite here."""
        cute.arch.sync_warp()
        if (thread < item.last) & (item.last > 1):
            ptx.arrive_remote(ptx.remote(Int32(shared.ready.data_ptr().toint()), thread))

    @cute.jit
    def send_statistics(
        self, shared: cutlass.Constexpr, thread: Int32, item: Item, maximum: cute.Tensor, total: cute.Tensor
    ) -> None:
        """Gives all CTAs of the token the maxima and sums of this step, as soon as they are ready for it."""
        if (item.first < item.last) & (item.last > 1):
            received, steps, unit_bytes = shared.received.data_ptr(), item.last, CONSUMER_THREADS * 16
            units = self.first_unit(item.first + 1, steps) - self.first_unit(item.first, steps)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(
                    received, steps * (units * unit_bytes + self.statistics_bytes())
                )
            slot = Int32(shared.spare.data_ptr().toint()) + thread * 16 + item.first * self.slot_bytes(steps)
            ptx.wait_cluster(Int32(shared.ready.data_ptr().toint()), Int32(0))
            for cta in cutlass.range(0, steps, 1, unroll=1):
                target, barrier = ptx.remote(slot, cta), ptx.remote(Int32(received.toint()), cta)
                ptx.store_async_f32x4(target, (maximum[0], total[0], maximum[1], total[1]), barrier)
                if const_expr(self.configuration.lse):
                    ptx.store_async_f32x2(target + (unit_bytes - thread * 8), (total[2], total[3]), barrier)

    @cute.jit
    def exchange(
        self,
        shared: cutlass.Constexpr,
        thread: Int32,
        item: Item,
        maximum: cute.Tensor,
        total: cute.Tensor,
        products: list,
    ) -> None:
        """Gives every CTA its columns of this step's product, and folds those of all steps that it gets."""
        received, steps, units = Int32(shared.received.data_ptr().toint()), item.last, self.units()
        begin, end = self.first_unit(item.first, steps), self.first_unit(item.first + 1, steps)
        slot_bytes, lead, unit_bytes = self.slot_bytes(steps), self.statistics_bytes(), CONSUMER_THREADS * 16
        base = Int32(shared.spare.data_ptr().toint()) + thread * 16
        slot = base + item.first * slot_bytes
        place, before = Int32(0), Int32(-1)
        for u in cutlass.range_constexpr(units):
            owner = u * steps // units
            place = (place + 1) if owner == before else Int32(0)
            before = owner
            words = tuple(products[u // 8][4 * (u % 8) + j] for j in range(4))
            target = ptx.remote(slot + (lead + place * unit_bytes), owner)
            ptx.store_async_f32x4(target, words, ptx.remote(received, owner))
        for product in products:
            product.fill(0.0)
        maximum.fill(NO_MAXIMUM)
        total.fill(0.0)
        ptx.wait_cluster(received, Int32(0))
        if end > begin:
            for step in cutlass.range(0, steps, 1, unroll=1):
                self.fold_slot(base + step * slot_bytes, thread, end - begin, maximum, total, products)

    def fold_slot(
        self, slot: Int32, thread: Int32, mine: Int32, maximum: cute.Tensor, total: cute.Tensor, products: list
    ) -> None:
        """Lets a step's columns, so many units of them, join those of the steps before it."""
        units, unit_bytes = self.units() // 2, CONSUMER_THREADS * 16
        statistics, exact = ptx.load_shared_f32x4(slot), (0.0, 0.0)
        if self.configuration.lse:
            exact = ptx.load_shared_f32x2(slot + (unit_bytes - thread * 8))
        words = []
        for u in range(units):
            existing = ptx.imin(Int32(u), mine - 1)  # of what this CTA has not, something else
            words.append(ptx.load_shared_f32x4(slot + (self.statistics_bytes() + existing * unit_bytes)))
        for k in range(2):
            sums = (statistics[1], statistics[3], *exact)
            before, weight = self.fold_statistics(maximum, total, statistics[2 * k], sums, k)
            for u in range(units):
                product = products[u // 8]
                for at in range(4 * (u % 8) + 2 * k, 4 * (u % 8) + 2 * k + 2):
                    product[at] = ptx.fma(words[u][at % 4], weight, product[at] * before)

    @cute.jit
    def write(
        self,
        args: Arguments,
        item: Item,
        which: Int32,
        row: Int32,
        lane: Int32,
        inverse: tuple,
        products: list,
        most: cutlass.Constexpr,
    ) -> None:
        """This CTA's columns of O, at most so many units."""
        begin, end = self.first_unit(item.first, item.last), self.first_unit(item.first + 1, item.last)
        for k in cutlass.range_constexpr(2):
            head = item.head_block * HEADS + row + 8 * k
            if head < args.num_heads:
                at = Int64(item.token) * args.out_token_stride + Int64(head) * args.out_head_stride
                at += self.first_channel(item, which) + begin * 8 + lane % 4 * 2
                for u in cutlass.range_constexpr(most):
                    if u < end - begin:
                        first = 4 * (u % 8) + 2 * k
                        low, high = products[u // 8][first] * inverse[k], products[u // 8][first + 1] * inverse[k]
                        if const_expr(self.configuration.fp32_out):
                            ptx.store_f32x2(args.out + (at + u * 8) * 4, (low, high))
                        else:
                            ptx.store_u32(args.out + (at + u * 8) * 2, ptx.pack_bf16(low, high))

    @cute.jit
    def copy_whole(
        self,
        shared: cutlass.Constexpr,
        copy_out: Copy,
        item: Item,
        which: Int32,
        warp: Int32,
        lane: Int32,
        inverse: tuple,
        products: list,
    ) -> None:
        """All columns of O of a token with a single step, by the copy engine, from where Q was."""
        q = Int32(shared.q.data_ptr().toint())
        places = shared.q.get_tensor(*layout(swizzled_atom(), (WARP_HEADS, GROUP, HEADS // WARP_HEADS, GROUPS)))
        sources, targets = partition(copy_out, places)
        heads = item.head_block * (HEADS // WARP_HEADS) + warp
        for i in cutlass.range_constexpr(len(products)):
            words = self.output_words(products[i], inverse)
            block = which * HALF_GROUPS + i
            self.store_p(q + block * BLOCK_BYTES, words, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            group = which * HALF_GROUPS + item.share * self.configuration.share_groups + i
            if lane == 0:
                cute.copy(copy_out.atom, sources[None, warp, block], targets[None, heads, group, item.token])
        if lane == 0:
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def output_words(self, product: cute.Tensor, inverse: tuple) -> list[Uint32]:
        """64 channels of O, in bf16."""
        pairs = range(cute.size(product) // 2)
        return [ptx.pack_bf16(*(product[2 * i + j] * inverse[i % 2] for j in range(2))) for i in pairs]
