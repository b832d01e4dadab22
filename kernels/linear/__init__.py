"""Products with weights, whose result for a row is the same in whatever company the row comes.

All take x with rows in the first dimension and a weight stored [n, k], accumulate in fp32 and round once. On a CPU the
implementation is "tiled" (see `dsv4_kernels.linear.tiled`): a row's bits do not depend on how many other rows come with
it, which is what makes a served token independent of batch and chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.registry import select


def linear(x: Tensor, weight: Tensor, act_qdq_block: int | None = None, impl: str | None = None) -> Tensor:
    """`x @ weight.T`, fp32 accumulation, result in x's dtype.

    Args:
        x: [T, k] fp32 or bf16.
        weight: [n, k] in x's dtype.
        act_qdq_block: if given, x is first rounded by `dsv4_kernels.quant.fp8_qdq` with this block (the FP8 linear
            layers of the release: 128; DeepSeek-V4 specification, section 4.2).
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, n] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    _check("linear", x, weight, x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1])
    return select("linear", x.device, x.dtype, impl)(x, weight, act_qdq_block)


def linear_fp32(x: Tensor, weight: Tensor, impl: str | None = None) -> Tensor:
    """`x.float() @ weight.float().T`, result fp32: the products of router, compressor and hyper-connections.

    Args:
        x: [T, k] fp32 or bf16.
        weight: [n, k], any floating dtype; fp32 spares a conversion a call.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, n] fp32.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear_fp32: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit each other")
    return select("linear_fp32", x.device, x.dtype, impl)(x, weight)


def grouped_linear(x: Tensor, weight: Tensor, impl: str | None = None) -> Tensor:
    """`einsum("tgk,gnk->tgn", x, weight)`: the first half of the grouped output projection.

    Args:
        x: [T, g, k] fp32 or bf16.
        weight: [g, n, k] in x's dtype.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, g, n] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    fits = x.dim() == 3 and weight.dim() == 3 and x.shape[1] == weight.shape[0] and x.shape[2] == weight.shape[2]
    _check("grouped_linear", x, weight, fits)
    return select("grouped_linear", x.device, x.dtype, impl)(x, weight)


def linear_fp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, impl: str | None = None) -> Tensor:
    """The product of FP8 layers (DeepSeek-V4 specification, section 4.2), of tokens that are quantised already.

    `sum_b (codes[:, b] @ weight[:, b].T) * (scales[:, b] * weight_scale[n // 128, b])` over the blocks b of 128
    channels, each block's product in fp32, the blocks added in fp32 in their order, and rounded once.

    Args:
        codes: [T, K] float8_e4m3fn.
        scales: [T, ceil(K / 128)] fp32, powers of two, of any strides: `dsv4_kernels.quant.fp8_quantise` makes both.
        weight: [N, K] float8_e4m3fn.
        weight_scale: [ceil(N / 128), ceil(K / 128)] fp32.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, N] bf16.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    operands = {"codes": codes, "scales": scales, "weight": weight, "weight_scale": weight_scale}
    shapes = ", ".join(f"{name} {tuple(operand.shape)}" for name, operand in operands.items())
    if any(operand.dim() != 2 for operand in operands.values()) or codes.shape[1] != weight.shape[1]:
        raise ValueError(f"linear_fp8: {shapes} do not fit each other")
    blocks = -(-codes.shape[1] // 128)
    wanted = {"scales": (codes.shape[0], blocks), "weight_scale": (-(-weight.shape[0] // 128), blocks)}
    if any(tuple(operands[name].shape) != shape for name, shape in wanted.items()):
        raise ValueError(f"linear_fp8: {shapes}; expected scales {wanted['scales']} and {wanted['weight_scale']}")
    dtypes = [operand.dtype for operand in operands.values()]
    if dtypes != [torch.float8_e4m3fn, torch.float32] * 2:
        raise ValueError(f"linear_fp8: codes must be float8_e4m3fn and scales float32; got {dtypes}")
    return select("linear_fp8", codes.device, torch.bfloat16, impl)(codes, scales, weight, weight_scale)


def _check(name: str, x: Tensor, weight: Tensor, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit each other")
    if x.dtype != weight.dtype:
        raise ValueError(f"{name}: x is {x.dtype} and weight {weight.dtype}; expected the same dtype")
