"""Experts in the order of Blackwell's tensor core: codes as in the checkpoint, scales in tiles of 128 rows.

In a tile of 128 rows and four scales, byte `16 (row % 32) + 4 (row // 32) + j` is scale j of a row: the order in which
`tcgen05.cp.32x128b.warpx4` copies to four columns of tensor memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 128
TILE_SCALES = 4
"""Scales of a row in a tile."""
TILE_BYTES = TILE_ROWS * TILE_SCALES
UE8M0_NAN = 255
_EXPERTS_AT_ONCE = 2


class TiledMatrix(NamedTuple):
    """One MXFP4 matrix [rows, K] of all experts."""

    codes: Tensor  # int8 [E, rows, K / 2], as stored
    scales: Tensor  # uint8 [E, rows / 128, K / 128, 512]
    rounded: int = 0
    """Codes that were rounded: none, because codes and scales keep their bits."""


def in_tiles(scale: Tensor) -> Tensor:
    """Scales in tiles: uint8 [E, rows / 128, n / 4, 512], from scales [E, rows, n] of one byte each, n a row.

    Raises:
        ValueError: the scales don't fill tiles.
    """
    experts, rows, blocks = scale.shape
    if rows % TILE_ROWS or blocks % TILE_SCALES:
        raise ValueError(
            f"scales [{experts}, {rows}, {blocks}] do not fill tiles of {TILE_ROWS} rows and {TILE_SCALES} scales: "
            "hidden and intermediate size must be multiples of 128"
        )
    tiles = scale.view(torch.uint8).view(experts, rows // TILE_ROWS, 4, 32, blocks // TILE_SCALES, TILE_SCALES)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows // TILE_ROWS, blocks // TILE_SCALES, TILE_BYTES)


def in_rows(tiles: Tensor) -> Tensor:
    """The inverse of `in_tiles`: uint8 [E, rows, scales of a row]."""
    experts, row_tiles, steps, _ = tiles.shape
    rows = tiles.view(experts, row_tiles, steps, 32, 4, TILE_SCALES).permute(0, 1, 4, 3, 2, 5)
    return rows.reshape(experts, row_tiles * TILE_ROWS, steps * TILE_SCALES)


def arrange(codes: Tensor, scale: Tensor, *, gate_up: bool, in_place: bool = False) -> TiledMatrix:
    """One matrix as the kernel reads it; codes are shared with the argument.

    In place, tiles overwrite the scales. Temporary memory is needed for the scales of two experts at a time.

    Args:
        codes: int8 [E, rows, K / 2], contiguous, the even column in the low nibble.
        scale: ue8m0 [E, rows, K / 32], contiguous.
        gate_up: whether the rows are the rows of w1, then of w3; this layout keeps their order.
        in_place: see above.

    Raises:
        ValueError: rows or K is not a multiple of 128, or a scale is NaN.
    """
    if (scale.view(torch.uint8) == UE8M0_NAN).any():
        raise ValueError("an expert's scale is NaN (ue8m0 255): the checkpoint is damaged")
    if not in_place:
        return TiledMatrix(codes, in_tiles(scale))
    return TiledMatrix(codes, tile_in_place(scale))


def tile_in_place(scale: Tensor) -> Tensor:
    """Scales [E, rows, n] of one byte each, contiguous, overwritten by tiles: a view [E, rows / 128, n / 4, 512]."""
    for first in range(0, len(scale), _EXPERTS_AT_ONCE):
        some = scale[first : first + _EXPERTS_AT_ONCE].view(torch.uint8)
        some.copy_(in_tiles(some).view(some.shape))
    return _as_tiles(scale)


def in_checkpoint_order(codes: Tensor, scale: Tensor, *, gate_up: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8 [E, rows, K / 2], scale bytes uint8 [E, rows, K / 32]): the inverse of `arrange` in place.

    Args:
        codes, scale: as `arrange` left them, in the shapes of its arguments.
        gate_up: as for `arrange`.
    """
    return codes.view(torch.uint8), in_rows(_as_tiles(scale))


def _as_tiles(scale: Tensor) -> Tensor:
    """A view of memory [E, rows, scales of a row] that holds tiles."""
    experts, rows, blocks = scale.shape
    return scale.view(torch.uint8).view(experts, rows // TILE_ROWS, blocks // TILE_SCALES, TILE_BYTES)
