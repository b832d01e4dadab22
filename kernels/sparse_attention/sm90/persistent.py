"""Attention on Hopper: wgmma over gathered rows, one persistent kernel for decode, speculation and prefill. (Few tokens
with few keys have another one, cluster.py, with the same bits.)

A work item is one query token, one block of 64 heads, one piece of its keys and one share of the channels of O. A CTA
walks over items; of each item it reads Q once and then keys in steps of 128, two tiles of 64. The keys of a step are
bf16 in shared memory, K (K-major) and V (MN-major) at once, filled and released in eight groups of 64 channels.

    who             does                                                        waits for
    producer 0, 1   gathers rows: e4m3 -> bf16, st.shared; cp.async             free[group], of its four groups
    consumer 0, 1   S = Q K^T of its tile, group by group as they come          full[group], of all eight
                    the maximum over both tiles, P = 2**(S - maximum)           the other one's maximum
                    64 channels of P V at a time, of its half; O takes them in  the other one's P

There are two of each, side by side and in the same code: a consumer has the scores of one tile and half of the channels
of O, in registers; a producer fills one half of the channels of both tiles. A group is free again when its product is
done, which is the last thing that reads it: the scores came before, and the exchange of P says so of the other tile's.
Consumer 0 gives its P away when its first product is on its way. So the products take turns: while one consumer folds,
the other one's runs.

bf16 rows are only copied, which one producer does for both halves. The registers of a second one hold the other
consumer's P, which `wgmma` would read from shared memory for every group again, beside keys and copies.

Where tokens have a CTA each, little stops between them: Q of the next one is copied as soon as nobody reads this one's,
and O of this one is written, from where P was, while the first scores of the next one are computed. Both times the copy
engine does it.

Where there are few tokens, several CTAs divide the channels of O: each computes all scores, which repeats work, but has
only its share of the products, of the output and of what is merged. Groups of other shares are free after the scores.
The registers that O leaves go to a second pair of producers, which take turns with the first.

Every step is computed as if it were alone, with its own maximum and products that begin at zero. Then it is folded into
O and the sums (`Results.factors`): O = O * a + (P V) * b in fp32. So it does not matter who computes a step, as long as
the order of the folding is kept: a query's steps are folded within parts, and parts with each other, and the parts
follow from the query's own length alone (`split.num_parts`, `split.part_steps`). Results are bitwise the same in any
batch, on any number of multiprocessors, with `split_keys` for a token that has one part and without. What may depend on
the batch is who does it: if all of them fit on the GPU at once, parts are divided into pieces of a few steps, and the
channels into shares; if tokens are many, a CTA has whole ones, and folds their parts by way of a scratch slot of its
own. The scores are summed over the channels in one order, whatever a CTA's share. A piece at the beginning of a part
folds its steps; any other leaves each of them as a partial result of its own, because nobody has yet what it would have
to be folded into.

Maxima, in units of log2, only move when a step's exceeds them by more than RESCALE_ABOVE, which is rare after an item's
first step. There are two sums: of P as it is multiplied, in bf16, which normalises O; and of P before rounding, for the
log-sum-exp.

Who does what is found out by one warp, for an item after the other while rows are on their way, and read by all in
shared memory (`WorkItems.know_item`); producers, which are ahead, do so by themselves, but for the first item.

Partial results are fp32, in scratch slots of their CTA. Every CTA of a query then merges a share of the columns and
rows, one item later than it wrote its own: nobody waits while there is work. Where only the first piece of a query has
a step more than the others, these merge, and get all results but the first one while they wait for it. A CTA waits for
pieces of the same query, whose numbers are below that of the item it has just written, and before it writes to a slot
again for the merge that reads it, which is older still. So the waiting ends, if all CTAs are resident at once (at most
one a multiprocessor) and a token's parts are no more than the CTAs, which `sparse_attention` checks.
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from dsv4_kernels import ptx
from dsv4_kernels.sparse_attention.sm90.combine import Merging
from dsv4_kernels.sparse_attention.sm90.plan import (
    BLOCK_BYTES,
    CONSUMER_THREADS,
    DIM,
    GROUP,
    GROUPS,
    HALF_GROUPS,
    HEADS,
    NO_MAXIMUM,
    PRODUCER_THREADS,
    ROW_STRIDE,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    TILE,
    WARP_HEADS,
    Arguments,
    Copy,
    Named,
    Shared,
    Split,
    copy_of_out,
    copy_of_q,
    layout,
    partition,
    swizzled_atom,
)
from dsv4_kernels.sparse_attention.sm90.producers import Producers
from dsv4_kernels.sparse_attention.sm90.scores import Scores, multiply
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import Item


class SparseAttention(Producers, Scores, Merging):
    """The kernel of one configuration. `launch` is what is compiled; its arguments are those of `Arguments`."""

    @cute.jit
    def launch(self, arguments: Arguments, num_ctas: Int32, stream: cuda.CUstream) -> None:
        """Persistent: the CTAs must all be resident at once."""
        copy_q = None
        if const_expr(not self.configuration.split):
            copy_q = copy_of_q(arguments)
        copy_out = None
        if const_expr(not self.configuration.fp32_out):
            copy_out = copy_of_out(arguments)
        self.kernel(arguments, copy_q, copy_out).launch(
            grid=[num_ctas, 1, 1], block=[self.configuration.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, args: Arguments, copy_q: Copy | None, copy_out: Copy | None) -> None:
        """Sets up barriers, counts pieces, and sends every warp to its role with its share of registers."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.utils.SmemAllocator().allocate(Shared)
        if warp == 0:
            with cute.arch.elect_one():
                for group in cutlass.range_constexpr(GROUPS):
                    cute.arch.mbarrier_init(
                        shared.full.data_ptr() + group, PRODUCER_THREADS // 32 + self.asynchronous(group)
                    )
                    cute.arch.mbarrier_init(shared.free.data_ptr() + group, 4)
                cute.arch.mbarrier_init(shared.q_full.data_ptr(), 1)
                cute.arch.mbarrier_init_fence()
        if const_expr(self.configuration.split):
            if warp == CONSUMER_THREADS // 32:
                self.count_pieces(args, shared, thread % 32)
            elif warp > CONSUMER_THREADS // 32:
                self.prefetch_lists(args, thread - CONSUMER_THREADS - 32)
        cute.arch.barrier()
        if warp < CONSUMER_THREADS // 32:
            cute.arch.setmaxregister_increase(self.configuration.registers[0])
            self.consume(args, shared, copy_q, copy_out, thread, warp // 4)
        else:
            cute.arch.setmaxregister_decrease(self.configuration.registers[1])
            producer = warp // 4 - CONSUMER_THREADS // 128
            self.produce(args, shared, thread % 128, producer % 2, producer // 2)

    # Consumers

    @cute.jit
    def consume(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        copy_q: Copy | None,
        copy_out: Copy | None,
        thread: Int32,
        which: Int32,
    ) -> None:
        """One consumer warpgroup: scores of tile `which`, channels [which * 256, + 256) of O."""
        in_group = thread % 128
        lane, warp = thread % 32, in_group // 32
        row = warp * WARP_HEADS + lane // 4  # of the accumulators' first row; the second is row + 8
        full, free = shared.full.data_ptr(), shared.free.data_ptr()
        p_address = Int32(shared.p.data_ptr().toint())
        rows = cute.recast_ptr(shared.rows.data_ptr() + which * TILE // 8, dtype=Uint32)
        maxima = Int32(shared.maxima.data_ptr().toint()) + row * 4

        scores_mma, own_mma, other_mma, q_operand, key_operand, p_operand, value_operand = self.operands(
            shared, in_group
        )

        # Of the accumulators: element 4 * j + 2 * i + k of a thread is row `row` + 8 i, column 8 j + 2 (lane % 4) + k.
        out = cute.make_rmem_tensor((HEADS * GROUP // 128 * self.configuration.share_groups,), Float32)
        scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((HEADS, TILE)), Float32)
        product = cute.make_rmem_tensor(own_mma.partition_shape_C((HEADS, GROUP)), Float32)
        own_p = cute.make_rmem_tensor(own_mma.partition_shape_A((HEADS, TILE)), BFloat16)
        packed_p = cute.recast_tensor(own_p, Uint32)
        other_p = p_operand[None, None, None, 1 - which]
        p_in_registers = self.configuration.p_in_registers
        if const_expr(p_in_registers):
            other_mma, other_p = own_mma, cute.make_rmem_tensor(own_mma.partition_shape_A((HEADS, TILE)), BFloat16)
        weight, step_total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
        # Of two rows each: maxima; sums of P as it is multiplied, and sums before rounding.
        maximum, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)

        num_items = self.num_items(args, shared)
        ctas, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        share = self.share(index)
        phase = Int32(0)
        split = self.configuration.split
        turn, stop = Int32(0), num_items
        if const_expr(split):
            stop += ctas  # a token's share is merged one turn later than its piece was written
        inverse = cute.make_rmem_tensor((2,), Float32)
        store_out = functools.partial(self.store_out, args, shared, copy_out)
        steps = Int32(0)  # of the item at hand, if it is a whole token
        if index < num_items:
            self.load_q(args, shared, copy_q, thread, index, turn)
            if thread < 2 * HEADS:
                (shared.sinks.data_ptr() + thread).store(self.sink(args, thread))
            if const_expr(not split):
                steps = self.steps_of_item(args, index)
                self.clear(maximum, total, out)
        while index < stop:
            if index < num_items:
                if const_expr(split):
                    item = self.known_item(shared, turn)
                    self.clear(maximum, total, out)
                    self.wait_for_slot(args, shared, thread, turn - SCRATCH_SLOTS)
                else:
                    item = self.whole_token(args, index, steps)
                self.wait_for_q(shared, turn)
                if const_expr(split):
                    # While the first rows are on their way.
                    if thread < 32:
                        if (turn == 0) & (item.pieces > 1):
                            self.list_partials(args, shared, lane, item, index, chooses=True)
                        if index + ctas < num_items:
                            self.know_item(args, shared, index + ctas, turn + 1, lane)
                step, first_export = item.first, item.last  # the first step that leaves a partial result
                if const_expr(split):
                    if item.pieces > 1:
                        first_export = item.last - 1
                        if not item.begins:
                            first_export = item.first  # nobody has yet what this would be folded into
                while step < item.last:
                    # Anew in every step, so that descriptors are computed where they are used, not kept in registers.
                    which = cute.arch.make_warp_uniform(which)
                    multiply_keys = functools.partial(
                        self.multiply_keys, full, phase, which, rows, scores_mma, scores, q_operand, key_operand
                    )
                    holes = Uint32(0), Uint32(0)
                    if const_expr(not self.configuration.overlaps):
                        holes = multiply_keys()
                    elif (step == item.first) & (index >= ctas):
                        before = self.whole_token(args, index - ctas, Int32(0))
                        store = functools.partial(store_out, before, which, warp, lane, out, inverse)
                        holes = multiply_keys(store)
                        self.finish_store()
                    else:
                        holes = multiply_keys()
                    self.mask(scores, holes, lane)
                    highest = self.highest(args, scores, maxima, which, lane)
                    if const_expr(not split):
                        if (step == item.last - 1) & (index + ctas < num_items):  # nobody reads Q any more
                            self.load_q(args, shared, copy_q, thread, index + ctas, turn + 1)
                            steps = self.steps_of_item(args, index + ctas)
                    if const_expr(self.configuration.shares > 1):
                        self.release_others(free + which * HALF_GROUPS, share, lane)
                    self.exponentials(args, scores, highest, packed_p, step_total)
                    self.store_p(p_address + which * BLOCK_BYTES, packed_p, warp, lane)
                    if const_expr(not p_in_registers):  # else it is read as it is written, not by wgmma
                        cute.arch.fence_view_async_shared()
                    if which == 1:  # consumer 0 comes there with its first product, ahead of this one's
                        self.arrive(Named.P + 1)
                    self.fold_sums(highest, step_total, maximum, total, weight, out)
                    self.sync(Named.P + 1 - which)
                    if const_expr(p_in_registers):
                        words = cute.recast_tensor(other_p, Uint32)
                        self.load_p(p_address + (1 - which) * BLOCK_BYTES, words, warp, lane)
                    for i in cutlass.range_constexpr(self.configuration.share_groups):
                        share = self.anew(share)
                        place = share * self.configuration.share_groups + i
                        if const_expr(self.configuration.shares == 1):
                            place = self.place(i)
                        group = which * HALF_GROUPS + place
                        own_values = value_operand[None, None, None, which * GROUPS + group]
                        multiply(own_mma, product, own_p, own_values, 0, False)
                        other_values = value_operand[None, None, None, (1 - which) * GROUPS + group]
                        multiply(other_mma, product, other_p, other_values, 0, True)
                        warpgroup.commit_group()
                        if const_expr(i == 0):
                            if which == 0:
                                self.arrive(Named.P)
                        warpgroup.wait_group(0)
                        self.arrive_for_warp(free + group, lane)
                        first = (place if const_expr(self.configuration.shares == 1) else i) * cute.size(product)
                        for j in cutlass.range_constexpr(cute.size(product)):
                            out[first + j] = ptx.fma(product[j], weight[j // 2 % 2], out[first + j])
                        if const_expr(split):
                            if step >= first_export:  # while the next product runs
                                slot = self.slot(args, turn, step - first_export) + thread * 16
                                self.store_columns(slot, out, first // 4, cute.size(product) // 4)
                    if const_expr(split):
                        if step >= first_export:
                            slot = self.slot(args, turn, step - first_export)
                            self.store_statistics(slot + SLOT_BYTES, thread, maximum, total)
                            self.clear(maximum, total, out)
                        elif const_expr(split == Split.PARTS):
                            if self.ends_part(args, item, step + 1):
                                self.set_aside(args, turn, thread, step + 1, item.last, maximum, total, out)
                    phase ^= 1
                    step += 1
                if const_expr(split):
                    self.sync(Named.CONSUMERS)  # nobody reads Q any more, and what this CTA leaves is stored
                    item = self.known_item(shared, turn)  # again: its numbers need no registers meanwhile
                    if item.pieces > 1:
                        if thread == 0:
                            self.count_piece(args, shared, item)
                    if index + ctas < num_items:
                        self.load_q(args, shared, copy_q, thread, index + ctas, turn + 1)
                    if item.pieces == 1:
                        factors = cute.make_rmem_tensor((2,), Float32)
                        self.normalise(args, shared, item, which, row, lane, maximum, total, factors)
                        self.store_all(functools.partial(store_out, item, which, warp, lane, out, factors))
                else:
                    item = self.whole_token(args, index, Int32(0))
                    self.normalise(args, shared, item, which, row, lane, maximum, total, inverse)
                    maximum.fill(NO_MAXIMUM)
                    total.fill(0.0)
                    if (index + ctas >= num_items) | (not self.configuration.overlaps):
                        self.store_all(functools.partial(store_out, item, which, warp, lane, out, inverse))
            if const_expr(split):
                if turn > 0:
                    item = self.item(args, shared, index - ctas, turn - 1)
                    if item.pieces > 1:
                        self.merge(args, shared, thread, which, item, index - ctas, turn - 1, num_items)
            turn += 1
            index += ctas
        if const_expr(split):
            if self.slots_are_reused(num_items):
                self.leave(args, shared, thread)

    @cute.jit
    def release_others(self, free: cute.Pointer, share: Int32, lane: Int32) -> None:
        """Gives back this consumer's groups of other CTAs' shares, which only the scores were for."""
        for place in cutlass.range_constexpr(HALF_GROUPS):
            if place // self.configuration.share_groups != share:
                self.arrive_for_warp(free + place, lane)

    @cute.jit
    def load_q(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        copy_q: Copy | None,
        thread: Int32,
        index: Int32,
        turn: Int32,
    ) -> None:
        """Starts copying Q of an item to shared memory, zeros where there are no heads.

        One thread, by the copy engine; where keys are divided, which leaves no registers for that, all consumers.
        """
        if const_expr(self.configuration.split):
            self.load_q_rows(args, shared, thread, self.known_item(shared, turn))
        elif thread < 32:
            item = self.whole_token(args, index, Int32(0))
            full = shared.q_full.data_ptr()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, HEADS * DIM * 2)
            places = shared.q.get_tensor(*layout(swizzled_atom(), (HEADS, GROUP, GROUPS)))
            targets, sources = partition(copy_q, places)
            for group in cutlass.range_constexpr(GROUPS):
                source = sources[None, item.head_block, group, item.token]
                cute.copy(copy_q.atom, source, targets[None, group], tma_bar_ptr=full)

    @cute.jit
    def load_q_rows(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, item: Item) -> None:
        """Starts copying Q of an item to shared memory, zeros where there are no heads; all consumers do."""
        base = Int32(shared.q.data_ptr().toint())
        for i in cutlass.range_constexpr(HEADS * DIM * 2 // 16 // CONSUMER_THREADS):
            row = i * (CONSUMER_THREADS // 64) + thread // 64
            place = thread % 64  # of 16 bytes in the row
            head = item.head_block * HEADS + row
            num_bytes = Int32(16)
            if head >= args.num_heads:
                num_bytes, head = Int32(0), Int32(0)
            source = Int64(item.token) * args.q_token_stride + Int64(head) * args.q_head_stride
            block = base + (place // 8) * BLOCK_BYTES + row * ROW_STRIDE
            ptx.copy_async(block + ((place % 8) ^ (row & 7)) * 16, args.q + source * 2 + place * 16, num_bytes)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def wait_for_q(self, shared: cutlass.Constexpr, turn: Int32) -> None:
        """Until Q of this turn's item is there."""
        if const_expr(self.configuration.split):
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            self.sync(Named.CONSUMERS)
        else:
            cute.arch.mbarrier_wait(shared.q_full.data_ptr(), turn % 2)

    @cute.jit
    def fold_sums(
        self,
        highest: tuple,
        step_total: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Takes a step into the sums and makes O ready for it: `weight` is the factor of what P yields."""
        before = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            before[i], weight[i] = self.factors(maximum, highest[i], i)
            for k in cutlass.range_constexpr(0, 4, 2):
                total[k + i] = ptx.fma(step_total[k + i], weight[i], total[k + i] * before[i])
        if cute.arch.vote_any_sync((before[0] != 1.0) | (before[1] != 1.0)):
            for j in cutlass.range_constexpr(cute.size(out)):
                out[j] = out[j] * before[j // 2 % 2]
