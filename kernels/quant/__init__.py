"""Quantisers of DeepSeek-V4 and the Hadamard transform (DeepSeek-V4 specification, sections 3.5 and 4.2).

`fp8_qdq` and `fp4_qdq` quantise and dequantise at once ("fake quantisation"): quantisation-aware training did this to
activations and keys, and a model must repeat it. Codes, scales and weight formats are in `dsv4_kernels.number_formats`.
On a GPU window rows and entries are quantised by the ops that store them, `norm_rope_store` and `compressor`.
"""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.registry import select


def fp8_qdq(x: Tensor, block: int, impl: str | None = None) -> Tensor:
    """x rounded to e4m3 with one power-of-two scale per block of the last dimension, and dequantised.

    Per block: `amax = max(max|x|, 1e-4)`, `s = 2**ceil(log2(amax / 448))`, `e4m3_rne(clamp(x / s, ±448)) * s`.

    The block is 64 for KV rows (over their 448 unrotated channels) and 128 for the input of a linear layer.

    Args:
        x: [..., d] fp32 or bf16.
        block: channels that share a scale; the last block may be shorter.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [..., d] in x's dtype.

    Raises:
        ValueError: block < 1.
    """
    if block < 1:
        raise ValueError(f"block of fp8_qdq is {block}; expected at least 1")
    return select("fp8_qdq", x.device, x.dtype, impl)(x, block)


def fp8_quantise(
    x: Tensor, block: int = 128, column_major: bool = False, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """The codes and scales of `fp8_qdq`, in the form that FP8 products read.

    Args:
        x: [T, K] fp32 or bf16.
        block: channels that share a scale; the last block may be shorter. The GPU kernel supports 128.
        column_major: the scales of neighbouring tokens are contiguous, and each column begins at a multiple of 16
            bytes, as TMA demands of DeepGEMM's operands.
        impl: implementation by name; None lets the registry choose.

    Returns:
        codes [T, K] float8_e4m3fn, contiguous; scales [T, ceil(K / block)] fp32 powers of two.

    Raises:
        ValueError: x does not have two dimensions, or block < 1.
    """
    if x.dim() != 2 or block < 1:
        raise ValueError(f"fp8_quantise needs x [T, K] and a block of at least 1; got {tuple(x.shape)} and {block}")
    return select("fp8_quantise", x.device, x.dtype, impl)(x, block, column_major)


def fp4_qdq(x: Tensor, block: int = 32, impl: str | None = None) -> Tensor:
    """x rounded to e2m1 with one power-of-two scale per block of the last dimension, and dequantised.

    Per block: `amax = max(max|x|, 6·2**-126)`, `s = 2**ceil(log2(amax / 6))`, `e2m1_rne(clamp(x / s, ±6)) * s`; a tie
    rounds to the even code.

    Args:
        x: [..., d] fp32 or bf16.
        block: channels that share a scale; the last block may be shorter.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [..., d] in x's dtype.

    Raises:
        ValueError: block < 1.
    """
    if block < 1:
        raise ValueError(f"block of fp4_qdq is {block}; expected at least 1")
    return select("fp4_qdq", x.device, x.dtype, impl)(x, block)


def hadamard(x: Tensor, impl: str | None = None) -> Tensor:
    """The product of the last dimension with the orthonormal Hadamard matrix in Sylvester's order.

    `H[i, j] = (-1)**popcount(i & j) / sqrt(d)`; computed in fp32, cast to x's dtype once. The transform is its own
    inverse.

    Args:
        x: [..., d] fp32 or bf16, d a power of two.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [..., d] in x's dtype.

    Raises:
        ValueError: d is not a power of two.
    """
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ValueError(f"hadamard needs a last dimension that is a power of two; x has shape {tuple(x.shape)}")
    return select("hadamard", x.device, x.dtype, impl)(x)
