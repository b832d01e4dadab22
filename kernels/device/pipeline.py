"""Position in a ring of pipeline stages: the index of a stage, and the phase of its mbarriers to wait for.

`cutlass.pipeline.PipelineState` counts the same. It is not used here because its `advance` by several stages divides,
while a ring whose stages are used in pairs wraps by one comparison.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Stage(NamedTuple):
    """A stage of a ring."""

    index: Int32
    phase: Int32
    """Parity of the mbarrier phase whose completion makes the stage usable."""


def first_to_fill() -> Stage:
    """The producer's first stage. Its waits for empty stages return at once in the first round: no stage is in use."""
    return Stage(Int32(0), Int32(1))


def first_to_read() -> Stage:
    """The consumer's first stage."""
    return Stage(Int32(0), Int32(0))


@cute.jit
def following(stage: Stage, stages: cutlass.Constexpr[int], step: cutlass.Constexpr[int] = 1) -> Stage:
    """The stage `step` further in a ring of `stages`, a multiple of `step`; the phase changes where the ring wraps."""
    index, phase = stage.index + step, stage.phase
    if index == stages:
        index, phase = Int32(0), phase ^ 1
    return Stage(index, phase)


def stage_of(count: Int32, stages: int) -> Stage:
    """The consumer's stage for the item that has number `count`, from 0 on, of all items that went into the ring."""
    return Stage(count % stages, count // stages & 1)


def wrapped(index: Int32, phase: Int32, stages: int) -> Stage:
    """The stage for an index that may exceed `stages`; `phase` is the phase of indices below `stages`."""
    phase = (phase + index // stages) & 1
    return Stage(index % stages, phase)


@cute.jit
def index_after(index: Int32, stages: cutlass.Constexpr[int], step: cutlass.Constexpr[int] = 1) -> Int32:
    """The index `step` stages further in a ring that `cp.async` fills, which has no phases; step is at most
    `stages`."""
    index += step
    if cutlass.const_expr(step == 1):
        if index == stages:
            index = Int32(0)
    else:
        if index >= stages:
            index -= stages
    return index
