"""Attention on Hopper (sm_90a): wgmma over gathered rows, one persistent kernel for decode, speculation and prefill.

A work item is one query token, one block of 64 heads and one part of its keys. A CTA walks over items; of each item it
reads Q once and then keys in steps of 128: two tiles of 64 keys. A tile is a [64 x 512] bf16 buffer in shared memory
that is K (K-major) and V (MN-major) at once; it is filled and released in halves of 256 channels, left and right.

    who                       does                                             waits for
    producers (2 warpgroups)  gather rows, e4m3 -> bf16, st.shared; cp.async   free[tile][half], in consumption order
    consumer 0                S0 = Q K0^T, P0; O[:, :256] += P0 V0 + P1 V1     full[0][both], full[1][left], consumer 1
    consumer 1                S1 = Q K1^T, P1; O[:, 256:] += P1 V1 + P0 V0     full[1][both], full[0][right], consumer 0

Both consumers keep [64 x 256] of O in registers, so each computes the scores of one tile and hands its probabilities to
the other through shared memory. Every step begins with the scores. Then consumer 1's maximum builds on consumer 0's and
consumer 0 takes over the result, so that both end a step with the same one; the softmax of one hides behind products of
the other:

    consumer 0:  S0 | P0, maxima 0 -> | O += P0 V0 | -> maxima 1, rescale P0 and O, P0 -> | -> P1, O += P1 V1
    consumer 1:  S1 | -> maxima 0, P1, maxima 1 ->, P1 -> | O += P1 V1 | -> P0, O += P0 V0

A half is free again when its last product is done. That is of tile 0 left and tile 1 left consumer 0's, of the right
halves consumer 1's; the scores of the same half came before, and the exchange of P says so.

Maxima, in units of log2, only move when scores exceed them by more than RESCALE_ABOVE, which is rare after an item's
first step. The first one is exact: the largest weight of few keys is one. Where consumer 1 moves them it is by a whole
number, because P0 is in bf16 by then: it follows by a power of two, exactly. There are two sums: of P as it is
multiplied, in bf16, which normalises O; and of P before rounding, for the log-sum-exp.

A query's keys are divided in parts by its own length alone (`split.num_parts`, `split.part_steps`). Parts leave fp32
partial results in a ring of scratch slots of their CTA. Then every CTA of a query merges a share of the columns, over
all parts in their order, one item later than it wrote its own: nobody waits while there is work. A CTA waits for parts
of the same query, whose numbers are below that of the item it has just written, and before it writes to a slot again
for the merge that reads it, which is older still. So the waiting ends, if all CTAs are resident at once (at most one a
multiprocessor) and a token's parts are no more than the CTAs, which `sparse_attention` checks. Nothing depends on which
CTA ran when: results are bitwise the same in any batch.
"""

import functools
from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4_kernels.compile_cache import load_or_compile
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention import sm90_ptx as ptx
from dsv4_kernels.sparse_attention.addresses import address, row_bytes
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.scratch import Scratch
from dsv4_kernels.sparse_attention.sm90_gather import Producers
from dsv4_kernels.sparse_attention.sm90_plan import (
    BLOCK_BYTES,
    CONSUMER_REGISTERS,
    CONSUMER_THREADS,
    DIM,
    HALF,
    HEADS,
    LOG2_E,
    MAX_SPLIT_TOKENS,
    NO_MAXIMUM,
    PRODUCER_REGISTERS,
    PRODUCER_THREADS,
    RESCALE_ABOVE,
    ROW_STRIDE,
    SCRATCH_SLOTS,
    SLOT_BYTES,
    STATISTICS_BYTES,
    THREADS,
    TILE,
    Arguments,
    Configuration,
    Entries,
    Named,
    Shared,
)
from dsv4_kernels.sparse_attention.sm90_results import Results
from dsv4_kernels.sparse_attention.split import STEP_KEYS


