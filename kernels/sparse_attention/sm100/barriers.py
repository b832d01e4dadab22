"""Barriers between the Blackwell kernel's warps; kernel.py says who waits for whom."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as prims

from dsv4_kernels.device.mbarrier import wait
from dsv4_kernels.device.pipeline import stage_of
from dsv4_kernels.sparse_attention.sm100.plan import GROUP_THREADS, NamedBarrier


@cute.jit
def wait_for_tile(barriers: cutlass.Pointer, first: cutlass.Constexpr, tile: Int32, plan: cutlass.Constexpr) -> None:
    """Waits at the barrier of a key tile's stage, in the group of barriers that begins at `first`."""
    stage = stage_of(tile, plan.stages)
    wait(barriers, first + stage.index, stage.phase)


def softmax_barrier() -> None:
    """Barrier of all softmax warps."""
    prims.barrier_cta_sync_aligned(NamedBarrier.SOFTMAX, thread_count=GROUP_THREADS)
