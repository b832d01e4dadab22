"""The consumers' softmax in the Hopper kernels: scores of a step, row max, P; lazy rescaling and LSE merge.

Every step has its own row max, and products that begin at zero. The step is then merged into O and the row sums:
O = O * a + (P V) * b in fp32, with a and b from `rescale_factors`. Every merge of the kernels has this form, so the
bits do not depend on which CTA merges.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4_kernels.device import ptx
from dsv4_kernels.device.tma import swizzled_layout
from dsv4_kernels.sparse_attention.sm90.barriers import sync
from dsv4_kernels.sparse_attention.sm90.plan import (
    DIM,
    GROUP,
    GROUPS,
    HEADS,
    KEY_TILE,
    NO_ROW_MAX,
    RESCALE_LOG2,
    ROW_STRIDE,
    WARP_HEADS,
    Arguments,
    NamedBarrier,
)
from dsv4_kernels.sparse_attention.sm90.tile_scheduler import groups_in_order

# Products


class Products(NamedTuple):
    """The products of a warpgroup's thread, and their operands in shared memory."""

    scores: cute.TiledMma
    """S = Q K^T."""
    own: cute.TiledMma
    """P V with P in registers: this consumer's key tile."""
    other: cute.TiledMma
    """P V with P in shared memory: the other consumer's key tile."""
    q: cute.Tensor
    keys: cute.Tensor
    p: cute.Tensor
    values: cute.Tensor
    """The blocks of `keys`, transposed."""


def products_of(shared: cutlass.Constexpr, in_group: Int32) -> Products:
    """The products of thread `in_group` of a consumer warpgroup."""
    q = shared.q.get_tensor(*swizzled_layout((HEADS, DIM)))
    keys = shared.keys.get_tensor(*swizzled_layout((KEY_TILE, GROUP, 2 * GROUPS)))
    p = shared.p.get_tensor(*swizzled_layout((HEADS, KEY_TILE, 2)))
    values = cute.composition(keys, cute.make_ordered_layout((GROUP, KEY_TILE, 2 * GROUPS), order=(1, 0, 2)))

    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    types = (BFloat16, BFloat16)
    scores_mma = hopper.make_trivial_tiled_mma(*types, k_major, k_major, Float32, (1, 1, 1), (HEADS, KEY_TILE))
    own_mma = hopper.make_trivial_tiled_mma(
        *types, k_major, mn_major, Float32, (1, 1, 1), (HEADS, GROUP), warpgroup.OperandSource.RMEM
    )
    other_mma = hopper.make_trivial_tiled_mma(*types, k_major, mn_major, Float32, (1, 1, 1), (HEADS, GROUP))
    thread_mma = scores_mma.get_slice(in_group)
    q_operand = thread_mma.make_fragment_A(thread_mma.partition_A(q))
    key_operand = thread_mma.make_fragment_B(thread_mma.partition_B(keys))
    thread_mma = other_mma.get_slice(in_group)
    p_operand = thread_mma.make_fragment_A(thread_mma.partition_A(p))
    value_operand = thread_mma.make_fragment_B(thread_mma.partition_B(values))
    return Products(scores_mma, own_mma, other_mma, q_operand, key_operand, p_operand, value_operand)


def multiply(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    a_first: int,
    accumulate: bool,
) -> None:
    """Issues accumulator (+)= a[.., a_first:] @ b by wgmma, without a commit."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(b, mode=[2])):
        cute.gemm(atom, accumulator, a[None, None, a_first + k], b[None, None, k], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def compute_scores(
    full: cute.Pointer,
    phase: Int32,
    consumer: Int32,
    rows: cute.Pointer,
    mma: Products,
    scores: cute.Tensor,
    meanwhile: Callable[[int], None] | None = None,
) -> tuple:
    """Computes the scores of a key tile, channel group by group as they arrive; returns the bits of its rows.

    `meanwhile(i)` is called after every second group. The bits are written before the first group is full, and are read
    here while the last products run.
    """
    for i, group in enumerate(groups_in_order()):
        cute.arch.mbarrier_wait(full + group, phase)
        keys = mma.keys[None, None, None, consumer * GROUPS + group]
        multiply(mma.scores, scores, mma.q, keys, group * GROUP // 16, i > 0)
        warpgroup.commit_group()
        if meanwhile and i % 2 == 1:
            meanwhile(i // 2)
    bits = Uint32(rows.load()), Uint32((rows + 1).load())
    warpgroup.wait_group(0)
    return bits


# Softmax of a step


@cute.jit
def mask_scores(scores: cute.Tensor, rows: tuple, lane: Int32) -> None:
    """Sets scores to -inf where the key tile has a hole; `rows` are its 64 bits."""
    low, high = rows
    if (low & high) != 0xFFFFFFFF:
        low, high = low >> (2 * (lane % 4)), high >> (2 * (lane % 4))
        for j in cutlass.range_constexpr(KEY_TILE // 8):
            bits = (low if j < 4 else high) >> (8 * (j % 4))
            for column in cutlass.range_constexpr(2):
                if ((bits >> column) & 1) == 0:
                    scores[4 * j + column] = -Float32.inf
                    scores[4 * j + 2 + column] = -Float32.inf


@cute.jit
def find_step_max(args: Arguments, scores: cute.Tensor, shared_max: Int32, consumer: Int32, lane: Int32) -> tuple:
    """Row maxima of this thread's two rows over both key tiles, in log2 units; NO_ROW_MAX if all keys are holes."""
    step_max = []
    for i in cutlass.range_constexpr(2):
        largest = scores[2 * i]
        for j in cutlass.range_constexpr(KEY_TILE // 8):
            largest = ptx.fmax(largest, ptx.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
        largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
        largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=2))
        largest = ptx.fmax(largest * args.scale_log2, Float32(NO_ROW_MAX))
        if lane % 4 == 0:
            ptx.store_shared_f32(shared_max + (consumer * HEADS + 8 * i) * 4, largest)
        step_max.append(largest)
    sync(NamedBarrier.CONSUMERS)
    return tuple(
        ptx.fmax(step_max[i], ptx.load_shared_f32(shared_max + ((1 - consumer) * HEADS + 8 * i) * 4)) for i in range(2)
    )


