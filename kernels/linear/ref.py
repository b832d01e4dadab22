"""Definition of the products, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.number_formats import dequantise_fp8_weight
from dsv4_kernels.quant import fp8_qdq
from dsv4_kernels.quant.ref import fp8_quantise
from dsv4_kernels.rope.ref import apply_rope


class HeadRotation(NamedTuple):
    """The rotation that turns the last channels of every head of an input back before the product."""

    positions: Tensor  # [T] int64
    frequencies: Tensor  # [R / 2] fp32
    head_dim: int


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


def grouped_linear_fp8_weight(
    x: Tensor, weight: Tensor, scale: Tensor, rotation: HeadRotation | None, quantises: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dsv4_kernels.linear.grouped_linear_fp8_weight`."""
    if rotation is not None:
        heads = x.unflatten(2, (-1, rotation.head_dim))
        x = apply_rope(heads, rotation.positions, rotation.frequencies, True).flatten(2)
    plain = [dequantise_fp8_weight(*of_group, x.dtype) for of_group in zip(weight, scale, strict=True)]
    out = grouped_linear(x, torch.stack(plain))
    return fp8_quantise(out.flatten(1), 128, True) if quantises else out


def linear_fp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.linear_fp8`."""
    of_rows = weight_scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    total = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.float32, device=codes.device)
    for block in range(scales.shape[1]):
        channels = slice(block * BLOCK, (block + 1) * BLOCK)
        product = codes[:, channels].float() @ weight[:, channels].float().T
        total += product * (scales[:, block, None] * of_rows[None, :, block])
    return total.bfloat16()
