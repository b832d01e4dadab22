"""MXFP4 experts in the layout of Hopper's kernel: codes in the order of the lanes, scales as shifts.

e2m1 times a power of two is an e4m3 if the power is within a range of 2^0 to 2^11: at its lower end 0.5 becomes 2^-6,
the smallest normal number, and at its upper end 6 becomes 384, which still fits. So a row keeps one fp32 factor, and
each scale group of 32 channels a shift of four bits above the row's base. Scale groups more than 2^11 below the largest
of their row get their codes rounded to the row's smallest scale, to nearest, ties to even: an error of at most 2^-12 of
the row's largest scale group. `rounded` counts the codes that change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 128
"""Rows of a work tile: 64 for each of two warpgroups."""
STEP = 128
"""Channels of K in a pipeline stage, and of an activation scale."""
UNIT_ROWS = 16
"""Rows of a warp in a tile of 64."""
UNIT_BYTES = UNIT_ROWS * STEP // 2
"""Bytes of a unit's codes in a step."""
UNIT_SHIFT_BYTES = UNIT_ROWS * STEP // 32 // 2
"""Bytes of a unit's shifts in a step: four bits for a row and 32 channels, a word for two rows."""
UNITS = TILE_ROWS // UNIT_ROWS
CODE_BYTES, SHIFT_BYTES = UNITS * UNIT_BYTES, UNITS * UNIT_SHIFT_BYTES
"""Bytes of a work tile's codes and shifts in a step."""
LARGEST_SHIFT = 11
SMALLEST_SCALE = 5
"""A shift of 0 is 2^-5: 0.5 becomes e4m3's 2^-6."""
UE8M0_BIAS = 127
UE8M0_NAN = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPERTS_AT_ONCE = 2


class HopperMatrix(NamedTuple):
    """One matrix [rows, K] of all experts; an expert's part of each tensor is contiguous."""

    codes: Tensor  # uint8 [E, rows / 128, K / 128, CODE_BYTES]
    shifts: Tensor  # uint8 [E, rows / 128, K / 128, SHIFT_BYTES]
    factors: Tensor  # fp32 [E, rows]: a factor for each row, in this layout's order of rows
    rounded: int
    """Codes that were rounded because their scale was too small for their row."""


@dataclass(frozen=True)
class HopperExperts:
    """Weights of this rank's routed experts.

    In w13, 8 rows of w1 alternate with 8 rows of w3, so a thread has the gate and the up of a channel. In w2, the even
    rows of 16 precede the odd rows, so a thread has two neighbouring channels.
    """

    w13: HopperMatrix  # 2 I x d
    w2: HopperMatrix  # d x I

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w13.codes.shape[0]

    @property
    def hidden_size(self) -> int:
        """d."""
        return self.w2.factors.shape[1]

    @property
    def channels(self) -> int:
        """I."""
        return self.w13.factors.shape[1] // 2


