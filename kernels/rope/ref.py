"""Definition of the rotary embedding, in plain PyTorch (DeepSeek-V4 specification, section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class YarnScaling:
    """Parameters of YaRN's scaling of the slow frequencies. No amplitude factor: DeepSeek-V4 scales neither cos/sin nor
    scores."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float


def rope_frequencies(dim: int, theta: float, yarn: YarnScaling | None) -> Tensor:
    """The angle per position of each channel pair.

    `f_i = theta**(-2i / dim)`. With YaRN, pairs that turn less than `beta_slow` times over the original context are
    slowed by `factor`, pairs that turn more than `beta_fast` times are kept, and a linear ramp joins them: `f_i /
    factor * ramp_i + f_i * (1 - ramp_i)`. It applies at all positions.

    Args:
        dim: rotated channels, even.
        theta: base.
        yarn: None for layers without compression.

    Returns:
        [dim / 2] fp32.

    Raises:
        ValueError: dim is odd or not positive.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rope dim is {dim}; expected a positive even number")
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return frequencies

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(yarn.beta_slow)), dim - 1)
    width = max(high - low, 1e-3)  # the ramp is a step if both ends fall on one pair
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def apply_rope(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
    """See `dsv4_kernels.rope.apply_rope`."""
    rotated = 2 * frequencies.shape[0]
    angles = positions.float().unsqueeze(-1) * frequencies  # [T, R / 2]
    angles = angles.view(angles.shape[0], *(1,) * (x.dim() - 2), angles.shape[1])
    cos, sin = torch.cos(angles), torch.sin(angles)
    if inverse:
        sin = -sin
    even, odd = x[..., -rotated:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - rotated], turned.to(x.dtype)), -1)


def apply_rope_in_place(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> None:
    """See `dsv4_kernels.rope.apply_rope_in_place`."""
    rotated = x[..., x.shape[-1] - 2 * frequencies.shape[0] :]
    rotated.copy_(apply_rope(rotated, positions, frequencies, inverse))
