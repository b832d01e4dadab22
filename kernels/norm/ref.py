"""Definition of the norm, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.reference.row_pieces import in_row_pieces


@in_row_pieces
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `dsv4_kernels.norm.rms_norm`."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    return y.to(x.dtype)


def rms_norm_fp8(x: Tensor, weight: Tensor | None, eps: float, column_major: bool) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.norm.rms_norm_fp8`."""
    return fp8_quantise(rms_norm(x, weight, eps), column_major=column_major, impl="ref")
