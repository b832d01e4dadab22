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


def initialise(barriers: cutlass.Pointer, groups: list[tuple[int, int, int | Int32]]) -> None:
    """Initialises groups of mbarriers, in one thread of the calling warp.

    Args:
        barriers: the first mbarrier.
        groups: (index of the group's first mbarrier, number of mbarriers, arrivals that complete a phase).
    """
    _initialise(barriers, tuple(groups))


@cute.jit
def _initialise(barriers: cutlass.Pointer, groups: cutlass.Constexpr[tuple]) -> None:
    if prims.elect_sync():
        for first, count, arrivals in groups:
            for i in range(count):
                prims.mbarrier_init(barriers + (first + i), arrivals)
        prims.fence_mbarrier_init()
