"""Definition of the products, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.quant import fp8_qdq

BLOCK = 128
"""Channels, and rows of a weight, that share a scale."""


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


def linear_fp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.linear_fp8`."""
    of_rows = weight_scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    total = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.float32, device=codes.device)
    for block in range(scales.shape[1]):
        channels = slice(block * BLOCK, (block + 1) * BLOCK)
        product = codes[:, channels].float() @ weight[:, channels].float().T
        total += product * (scales[:, block, None] * of_rows[None, :, block])
    return total.bfloat16()
