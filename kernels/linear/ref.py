"""Definition of the products, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.quant import fp8_qdq


def linear(x: Tensor, weight: Tensor, act_qdq_block: int | None) -> Tensor:
    """See `dsv4_kernels.linear.linear`."""
    if act_qdq_block is not None:
        x = fp8_qdq(x, act_qdq_block)
    return (x.float() @ weight.float().T).to(x.dtype)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.linear_fp32`."""
    return x.float() @ weight.float().T


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.grouped_linear`."""
    return torch.einsum("tgk,gnk->tgn", x.float(), weight.float()).to(x.dtype)
