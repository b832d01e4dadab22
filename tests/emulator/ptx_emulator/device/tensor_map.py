"""TMA tensor maps: the 128 bytes that `cp.async.bulk.tensor` reads, encoded in Python.

CuTe DSL's host code packs the maps of its own kernels. This encoder serves PTX that is run with explicit arguments, and
host code that calls the driver's `cuTensorMapEncodeTiled`. The layout is not public: it was derived from the words that
the driver and the DSL write (MODEL.md). Not modelled: im2col maps, interleaved layouts, swizzles of 64-byte atoms or
with exchanged halves.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum

TENSOR_MAP_BYTES = 128
MAX_RANK = 5


class ElementType(IntEnum):
    """The driver's CUtensorMapDataType."""

    U8 = 0
    U16 = 1
    U32 = 2
    S32 = 3
    U64 = 4
    S64 = 5
    F16 = 6
    F32 = 7
    F64 = 8
    BF16 = 9
    F32_FTZ = 10
    TF32 = 11
    TF32_FTZ = 12
    U4_ALIGN8 = 13  # packed in shared memory too
    # Padded: 16 elements to 16 bytes of shared memory.
    U4_ALIGN16 = 14
    U6_ALIGN16 = 15


class Swizzle(IntEnum):
    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM32 = 4  # moves 32 bytes at a time, not 16


ELEMENT_BITS: dict[ElementType, int] = {
    ElementType.U8: 8,
    ElementType.U16: 16,
    ElementType.U32: 32,
    ElementType.S32: 32,
    ElementType.U64: 64,
    ElementType.S64: 64,
    ElementType.F16: 16,
    ElementType.F32: 32,
    ElementType.F64: 64,
    ElementType.BF16: 16,
    ElementType.F32_FTZ: 32,
    ElementType.TF32: 32,
    ElementType.TF32_FTZ: 32,
    ElementType.U4_ALIGN8: 4,
    ElementType.U4_ALIGN16: 4,
    ElementType.U6_ALIGN16: 6,
}

# The descriptor's own numbering. TF32 is F32 (or F32_FTZ) with a flag.
_TYPE_CODE: dict[ElementType, int] = {
    ElementType.U8: 0,
    ElementType.U16: 1,
    ElementType.U32: 2,
    ElementType.S32: 3,
    ElementType.U64: 4,
    ElementType.S64: 5,
    ElementType.F16: 6,
    ElementType.F32: 7,
    ElementType.F32_FTZ: 8,
    ElementType.F64: 9,
    ElementType.BF16: 10,
    ElementType.TF32: 7,
    ElementType.TF32_FTZ: 8,
    ElementType.U4_ALIGN8: 11,
    ElementType.U4_ALIGN16: 12,
    ElementType.U6_ALIGN16: 13,
}
_TF32_FLAG = 1 << 16
_OOB_NAN_FLAG = 1 << 15
_VERSION_SM100 = 2
_ATOM32_FLAG = 1 << 19
_SWIZZLE_SPAN_BYTES = {Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128, Swizzle.B128_ATOM32: 128}
_PADDED = (ElementType.U4_ALIGN16, ElementType.U6_ALIGN16)
_PADDED_BOX = 128  # elements


