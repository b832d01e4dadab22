"""The products of the kernels for few heads and their operands in shared memory (kernel.py, tile.py)."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4_kernels.device.tma import swizzled_layout
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import COLUMNS
from dsv4_kernels.sparse_attention.sm90.plan import GROUP, GROUPS, KEY_TILE


def mma_operands(shared: cutlass.Constexpr, thread: Int32) -> tuple:
    """(products for scores and O, operands Q, values and P in shared memory) of a thread."""
    q = shared.q.get_tensor(*swizzled_layout((COLUMNS, GROUP, GROUPS)))
    keys = shared.values.get_tensor(*swizzled_layout((KEY_TILE, GROUP, GROUPS)))
    values = cute.composition(keys, cute.make_ordered_layout((GROUP, KEY_TILE, GROUPS), order=(1, 0, 2)))
    p = shared.p.get_tensor(*swizzled_layout((COLUMNS, KEY_TILE)))
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    types, one = (BFloat16, BFloat16), (1, 1, 1)
    scores_mma = hopper.make_trivial_tiled_mma(
        *types, k_major, k_major, Float32, one, (KEY_TILE, COLUMNS), warpgroup.OperandSource.RMEM
    )
    out_mma = hopper.make_trivial_tiled_mma(*types, mn_major, k_major, Float32, one, (GROUP, COLUMNS))
    thread_mma = scores_mma.get_slice(thread)
    q_operand = thread_mma.make_fragment_B(thread_mma.partition_B(q))
    thread_mma = out_mma.get_slice(thread)
    value_operand = thread_mma.make_fragment_A(thread_mma.partition_A(values))
    p_operand = thread_mma.make_fragment_B(thread_mma.partition_B(p))
    return scores_mma, out_mma, q_operand, value_operand, p_operand
