"""Sums over the lanes of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def prefix_sum(x: Int32, lane: Int32) -> Int32:
    """The sum of x over the lanes of the warp from lane 0 to this lane."""
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(x, offset=1 << i, mask_and_clamp=0)
        if lane >= (1 << i):
            x += other
    return x
