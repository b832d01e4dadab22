"""Global memory through which the CTAs of a launch meet: partial results and counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scratch:
    """A launch's own memory. Launches that run at the same time must not share it."""

    slots: Tensor  # [bytes] uint8, without a meaning between launches
    counters: Tensor  # [n] int32, zero between launches

    @staticmethod
    def on(device: torch.device, num_bytes: int, num_counters: int) -> Scratch:
        """For a launch on the current stream.

        A stream keeps its own. While a graph is captured, the slots come from the graph's pool, which its other
        temporaries share; the counters are those that all graphs of a device use, so graphs that divide keys must not
        run at the same time.

        Raises:
            RuntimeError: a graph is being captured, and no such call has been made on the device.
        """
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        counters = _graph_counters.get(device)
        if capturing:
            if counters is None or counters.numel() < num_counters:
                raise RuntimeError(
                    "sparse_attention: a CUDA graph is being captured with split_keys, and the kernel has not run on "
                    f"{device} with as many tokens before; make the same call once without a graph"
                )
            return Scratch(torch.empty(num_bytes, dtype=torch.uint8, device=device), counters)
        if counters is None or counters.numel() < num_counters:
            _graph_counters[device] = torch.zeros(num_counters, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        held = _by_stream.get((device, stream))
        if held is None or held.slots.numel() < num_bytes or held.counters.numel() < num_counters:
            held = _by_stream[device, stream] = Scratch(
                torch.empty(num_bytes, dtype=torch.uint8, device=device),
                torch.zeros(num_counters, dtype=torch.int32, device=device),
            )
        return held


_by_stream: dict[tuple[torch.device, int], Scratch] = {}
_graph_counters: dict[torch.device, Tensor] = {}
