"""What the consumers of the Hopper kernels compute of a step: scores, their maxima, and P (see persistent.py)."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4_kernels import ptx
from dsv4_kernels.sparse_attention.sm90.epilogue import Results
from dsv4_kernels.sparse_attention.sm90.plan import (
    DIM,
    GROUP,
    GROUPS,
    HEADS,
    NO_MAXIMUM,
    TILE,
    Arguments,
    Named,
    layout,
    swizzled_atom,
)


class Scores(Results):
    """Of the tile of one consumer."""

    def operands(self, shared: cutlass.Constexpr, in_group: Int32) -> tuple:
        """The products of a warpgroup's thread and what they multiply.

        Scores (S = Q K^T), own product (P in registers) and the other tile's (P in shared memory); then Q, keys, P and
        values: blocks of shared memory, keys and values being the same.
        """
        swizzled = swizzled_atom()
        q = shared.q.get_tensor(*layout(swizzled, (HEADS, DIM)))
        keys = shared.keys.get_tensor(*layout(swizzled, (TILE, GROUP, 2 * GROUPS)))
        p = shared.p.get_tensor(*layout(swizzled, (HEADS, TILE, 2)))
        values = cute.composition(keys, cute.make_ordered_layout((GROUP, TILE, 2 * GROUPS), order=(1, 0, 2)))

        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        types = (BFloat16, BFloat16)
        scores_mma = hopper.make_trivial_tiled_mma(*types, k_major, k_major, Float32, (1, 1, 1), (HEADS, TILE))
        own_mma = hopper.make_trivial_tiled_mma(
            *types, k_major, mn_major, Float32, (1, 1, 1), (HEADS, GROUP), warpgroup.OperandSource.RMEM
        )
        other_mma = hopper.make_trivial_tiled_mma(*types, k_major, mn_major, Float32, (1, 1, 1), (HEADS, GROUP))
        part = scores_mma.get_slice(in_group)
        q_operand = part.make_fragment_A(part.partition_A(q))
        key_operand = part.make_fragment_B(part.partition_B(keys))
        part = other_mma.get_slice(in_group)
        p_operand = part.make_fragment_A(part.partition_A(p))
        value_operand = part.make_fragment_B(part.partition_B(values))
        return scores_mma, own_mma, other_mma, q_operand, key_operand, p_operand, value_operand

    def multiply_keys(
        self,
        full: cute.Pointer,
        phase: Int32,
        which: Int32,
        rows: cute.Pointer,
        mma: cute.TiledMma,
        scores: cute.Tensor,
        q: cute.Tensor,
        keys: cute.Tensor,
        meanwhile: Callable[[int], None] | None = None,
    ) -> tuple:
        """Scores of a tile, group by group as they come; `meanwhile(i)` is called after every second one.

        Returns the bits of its rows, which are there with the first group and read before the last scores are done.
        """
        for i, group in enumerate(self.groups_in_order()):
            cute.arch.mbarrier_wait(full + group, phase)
            multiply(mma, scores, q, keys[None, None, None, which * GROUPS + group], group * GROUP // 16, i > 0)
            warpgroup.commit_group()
            if meanwhile and i % 2 == 1:
                meanwhile(i // 2)
        bits = Uint32(rows.load()), Uint32((rows + 1).load())
        warpgroup.wait_group(0)
        return bits

    @cute.jit
    def mask(self, scores: cute.Tensor, rows: tuple, lane: Int32) -> None:
        """-inf where the tile has a hole; `rows` are its 64 bits."""
        low, high = rows
        if (low & high) != 0xFFFFFFFF:
            low, high = low >> (2 * (lane % 4)), high >> (2 * (lane % 4))
            for j in cutlass.range_constexpr(TILE // 8):
                bits = (low if j < 4 else high) >> (8 * (j % 4))
                for column in cutlass.range_constexpr(2):
                    if ((bits >> column) & 1) == 0:
                        scores[4 * j + column] = -Float32.inf
                        scores[4 * j + 2 + column] = -Float32.inf

    @cute.jit
    def highest(self, args: Arguments, scores: cute.Tensor, maxima: Int32, which: Int32, lane: Int32) -> tuple:
        """Maxima of this thread's two rows over both tiles, in units of log2; NO_MAXIMUM if all keys are holes."""
        highest = []
        for i in cutlass.range_constexpr(2):
            largest = scores[2 * i]
            for j in cutlass.range_constexpr(TILE // 8):
                largest = ptx.fmax(largest, ptx.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
            largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
            largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=2))
            largest = ptx.fmax(largest * args.scale_log2, Float32(NO_MAXIMUM))
            if lane % 4 == 0:
                ptx.store_shared_f32(maxima + (which * HEADS + 8 * i) * 4, largest)
            highest.append(largest)
        self.sync(Named.CONSUMERS)
        return tuple(
            ptx.fmax(highest[i], ptx.load_shared_f32(maxima + ((1 - which) * HEADS + 8 * i) * 4)) for i in range(2)
        )

    @cute.jit
    def exponentials(
        self, args: Arguments, scores: cute.Tensor, highest: tuple, packed_p: cute.Tensor, step_total: cute.Tensor
    ) -> None:
        """P = 2**(s - highest) in bf16, its sums, and those before rounding if they are asked for.

        All at once: the sums are computed while exponentials are waited for.
        """
        step_total.fill(0.0)
        for j in cutlass.range_constexpr(TILE // 8):
            for i in cutlass.range_constexpr(2):
                low = ptx.exp2(ptx.fma(scores[4 * j + 2 * i], args.scale_log2, -highest[i]))
                high = ptx.exp2(ptx.fma(scores[4 * j + 2 * i + 1], args.scale_log2, -highest[i]))
                pair = ptx.pack_bf16(low, high)
                packed_p[2 * j + i] = pair
                # The sum of what is multiplied: rounding then cancels in O / sum.
                step_total[i] = step_total[i] + (ptx.as_f32(pair << 16) + ptx.as_f32(pair & Uint32(0xFFFF0000)))
                if const_expr(self.configuration.lse):
                    step_total[2 + i] = step_total[2 + i] + (low + high)


def multiply(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    a_first: int,
    accumulate: bool,
) -> None:
    """accumulator (+)= a[.., a_first:] @ b by wgmma, not committed yet."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(b, mode=[2])):
        cute.gemm(atom, accumulator, a[None, None, a_first + k], b[None, None, k], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)
