"""Decoders of the fifth-generation tensor core: tensor memory, copies into it, MMA, commit."""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import NONE, Decoder, family
from ptx_emulator.front_end.parser import Statement, split_operands

_GROUP = r"\.cta_group::(?P<group>[12])"


def _vector(text: str) -> list[str]:
    return split_operands(text[1:-1]) if text.startswith("{") else [text]


@family("tcgen05", r"tcgen05\.alloc" + _GROUP + r"\.sync\.aligned(?:\.shared::cta)?\.b32")
def _alloc(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    d.emit("tcgen05.alloc", [operand, d.source(s.operands[1], "b32")], (offset, int(m["group"])))


@family("tcgen05", r"tcgen05\.dealloc" + _GROUP + r"\.sync\.aligned\.b32")
def _dealloc(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("tcgen05.dealloc", [d.source(x, "b32") for x in s.operands[:2]])


@family("tcgen05", r"tcgen05\.relinquish_alloc_permit" + _GROUP + r"\.sync\.aligned")
def _relinquish(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("tcgen05.relinquish", [])


@family("tcgen05", r"tcgen05\.fence::(?P<side>before|after)_thread_sync")
def _fence(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    """Decodes tcgen05.fence, which only Checks.tcgen05_fence checks: known-right kernels omit it (MODEL.md)."""
    d.emit("tcgen05.fence", [], (int(m["side"] == "after"),))


@family("tcgen05", r"tcgen05\.shift" + _GROUP + r"\.down")
def _shift(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    d.emit("tcgen05.shift", [operand], (offset, int(m["group"])))


@family("tcgen05", r"tcgen05\.wait::(?P<kind>ld|st)\.sync\.aligned")
def _wait(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("tcgen05.wait", [], (int(m["kind"] == "ld"), int(m["kind"] == "st")))


_SHAPES = {"32x32b": (0, 1), "16x64b": (1, 1), "16x128b": (2, 2), "16x256b": (3, 4), "16x32bx2": (4, 1)}


@family(
    "tcgen05",
    r"tcgen05\.(?P<op>ld|st)\.sync\.aligned\.(?P<shape>32x32b|16x64b|16x128b|16x256b|16x32bx2)"
    r"\.x(?P<n>\d+)(?P<pack>\.(?:un)?pack::16b)?\.b32",
)
def _ld_st(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    load = m["op"] == "ld"
    if m["pack"] and m["pack"] != (".pack::16b" if load else ".unpack::16b"):
        raise d.unknown("ld packs and st unpacks")
    shape, registers_each = _SHAPES[m["shape"]]
    operands = list(s.operands)
    registers = operands.pop(0 if load else -1)
    address = operands.pop(0)
    split = 0
    if m["shape"] == "16x32bx2":
        split = d.immediate(operands.pop(0))
    if operands:
        raise d.unknown("too many operands")
    names = _vector(registers)
    if len(names) != int(m["n"]) * registers_each or len(names) > 128:
        raise d.unknown(f"{int(m['n']) * registers_each} registers expected")
    base, offset = d.address(address)
    rows = [d.destination(x, "b32") if load else d.source(x, "b32") for x in names]
    d.emit(
        "tcgen05." + m["op"],
        [*rows, base] if load else [base, *rows],
        (shape, len(names), offset, int(m["pack"] is not None), split),
    )


# (the first source row for each quarter of the lanes; rows; bytes per row)
_CP = {
    "128x256b": ((0, 32, 64, 96), 128, 32),
    "128x128b": ((0, 32, 64, 96), 128, 16),
    "64x128b.warpx2::02_13": ((0, 32, 0, 32), 64, 16),
    "64x128b.warpx2::01_23": ((0, 0, 32, 32), 64, 16),
    "32x128b.warpx4": ((0, 0, 0, 0), 32, 16),
}


@family(
    "tcgen05",
    r"tcgen05\.cp" + _GROUP + r"\.(?P<shape>128x256b|128x128b|64x128b"
    r"\.warpx2::(?:02_13|01_23)|32x128b\.warpx4)(?:\.b8x16\.b(?P<bits>[46])x16_p(?:64|32))?",
)
def _cp(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    quarters, rows, nbytes = _CP[m["shape"]]
    base, offset = d.address(s.operands[0])
    d.emit(
        "tcgen05.cp",
        [base, d.source(s.operands[1], "b64")],
        (rows, nbytes, offset, int(m["group"]), *quarters, int(m["bits"] or 0)),
    )


_KINDS = {"f16": 0, "tf32": 1, "f8f6f4": 2, "i8": 3, "mxf8f6f4": 4, "mxf4": 5, "mxf4nvf4": 6}
# Scale factors along K of one instruction, by kind and qualifier (old and new spelling).
_SCALES = {
    ("mxf8f6f4", None): 1,
    ("mxf8f6f4", "scale_vec::1X"): 1,
    ("mxf8f6f4", "block32"): 1,
    ("mxf4", None): 2,
    ("mxf4", "scale_vec::2X"): 2,
    ("mxf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2,
    ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::4X"): 4,
    ("mxf4nvf4", "block16"): 4,
}


@family(
    "tcgen05",
    r"tcgen05\.mma(?P<ws>\.ws)?" + _GROUP + r"\.kind::(?P<kind>\w+)(?P<scaled>\.block_scale)?"
    r"(?:\.(?P<vec>scale_vec::[124]X|block16|block32))?(?P<ashift>\.ashift)?"
    r"(?:\.collector::(?:a|b[0-3])::(?P<collector>discard|lastuse|fill|use))?",
)
def _mma(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    kind = m["kind"]
    if kind not in _KINDS:
        raise d.unknown(f"kind::{kind} is not modelled")
    block_scaled = kind.startswith("mx")
    if block_scaled != (m["scaled"] is not None) or (block_scaled and m["ws"]):
        raise d.unknown("block_scale exists for the mx kinds, without .ws")
    scales = _SCALES[kind, m["vec"]] if block_scaled else 0
    a = list(s.operands)
    accumulator, d_offset = d.address(a.pop(0))
    a_text = a.pop(0)
    in_tmem = a_text.startswith("[")
    a_operand, a_offset = d.address(a_text) if in_tmem else (d.source(a_text, "b64"), 0)
    b_operand = d.source(a.pop(0), "b64")
    descriptor = d.source(a.pop(0), "b32")
    scale_a = scale_b = NONE
    if block_scaled:
        scale_a, scale_b = (_plain_address(d, a.pop(0)) for _ in range(2))
    disable: list[int] = []
    if a and a[0].startswith("{"):
        disable = [d.source(x, "b32") for x in _vector(a.pop(0))]
        if len(disable) != 4 * int(m["group"]) or m["ws"]:
            raise d.unknown("wrong number of disable-output-lane registers")
    enable = d.predicate(a.pop(0))
    input_scale = -1
    if a and not m["ws"]:
        input_scale = d.immediate(a.pop(0))
        if input_scale is None or kind not in ("f16", "tf32") or not 0 <= input_scale <= 15:
            raise d.unknown("scale-input-d is an immediate in [0, 15], for kind::f16 and tf32")
    if a and m["ws"] and d.immediate(a[0]) == 0:
        a.pop(0)  # a zero-column mask of 0
    if a:
        raise d.unknown("a zero-column mask is not modelled" if m["ws"] else "too many operands")
    d.emit(
        "tcgen05.mma",
        [accumulator, a_operand, b_operand, descriptor, enable, scale_a, scale_b, *disable],
        (
            int(m["group"]),
            _KINDS[kind],
            int(in_tmem),
            len(disable),
            a_offset,
            d_offset,
            int(m["ws"] is not None) | 2 * int(m["collector"] in ("use", "lastuse")),
            scales,
            input_scale,
            int(m["ashift"] is not None),
        ),
    )


def _plain_address(d: Decoder, text: str) -> int:
    operand, offset = d.address(text)
    if offset:
        t = d.temporary("b32")
        d.emit("add.u32", [t, operand, d.constant(offset, 4)])
        return t
    return operand


@family(
    "tcgen05",
    r"tcgen05\.commit" + _GROUP + r"\.mbarrier::arrive::one"
    r"(?:\.shared::cluster)?(?P<multicast>\.multicast::cluster)?\.b64",
)
def _commit(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    mask = d.source(s.operands[1], "b16") if m["multicast"] else NONE
    d.emit("tcgen05.commit", [operand, mask], (offset, int(m["multicast"] is not None), int(m["group"])))
