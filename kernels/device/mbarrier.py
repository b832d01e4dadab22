"""Waits and arrivals at mbarriers in kernels that are written with CuTe DSL's experimental primitives (Blackwell)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as prims


@cute.jit
def wait(barriers: cutlass.Pointer, index: Int32, parity: Int32) -> None:
    """Waits until the phase of this parity of mbarrier `index` has completed."""
    while not prims.mbarrier_try_wait_parity(barriers + index, parity):
        pass


@cute.jit
def arrive(barrier: cutlass.Pointer) -> None:
    """Arrives once for the warp, after everything that its lanes did before."""
    prims.bar_warp_sync(0xFFFFFFFF)
    if prims.elect_sync():
        prims.mbarrier_arrive(barrier)
