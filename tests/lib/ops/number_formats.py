"""The number formats by enumeration in numpy: an oracle that shares no step with dsv4_kernels.quant.

Every value of a format is listed from its bits, and a number is rounded by looking for the nearest value, a tie going
to the even code.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def _small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


E4M3 = np.array([_small_float(code, 4, 3, 7) for code in range(0x7F)])
"""Values of the codes 0x00-0x7E; 0x7F is NaN; bit 7 is the sign."""
E2M1 = np.array([_small_float(code, 2, 1, 1) for code in range(8)])
"""Values of the codes 0-7; bit 3 is the sign."""


def nearest_codes(x: np.ndarray, table: np.ndarray, sign_bit: int) -> np.ndarray:
    """Return codes of the table's values nearest to float64 numbers, ties to the even code, larger numbers
    saturating."""
    magnitude = np.abs(x)
    upper = np.clip(np.searchsorted(table, magnitude), 0, len(table) - 1)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = table[upper] - magnitude, magnitude - table[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0)) | (to_upper < 0)
    code = np.where(take_upper, upper, lower)
    return np.where(np.signbit(x), code | sign_bit, code).astype(np.uint8)


def block_exponents(blocks: np.ndarray, floor: float, largest: float) -> np.ndarray:
    """Return, for [..., block], the exponent of the smallest power of two >= fp32(amax · fp32(1 / largest))."""
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(floor)).astype(np.float32)
    ratio = amax * np.float32(1.0 / largest)
    mantissa, exponent = np.frexp(ratio)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def quantise(
    x: torch.Tensor, block: int, table: np.ndarray, sign_bit: int, floor: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [N, d] uint8, exponents [N, d / block] and values [N, d] float64 of x [N, d]."""
    blocks = x.double().numpy().reshape(x.shape[0], -1, block)
    exponents = block_exponents(blocks, floor, float(table[-1]))
    codes = nearest_codes(blocks / np.exp2(exponents)[..., None], table, sign_bit)
    values = table[codes & (sign_bit - 1)] * np.where(codes & sign_bit, -1.0, 1.0) * np.exp2(exponents)[..., None]
    return codes.reshape(x.shape), exponents, values.reshape(x.shape)


def quantise_e4m3(x: torch.Tensor, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `quantise` to e4m3 with the release's floor."""
    return quantise(x, block, E4M3, 0x80, 1e-4)


def quantise_e2m1(x: torch.Tensor, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `quantise` to e2m1 with the release's floor."""
    return quantise(x, block, E2M1, 0x8, 6 * math.ldexp(1, -126))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and bits are equal: -0.0 is not 0.0, a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a copy: `contiguous` keeps the stride of an axis of one, and a view of bytes then refuses
    it."""
    return torch.empty(x.numel(), dtype=x.dtype, device=x.device).copy_(x.flatten()).view(torch.uint8)
