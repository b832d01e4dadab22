"""Decoder of mma.sync, the tensor core instruction of a warp that keeps its matrices in registers."""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import Decoder, family
from ptx_emulator.front_end.parser import Statement, split_operands

_TYPES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6}
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_ACCUMULATORS = {"f32": 0, "f16": 1, "s32": 2}
_SHAPES_K = {16: (8, 16), 32: (4, 8), 8: (16, 32)}  # key: bits of A's elements


@family(
    "mma",
    r"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col(?P<saturate>\.satfinite)?"
    r"\.(?P<d>f32|f16|s32)\.(?P<a>\w+)\.(?P<b>\w+)\.(?P<c>f32|f16|s32)",
)
def _mma(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    a, b, k, accumulator = m["a"], m["b"], int(m["k"]), m["d"]
    if a not in _TYPES or b not in _TYPES or k not in _SHAPES_K[_BITS[a]] or m["c"] != accumulator:
        raise d.unknown("this shape or these types of mma.sync are not modelled")
    integer = a in ("s8", "u8")
    bytes_float = _BITS[a] == 8 and not integer
    mixed = a != b and not ({a, b} <= {"s8", "u8"} or {a, b} <= {"e4m3", "e5m2"})
    if mixed or integer != (accumulator == "s32") or (accumulator == "f16" and a != "f16" and not bytes_float):
        raise d.unknown("mma.sync does not combine these types")
    if m["saturate"] and not integer:
        raise d.unknown("only integers saturate")
    registers_a = 16 * k * _BITS[a] // 1024
    registers_d = 2 if accumulator == "f16" else 4
    rows: list[int] = []
    counts = (registers_d, registers_a, registers_a // 2, registers_d)
    for position, (text, count) in enumerate(zip(s.operands, counts, strict=True)):
        names = split_operands(text[1:-1]) if text.startswith("{") else [text]
        if len(names) != count:
            raise d.unknown(f"{count} registers expected")
        rows += [d.source(name, "b32") if position else d.destination(name, "b32") for name in names]
    aux = (_TYPES[a], _TYPES[b], k, _ACCUMULATORS[accumulator], int(m["saturate"] is not None))
    d.emit("mma.sync", rows, aux)
