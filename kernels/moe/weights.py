"""MXFP4 and NVFP4 experts, with scales as in a checkpoint or in the order of Blackwell's tensor core."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dsv4_kernels.moe.sm90.weights import HopperExperts, arrange
from dsv4_kernels.moe.sm100.weights import in_rows, in_tiles


class _Experts:
    """Weights of either format: codes of both products, and scales in rows or in tiles."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    in_tiles: bool

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """d."""
        return self.w2.shape[1]

    @property
    def channels(self) -> int:
        """I."""
        return 2 * self.w2.shape[2]

    def tiled(self) -> Self:
        """The same weights with scales in tiles: codes are shared, scales are copied, one matrix at a time.

        Raises:
            ValueError: d or I is not a multiple of 128.
        """
        if self.in_tiles:
            return self
        return replace(self, w13_scale=in_tiles(self.w13_scale), w2_scale=in_tiles(self.w2_scale), in_tiles=True)


@dataclass(frozen=True)
class Mxfp4Experts(_Experts):
    """Weights of this rank's routed experts."""

    w13: Tensor  # int8 [E, 2 I, d / 2]: two e2m1 codes a byte, the even column in the low nibble; w1's rows, then w3's
    w13_scale: Tensor  # ue8m0 [E, 2 I, d / 32], or in tiles uint8 [E, 2 I / 128, d / 128, 512]
    w2: Tensor  # int8 [E, d, I / 2]
    w2_scale: Tensor  # ue8m0 [E, d, I / 32], or in tiles uint8 [E, d / 128, I / 128, 512]
    in_tiles: bool = False

    def in_rows(self) -> Mxfp4Experts:
        """The same weights with scales in rows: the inverse of `tiled`."""
        if not self.in_tiles:
            return self
        return replace(self, w13_scale=_in_rows(self.w13_scale), w2_scale=_in_rows(self.w2_scale), in_tiles=False)

    def for_hopper(self) -> HopperExperts:
        """A copy of the weights in the layout of Hopper's kernel (sm90/weights.py).

        Raises:
            ValueError: d or I is not a multiple of 128, or a scale is NaN.
        """
        plain = self.in_rows()
        w13 = arrange(plain.w13, plain.w13_scale, gate_up=True)
        return HopperExperts(w13, arrange(plain.w2, plain.w2_scale, gate_up=False))


@dataclass(frozen=True)
class Nvfp4Experts(_Experts):
    """Weights of this rank's routed experts of an NVFP4 checkpoint. Each product has one fp32 scale for its inputs."""

    w13: Tensor  # uint8 [E, 2 I, d / 2]
    w13_scale: Tensor  # e4m3 [E, 2 I, d / 16], or in tiles uint8 [E, 2 I / 128, d / 64, 512]
    w13_global: Tensor  # fp32 [E, 2]: weight_scale_2 of w1 and w3
    w13_input: Tensor  # fp32 []: the largest input_scale of any expert
    w2: Tensor  # uint8 [E, d, I / 2]
    w2_scale: Tensor  # e4m3 [E, d, I / 16], or in tiles uint8 [E, d / 128, I / 64, 512]
    w2_global: Tensor  # fp32 [E]
    w2_input: Tensor  # fp32 []
    in_tiles: bool = False

    @functools.cached_property
    def gate_up_factors(self) -> Tensor:
        """fp32 [E, 2]: what a sum over codes and scales lacks in the products with w1 and w3."""
        return (self.w13_global * self.w13_input).contiguous()

    @functools.cached_property
    def down_factors(self) -> Tensor:
        """fp32 [E, 2]: as `gate_up_factors` of the product with w2, twice."""
        return (self.w2_global * self.w2_input)[:, None].repeat(1, 2)


def _in_rows(tiles: Tensor) -> Tensor:
    return in_rows(tiles).view(torch.float8_e8m0fnu)