@cute.jit
def exponentiate(
    args: Arguments, scores: cute.Tensor, step_max: tuple, packed_p: cute.Tensor, step_sum: cute.Tensor
) -> None:
    """Writes P = 2**(s - step_max) in bf16, and its row sums.

    Both in one loop: the sums fill the latency of the exponentials.
    """
    step_sum.fill(0.0)
    for j in cutlass.range_constexpr(KEY_TILE // 8):
        for i in cutlass.range_constexpr(2):
            low = ptx.exp2(ptx.fma(scores[4 * j + 2 * i], args.scale_log2, -step_max[i]))
            high = ptx.exp2(ptx.fma(scores[4 * j + 2 * i + 1], args.scale_log2, -step_max[i]))
            pair = ptx.pack_bf16(low, high)
            packed_p[2 * j + i] = pair
            # The sum of the rounded values, which the products use too: the rounding then cancels in O / sum.
            step_sum[i] = step_sum[i] + (ptx.as_f32(pair << 16) + ptx.as_f32(pair & Uint32(0xFFFF0000)))


# P between registers and shared memory


def store_p(block: Int32, words: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """Stores the warp's 16 rows of an accumulator of 64 columns, as bf16 pairs, to a swizzled block."""
    for j, address in enumerate(p_addresses(block, warp, lane)):
        ptx.store_matrices(address, (words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]))


def load_p(block: Int32, words: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """Loads the P that the same warp of the other consumer stored by `store_p`."""
    for j, address in enumerate(p_addresses(block, warp, lane)):
        words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = ptx.load_matrices(address)


def p_addresses(block: Int32, warp: Int32, lane: Int32) -> list[Int32]:
    """Addresses of this lane's matrix rows for `stmatrix` and `ldmatrix` of four matrices, 16 columns each."""
    row = warp * WARP_HEADS + lane % 16
    chunks = [(2 * j + lane // 16) ^ (row & 7) for j in range(KEY_TILE // 16)]
    return [block + row * ROW_STRIDE + chunk * 16 for chunk in chunks]


# Lazy rescaling and LSE merge of a thread's two rows


@cute.jit
def rescale_factors(row_max: cute.Tensor, joining_max: Float32, i: cutlass.Constexpr) -> tuple:
    """(scale of the old values, relative to row_max[i]; scale of the new values); updates row_max[i] to cover both.

    This and `fma(new, scale of new, old * scale of old)` are the merge of steps and of partial results.
    """
    newest = row_max[i]
    if joining_max > newest + RESCALE_LOG2:
        newest = joining_max
    factors = ptx.exp2(row_max[i] - newest), ptx.exp2(joining_max - newest)
    row_max[i] = newest
    return factors


@cute.jit
def rescale_out(
    step_max: tuple,
    step_sum: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
) -> None:
    """Merges a step into the row sums, rescales O for it, and writes `weight`, the scale of the step's P V."""
    before = cute.make_rmem_tensor((2,), Float32)
    for i in cutlass.range_constexpr(2):
        before[i], weight[i] = rescale_factors(row_max, step_max[i], i)
        row_sum[i] = ptx.fma(step_sum[i], weight[i], row_sum[i] * before[i])
    if cute.arch.vote_any_sync((before[0] != 1.0) | (before[1] != 1.0)):
        for j in cutlass.range_constexpr(cute.size(out)):
            out[j] = out[j] * before[j // 2 % 2]


def clear_partial(row_max: cute.Tensor, row_sum: cute.Tensor, values: cute.Tensor) -> None:
    """Sets a partial result to the result of no keys."""
    row_max.fill(NO_ROW_MAX)
    row_sum.fill(0.0)
    values.fill(0.0)


def merge_partial(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    values: cute.Tensor,
    joining_max: cute.Tensor | tuple,
    joining_sum: cute.Tensor | tuple,
    joining_values: cute.Tensor | list,
) -> None:
    """Merges a second partial result (`joining_*`) into the first."""
    for k in range(2):
        factors = merge_row_stats(row_max, row_sum, joining_max[k], joining_sum, k)
        merge_values(values, joining_values, factors, k)


def merge_row_stats(
    row_max: cute.Tensor, row_sum: cute.Tensor, joining_max: Float32, joining_sum: cute.Tensor | tuple, k: int
) -> tuple:
    """Merges row k's max and sum; returns (scale of the old values, scale of the new ones)."""
    before, weight = rescale_factors(row_max, joining_max, k)
    row_sum[k] = ptx.fma(Float32(joining_sum[k]), weight, row_sum[k] * before)
    return before, weight


def merge_values(values: cute.Tensor, joining_values: cute.Tensor | list, factors: tuple, k: int) -> None:
    """Merges the values of row k, with the scales of `merge_row_stats`."""
    before, weight = factors
    for u in range(cute.size(values) // 4):
        for j in range(2):
            at = 4 * u + 2 * k + j
            values[at] = ptx.fma(joining_values[at], weight, values[at] * before)
