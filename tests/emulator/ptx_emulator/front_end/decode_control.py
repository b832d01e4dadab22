"""Comparisons, control flow, carries, and instructions with no effect on results."""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import NONE, Decoder, family
from ptx_emulator.front_end.forms import COMPARISONS
from ptx_emulator.front_end.parser import Scope, Statement


@family("setp", r"setp\.(?P<op>\w+)(?:\.(?P<combine>and|or|xor))?\.(?P<type>(?:ftz\.)?\w+)")
def _setp(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    suffix, kind = COMPARISONS[f"{m['op']}.{m['type']}"]
    p, _, q = s.operands[0].partition("|")
    combine = {None: 0, "and": 1, "or": 2, "xor": 3}[m["combine"]]
    if len(s.operands) != (4 if combine else 3):
        raise d.unknown("wrong number of operands")
    other = d.predicate(s.operands[3]) if combine else NONE
    d.emit(
        "setp." + suffix,
        [
            d.destination(p.strip(), "pred"),
            d.destination(q.strip(), "pred") if q else NONE,
            other,
            d.source(s.operands[1], kind),
            d.source(s.operands[2], kind),
        ],
        (combine,),
    )


@family("set", r"set\.(?P<op>\w+)\.(?P<to>u32|s32|f32)\.(?P<type>(?:ftz\.)?\w+)")
def _set(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    suffix, kind = COMPARISONS[f"{m['op']}.{m['type']}"]
    yes = 0x3F800000 if m["to"] == "f32" else 0xFFFFFFFF
    d.emit(
        "set." + suffix,
        [d.destination(s.operands[0], "b32"), d.source(s.operands[1], kind), d.source(s.operands[2], kind)],
        (0, yes),
    )


@family("bra", r"bra(?:\.uni)?")
def _bra(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("bra", []).label = s.operands[0]


@family("brx", r"brx\.idx(?:\.uni)?")
def _brx(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    scope: Scope | None = s.scope
    while scope is not None and s.operands[1] not in scope.branch_targets:
        scope = scope.parent
    if scope is None:
        raise d.unknown("its list of branch targets is not declared")
    labels = scope.branch_targets[s.operands[1]]
    first = sum(len(x) for x, _ in d.jump_labels)
    d.jump_labels.append((labels, s.scope))
    d.emit("brx", [d.source(s.operands[0], "b32")], (first, len(labels)))


@family("ret exit", r"(?:ret|exit)(?:\.uni)?")
def _exit(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("exit", [])


@family("call", r"call(?:\.uni)?")
def _call(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    """Decodes the two calls of the device runtime that kernels contain: printf is ignored, an assertion traps."""
    if "vprintf" in s.operands:
        d.emit("nop", [])
    elif "__assertfail" in s.operands:
        d.emit("trap", [])
    else:
        raise d.unknown("calls are not modelled")


@family("trap brkpt", r"trap|brkpt")
def _trap(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("trap", [])


@family("add addc sub subc", r"(?P<op>addc|subc|add|sub)(?P<cc>\.cc)?\.(?P<type>[us](?:32|64))")
def _carry(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    if d.carry is None:
        d.carry = d.temporary("pred") & 0x0FFFFFFF
    width = m["type"][1:]
    op = "addc" if m["op"].startswith("add") else "subc"
    d.emit(
        f"{op}.u{width}",
        [d.destination(s.operands[0], f"b{width}"), *(d.source(x, f"b{width}") for x in s.operands[1:3])],
        (d.carry, int(m["op"].endswith("c")), int(m["cc"] is not None)),
    )


# ---- no effect on results -------------------------------------------------------------------------------------------


@family(
    "prefetch prefetchu",
    r"prefetch(?:u)?(?:\.global|\.local|\.param|\.const)?"
    r"(?:\.L1|\.L2|\.tensormap)(?:::evict_\w+)?",
)
@family("discard", r"discard(?:\.global)?\.L2")
@family("applypriority", r"applypriority(?:\.global)?\.L2::evict_normal")
@family("pmevent", r"pmevent(?:\.mask)?")
def _no_effect(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("nop", [])


@family("griddepcontrol", r"griddepcontrol\.(?:wait|launch_dependents)")
def _griddepcontrol(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit(m.group(0), [])


@family("nanosleep", r"nanosleep\.u32")
def _nanosleep(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("yield", [])


@family("createpolicy", r"createpolicy\.(?:fractional|range|cvt)\.L2(?:::\w+)*(?:\.L2::\w+)*(?:\.global)?\.b64")
def _createpolicy(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("mov.b64", [d.destination(s.operands[0], "b64"), d.constant(0, 8)])
