"""Decoders of sm_90a's tensor core: wgmma.mma_async, and its fence, commit and wait."""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import Decoder, family
from ptx_emulator.front_end.parser import Statement, split_operands

_TARGET = "sm_90a"
# core/descriptor.h's Element
_ELEMENTS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 8, "u8": 9}
_ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32}  # other elements have 8
_FORMATS = {"f16": 0, "f32": 1, "s32": 2}
_BITS_OF_K = 256  # K of one instruction in bits, in every kind


def _need_target(d: Decoder) -> None:
    if d.module.target != _TARGET:
        raise d.unknown(f"wgmma needs .target {_TARGET}, the module has {d.module.target}")


@family("wgmma", r"wgmma\.fence\.sync\.aligned")
def _fence(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    _need_target(d)
    d.emit("wgmma.fence", [])


@family("wgmma", r"wgmma\.commit_group\.sync\.aligned")
def _commit(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    _need_target(d)
    d.emit("wgmma.commit_group", [])


@family("wgmma", r"wgmma\.wait_group\.sync\.aligned")
def _wait(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    _need_target(d)
    remaining = d.immediate(s.operands[0])
    if remaining is None or not 0 <= remaining <= 7:
        raise d.unknown("the number of groups is an immediate in [0, 7]")
    d.emit("wgmma.wait_group", [], (remaining,))


def _flags(d: Decoder, texts: list[str], allowed: tuple[int, ...], what: str) -> list[int]:
    values = [d.immediate(text) for text in texts]
    if any(value not in allowed for value in values):
        raise d.unknown(f"{what} is one of {allowed}")
    return values


@family(
    "wgmma",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)(?P<saturate>\.satfinite)?"
    r"\.(?P<d>f16|f32|s32)\.(?P<a>f16|bf16|tf32|e4m3|e5m2|s8|u8)\.(?P<b>f16|bf16|tf32|e4m3|e5m2|s8|u8)",
)
def _mma_async(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    """Decodes wgmma.mma_async.

    Operands: D, A (descriptor or four registers), B's descriptor, scale-d, then immediates: the signs of A and B for
    floats, the majors of 16-bit operands in shared memory.
    """
    _need_target(d)
    n, k, a, b, form = int(m["n"]), int(m["k"]), m["a"], m["b"], m["d"]
    integer = a in ("s8", "u8")
    if n % 8 or not 8 <= n <= 256 or (integer and n > 32 and n % 16):
        raise d.unknown(f"there is no N={n}")
    if k * _ELEMENT_BITS.get(a, 8) != _BITS_OF_K:
        raise d.unknown(f".{a} has K={_BITS_OF_K // _ELEMENT_BITS.get(a, 8)}")
    same_family = a == b if a in _ELEMENT_BITS else integer == (b in ("s8", "u8")) and b not in _ELEMENT_BITS
    wrong_format = (form == "s32") != integer or (form == "f16" and a in ("bf16", "tf32"))
    if not same_family or wrong_format or (m["saturate"] and not integer):
        raise d.unknown(f"there is no {form}.{a}.{b}")
    rest = list(s.operands)
    accumulator = split_operands(rest.pop(0)[1:-1])
    if len(accumulator) != (n // 4 if form == "f16" else n // 2):
        raise d.unknown(f"{len(accumulator)} accumulator registers do not fit N={n}")
    fragment = rest[0].startswith("{")
    first = split_operands(rest.pop(0)[1:-1]) if fragment else [rest.pop(0)]
    if fragment and len(first) != 4:
        raise d.unknown("A in registers takes four")
    a_operands = [d.destination(x, "b32") if fragment else d.source(x, "b64") for x in first]
    b_descriptor = d.source(rest.pop(0), "b64")
    scale_d = d.predicate(rest.pop(0))
    signs = [1, 1] if integer else _flags(d, rest[:2], (-1, 1), "an operand's sign")
    rest = rest if integer else rest[2:]
    majors = [0, 0]
    if a in ("f16", "bf16"):
        given = _flags(d, rest, (0, 1), "an operand's major")
        if len(given) != (1 if fragment else 2):
            raise d.unknown("one major is expected for each operand in shared memory")
        majors, rest = [0, *given][-2:], []
    if rest or len(signs) != 2:
        raise d.unknown("wrong number of operands")
    d.emit(
        "wgmma.mma_async",
        [*(d.destination(x, "b32") for x in accumulator), *a_operands, b_descriptor, scale_d],
        (
            n,
            k,
            _ELEMENTS[a],
            _ELEMENTS[b],
            _FORMATS[form],
            int(fragment),
            int(signs[0] != signs[1]),
            *majors,
            int(m["saturate"] is not None),
        ),
    )
