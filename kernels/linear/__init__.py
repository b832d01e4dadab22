"""Products of rows with weights; in batch-invariant implementations a row's bits do not depend on the other rows.

All functions take x with rows in the first dimension and a weight stored [n, k], accumulate in fp32 and round once. On
a CPU the implementation is "tiled" (see `dsv4_kernels.linear.tiled`), which is batch-invariant: a served token's bits
do not depend on batch and chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.linear.ref import HeadRotation
from dsv4_kernels.registry import select

__all__ = [
    *("HeadRotation", "expand_fp8_weight", "grouped_linear", "grouped_linear_fp8_weight"),
    *("linear", "linear_fp32"),
]

_BLOCK = 128
"""Rows and channels of an FP8 weight that share a scale."""


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
        ValueError: shapes or dtypes that do not match.
    """
    _check("linear", x, weight, x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1])
    return select("linear", x.device, x.dtype, impl)(x, weight, act_qdq_block)


def linear_fp32(x: Tensor, weight: Tensor, impl: str | None = None) -> Tensor:
    """`x.float() @ weight.float().T`, result fp32: the products of router, compressor and hyper-connections.

    Args:
        x: [T, k] fp32 or bf16.
        weight: [n, k]. Our GPU kernels take bf16; the other implementations any floating dtype, and fp32 saves them a
            conversion per call.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, n] fp32.

    Raises:
        ValueError: shapes that do not match.
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
        ValueError: shapes or dtypes that do not match.
    """
    fits = x.dim() == 3 and weight.dim() == 3 and x.shape[1] == weight.shape[0] and x.shape[2] == weight.shape[2]
    _check("grouped_linear", x, weight, fits)
    return select("grouped_linear", x.device, x.dtype, impl)(x, weight)


def grouped_linear_fp8_weight(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    rotation: HeadRotation | None = None,
    quantises: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`grouped_linear` with an FP8 weight as the checkpoint stores it, and the layer's operations before and after it.

    ::

        if rotation: x = apply_rope(x of heads, positions, frequencies, inverse=True)      # rounded to x's dtype
        out = grouped_linear(x, (weight * scale of its 128 x 128).to(x.dtype))             # exact: a power of two
        if quantises: out = fp8_quantise(out [T, g n], 128, column_major=True)

    Args:
        x: [T, g, k] fp32 or bf16. It is not modified.
        weight: [g, n, k] float8_e4m3fn without NaN.
        scale: [g, ceil(n / 128), ceil(k / 128)] fp32 powers of two.
        rotation: None for no rotation; its head_dim divides k.
        quantises: whether the result is quantised; n must then be a multiple of 128.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, g, n] in x's dtype, or codes [T, g n] and scales [T, g n / 128] of `dsv4_kernels.quant.fp8_quantise`.

    Raises:
        ValueError: shapes or dtypes that do not match.
    """
    name = "grouped_linear_fp8_weight"
    fits = x.dim() == 3 and weight.dim() == 3 and x.shape[1] == weight.shape[0] and x.shape[2] == weight.shape[2]
    if not fits:
        raise ValueError(f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit each other")
    groups, n, k = weight.shape
    expected = (groups, -(-n // _BLOCK), -(-k // _BLOCK))
    if tuple(scale.shape) != expected or weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise ValueError(
            f"{name}: weight is {weight.dtype} {tuple(weight.shape)} and scale {scale.dtype} {tuple(scale.shape)}; "
            f"expected torch.float8_e4m3fn and torch.float32 {expected}"
        )
    if rotation is not None:
        positions, frequencies, head_dim = rotation
        if positions.shape != x.shape[:1] or frequencies.dim() != 1:
            raise ValueError(
                f"{name}: positions have shape {tuple(positions.shape)} and frequencies {tuple(frequencies.shape)}; "
                f"expected ({x.shape[0]},) and [R / 2]"
            )
        if head_dim < max(1, 2 * len(frequencies)) or k % head_dim:
            raise ValueError(
                f"{name}: heads of {head_dim} channels, of which {2 * len(frequencies)} are turned, in {k} channels"
            )
    if quantises and n % _BLOCK:
        raise ValueError(f"{name}: {n} rows of a group are no multiple of {_BLOCK}, so groups would share scales")
    return select(name, x.device, x.dtype, impl)(x, weight, scale, rotation, quantises)


def expand_fp8_weight(weight: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """A weight of `grouped_linear_fp8_weight` in the dtype of its input, without rounding, for products of many tokens.

    Args:
        weight: [g, n, k] float8_e4m3fn, n and k multiples of 128.
        scale: [g, n / 128, k / 128] fp32.
        out: [g, n, k] fp32 or bf16, contiguous, written.

    Returns:
        out.
    """
    out.copy_(weight)
    blocks = out.unflatten(2, (-1, _BLOCK)).unflatten(1, (-1, _BLOCK))
    blocks.mul_(scale[:, :, None, :, None].to(out.dtype))
    return out


def linear_fp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, impl: str | None = None) -> Tensor:
    """The product of FP8 layers (DeepSeek-V4 specification, section 4.2), of tokens that are already quantised.

    `sum_b (codes[:, b] @ weight[:, b].T) * (scales[:, b] * weight_scale[n // 128, b])` over the blocks b of 128
    channels: each block's product in fp32, the blocks added in fp32 in their order, and rounded once.

    Args:
        codes: [T, K] float8_e4m3fn.
        scales: [T, ceil(K / 128)] fp32, powers of two, of any strides; `dsv4_kernels.quant.fp8_quantise` makes both.
        weight: [N, K] float8_e4m3fn.
        weight_scale: [ceil(N / 128), ceil(K / 128)] fp32.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, N] bf16.

    Raises:
        ValueError: shapes or dtypes that do not match.
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
