"""Concurrent execution of two independent parts of a sublayer in a CUDA graph: one of them on a second stream.

With few tokens most kernels leave most of a GPU idle, and their time is mostly start-up and drain; the graph then runs
two chains of kernels at once. With many tokens each kernel fills the GPU. Bits do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

MOST_TOKENS = 32
"""Most tokens of a graph with a side stream. With it a decode step of six layers keeps the GPU busy for 0.97, 0.97 and
0.98 of the time without it, at 1, 4 and 16 tokens, and a server makes 1.02 times the tok/s at 16 and 32 requests
(benchmarks/results/serve_switches_h200.json). At 64 tokens it gained nothing (step_switches_h200.json)."""

First = TypeVar("First")
Second = TypeVar("Second")


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
    few = tokens <= MOST_TOKENS
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
