"""Independent parts of a sublayer, run at the same time: in one launch, or on a second stream of a CUDA graph.

With few tokens most kernels leave most of a GPU idle, and their time is mostly start-up and drain. With many tokens
each kernel fills the GPU, and the parts run one after the other. Bits do not change.

    SGLANG_DSV4_JOINT_LAUNCH    on (default): parts of up to `joint_tokens()` tokens are one launch
                                (`dsv4_kernels.host.joint_launch`) where `together` runs them. Not products on
                                Blackwell, whose FP8 products are launches of their own. The boundary sums over
                                experts in such forwards (`dsv4_kernels.host.expert_rows`).
                                off: they run on two streams, as parts of up to MOST_TOKENS tokens in graphs do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dsv4_kernels.host import joint_launch
from sglang_dsv4 import env

VARIABLE = "SGLANG_DSV4_JOINT_LAUNCH"
MOST_TOKENS = 32
"""Most tokens of a graph with a side stream. With it a decode step of six layers keeps the GPU busy for 0.97, 0.97 and
0.98 of the time without it, at 1, 4 and 16 tokens, and a server makes 1.02 times the tok/s at 16 and 32 requests
(benchmarks/results/serve_switches_h200.json). At 64 tokens it gained nothing (step_switches_h200.json)."""

First = TypeVar("First")
Second = TypeVar("Second")


@functools.cache
def is_on() -> bool:
    """Whether forwards of few tokens join launches.

    Raises:
        ValueError: the environment variable holds another word than "on" and "off".
    """
    return env.choice(VARIABLE) != "off"


@functools.cache
def _is_blackwell() -> bool:
    """Whether the process's GPU is a Blackwell: asked once, since a forward without graphs asks some 200 times."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def joint_tokens() -> int:
    """Most tokens of a forward with joint launches."""
    return joint_launch.MOST_TOKENS["sm100" if _is_blackwell() else "sm90"]


def joins(tokens: int) -> bool:
    """Whether a forward of so many tokens joins launches."""
    return is_on() and tokens <= joint_tokens()


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _on_two_streams(tokens: int, *calls: Callable[[], Any] | None) -> tuple:
    """The results of the calls: while a graph of few tokens is captured, the first runs on the current stream, the
    others on the side stream; else one follows the other."""
    captured = tokens <= MOST_TOKENS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if not (captured and any(calls[1:])):
        return tuple(call and call() for call in calls)
    current = torch.cuda.current_stream()
    side = _side_stream(current.device_index)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        of_others = [call and call() for call in calls[1:]]
    of_first = calls[0] and calls[0]()
    current.wait_stream(side)
    return of_first, *of_others


def side_by_side(first: Callable[[], First], second: Callable[[], Second], tokens: int) -> tuple[First, Second]:
    """The results of both functions; later work on the current stream runs after both.

    Args:
        first: runs on the current stream.
        second: runs on the side stream while a graph is captured. It reads no memory that `first` writes, and writes
            none that `first` reads or writes. Its inputs must outlive this call, so that their memory is not reused
            meanwhile.
        tokens: of the forward.
    """
    return _on_two_streams(tokens, first, second)


in_order = joint_launch.chained
"""A context in a call of `together` whose kernels may depend on the ones before; in a joint launch one CTA runs
them."""


def together(tokens: int, *calls: Callable[[], Any] | None, products: bool = False) -> tuple:
    """The results of the calls, None for a call that is None; later work on the current stream runs after all.

    Args:
        tokens: of the forward.
        calls: each launches kernels that depend on no other kernel that is launched here, of this call or another,
            unless `in_order` is around them.
            Inputs of all calls but the first must outlive this call, as for `side_by_side`.
        products: whether the calls are products, of which Blackwell makes no joint launch.
    """
    if joins(tokens) and not (products and _is_blackwell()):
        with joint_launch.joined():
            return tuple(call and call() for call in calls)
    return _on_two_streams(tokens, *calls)
