"""Tensors for kernels' tests with gaps between their rows, and with rows more than 2**31 bytes apart.

Shared by the tests of all kernels. A contiguous tensor hides a stride that is taken from another tensor or from a
shape; a small one hides an offset that is computed in 32 bits.

    q = strided(q, 0, 1, 8)                       # [T, H, 512] with strides ((H + 1) * 520, 520, 1)
    pool = sparse((2**20, 512), (520, 1), torch.bfloat16)
    with emulated() as device:
        use_in_place(device, pool)                # before the launch; otherwise the emulator copies all of it
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ptx_emulator import Device

NONSENSE = 2**31 - 1
"""Value of slots and page numbers that must not be read."""
BEYOND_BYTES = (1 << 33) + (1 << 26)
"""Size of a pool in which neither bytes nor bf16 elements can be counted in 32 bits, signed or unsigned."""
LARGE_BYTES = 1 << 30
"""Storages of at least this size are not copied into the emulator's memory."""


def nothing_of(dtype: torch.dtype) -> float | int:
    """Return the value of gaps: NaN, in bytes of any format; an invalid number in lists."""
    if dtype.is_floating_point:
        return float("nan")
    return 0xFF if dtype == torch.uint8 else NONSENSE


def strided(x: Tensor, *gaps: int, device: str | torch.device | None = None) -> Tensor:
    """Return the same values as part of a tensor that is longer by `gaps` in each dimension, on `device`.

    So the stride of a dimension follows from the gaps of the dimensions after it; the first gap only extends the end.
    """
    longer = [n + gap for n, gap in zip(x.shape, gaps, strict=True)]
    wide = torch.full(longer, nothing_of(x.dtype), dtype=x.dtype, device=x.device if device is None else device)
    view = wide[tuple(slice(n) for n in x.shape)]
    view.copy_(x)
    return view


def sparse(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Tensor:
    """Return a tensor with these strides, in elements. On a CPU it is zeros, of which only touched pages use memory; on
    a GPU, where all of it does, gaps have the value of `nothing_of`."""
    num_bytes = (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))) * dtype.itemsize
    if torch.device(device).type == "cpu":
        # 0x4000 is MAP_NORESERVE: untouched pages reserve no memory.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    else:
        flat = torch.full((num_bytes // dtype.itemsize,), nothing_of(dtype), dtype=dtype, device=device)
    return flat.as_strided(shape, strides)


def far_apart(x: Tensor, row_gap: int = 8) -> Tensor:
    """Return the same values [n, ..., d] with x[0] and x[-1] 2**32 elements apart, the other rows between them.

    With n of at least 4 the first stride is below 2**31 elements, as with many tokens.
    """
    strides = [1]
    for length in x.shape[:0:-1]:
        strides.insert(0, strides[0] * length + (row_gap if len(strides) == 1 else 0))
    strides[0] = -(-(1 << 32) // (len(x) - 1) // 64) * 64  # rounded up
    far = sparse(tuple(x.shape), tuple(strides), x.dtype, x.device)
    far.copy_(x)
    return far


def last_of_many(rows: Tensor, count: int) -> Tensor:
    """Return `count` rows side by side, zeros in `sparse` memory except for the last ones, which are `rows`."""
    many = sparse((count, *rows.shape[1:]), rows.contiguous().stride(), rows.dtype)
    many[-len(rows) :] = rows
    return many


def use_in_place(device: Device, *tensors: Tensor | None) -> None:
    """Let launches of the emulated device use these CPU tensors in place if they are large; small ones are copied."""
    for tensor in tensors:
        if tensor is not None and tensor.untyped_storage().nbytes() >= LARGE_BYTES:
            device.memory.use_in_place(tensor)
