"""NaN, infinity and overflow in a checkpoint's weights: found while they are loaded, and named at the end.

A value that is no number spreads to every logit, and SGLang answers with null log-probabilities. Each tensor's extremes
are taken right before it is copied into its parameter, where it lies, so no file is read twice. They stay on the
tensor's device until some thousands are fetched in one copy: a load from GPU memory does not wait at each tensor.
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
    largest_code: float | None  # of a weight that this scale multiplies
    sign: str | None  # what a value may not be: "negative", "not positive", or None
    low: Tensor
    """A scalar, as `high`: of e4m3 the largest code as int8, of e8m0 the largest byte, of other floats the minimum."""
    high: Tensor
    """Of e4m3 the largest code as uint8, of e8m0 the largest byte, of other floats the maximum."""


class WeightValues:
    """Extremes of the tensors of one load."""

    def __init__(self) -> None:
        self._taken: list[_Extremes] = []
        self._wrong: list[str] = []

    def take_weight(self, name: str, weight: Tensor) -> None:
        """Note a weight `[...]` of any format; every byte of FP4 codes and every expert id is a number."""
        self._take(name, weight)

    def take_scale(self, name: str, scale: Tensor, weight: Tensor) -> None:
        """Note the scales, e8m0 or fp32, of FP8 or FP4 (int8) codes."""
        self._take(name, scale, E2M1_MAX if weight.dtype == torch.int8 else E4M3_MAX)

    def take_nvfp4_scale(self, name: str, scale: Tensor) -> None:
        """Note the e4m3 scales of NVFP4 codes: a GPU's format for them has no sign."""
        self._take(name, scale, sign="negative")

    def take_nvfp4_global_scale(self, name: str, scale: Tensor) -> None:
        """Note the fp32 scale of an NVFP4 matrix; 0 is that of a matrix of zeros."""
        self._take(name, scale, E2M1_MAX * E4M3_MAX, sign="negative")

    def take_input_scale(self, name: str, scale: Tensor) -> None:
        """Note the fp32 scale by which a product divides its input."""
        self._take(name, scale, sign="not positive")

    def problems(self) -> list[str]:
        """One line for each tensor that holds what is no finite number."""
        self._judge()
        return self._wrong

    def _take(self, name: str, tensor: Tensor, largest_code: float | None = None, sign: str | None = None) -> None:
        if tensor.dtype == torch.float8_e4m3fn:
            low, high = tensor.view(torch.int8).amax(), tensor.view(torch.uint8).amax()
        elif tensor.dtype == torch.float8_e8m0fnu:
            low = high = tensor.view(torch.uint8).amax()
        elif tensor.is_floating_point():
            low, high = tensor.aminmax()  # a NaN among them is both
        else:
            return
        self._taken.append(_Extremes(name, tensor.dtype, largest_code, sign, low, high))
        if len(self._taken) == _FETCH_AT_ONCE:
            self._judge()

    def _judge(self) -> None:
        """The only place that waits for a device."""
        numbers = _fetch([scalar for taken in self._taken for scalar in (taken.low, taken.high)])
        for taken, low, high in zip(self._taken, numbers[::2], numbers[1::2], strict=True):
            what = _what_is_wrong(taken, low, high)
            if what is not None:
                self._wrong.append(f"{taken.name!r} ({what})")
        self._taken.clear()


def _fetch(scalars: list[Tensor]) -> list[float]:
    """Scalars of several devices and dtypes: one copy and one wait for each pair of these."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, scalar in enumerate(scalars):
        groups.setdefault((scalar.device, scalar.dtype), []).append(i)
    numbers = [math.nan] * len(scalars)
    for places in groups.values():
        for i, number in zip(places, torch.stack([scalars[i] for i in places]).tolist(), strict=True):
            numbers[i] = number
    return numbers


def _what_is_wrong(taken: _Extremes, low: float, high: float) -> str | None:
    if taken.dtype == torch.float8_e4m3fn:
        if low == _E4M3_NAN or high == _E4M3_MINUS_NAN:
            return "NaN"
        return taken.sign if taken.sign and high > _E4M3_MINUS_ZERO else None
    if taken.dtype == torch.float8_e8m0fnu:
        low = high = math.nan if high == _E8M0_NAN else math.ldexp(1.0, int(high) - _E8M0_BIAS)
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    if math.isinf(low) or math.isinf(high):
        return "infinite"
    if (taken.sign == "negative" and low < 0) or (taken.sign == "not positive" and low <= 0):
        return taken.sign
    largest = max(abs(low), abs(high))
    if taken.largest_code is not None and largest * taken.largest_code > torch.finfo(torch.bfloat16).max:
        return f"a scale of {largest:.3g}, with which weights can be infinite"
    return None
