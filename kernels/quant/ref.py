"""Definition of the quantisers and the Hadamard transform, in plain PyTorch (specification, sections 3.5 and 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.number_formats import decode_fp8, encode_fp8, round_to_e2m1
from dsv4_kernels.reference.row_pieces import in_row_pieces


@in_row_pieces
def fp8_qdq(x: Tensor, block: int) -> Tensor:
    """See `dsv4_kernels.quant.fp8_qdq`."""
    codes, scales = encode_fp8(x, block)
    return decode_fp8(codes, scales, block).to(x.dtype)


def fp8_quantise(x: Tensor, block: int, column_major: bool) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.quant.fp8_quantise`."""
    codes, scales = encode_fp8(x, block)
    if column_major:
        columns = torch.empty(scales.shape[1], -(-len(scales) // 4) * 4, dtype=scales.dtype, device=scales.device)
        scales = columns.T[: len(scales)].copy_(scales)
    return codes.contiguous(), scales


@in_row_pieces
def fp4_qdq(x: Tensor, block: int) -> Tensor:
    """See `dsv4_kernels.quant.fp4_qdq`."""
    values, scales = round_to_e2m1(x, block)
    return (values * scales.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


@in_row_pieces
def hadamard(x: Tensor) -> Tensor:
    """See `dsv4_kernels.quant.hadamard`."""
    d = x.shape[-1]
    y = x.float()
    stride = 1
    while stride < d:
        pairs = y.unflatten(-1, (-1, 2, stride))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        stride *= 2
    return (y * d**-0.5).to(x.dtype)
