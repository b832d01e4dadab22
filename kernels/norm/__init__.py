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
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight has shape {tuple(weight.shape)}; x {tuple(x.shape)} needs ({x.shape[-1]},)")
    return select("rms_norm", x.device, x.dtype, impl)(x, weight, eps)
