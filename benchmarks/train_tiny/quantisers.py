"""The release's fake quantisers with straight-through gradients, in PyTorch operators that run on any device.

The values are those of `dsv4_kernels.number_formats`, bit for bit (DeepSeek-V4 specification, section 4.2). No package
of this repository is imported: the training host needs nothing but PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
FP8_AMAX_FLOOR, FP4_AMAX_FLOOR = 1e-4, 6.0 * 2.0**-126


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x, for positive normal fp32."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    spacing = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / spacing) * spacing, x)


def fp8_rows(x: Tensor, block: int) -> Tensor:
    """x [..., n] rounded to e4m3 with a power-of-two scale for `block` channels; same dtype."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=FP8_AMAX_FLOOR)
    scale = _power_of_two_above(amax * (1.0 / E4M3_MAX))
    return (_e4m3(blocks / scale) * scale).flatten(-2).to(x.dtype)


def fp4_rows(x: Tensor, block: int = 32) -> Tensor:
    """x [..., n] rounded to e2m1 with a power-of-two scale for `block` channels; same dtype."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=FP4_AMAX_FLOOR)
    scale = _power_of_two_above(amax * (1.0 / E2M1_MAX))
    return (_e2m1(blocks / scale) * scale).flatten(-2).to(x.dtype)


def fp8_matrix(weight: Tensor) -> Tensor:
    """A matrix [n, k] fp32 rounded to e4m3 with a power-of-two scale for 128 x 128; n and k multiples of 128."""
    blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=FP8_AMAX_FLOOR)
    scale = _power_of_two_above(amax * (1.0 / E4M3_MAX))
    return (_e4m3(blocks / scale) * scale).flatten(2).flatten(0, 1)


class _StraightThrough(torch.autograd.Function):
    """A quantiser whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[..., Tensor], block: int) -> Tensor:  # noqa: ANN401
        return rounded(x, block)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return grad, None, None


def straight_through(x: Tensor, rounded: Callable[..., Tensor], block: int) -> Tensor:
    """``rounded(x, block)``, with the gradient of x."""
    return _StraightThrough.apply(x, rounded, block)


def hadamard_matrix(n: int) -> Tensor:
    """The orthonormal Hadamard matrix [n, n] fp32 in Sylvester order; n a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(n)
