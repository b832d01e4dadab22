"""Two parts of a sublayer that do not need each other, side by side in a CUDA graph: one of them on a second stream.

With few tokens most kernels leave most of a GPU idle, and last as long as they take to begin and to end; the graph then
runs two chains of them at once. Not with many, whose kernels fill the GPU. Bits do not change.

    SGLANG_DSV4_SIDE_STREAM    on: as said, in graphs of up to MOST_TOKENS; off (default): one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from sglang_dsv4 import env

VARIABLE = "SGLANG_DSV4_SIDE_STREAM"
MOST_TOKENS = 32
"""Of a graph. A decode step of six layers keeps the GPU busy for 0.97, 0.99 and 0.98 of the time with 1, 16 and 32
tokens, and for 1.02 with 64 (benchmarks/results/step_switches_h200.json)."""

First = TypeVar("First")
Second = TypeVar("Second")


@functools.cache
def is_on() -> bool:
    """Whether the environment asks for it.

    Raises:
        ValueError: neither on nor off.
    """
    return env.choice(VARIABLE) == "on"


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def side_by_side(first: Callable[[], First], second: Callable[[], Second], tokens: int) -> tuple[First, Second]:
    """Both results, once both are there for whatever the current stream does next.

    Args:
        first: runs on the current stream.
        second: neither reads what `first` writes, nor writes what it reads or writes; while a graph is captured it runs
            on the side stream. What it reads must outlive this call, so that no memory of it is given away meanwhile.
        tokens: of the forward.
    """
    few = is_on() and tokens <= MOST_TOKENS
    if not (few and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return first(), second()
    current = torch.cuda.current_stream()
    side = _side_stream(current.device_index)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        of_second = second()
    of_first = first()
    current.wait_stream(side)
    return of_first, of_second
