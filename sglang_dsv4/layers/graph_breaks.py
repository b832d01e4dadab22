"""Breaks in the CUDA graphs of a prefill: a layer's attention, which depends on the batch, runs between two graphs.

`warmup.prefill_graphs` records the rest of a forward, which depends on the number of tokens alone. At a break the
graph ends; in a replay the function is called there as in a forward without graphs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from enum import Enum

from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
from torch import Tensor


class Pass(Enum):
    """How the current forward runs."""

    DIRECT = "without graphs of its prefill"
    WARM_UP = "before it is recorded: there is no batch, so breaks write zeros"
    RECORDED = "recorded"


_pass = Pass.DIRECT


@contextlib.contextmanager
def running(kind: Pass) -> Iterator[None]:
    """Run forwards of this kind inside."""
    global _pass
    before, _pass = _pass, kind
    try:
        yield
    finally:
        _pass = before


def has_breaks() -> bool:
    """Whether the current forward is recorded, or warms up for it. A result that crosses a break is then written into
    memory that was allocated before the break."""
    return _pass is not Pass.DIRECT


def break_into(function: Callable[..., None]) -> Callable[..., None]:
    """A method `function(self, out, ...)` as a break: it writes `out`, and its other arguments are tensors, tuples of
    tensors, or values that no replay changes."""
    recorded = eager_on_graph(function, capture_stub=lambda *arguments: None)

    @functools.wraps(function)
    def call(self: object, out: Tensor, *arguments: object) -> None:
        if _pass is Pass.WARM_UP:
            out.zero_()
        else:
            recorded(self, out, *arguments)

    return call
