"""Copies of host integers to a device that do not wait for work queued on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT_BYTES = 128
"""Alignment of each array in the copied buffer: kernels may load several elements at once."""


def to_device(values: list, device: torch.device | str) -> Tensor:
    """The (nested) list of integers as an int64 tensor on a device.

    A copy to a GPU is made from pinned memory, which PyTorch keeps until it is done. A copy from pageable memory would
    wait for the stream, and with it the scheduler, which prepares the next forward while one runs.
    """
    on_gpu = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def arrays_to_device(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """The NumPy arrays of integers as tensors on a device, moved in one copy for each dtype among them.

    Each copy, and each kernel that slices or converts one, costs the host as much as launching any small kernel.
    """
    on_gpu = torch.device(device).type == "cuda"
    found: dict[str, Tensor] = {}
    for dtype in {array.dtype for array in arrays.values()}:
        same = {name: array for name, array in arrays.items() if array.dtype == dtype}
        step = ALIGNMENT_BYTES // dtype.itemsize
        begins, end = {}, 0
        for name, array in same.items():
            begins[name] = end
            end += -(-array.size // step) * step
        staged = torch.empty(end, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=on_gpu)
        numbers = staged.numpy()
        for name, array in same.items():
            numbers[begins[name] : begins[name] + array.size] = array.ravel()
        moved = staged.to(device, non_blocking=on_gpu)
        for name, array in same.items():
            found[name] = moved[begins[name] : begins[name] + array.size].view(array.shape)
    return found
