"""MXFP4 and NVFP4 experts, with scales as in a checkpoint or in the order of Blackwell's tensor core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dsv4_kernels.moe.sm90.weights import HopperExperts, arrange

_TILE_ROWS = 128
_STEP_SCALES = 4


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
        return replace(self, w13_scale=_in_tiles(self.w13_scale), w2_scale=_in_tiles(self.w2_scale), in_tiles=True)


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


def _in_tiles(scale: Tensor) -> Tensor:
    """Scales in tiles: uint8 [E, rows / 128, scales of a row / 4, 512], from ue8m0 [E, rows, k / 32] or e4m3
    [E, rows, k / 16].

    In a tile of 128 rows and four scales, byte `16 (row % 32) + 4 (row // 32) + j` is scale j of a row: the order in
    which `tcgen05.cp.32x128b.warpx4` copies to four columns of tensor memory.
    """
    experts, rows, blocks = scale.shape
    if rows % _TILE_ROWS or blocks % _STEP_SCALES:
        raise ValueError(
            f"scales [{experts}, {rows}, {blocks}] do not fill tiles of {_TILE_ROWS} rows and {_STEP_SCALES} scales: "
            "hidden and intermediate size must be multiples of 128"
        )
    tiles = scale.view(torch.uint8).view(experts, rows // _TILE_ROWS, 4, 32, blocks // _STEP_SCALES, _STEP_SCALES)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows // _TILE_ROWS, blocks // _STEP_SCALES, 512)


def _in_rows(tiles: Tensor) -> Tensor:
    experts, row_tiles, steps, _ = tiles.shape
    rows = tiles.view(experts, row_tiles, steps, 32, 4, _STEP_SCALES).permute(0, 1, 4, 3, 2, 5)
    return rows.reshape(experts, row_tiles * _TILE_ROWS, steps * _STEP_SCALES).view(torch.float8_e8m0fnu)