class TensorMapError(ValueError):
    """The driver would refuse this tensor map."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TensorMapError(message)


def encode(
    address: int,
    element_type: ElementType,
    sizes: Sequence[int],  # elements, innermost first
    strides_bytes: Sequence[int],  # of dimensions 1.. ; dimension 0 is dense
    box: Sequence[int],  # elements, innermost first
    *,
    swizzle: Swizzle = Swizzle.NONE,
    element_strides: Sequence[int] | None = None,
    oob_nan: bool = False,
    l2_promotion: int = 0,
) -> bytes:
    """The tensor map as `cuTensorMapEncodeTiled` would pack it, for sm_100a.

    Refuses what the driver's documentation says it refuses, so that a test cannot pass here with a
    map that no GPU would take.
    """
    rank = len(sizes)
    element_strides = tuple(element_strides or (1,) * rank)
    _require(element_type in _TYPE_CODE, f"element type {element_type.name} is not modelled")
    bits = ELEMENT_BITS[element_type]
    _require(1 <= rank <= MAX_RANK, f"rank {rank} is not in 1..{MAX_RANK}")
    _require(
        len(strides_bytes) == rank - 1 and len(box) == rank and len(element_strides) == rank,
        f"rank {rank} needs {rank - 1} strides, {rank} box sizes and element strides",
    )
    _require(address % 16 == 0, f"address {address:#x} is not a multiple of 16")
    for k, size in enumerate(sizes):
        _require(1 <= size <= 1 << 32, f"size {size} of dimension {k} is not in 1..2^32")
    for k, stride in enumerate(strides_bytes):
        _require(
            stride % 16 == 0 and 0 <= stride < 1 << 40,
            f"stride {stride} bytes of dimension {k + 1} is not a multiple of 16 below 2^40",
        )
    for k, (extent, step) in enumerate(zip(box, element_strides, strict=True)):
        _require(1 <= extent <= 256, f"box size {extent} of dimension {k} is not in 1..256")
        _require(1 <= step <= 8, f"element stride {step} of dimension {k} is not in 1..8")
    if element_type in _PADDED:
        _require(
            box[0] == _PADDED_BOX and sizes[0] % _PADDED_BOX == 0,
            f"{element_type.name} needs boxes of {_PADDED_BOX} and a multiple of that, not {box[0]} of {sizes[0]}",
        )
        _require(
            address % 32 == 0 and all(stride % 32 == 0 for stride in strides_bytes),
            f"{element_type.name} needs an address and strides that are multiples of 32",
        )
        _require(
            swizzle in (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM32),
            f"{element_type.name} does not go with swizzle {swizzle.name}",
        )
    inner_bytes = box[0] * bits // 8
    _require(inner_bytes % 16 == 0, f"inner box of {inner_bytes} bytes is not a multiple of 16")
    span = _SWIZZLE_SPAN_BYTES.get(swizzle)
    _require(
        span is None or inner_bytes <= span,
        f"inner box of {inner_bytes} bytes exceeds the {swizzle.name} span",
    )
    is_float = ElementType.F16 <= element_type <= ElementType.TF32_FTZ
    _require(not oob_nan or is_float, f"NaN fill needs a floating-point type, not {element_type}")

    # Dimensions beyond the rank keep zero fields, as the driver leaves them.
    def padded(values: list[int]) -> list[int]:
        return values + [0] * (MAX_RANK - len(values))

    last = padded([size - 1 for size in sizes])
    box_last = padded([extent - 1 for extent in box])
    step_last = padded([step - 1 for step in element_strides])
    stride16 = padded([stride >> 4 for stride in strides_bytes])
    flags = _VERSION_SM100 | rank - 1 << 4 | _TYPE_CODE[element_type] << 7 | min(swizzle, Swizzle.B128) << 13
    if swizzle == Swizzle.B128_ATOM32:
        flags |= _ATOM32_FLAG
    flags |= l2_promotion << 17
    if element_type in (ElementType.TF32, ElementType.TF32_FTZ):
        flags |= _TF32_FLAG
    if oob_nan:
        flags |= _OOB_NAN_FLAG
    low = [value & 0xFFFFFFFF for value in stride16]
    high = sum((value >> 32) << 4 * k for k, value in enumerate(stride16[:4]))
    steps = sum(step << 3 * k for k, step in enumerate(step_last))
    words = (
        address,
        flags | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | high << 32,
        last[0] | last[1] << 32,
        last[2] | last[3] << 32,
        last[4] | steps << 32 | box_last[0] << 56,
        sum(extent << 8 * k for k, extent in enumerate(box_last[1:])),
    )
    return struct.pack("<8Q", *words).ljust(TENSOR_MAP_BYTES, b"\0")


def words(tensor_map: bytes) -> tuple[int, ...]:
    """The tensor map as sixteen 64-bit words, for messages and comparisons."""
    return struct.unpack("<16Q", tensor_map)
