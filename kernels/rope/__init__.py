"""Rotary position embedding (DeepSeek-V4 specification, section 3.2)."""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.registry import select
from dsv4_kernels.rope.ref import YarnScaling, rope_frequencies

__all__ = ["YarnScaling", "apply_rope", "apply_rope_in_place", "rope_frequencies"]


def apply_rope(
    x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False, impl: str | None = None
) -> Tensor:
    """The last `2 * len(frequencies)` channels of x rotated by the angle `position * frequency`.

    Channels (2i, 2i+1) of the rotated part are one pair: `(a + ib) * (cos + i sin)`, in fp32, cast to x's dtype once.

    Args:
        x: [T, ..., D] fp32 or bf16. It is not modified.
        positions: [T] integer; the angle is the product of two fp32 numbers.
        frequencies: [R / 2] fp32 (`rope_frequencies`), R <= D.
        inverse: rotate back (the conjugate), as for the attention output.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, ..., D] in x's dtype.

    Raises:
        ValueError: shapes that do not match.
    """
    _check("apply_rope", x, positions, frequencies)
    return select("apply_rope", x.device, x.dtype, impl)(x, positions, frequencies, inverse)


def apply_rope_in_place(
    x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False, impl: str | None = None
) -> Tensor:
    """x, rotated as by `apply_rope` in place: only the rotated channels are read and written.

    Args:
        x: [T, ..., D] fp32 or bf16, of any strides. On a GPU [T, D] or [T, H, D], rows at multiples of 16 bytes.
        positions, frequencies, inverse, impl: as in `apply_rope`.

    Returns:
        x.

    Raises:
        ValueError: shapes that do not match.
    """
    _check("apply_rope_in_place", x, positions, frequencies)
    select("apply_rope_in_place", x.device, x.dtype, impl)(x, positions, frequencies, inverse)
    return x


def _check(name: str, x: Tensor, positions: Tensor, frequencies: Tensor) -> None:
    if positions.shape != x.shape[:1]:
        raise ValueError(
            f"{name}: positions have shape {tuple(positions.shape)}; x {tuple(x.shape)} needs ({x.shape[0]},)"
        )
    if frequencies.dim() != 1 or 2 * frequencies.shape[0] > x.shape[-1]:
        raise ValueError(
            f"{name}: frequencies have shape {tuple(frequencies.shape)}; expected [R / 2], R at most {x.shape[-1]}"
        )
