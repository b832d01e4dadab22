"""Loads, stores, atomics and matrix accesses."""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import NONE, ORDERS, SCOPES, SPACES, Decoder, family
from ptx_emulator.front_end.parser import TYPE_BYTES, Statement, split_operands

_EVICT = r"(?:\.L1::(?:evict_\w+|no_allocate))?(?:\.L2::evict_\w+)?(?P<hint>\.L2::cache_hint)?(?:\.L2::\d+B)?"
_SCOPE = r"(?:\.(?P<scope>cta|cluster|gpu|sys))?"


def _order_and_scope(d: Decoder, m: re.Match[str]) -> tuple[int, int]:
    """(order, scope) of a load or a store. Volatile is relaxed at .sys; relaxed and stronger accesses name their
    scope."""
    order = m["order"] or ""
    if order == "volatile":
        return ORDERS[order], SCOPES["sys"]
    if ORDERS[order] and not m["scope"]:
        raise d.unknown(f".{order} needs a scope: .cta, .cluster, .gpu or .sys")
    return ORDERS[order], SCOPES[m["scope"] or "cta"]


def _vector(text: str) -> list[str]:
    return split_operands(text[1:-1]) if text.startswith("{") else [text]


@family(
    "ld",
    r"ld(?:\.(?P<order>weak|volatile|relaxed|acquire))?" + _SCOPE + r"(?P<mmio>\.mmio)?"
    r"(?:\.(?P<space>global|shared::cta|shared::cluster|shared|local|const|param::entry|param::func|param))?"
    r"(?:\.c[agsvu]|\.lu)?(?P<nc>\.nc)?" + _EVICT + r"(?:\.v(?P<vec>[248]))?\.(?P<type>\w+)",
)
# CUTLASS's C++ writes the state space before the order, the manual after it.
@family(
    "ld",
    r"ld\.(?P<space>global)\.(?P<order>relaxed|acquire)" + _SCOPE + r"(?:\.v(?P<vec>[248]))?\.(?P<type>\w+)",
)
def _ld(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    space = SPACES[m["space"] or ""]
    nbytes, count = TYPE_BYTES[m["type"]], int(m["vec"] or 1)
    names = _vector(s.operands[0])
    if len(names) != count:
        raise d.unknown(f"{count} destinations expected")
    if nbytes * count > 32 or (nbytes * count == 32 and space != 0):
        raise d.unknown("at most 16 bytes per access (32 in global memory)")
    signed = m["type"][0] == "s"
    rows = []
    for name in names:
        operand = NONE if name == "_" else d.register(name)
        if operand is None or (operand != NONE and (operand >> 29 & 3) == 3):
            raise d.unknown(f"destination {name!r} is not a register")
        if operand != NONE and TYPE_BYTES[d.types[operand]] < nbytes:
            raise d.unknown(f"destination {name} is narrower than .{m['type']}")
        rows.append(operand)
    sign = 0
    if signed:
        sign = 2 if rows[0] != NONE and TYPE_BYTES[d.types[rows[0]]] == 2 else 1
    order, scope = _order_and_scope(d, m)
    if space == 4:
        p = re.fullmatch(r"\[([\w$%]+)(?:\+(\d+))?\]", s.operands[1])
        if p and p.group(1) in d.params:
            param = d.params[p.group(1)]
            offset = int(p.group(2) or 0)
            if offset + nbytes * count > param.nbytes:
                raise d.unknown(f"reads beyond the {param.nbytes} bytes of the parameter")
            d.emit("ld", [*rows, NONE], (4, count, nbytes, sign, param.offset + offset))
            return
        if p and d.register(p.group(1)) is None:
            d.emit("nop", [])  # the result of a call that does nothing
            return
    operand, offset = d.address(s.operands[1])
    d.emit("ld.spin" if order else "ld", [*rows, operand], (space, count, nbytes, sign, offset, order, scope))


@family("ldu", r"ldu\.global\.(?:v(?P<vec>[24])\.)?(?P<type>\w+)")
def _ldu(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    raise d.unknown("ldu is not modelled")


@family(
    "st",
    r"st(?:\.(?P<order>weak|volatile|relaxed|release))?"
    + _SCOPE
    + r"(?P<mmio>\.mmio)?(?:\.(?P<space>global|shared::cta|shared::cluster|shared|local|param::func|param))?"
    r"(?:\.wb|\.c[gs]|\.wt)?" + _EVICT + r"(?:\.v(?P<vec>[248]))?\.(?P<type>\w+)",
)
def _st(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    space = SPACES[m["space"] or ""]
    if space == 4:
        d.emit("nop", [])  # an argument of a call that does nothing
        return
    kind = m["type"]
    nbytes, count = TYPE_BYTES[kind], int(m["vec"] or 1)
    names = _vector(s.operands[1])
    if len(names) != count:
        raise d.unknown(f"{count} sources expected")
    if nbytes * count > 32 or (nbytes * count == 32 and space != 0):
        raise d.unknown("at most 16 bytes per access (32 in global memory)")
    rows = []
    for name in names:
        operand = d.register(name)
        if operand is None:
            operand = d.source(name, kind)
        elif (operand >> 29 & 3) == 3 or max(TYPE_BYTES[d.types[operand]], 4) < min(nbytes, 16):
            raise d.unknown(f"{name} does not hold .{kind}")
        rows.append(operand)
    operand, offset = d.address(s.operands[0])
    d.emit("st", [*rows, operand], (space, count, nbytes, 0, offset, *_order_and_scope(d, m)))


_ATOM_OPS = {"add": 0, "max": 1, "min": 2, "exch": 3, "cas": 4, "and": 5, "or": 6, "xor": 7, "inc": 8, "dec": 9}
_ATOM_TYPES = {
    "u32": 0,
    "b32": 0,
    "s32": 1,
    "u64": 2,
    "b64": 2,
    "s64": 3,
    "f32": 4,
    "f64": 5,
    "f16x2": 6,
    "bf16x2": 7,
    "f16": 8,
    "bf16": 9,
    "b128": 10,
}
_ATOM_REGISTER = {"f16x2": "b32", "bf16x2": "b32", "bf16": "b16"}


@family(
    "atom red",
    r"(?P<head>atom|red)(?:\.(?P<order>relaxed|acquire|release|acq_rel))?"
    + _SCOPE
    + r"(?:\.(?P<space>global|shared::cta|shared::cluster|shared))?"
    + _SCOPE.replace("scope", "scope_after_space")
    + r"\.(?P<op>\w+)(?:\.noftz)?"
    + _EVICT
    + r"(?:\.v(?P<vec>[248]))?\.(?P<type>\w+)",
)
def _atom(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    has_dst = m["head"] == "atom"
    kind, count = m["type"], int(m["vec"] or 1)
    register = _ATOM_REGISTER.get(kind, kind)
    rows = [d.destination(x, register) for x in _vector(s.operands[0])] if has_dst else []
    rest = s.operands[has_dst:]
    operand, offset = d.address(rest[0])
    values = [d.source(x, register) for x in _vector(rest[1])]
    if m["op"] == "cas":
        values.append(d.source(rest[2], register))
    elif len(values) != count:
        raise d.unknown(f"{count} values expected")
    order = ORDERS[m["order"] or "relaxed"]
    d.emit(
        "atom",
        [*rows, operand, *values],
        (
            SPACES[m["space"] or ""],
            _ATOM_OPS[m["op"]],
            _ATOM_TYPES[kind],
            int(has_dst),
            offset,
            order,
            count,
            int(m["op"] == "cas"),
            SCOPES[m["scope"] or m["scope_after_space"] or "gpu"],
        ),
    )


# CUTLASS's C++ writes the count before the shape, the manual after it.
@family(
    "ldmatrix stmatrix",
    r"(?P<op>ld|st)matrix\.sync\.aligned\.(?:m8n8\.x(?P<n>[124])(?P<trans>\.trans)?"
    r"|x(?P<n2>[124])(?P<trans2>\.trans)?\.m8n8)\.shared(?:::cta)?\.b16",
)
def _matrix(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    _emit_matrix(d, s, m["op"], m["op"] + "matrix", int(m["n"] or m["n2"]), bool(m["trans"] or m["trans2"]))


@family("ldmatrix", r"(?P<op>ld)matrix\.sync\.aligned\.m16n16\.x(?P<n>[12])\.trans\.shared(?:::cta)?\.b8")
@family("stmatrix", r"(?P<op>st)matrix\.sync\.aligned\.m16n8\.x(?P<n>[124])\.trans\.shared(?:::cta)?\.b8")
def _matrix_bytes(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    load = m["op"] == "ld"
    _emit_matrix(
        d, s, m["op"], "ldmatrix.m16n16.b8" if load else "stmatrix.m16n8.b8", int(m["n"]) * (2 if load else 1), True
    )


def _emit_matrix(d: Decoder, s: Statement, op: str, handler: str, count: int, transposed: bool) -> None:
    load = op == "ld"
    registers, address = s.operands if load else reversed(s.operands)
    names = _vector(registers)
    if len(names) != count:
        raise d.unknown(f"{count} registers expected")
    rows = [d.destination(x, "b32") if load else d.source(x, "b32") for x in names]
    operand, offset = d.address(address)
    if (operand >> 29 & 3) == 1:
        t = d.temporary("b32")
        d.emit("cvt.u32.u64", [t, operand])
        operand = t
    d.emit(handler, [*rows, operand], (len(rows), int(transposed), offset))
