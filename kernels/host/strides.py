"""Strides and alignment of tensors, as kernels need them."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_BYTES = 16
"""Bytes of one load or store of a row."""


def stride_bytes(x: Tensor | None, dim: int) -> int:
    """Bytes from one index of a dimension to the next; 0 for None."""
    return 0 if x is None else x.stride(dim) * x.element_size()


def check_rows(what: str, x: Tensor, dim: int | None = None) -> None:
    """Checks that a kernel can read rows of bf16 in units of 16 bytes.

    Args:
        what: the tensor's name in the message: "rms_norm: x".
        x: [..., d].
        dim: the required d; None allows any multiple of 8.

    Raises:
        ValueError: a dtype other than bf16, another d, channels that are not contiguous, or rows at addresses that are
            not multiples of 16 bytes.
    """
    channels = UNIT_BYTES // torch.bfloat16.itemsize
    fits = x.dtype == torch.bfloat16 and x.dim() > 0 and (x.shape[-1] == dim if dim else x.shape[-1] % channels == 0)
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    fits = fits and (x.shape[-1] == 1 or x.stride(-1) == 1) and not any(stride % channels for stride in strides)
    if not fits or x.data_ptr() % UNIT_BYTES:
        raise ValueError(
            f"{what} must be torch.bfloat16 [..., {dim or 'a multiple of 8'}] with contiguous channels and rows at "
            f"multiples of {UNIT_BYTES} bytes; got {x.dtype} {tuple(x.shape)} with strides {x.stride()} at address "
            f'{x.data_ptr():#x}. The implementation "ref" takes any'
        )


def check_codes(what: str, codes: Tensor, dim: int) -> None:
    """Checks that a kernel can read rows of FP8 codes in units of 16 bytes.

    Args:
        what: the tensor's name in the message.
        codes: [T, dim], one byte a channel.
        dim: the required number of channels.

    Raises:
        ValueError: another shape, channels that are not contiguous, or rows at addresses that are not multiples of 16
            bytes.
    """
    rows_apart = codes.stride(0) if len(codes) > 1 else 0
    if codes.shape[1] != dim or codes.stride(1) != 1 or rows_apart % UNIT_BYTES or codes.data_ptr() % UNIT_BYTES:
        raise ValueError(
            f"{what} must be [T, {dim}] with contiguous channels and rows at multiples of {UNIT_BYTES} bytes; got "
            f"{tuple(codes.shape)} with strides {codes.stride()} at {codes.data_ptr():#x}"
        )
