"""RMSNorm with its weight in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from sglang_dsv4.layers.linear import Fp8Input


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, in fp32, cast to x's dtype once (section 2.1)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., dim]` normed, in x's dtype."""
        return rms_norm(x, self.weight, self.eps)

    def of_linear(self, x: Tensor, quantises: bool) -> Tensor | Fp8Input:
        """`x [T, dim]` normed, as linear layers take it; `quantises`: see `layers.linear.quantises_once`."""
        if not quantises:
            return self(x)
        return Fp8Input(*rms_norm_fp8(x, self.weight, self.eps, column_major=True))