class SparseAttention(Producers, Results):
    """The kernel of one configuration. `launch` is what is compiled; its arguments are those of `Arguments`."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    @cute.jit
    def launch(self, arguments: Arguments, num_ctas: Int32, stream: cuda.CUstream) -> None:
        """Persistent: the CTAs must all be resident at once."""
        self.kernel(arguments).launch(grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, args: Arguments) -> None:
        """Sets up barriers, counts parts, and sends every warp to its role with its share of registers."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.utils.SmemAllocator().allocate(Shared)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(
                        shared.full.data_ptr() + i, PRODUCER_THREADS // 32 + self.asynchronous(i % 2)
                    )
                    cute.arch.mbarrier_init(shared.free.data_ptr() + i, 4)
                cute.arch.mbarrier_init_fence()
        if const_expr(self.configuration.split):
            self.count_parts(args, shared, thread)
        cute.arch.barrier()
        if warp < CONSUMER_THREADS // 32:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp < 4:
                self.consume(args, shared, thread, 0)
            else:
                self.consume(args, shared, thread, 1)
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(args, shared, thread - CONSUMER_THREADS)

    # Consumers

    @cute.jit
    def consume(self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, which: cutlass.Constexpr) -> None:
        """One consumer warpgroup: scores of tile `which`, channels [which * 256, + 256) of O."""
        in_group = thread % 128
        lane, warp = thread % 32, in_group // 32
        row = warp * 16 + lane // 4  # of the accumulators' first row; the second is row + 8
        full, free = shared.full.data_ptr(), shared.free.data_ptr()
        p_own = Int32(shared.p.data_ptr().toint()) + which * BLOCK_BYTES
        rows = cute.recast_ptr(shared.rows.data_ptr() + which * TILE // 8, dtype=Uint32)
        maxima = Int32(shared.maxima.data_ptr().toint()) + row * 4
        sums = Int32(shared.sums.data_ptr().toint()) + row * 4

        # The same blocks of shared memory as operands of four products.
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        q = shared.q.get_tensor(*layout(swizzled, (HEADS, DIM)))
        keys = shared.keys.get_tensor(*layout(swizzled, (TILE, HALF, 4)))
        p = shared.p.get_tensor(*layout(swizzled, (HEADS, TILE, 2)))
        values = cute.composition(keys, cute.make_ordered_layout((HALF, TILE, 4), order=(1, 0, 2)))

        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        types = (BFloat16, BFloat16)
        scores_mma = hopper.make_trivial_tiled_mma(*types, k_major, k_major, Float32, (1, 1, 1), (HEADS, TILE))
        own_mma = hopper.make_trivial_tiled_mma(
            *types, k_major, mn_major, Float32, (1, 1, 1), (HEADS, HALF // 2), warpgroup.OperandSource.RMEM
        )
        other_mma = hopper.make_trivial_tiled_mma(*types, k_major, mn_major, Float32, (1, 1, 1), (HEADS, HALF // 2))
        part = scores_mma.get_slice(in_group)
        q_operand = part.make_fragment_A(part.partition_A(q))
        key_operand = part.make_fragment_B(part.partition_B(keys))
        part = other_mma.get_slice(in_group)
        other_p_operand = part.make_fragment_A(part.partition_A(p))[None, None, None, 1 - which]
        value_operand = part.make_fragment_B(part.partition_B(values))
        own_values = value_operand[None, None, None, 2 * which + which]
        other_values = value_operand[None, None, None, 2 * (1 - which) + which]

        out = cute.make_rmem_tensor(own_mma.partition_shape_C((HEADS, HALF)), Float32)
        scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((HEADS, TILE)), Float32)
        own_p = cute.make_rmem_tensor(own_mma.partition_shape_A((HEADS, TILE)), BFloat16)
        packed_p = cute.recast_tensor(own_p, Uint32)
        # Of two rows each: maxima; sums of P as it is multiplied, and sums before rounding.
        maximum, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Float32)
        num_sums = 4 if const_expr(self.configuration.lse) else 2

        num_items = self.num_items(args, shared)
        ctas, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        phase = Int32(0)
        split = self.configuration.split
        pending, history = Int32(-1), cute.make_rmem_tensor((SCRATCH_SLOTS,), Int32)
        history.fill(-1)
        if index < num_items:
            item = self.item(args, shared, index)
            self.load_q(args, shared, thread, item.token, item.head_block)
        while index < num_items:
            item = self.item(args, shared, index)
            following = index + ctas
            for i in cutlass.range_constexpr(2):
                maximum[i] = Float32(NO_MAXIMUM)
            total.fill(0.0)
            out.fill(0.0)
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            self.sync(Named.CONSUMERS)
            if const_expr(which == 1):
                if in_group < HEADS:
                    sink = self.sink(args, item.head_block * HEADS + in_group)
                    (shared.sinks.data_ptr() + in_group).store(sink)

            step = item.first
            while step < item.last:
                fresh = step == item.first
                for i in cutlass.range_constexpr(2):
                    half = i if const_expr(which == 0) else 1 - i  # in the order in which they arrive
                    cute.arch.mbarrier_wait(full + 2 * which + half, phase)
                    half_keys = key_operand[None, None, None, 2 * which + half]
                    multiply(scores_mma, scores, q_operand, half_keys, half * HALF // 16, i > 0)
                warpgroup.wait_group(0)
                self.mask(scores, rows, lane)
                if const_expr(which == 0):
                    self.softmax(args, scores, packed_p, maximum, total, out, None, fresh)
                    self.publish_maxima(maxima, maximum, lane)
                    self.arrive(Named.MAX0)
                    multiply(own_mma, out, own_p, own_values, 0, True)
                    warpgroup.wait_group(0)
                    self.release(free + 0, lane)
                    self.sync(Named.MAX1)
                    self.follow(maxima, packed_p, maximum, total, out)
                    self.store_p(p_own, packed_p, warp, lane)
                    cute.arch.fence_view_async_shared()
                    self.arrive(Named.P0)
                    cute.arch.mbarrier_wait(full + 2, phase)
                    self.sync(Named.P1)
                    multiply(other_mma, out, other_p_operand, other_values, 0, True)
                    warpgroup.wait_group(0)
                    self.release(free + 2, lane)
                else:
                    self.sync(Named.MAX0)
                    self.softmax(args, scores, packed_p, maximum, total, out, maxima, fresh)
                    self.publish_maxima(maxima, maximum, lane)
                    self.arrive(Named.MAX1)
                    self.store_p(p_own, packed_p, warp, lane)
                    cute.arch.fence_view_async_shared()
                    self.arrive(Named.P1)
                    multiply(own_mma, out, own_p, own_values, 0, True)
                    cute.arch.mbarrier_wait(full + 1, phase)
                    self.sync(Named.P0)
                    multiply(other_mma, out, other_p_operand, other_values, 0, True)
                    warpgroup.wait_group(1)
                    self.release(free + 3, lane)
                    warpgroup.wait_group(0)
                    self.release(free + 1, lane)
                phase ^= 1
                step += 1
            for i in cutlass.range_constexpr(num_sums):
                total[i] += cute.arch.shuffle_sync_bfly(total[i], offset=1)
                total[i] += cute.arch.shuffle_sync_bfly(total[i], offset=2)
                if lane % 4 == 0:
                    ptx.store_shared_f32(sums + ((i // 2 * 2 + which) * HEADS + i % 2 * 8) * 4, total[i])
            if const_expr(split):
                self.wait_for_slot(args, shared, thread, history[0])
            self.sync(Named.CONSUMERS)
            for i in cutlass.range_constexpr(num_sums):
                total[i] += ptx.load_shared_f32(sums + ((i // 2 * 2 + 1 - which) * HEADS + i % 2 * 8) * 4)
            self.load_next_q(args, shared, thread, following, num_items)
            item = self.item(args, shared, index)  # again: its numbers need no registers meanwhile
            if const_expr(split):
                if item.parts > 1:
                    self.store_partial(args, index, which, thread, out, maximum, total)
                    self.sync(Named.CONSUMERS)
                    if thread == 0:
                        ptx.add_release(self.arrived(args, item))
                else:
                    self.store_out(args, shared, item, which, p_own, warp, row, lane, out, maximum, total)
                if pending >= 0:
                    self.merge(args, shared, thread, pending, num_items)
                pending = index
                if item.parts == 1:
                    pending = Int32(-1)
                history[0], history[1], history[2] = history[1], history[2], pending
            else:
                self.store_out(args, shared, item, which, p_own, warp, row, lane, out, maximum, total)
            index = following
        if const_expr(split):
            if pending >= 0:
                self.merge(args, shared, thread, pending, num_items)
            if self.slots_are_reused(num_items):
                self.leave(args, shared, thread)

    @cute.jit
    def release(self, barrier: cute.Pointer, lane: Int32) -> None:
        """Gives a half buffer back to the producers."""
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def load_next_q(
        self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, following: Int32, num_items: Int32
    ) -> None:
        """Starts copying Q of this CTA's next item; nobody may read the present one any more."""
        if following < num_items:
            item = self.item(args, shared, following)
            self.load_q(args, shared, thread, item.token, item.head_block)

    @cute.jit
    def load_q(
        self, args: Arguments, shared: cutlass.Constexpr, thread: Int32, token: Int32, head_block: Int32
    ) -> None:
        """Starts copying Q of an item to shared memory, zeros where there are no heads."""
        base = Int32(shared.q.data_ptr().toint())
        for i in cutlass.range_constexpr(HEADS * DIM * 2 // 16 // CONSUMER_THREADS):
            row = i * (CONSUMER_THREADS // 64) + thread // 64
            piece = thread % 64
            head = head_block * HEADS + row
            num_bytes = Int32(16)
            if head >= args.num_heads:
                num_bytes, head = Int32(0), Int32(0)
            address = args.q + (Int64(token) * args.q_token_stride + Int64(head) * args.q_head_stride) * 2 + piece * 16
            block = base + (piece // 8) * BLOCK_BYTES + row * ROW_STRIDE
            ptx.copy_async(block + ((piece % 8) ^ (row & 7)) * 16, address, num_bytes)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def mask(self, scores: cute.Tensor, rows: cute.Pointer, lane: Int32) -> None:
        """-inf where the tile has a hole."""
        low, high = rows.load(), (rows + 1).load()
        if (low & high) != 0xFFFFFFFF:
            low, high = low >> (2 * (lane % 4)), high >> (2 * (lane % 4))
            for j in cutlass.range_constexpr(TILE // 8):
                bits = (low if j < 4 else high) >> (8 * (j % 4))
                for column in cutlass.range_constexpr(2):
                    if ((bits >> column) & 1) == 0:
                        scores[4 * j + column] = -Float32.inf
                        scores[4 * j + 2 + column] = -Float32.inf

    @cute.jit
    def softmax(
        self,
        args: Arguments,
        scores: cute.Tensor,
        packed_p: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        out: cute.Tensor,
        published: cutlass.Constexpr,
        fresh: Boolean,
    ) -> None:
        """P = 2**(s - maximum) in bf16 with the new maximum; O and the sums follow it.

        The new maximum builds on the one that the other consumer published (an address), if there is one.
        `fresh`: O and the sums are zero.
        """
        newest = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            largest = scores[2 * i]
            for j in cutlass.range_constexpr(TILE // 8):
                largest = ptx.fmax(largest, ptx.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
            largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
            largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=2))
            newest[i] = maximum[i]
            if const_expr(published is not None):
                newest[i] = ptx.load_shared_f32(published + 32 * i)
            largest = largest * args.scale_log2
            if largest > newest[i] + RESCALE_ABOVE:
                if const_expr(published is not None):
                    # The other's P follows by a power of two, unless it is all zeros.
                    if newest[i] != NO_MAXIMUM:
                        largest = newest[i] + ptx.ceil(largest - newest[i])
                newest[i] = largest
        self.rescale(maximum, newest, total, out, fresh)
        for i in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(TILE // 8):
                low = ptx.exp2(ptx.fma(scores[4 * j + 2 * i], args.scale_log2, -maximum[i]))
                high = ptx.exp2(ptx.fma(scores[4 * j + 2 * i + 1], args.scale_log2, -maximum[i]))
                pair = ptx.pack_bf16(low, high)
                packed_p[2 * j + i] = pair
                # The sum of what is multiplied: rounding then cancels in O / sum.
                total[i] = total[i] + (ptx.as_f32(pair << 16) + ptx.as_f32(pair & Uint32(0xFFFF0000)))
                if const_expr(self.configuration.lse):
                    total[2 + i] = total[2 + i] + (low + high)

    @cute.jit
    def rescale(
        self, maximum: cute.Tensor, newest: cute.Tensor, total: cute.Tensor, out: cute.Tensor, fresh: Boolean
    ) -> None:
        """Moves O and the sums to new maxima, where any of the warp's has changed."""
        if cute.arch.vote_any_sync((newest[0] != maximum[0]) | (newest[1] != maximum[1])):
            if not fresh:
                for i in cutlass.range_constexpr(2):
                    factor = ptx.exp2(maximum[i] - newest[i])
                    total[i] = total[i] * factor
                    total[2 + i] = total[2 + i] * factor
                    for j in cutlass.range_constexpr(HALF // 8):
                        out[4 * j + 2 * i] = out[4 * j + 2 * i] * factor
                        out[4 * j + 2 * i + 1] = out[4 * j + 2 * i + 1] * factor
            for i in cutlass.range_constexpr(2):
                maximum[i] = newest[i]

    @cute.jit
    def follow(
        self, published: Int32, packed_p: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, out: cute.Tensor
    ) -> None:
        """Takes over the other consumer's maxima (an address): P by an exact power of two, O and the sums."""
        newest = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            newest[i] = ptx.load_shared_f32(published + 32 * i)
        if cute.arch.vote_any_sync((newest[0] != maximum[0]) | (newest[1] != maximum[1])):
            for i in cutlass.range_constexpr(2):
                factor = ptx.exp2(maximum[i] - newest[i])
                pair = ptx.pack_bf16(factor, factor)
                for j in cutlass.range_constexpr(TILE // 8):
                    packed_p[2 * j + i] = ptx.scale_bf16x2(packed_p[2 * j + i], pair)
        self.rescale(maximum, newest, total, out, False)

    @cute.jit
    def publish_maxima(self, address: Int32, maximum: cute.Tensor, lane: Int32) -> None:
        """Writes a warp's maxima to shared memory, one lane a row."""
        cute.arch.sync_warp()  # the four threads of a row have read what is overwritten
        if lane % 4 == 0:
            for i in cutlass.range_constexpr(2):
                ptx.store_shared_f32(address + 32 * i, maximum[i])


def layout(atom: cute.ComposedLayout, shape: tuple) -> tuple:
    """(outer layout, swizzle) of `shape` tiled with a swizzled atom, first modes first."""
    layout = cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))
    return layout.outer, layout.inner


def multiply(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    a_first: int,
    accumulate: bool,
) -> None:
    """accumulator (+)= a[.., a_first:] @ b by wgmma, committed as one group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(b, mode=[2])):
        cute.gemm(atom, accumulator, a[None, None, a_first + k], b[None, None, k], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


# Host side

ARCH = "sm_90a"


def configurations() -> tuple[Configuration, ...]:
    """Everything that a model's layers may need."""
    return tuple(
        Configuration(fp8_rows, entries, fp32_out, lse, split)
        for fp8_rows in (True, False)
        for entries in Entries
        for fp32_out, lse in ((False, False), (False, True), (True, True))
        for split in (False, True)
    )


def compile(configuration: Configuration) -> Callable[..., None]:
    """The launcher of a configuration, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    def from_compiler() -> Callable[..., None]:
        example = Arguments(*(kind(1) for kind in Arguments.__annotations__.values()))
        return cute.compile(SparseAttention(configuration).launch, example, Int32(1), cuda.CUstream(0))

    return load_or_compile("sparse_attention_sm90", configuration, ARCH, from_compiler)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """CTAs that are resident at once: one a multiprocessor."""
    return cutlass.utils.HardwareInfo(device.index or 0).get_device_multiprocessor_count()


def sparse_attention(problem: Problem) -> None:
    """Writes `problem.out` and, if it is there, `problem.lse`.

    See `dsv4_kernels.sparse_attention.sparse_attention` for what is computed.

    Raises:
        RuntimeError: a CUDA graph is being captured with `split_keys` and no such call has been made on the device.
        ValueError: so small a `split_keys` that the parts of a token are more than the CTAs.
    """
    split = problem.max_parts > 1
    step = MAX_SPLIT_TOKENS if split else problem.num_tokens
    for first in range(0, problem.num_tokens, step):
        _launch(problem, slice(first, min(first + step, problem.num_tokens)), split)


def _launch(problem: Problem, tokens: slice, split: bool) -> None:
    device, num_tokens = problem.q.device, tokens.stop - tokens.start
    head_blocks = -(-problem.num_heads // HEADS)
    num_sms = num_multiprocessors(device)
    if split and problem.max_parts * head_blocks > num_sms:
        raise ValueError(
            f"sparse_attention: split_keys {problem.split_keys} may divide a token of this call into "
            f"{problem.max_parts} parts, times {head_blocks} blocks of heads; expected at most {num_sms} CTAs a token. "
            "Pass a larger split_keys"
        )
    configuration = Configuration(
        fp8_rows=problem.row_format is RowFormat.FP8,
        lse=problem.lse is not None,
        entries=Entries.LIST
        if problem.entry_rows is not None
        else Entries.NONE
        if problem.page_table is None
        else Entries.PAGES,
        fp32_out=not problem.normalised,
        split=split,
    )
    scratch = None
    if split:
        num_bytes = num_sms * SCRATCH_SLOTS * (SLOT_BYTES + STATISTICS_BYTES)
        scratch = Scratch.on(device, num_bytes, 2 * 2 * MAX_SPLIT_TOKENS + 1)
    entry_list = problem.entry_rows[tokens] if problem.entry_rows is not None else problem.page_table
    q, out, window_rows = problem.q[tokens], problem.out[tokens], problem.window_rows[tokens]
    arguments = Arguments(
        q=Int64(address(q)),
        q_token_stride=Int32(q.stride(0)),
        q_head_stride=Int32(q.stride(1)),
        num_tokens=Int32(num_tokens),
        num_heads=Int32(problem.num_heads),
        window=Int64(address(problem.window_storage)),
        window_page_bytes=Int32(row_bytes(problem.window_storage)),
        window_rows=Int64(address(window_rows)),
        window_rows_stride=Int32(window_rows.stride(0)),
        window_width=Int32(problem.window_slots),
        entries=Int64(address(problem.entry_storage)),
        entries_page_bytes=Int32(row_bytes(problem.entry_storage)),
        entry_list=Int64(address(entry_list)),
        entry_list_stride=Int32(0 if entry_list is None else entry_list.stride(0)),
        num_entries=Int32(problem.max_entry_slots),
        entries_per_page=Int32(problem.entries_per_page),
        token_to_request=Int64(address(problem.token_to_request, tokens)),
        visible=Int64(address(problem.visible, tokens)),
        sink=Int64(address(problem.sink)),
        out=Int64(address(out)),
        out_token_stride=Int32(out.stride(0)),
        out_head_stride=Int32(out.stride(1)),
        lse=Int64(address(problem.lse, tokens)),
        scale_log2=Float32(problem.scale * LOG2_E),
        steps_per_part=Int32(problem.split_keys // STEP_KEYS if split else 0),
        scratch=Int64(address(scratch and scratch.slots)),
        counters=Int64(address(scratch and scratch.counters)),
    )
    num_ctas = min(num_tokens * head_blocks * problem.max_parts, num_sms)
    stream = cuda.CUstream(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    compile(configuration)(arguments, Int32(num_ctas), stream)
