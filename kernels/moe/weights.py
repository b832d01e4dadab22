"""MXFP4 and NVFP4 experts, with scales as in a checkpoint or in the order of Blackwell's tensor core."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dsv4_kernels.moe.sm90 import weights as for_hopper
from dsv4_kernels.moe.sm90.weights import HopperExperts
from dsv4_kernels.moe.sm100 import weights as for_blackwell
from dsv4_kernels.moe.sm100.weights import in_rows, in_tiles

LAYOUTS = {"sm90": for_hopper, "sm100": for_blackwell}
"""Implementation -> the module that arranges an MXFP4 matrix for it: `arrange` and `in_checkpoint_order`."""


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
        w13 = for_hopper.arrange(plain.w13, plain.w13_scale, gate_up=True)
        return HopperExperts(w13, for_hopper.arrange(plain.w2, plain.w2_scale, gate_up=False))


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

    def with_factors(self) -> Nvfp4Experts:
        """The same weights; factors are computed now, not in the first call, which a graph may record."""
        assert len(self.gate_up_factors) == len(self.down_factors)
        return self

    @functools.cached_property
    def gate_up_factors(self) -> Tensor:
        """fp32 [E, 2]: what a sum over codes and scales lacks in the products with w1 and w3."""
        return (self.w13_global * self.w13_input).contiguous()

    @functools.cached_property
    def down_factors(self) -> Tensor:
        """fp32 [E, 2]: as `gate_up_factors` of the product with w2, twice."""
        return (self.w2_global * self.w2_input)[:, None].repeat(1, 2)


def arrange_in_place(
    name: str, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> tuple[HopperExperts | Mxfp4Experts, int]:
    """(the experts as the kernels of implementation `name` take them, codes that were rounded).

    Args:
        name: "sm90" or "sm100".
        w13, w13_scale, w2, w2_scale: as in `Mxfp4Experts`, scales in rows; they are overwritten, and the result refers
            to their memory.

    Raises:
        ValueError: as `arrange` of the layout.
    """
    arrange = LAYOUTS[name].arrange
    of_w13 = arrange(w13, w13_scale, gate_up=True, in_place=True)
    of_w2 = arrange(w2, w2_scale, gate_up=False, in_place=True)
    rounded = of_w13.rounded + of_w2.rounded
    if name == "sm90":
        return HopperExperts(of_w13, of_w2), rounded
    return Mxfp4Experts(of_w13.codes, of_w13.scales, of_w2.codes, of_w2.scales, in_tiles=True), rounded


def tile_in_place(scale: Tensor) -> Tensor:
    """One-byte scales [E, rows, n] in tiles: a view uint8 [E, rows / 128, n / 4, 512] of their memory. Signs are
    cleared, which e4m3 scales of the tensor core do not have (SGLang's dummy weights do).

    Raises:
        ValueError: the scales don't fill tiles.
    """
    scale.view(torch.uint8).bitwise_and_(0x7F)
    return for_blackwell.tile_in_place(scale)


def _in_rows(tiles: Tensor) -> Tensor:
    return in_rows(tiles).view(torch.float8_e8m0fnu)
