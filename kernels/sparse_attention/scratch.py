"""Global memory that the CTAs of a launch share: partial results and counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_COUNTERS = 1 << 16
"""Counters of every launch, of any size: a captured graph keeps its address, so counters are never reallocated."""


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of a launch. Launches that run at the same time must not share it."""

    slots: Tensor  # [bytes] uint8, undefined between launches
    counters: Tensor  # [NUM_COUNTERS] int32, zero between launches

    @staticmethod
    def on(device: torch.device, num_bytes: int) -> Scratch:
        """Scratch memory for a launch on the current stream; `slots` has at least `num_bytes` bytes.

        Each stream has its own scratch memory. While a graph is captured, the slots come from the graph's pool, which
        its other temporaries share. All graphs of a device use the same counters, so graphs that divide keys must not
        run at the same time.

        Raises:
            RuntimeError: a graph is being captured, and `Scratch.on` has not been called on the device before.
        """
        is_cuda = device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            if device not in _graph_counters:
                raise RuntimeError(
                    "sparse_attention: a CUDA graph is being captured with split_keys, and no keys have been divided "
                    f"on {device} before; make the same call once without a graph"
                )
            return Scratch(_slots(device, num_bytes), _graph_counters[device])
        if device not in _graph_counters:
            _graph_counters[device] = _counters(device)
        stream = device, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
        held = _by_stream.get(stream)
        if held is None or held.slots.numel() < num_bytes:
            counters = _counters(device) if held is None else held.counters
            held = _by_stream[stream] = Scratch(_slots(device, num_bytes), counters)
        return held


def _slots(device: torch.device, num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _counters(device: torch.device) -> Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


_by_stream: dict[tuple[torch.device, int], Scratch] = {}
_graph_counters: dict[torch.device, Tensor] = {}
