"""Host integers to a device, without waiting for what the device still has to do."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT_BYTES = 128
"""Where an array begins in what is copied: kernels may load several of its elements at once."""


def to_device(values: list, device: torch.device | str) -> Tensor:
    """A (nested) list of integers as int64 on a device.

    To a GPU from pinned memory, which PyTorch keeps until the copy is done. A copy from other memory would wait for the
    stream, and with it the scheduler, which prepares the next forward while one runs.
    """
    on_gpu = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def arrays_to_device(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """NumPy arrays of integers on a device, in one copy for each dtype among them.

    A copy, and a kernel to cut or convert it, costs the host as much as a whole small kernel does.
    """
    on_gpu = torch.device(device).type == "cuda"
    found: dict[str, Tensor] = {}
    for dtype in {array.dtype for array in arrays.values()}:
        same = {name: array for name, array in arrays.items() if array.dtype == dtype}
        step = ALIGNMENT_BYTES // dtype.itemsize
        places, end = {}, 0
        for name, array in same.items():
            places[name] = end
            end += -(-array.size // step) * step
        staged = torch.empty(end, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=on_gpu)
        numbers = staged.numpy()
        for name, array in same.items():
            numbers[places[name] : places[name] + array.size] = array.ravel()
        moved = staged.to(device, non_blocking=on_gpu)
        for name, array in same.items():
            found[name] = moved[places[name] : places[name] + array.size].view(array.shape)
    return found
