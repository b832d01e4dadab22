"""Host integers to a device, without waiting for what the device still has to do."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: list, device: torch.device | str) -> Tensor:
    """A (nested) list of integers as int64 on a device.

    To a GPU from pinned memory, which PyTorch keeps until the copy is done. A copy from other memory would wait for the
    stream, and with it the scheduler, which prepares the next forward while one runs.
    """
    on_gpu = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
