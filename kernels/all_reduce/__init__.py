"""Sum over the ranks of a tensor-parallel group, through memory that all of its GPUs can write."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.host.mailboxes import Mailboxes
from dsv4_kernels.registry import select

DTYPES = (torch.bfloat16, torch.float32)


def all_reduce(part: Tensor, mailboxes: Mailboxes, impl: str | None = None) -> Tensor:
    """The sum of all ranks' parts: `((part of rank 0 + part of rank 1) + ...)` in fp32, rounded once to their dtype.

    An element's bits depend on its own parts only, not on the number of rows or its place among them, and are the same
    on every rank. Every rank calls it with the same shapes, in the same order, on one stream.

    Args:
        part: [..., d] bf16 or fp32, contiguous; this rank's. At most `mailboxes.most_bytes` bytes for a GPU's kernel.
        mailboxes: of the group, on the device of `part`.
        impl: implementation by name; None lets the registry choose.

    Returns:
        The shape and dtype of `part`, contiguous. NaN where a rank's part did not arrive in time (`Mailboxes.late`).

    Raises:
        ValueError: another dtype, gaps between rows, or for the kernel too many bytes or no multiple of 16.
    """
    if part.dtype not in DTYPES or not part.is_contiguous():
        raise ValueError(
            f"all_reduce: part is {part.dtype} with strides {part.stride()}; expected contiguous bf16 or fp32"
        )
    return select("all_reduce", part.device, part.dtype, impl)(part, mailboxes)
