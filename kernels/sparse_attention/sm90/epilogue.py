"""Results of the Hopper kernels: how they are folded, normalised and written (see persistent.py)."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from dsv4_kernels import ptx
from dsv4_kernels.sparse_attention.sm90.plan import (
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
    TILE,
    WARP_HEADS,
    Arguments,
    Copy,
    Named,
    layout,
    partition,
    swizzled_atom,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import Item, WorkItems


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

    def inverses(
        self,
        args: Arguments,
        shared: cutlass.Constexpr,
        item: Item,
        which: Int32,
        warp: Int32,
        row: Int32,
        lane: Int32,
        is_first: Boolean,
        sinks: tuple,
        maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> tuple:
        """The same where several CTAs have columns of O, of which the first one writes the log-sum-exp; for a warp of
        either consumer."""
        self.sum_up(shared, which, row, lane, total, Named.MERGE + warp, 64)
        wanted = (which == 0) & (item.share == 0) & is_first
        self.store_lse_of_rows(args, item, wanted, row, lane, maximum, total)
        return tuple(self.inverse(sinks[k], maximum[k], total[k]) for k in range(2))

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