def arrange(codes: Tensor, scale: Tensor, *, gate_up: bool, in_place: bool = False) -> HopperMatrix:
    """One matrix in the kernel's layout.

    In place, the new codes overwrite the given codes. Shifts overwrite the first half of an expert's scales, factors
    the next `128 / K` of them, and zeros the rest. Temporary memory is needed for two experts at a time.

    Args:
        codes: int8 or uint8 [E, rows, K / 2], contiguous, the even column in the low nibble.
        scale: ue8m0 [E, rows, K / 32], contiguous.
        gate_up: whether the rows are the rows of w1, then of w3.
        in_place: see above; K must be at least 256.

    Raises:
        ValueError: rows or K is not a multiple of 128, or a scale is NaN.
    """
    experts, rows, half = codes.shape
    k = 2 * half
    if rows % TILE_ROWS or k % STEP or (in_place and k < 2 * STEP):
        raise ValueError(
            f"experts of {rows} rows and {k} columns: Hopper's kernel takes multiples of {TILE_ROWS} rows and of "
            f"{STEP} columns{', at least 256' if in_place else ''}. Name another --moe-runner-backend"
        )
    tiles = rows // TILE_ROWS, k // STEP
    if in_place:
        new_codes = codes.view(torch.uint8).view(experts, *tiles, CODE_BYTES)
        bytes_ = scale.view(torch.uint8).view(experts, -1)
        end = bytes_.shape[1] // 2
        new_shifts = bytes_[:, :end].unflatten(1, (*tiles, SHIFT_BYTES))
        factors = bytes_[:, end : end + 4 * rows].view(torch.float32)
    else:
        new_codes = torch.empty(experts, *tiles, CODE_BYTES, dtype=torch.uint8, device=codes.device)
        new_shifts = torch.empty(experts, *tiles, SHIFT_BYTES, dtype=torch.uint8, device=codes.device)
        factors = torch.empty(experts, rows, dtype=torch.float32, device=codes.device)
    order, rounded = _row_order(rows, gate_up, codes.device), 0
    for first in range(0, experts, _EXPERTS_AT_ONCE):
        some = slice(first, first + _EXPERTS_AT_ONCE)
        nibbles, bytes_of_scale = _nibbles(codes[some]), scale[some].view(torch.uint8).int()
        nibbles, shifts, base, changed = _shifted(nibbles[:, order], bytes_of_scale[:, order])
        new_codes[some] = _words(nibbles).view(torch.uint8).view(new_codes[some].shape)
        new_shifts[some] = _shift_words(shifts).view(torch.uint8).view(new_shifts[some].shape)
        factors[some] = torch.ldexp(torch.ones_like(base, dtype=torch.float32), base - UE8M0_BIAS + SMALLEST_SCALE)
        rounded += changed
    if in_place:
        bytes_[:, end + 4 * rows :] = 0  # the same weights have the same bytes, wherever they come from
    return HopperMatrix(new_codes, new_shifts, factors, rounded)


