"""NaN, infinity and overflow in a checkpoint's weights: found while they are loaded, and reported at the end.

One such value spreads to every logit, and SGLang answers with null log-probabilities. Each tensor's minimum and maximum
are computed on its device just before it is copied into its parameter, so no file is read twice. They are fetched to
the host some thousands at a time, so that loading does not wait for the device at each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.number_formats import E2M1_MAX, E4M3_MAX

_E4M3_NAN, _E4M3_MINUS_NAN = 0x7F, 0xFF  # e4m3fn has no infinity
_E4M3_MINUS_ZERO = 0x80
_E8M0_NAN = 0xFF
_E8M0_BIAS = 127
_FETCH_AT_ONCE = 4096


@dataclass(frozen=True)
class _Extremes:
    name: str
    dtype: torch.dtype
    largest_code: float | None  # the largest code that this scale can multiply; None if it is no scale
    sign: str | None  # the sign that a value may not have: "negative", "not positive", or None
    low: Tensor
    """A scalar: for e4m3 the largest code as int8, for e8m0 the largest byte, for other floats the minimum."""
    high: Tensor
    """A scalar: for e4m3 the largest code as uint8, for e8m0 the largest byte, for other floats the maximum."""


class WeightValues:
    """The minima and maxima of the tensors of one load."""

    def __init__(self) -> None:
        self._noted: list[_Extremes] = []
        self._wrong: list[str] = []

    def note_weight(self, name: str, weight: Tensor) -> None:
        """Note a weight `[...]` of any format. FP4 codes and expert ids can't be NaN or infinite, and are not read."""
        self._note(name, weight)

    def note_scale(self, name: str, scale: Tensor, weight: Tensor) -> None:
        """Note the scales, e8m0 or fp32, of FP8 or FP4 (int8) codes."""
        self._note(name, scale, E2M1_MAX if weight.dtype == torch.int8 else E4M3_MAX)

    def note_nvfp4_scale(self, name: str, scale: Tensor) -> None:
        """Note the e4m3 scales of NVFP4 codes, which may not be negative: the GPU's format has no sign."""
        self._note(name, scale, sign="negative")

    def note_nvfp4_global_scale(self, name: str, scale: Tensor) -> None:
        """Note the fp32 scale of an NVFP4 matrix; it is 0 for a matrix of zeros."""
        self._note(name, scale, E2M1_MAX * E4M3_MAX, sign="negative")

    def note_input_scale(self, name: str, scale: Tensor) -> None:
        """Note the fp32 scale by which a product divides its input."""
        self._note(name, scale, sign="not positive")

    def problems(self) -> list[str]:
        """One line for each tensor that holds values that are not finite, or of a sign that is not allowed."""
        self._judge()
        return self._wrong

    def _note(self, name: str, tensor: Tensor, largest_code: float | None = None, sign: str | None = None) -> None:
        if tensor.dtype == torch.float8_e4m3fn:
            low, high = tensor.view(torch.int8).amax(), tensor.view(torch.uint8).amax()
        elif tensor.dtype == torch.float8_e8m0fnu:
            low = high = tensor.view(torch.uint8).amax()
        elif tensor.is_floating_point():
            low, high = tensor.aminmax()  # both are NaN if one value is
        else:
            return
        self._noted.append(_Extremes(name, tensor.dtype, largest_code, sign, low, high))
        if len(self._noted) == _FETCH_AT_ONCE:
            self._judge()

    def _judge(self) -> None:
        """Fetch and check the noted minima and maxima; no other method waits for the device."""
        numbers = _fetch([scalar for noted in self._noted for scalar in (noted.low, noted.high)])
        for noted, low, high in zip(self._noted, numbers[::2], numbers[1::2], strict=True):
            what = _what_is_wrong(noted, low, high)
            if what is not None:
                self._wrong.append(f"{noted.name!r} ({what})")
        self._noted.clear()


def _fetch(scalars: list[Tensor]) -> list[float]:
    """The scalars as numbers, fetched by one copy for each pair of device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, scalar in enumerate(scalars):
        groups.setdefault((scalar.device, scalar.dtype), []).append(i)
    numbers = [math.nan] * len(scalars)
    for places in groups.values():
        for i, number in zip(places, torch.stack([scalars[i] for i in places]).tolist(), strict=True):
            numbers[i] = number
    return numbers


def _what_is_wrong(noted: _Extremes, low: float, high: float) -> str | None:
    if noted.dtype == torch.float8_e4m3fn:
        if low == _E4M3_NAN or high == _E4M3_MINUS_NAN:
            return "NaN"
        return noted.sign if noted.sign and high > _E4M3_MINUS_ZERO else None
    if noted.dtype == torch.float8_e8m0fnu:
        low = high = math.nan if high == _E8M0_NAN else math.ldexp(1.0, int(high) - _E8M0_BIAS)
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    if math.isinf(low) or math.isinf(high):
        return "infinite"
    if (noted.sign == "negative" and low < 0) or (noted.sign == "not positive" and low <= 0):
        return noted.sign
    largest = max(abs(low), abs(high))
    if noted.largest_code is not None and largest * noted.largest_code > torch.finfo(torch.bfloat16).max:
        return f"a scale of {largest:.3g}, with which weights can be infinite"
    return None
