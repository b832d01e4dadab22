"""The values of the small float formats, from their definitions."""

import numpy as np

FORMATS = {  # exponent bits, mantissa bits, bias, codes that are finite
    "e4m3": (4, 3, 7, 127),
    "e5m2": (5, 2, 15, 124),
    "e2m1": (2, 1, 1, 8),
    "e2m3": (2, 3, 1, 32),
    "e3m2": (3, 2, 3, 32),
}


def decode(fmt: str) -> np.ndarray:
    """The value of every finite non-negative code."""
    _, mantissa_bits, bias, count = FORMATS[fmt]
    codes = np.arange(count)
    e, m = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    return np.where(e == 0, m * 2.0 ** (1 - bias - mantissa_bits), (1 + m / 2**mantissa_bits) * 2.0 ** (e - bias))