def in_checkpoint_order(codes: Tensor, scale: Tensor, *, gate_up: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8 [E, rows, K / 2], scale bytes uint8 [E, rows, K / 32]) whose arrangement is the given bytes.

    The inverse of `arrange` in place. Scales of groups of zeros and codes that `arrange` rounded differ from the
    checkpoint's; arranged again they give the same bytes.

    Args:
        codes, scale: as `arrange` left them, in the shapes of its arguments.
        gate_up: as for `arrange`.
    """
    experts, rows, half = codes.shape
    tiles, k = (rows // TILE_ROWS, 2 * half // STEP), 2 * half
    bytes_ = scale.view(torch.uint8).view(experts, -1)
    end = bytes_.shape[1] // 2
    factors = bytes_[:, end : end + 4 * rows].contiguous().view(torch.float32)
    base = torch.frexp(factors).exponent - 1 + UE8M0_BIAS - SMALLEST_SCALE
    # E, tile, step, unit, pair, g, t, group, row half -> E, tile, unit, row half, g, step, pair, group, t
    words = codes.reshape(experts, -1).view(torch.int32).view(experts, *tiles, UNITS, 2, UNIT_ROWS // 2, 4, 2, 2)
    words = words.permute(0, 1, 3, 8, 5, 2, 4, 7, 6)
    halves = [
        torch.stack(
            [(words >> (16 * part + 4 * i) & 7) | (words >> (8 * i + (3 if part else 7)) & 1) << 3 for i in range(4)],
            -1,
        )
        for part in range(2)
    ]
    nibbles = torch.stack(halves, -3).reshape(experts, rows, k)
    # E, tile, step, unit, g -> E, tile, unit, g, step
    words = bytes_[:, :end].contiguous().view(torch.int32).view(experts, *tiles, UNITS, UNIT_ROWS // 2)
    words = words.permute(0, 1, 3, 4, 2)
    halves = [torch.stack([words >> (4 * (2 * group + part)) & 15 for group in range(4)], -1) for part in range(2)]
    shifts = torch.stack(halves, 3).reshape(experts, rows, k // 32)
    order = _row_order(rows, gate_up, codes.device)
    in_order = torch.empty_like(nibbles), torch.empty_like(shifts)
    in_order[0][:, order], in_order[1][:, order] = nibbles, shifts + base[..., None]
    nibbles, scales = in_order
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8), scales.to(torch.uint8)


def _row_order(rows: int, gate_up: bool, device: torch.device) -> Tensor:
    """The row of the matrix for each row of the layout."""
    numbers = torch.arange(rows, device=device)
    if gate_up:
        return numbers.view(2, rows // UNIT_ROWS, UNIT_ROWS // 2).transpose(0, 1).flatten()
    return numbers.view(rows // UNIT_ROWS, UNIT_ROWS // 2, 2).transpose(1, 2).flatten()


def _nibbles(codes: Tensor) -> Tensor:
    """Codes as int32 [..., K], one an element."""
    bytes_ = codes.view(torch.uint8).int()
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def _shifted(nibbles: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """(nibbles, shifts [E, rows, K / 32], a row's base as ue8m0 [E, rows], changed codes)."""
    groups = nibbles.view(*scale.shape, 32)
    used = (groups & 7).amax(-1) > 0  # the scale of zeros does not matter
    if (scale[used] == UE8M0_NAN).any():
        raise ValueError("an expert's scale is NaN (ue8m0 255): the checkpoint is damaged")
    largest = torch.where(used, scale, 0).amax(-1)
    base = (largest - LARGEST_SHIFT).clamp(min=0)
    shifts = torch.where(used, scale - base[..., None], 0)
    below = shifts < 0
    if not below.any():
        return nibbles, shifts, base, 0
    small = groups[below]
    magnitudes = torch.tensor(_MAGNITUDES, device=nibbles.device)
    value = torch.ldexp(magnitudes[small & 7], shifts[below][:, None])
    # To nearest, ties to the even code: the rounding of e2m1.
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    index = torch.searchsorted(middles, value)
    tie = (index < len(middles)) & (value == middles[index.clamp(max=len(middles) - 1)])
    index = torch.where(tie & (index % 2 == 1), index + 1, index)
    lost = int((magnitudes[index] != value).sum())
    groups = groups.clone()
    groups[below] = (small & 8) | index.int()
    return groups.flatten(-2), shifts.clamp(min=0), base, lost


def _words(nibbles: Tensor) -> Tensor:
    """Packed codes, int32 [E, rows / 128, K / 128, CODE_BYTES / 4].

    A word has eight codes. The codes of channels 4 t + i and 16 + 4 t + i have their magnitudes at bits 4 i and
    16 + 4 i, where `prmt` reads selectors, and their signs at bits 8 i + 7 and 8 i + 3: these are the sign bits of the
    bytes that `prmt` writes, unshifted and shifted by four.
    """
    experts, rows, k = nibbles.shape
    # [E, tiles, units, row half, g, steps, pair of groups, group of it, half of it, t, i]
    shape = (experts, rows // TILE_ROWS, UNITS, 2, UNIT_ROWS // 2, k // STEP, 2, 2, 2, 4, 4)
    parts = nibbles.view(shape)
    word = torch.zeros((*shape[:8], 4), dtype=torch.int32, device=nibbles.device)
    for half in range(2):
        for i in range(4):
            code = parts[..., half, :, i]
            word |= (code & 7) << (16 * half + 4 * i)
            word |= (code >> 3) << (8 * i + (3 if half else 7))
    # E, tile, step, unit, pair, g, t, group, row half
    return word.permute(0, 1, 5, 2, 6, 4, 8, 7, 3).flatten(3).contiguous()


def _shift_words(shifts: Tensor) -> Tensor:
    """Packed shifts, int32 [E, rows / 128, K / 128, SHIFT_BYTES / 4]: four bits at 4 (2 group + row half) of word g."""
    experts, rows, groups = shifts.shape
    parts = shifts.view(experts, rows // TILE_ROWS, UNITS, 2, UNIT_ROWS // 2, groups // 4, 4)
    word = torch.zeros_like(parts[:, :, :, 0, :, :, 0])
    for half in range(2):
        for group in range(4):
            word |= parts[:, :, :, half, :, :, group] << (4 * (2 * group + half))
    return word.permute(0, 1, 4, 2, 3).flatten(3).contiguous()
