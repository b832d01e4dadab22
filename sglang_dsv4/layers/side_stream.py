"""Concurrent execution of two independent parts of a sublayer in a CUDA graph: one of them on a second stream.

With few tokens most kernels leave most of a GPU idle, and their time is mostly start-up and drain; the graph then runs
two chains of kernels at once. With many tokens each kernel fills the GPU. Bits do not change.

    SGLANG_DSV4_SIDE_STREAM    on: as above, in graphs of up to MOST_TOKENS tokens; off (default): one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from sglang_dsv4 import env

VARIABLE = "SGLANG_DSV4_SIDE_STREAM"
MOST_TOKENS = 32
"""Most tokens of a graph with a side stream. A decode step of six layers keeps the GPU busy for 0.97, 0.99 and 0.98 of
the time without it at 1, 16 and 32 tokens, and for 1.02 at 64 (benchmarks/results/step_switches_h200.json)."""

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
    """The results of both functions; later work on the current stream runs after both.

    Args:
        first: runs on the current stream.
        second: runs on the side stream while a graph is captured. It reads no memory that `first` writes, and writes
            none that `first` reads or writes. Its inputs must outlive this call, so that their memory is not reused
            meanwhile.
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
