"""Tensor maps for hand-written kernels."""

import numpy as np

from ptx_emulator.device.tensor_map import ElementType, Swizzle, encode
from ptx_emulator.samples.handwritten import aligned


def tensor_map_of(
    array: np.ndarray,
    box: tuple[int, ...],
    swizzle: Swizzle = Swizzle.NONE,
    kind: ElementType = ElementType.U32,
    **options: object,
) -> np.ndarray:
    """The tensor map of a C-ordered array; the box is given innermost first."""
    sizes = array.shape[::-1]
    strides = [s for s in array.strides[::-1][1:]]
    return aligned(
        np.frombuffer(encode(array.ctypes.data, kind, sizes, strides, box, swizzle=swizzle, **options), np.uint8).copy()
    )
