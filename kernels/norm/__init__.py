"""RMS normalisation (DeepSeek-V4 specification, section 2.1)."""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.registry import select


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, impl: str | None = None) -> Tensor:
    """`x * rsqrt(mean(x²) + eps) * weight` over the last dimension, in fp32, cast to x's dtype once.

    Args:
        x: [..., d] fp32 or bf16.
        weight: [d], any floating dtype, or None (the per-head norm of q has no weight).
        eps: added to the mean square.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [..., d] in x's dtype.

    Raises:
        ValueError: weight does not have x's last dimension.
    """
    _check_weight("rms_norm", x, weight)
    return select("rms_norm", x.device, x.dtype, impl)(x, weight, eps)


def rms_norm_fp8(
    x: Tensor, weight: Tensor | None, eps: float, column_major: bool = False, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """`fp8_quantise(rms_norm(x, weight, eps), 128, column_major)`: the input of an FP8 product.

    Args:
        x: [T, d] fp32 or bf16.
        weight: [d], any floating dtype, or None.
        eps: added to the mean square.
        column_major: layout of the scales, as in `dsv4_kernels.quant.fp8_quantise`.
        impl: implementation by name; None lets the registry choose.

    Returns:
        codes [T, d] float8_e4m3fn, scales [T, ceil(d / 128)] fp32 powers of two.

    Raises:
        ValueError: x is not [T, d], or weight does not have x's last dimension.
    """
    if x.dim() != 2:
        raise ValueError(f"rms_norm_fp8 needs x [T, d]; got {tuple(x.shape)}")
    _check_weight("rms_norm_fp8", x, weight)
    return select("rms_norm_fp8", x.device, x.dtype, impl)(x, weight, eps, column_major)


def _check_weight(name: str, x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{name}: weight has shape {tuple(weight.shape)}; x {tuple(x.shape)} needs ({x.shape[-1]},)")
