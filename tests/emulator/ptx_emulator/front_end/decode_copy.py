"""Decoders of the asynchronous copies: cp.async, bulk copies, TMA tensor copies and maps, st.async,
clusterlaunchcontrol.

The modifiers of these instructions appear in several orders; each decoder consumes its own set and refuses the rest.
"""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import NONE, Decoder, family
from ptx_emulator.front_end.parser import Statement, split_operands

_REDUCTIONS = {"add": 0, "max": 1, "min": 2, "and": 5, "or": 6, "xor": 7, "inc": 8, "dec": 9}
_REDUCTION_TYPES = {"u32": 0, "s32": 1, "b32": 0, "u64": 2, "s64": 3, "b64": 2, "f32": 4, "f64": 5, "f16": 8, "bf16": 9}
_TYPE_BYTES = {"u32": 4, "s32": 4, "b32": 4, "u64": 8, "s64": 8, "b64": 8, "f32": 4, "f64": 8, "f16": 2, "bf16": 2}


class _Modifiers:
    """The modifiers after the instruction's name, consumed one by one; `finish` refuses the remaining ones."""

    def __init__(self, d: Decoder, text: str) -> None:
        self.d = d
        # "shared::cluster.global" is the direction and keeps its order; the other modifiers are a set.
        self.left = [x for x in text.split(".") if x]

    def take(self, *names: str) -> str | None:
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return None

    def finish(self) -> None:
        if self.left:
            raise self.d.unknown(f"modifier .{self.left[0]} is not modelled here")


def _smem(d: Decoder, text: str) -> tuple[int, int]:
    return d.address(text)


@family("cp", r"cp\.async\.bulk\.commit_group")
def _commit(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("bulk.commit_group", [])


@family("cp", r"cp\.async\.bulk\.wait_group(?P<read>\.read)?")
def _wait(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("bulk.wait_group", [], (d.immediate(s.operands[0]), int(m["read"] is not None)))


@family(
    "cp",
    r"cp\.async\.bulk\.prefetch\.(?:tensor\.\dd\.L2\.global(?:"
    r"\.tile(?:::gather4)?)?|L2\.global)(?:\.L2::cache_hint)?",
)
def _prefetch(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("nop", [])


@family("cp", r"cp(?P<reduce>\.reduce)?\.async\.bulk\.tensor\.(?P<rank>[1-5])d(?P<rest>\.[\w.:]+)")
def _tensor(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    mods = _Modifiers(d, m["rest"])
    rank = int(m["rank"])
    hint = mods.take("L2::cache_hint")
    mods.take("tile")
    if any(x.startswith("im2col") for x in mods.left):
        raise d.unknown("im2col tensor maps are not modelled")
    if "bulk_group" in mods.left:
        _tensor_store(d, s, m, mods, rank, hint)
        return
    gather = mods.take("tile::gather4")
    multicast = mods.take("multicast::cluster")
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    if (
        not mods.take("mbarrier::complete_tx::bytes")
        or not mods.take("shared::cluster", "shared::cta")
        or not mods.take("global")
        or m["reduce"]
    ):
        raise d.unknown("this form of cp.async.bulk.tensor is not modelled")
    mods.finish()
    operands = list(s.operands)
    dst, dst_offset = _smem(d, operands[0])
    map_text, coordinate_text = split_operands(operands[1][1:-1])
    coordinates = split_operands(coordinate_text[1:-1])
    if len(coordinates) != (5 if gather else rank):
        raise d.unknown("wrong number of coordinates")
    barrier, barrier_offset = _smem(d, operands[2])
    if len(operands) != 3 + (multicast is not None) + (hint is not None):
        raise d.unknown("wrong number of operands")
    mask = _mask(d, operands[3]) if multicast else NONE
    rows = [dst, d.source(map_text, "b64"), *(d.source(c, "b32") for c in coordinates), barrier, mask]
    d.emit(
        "tma.load",
        rows,
        (len(coordinates), dst_offset, barrier_offset, int(multicast is not None), int(pair), int(gather is not None)),
    )


def _mask(d: Decoder, text: str) -> int:
    return d.source(text, "b16")


def _tensor_store(d: Decoder, s: Statement, m: re.Match[str], mods: _Modifiers, rank: int, hint: str | None) -> None:
    mods.take("bulk_group")
    scatter = mods.take("tile::scatter4")
    if not mods.take("global") or not mods.take("shared::cta"):
        raise d.unknown("this form of cp.async.bulk.tensor is not modelled")
    reduction = 0
    if m["reduce"]:
        name = mods.take(*_REDUCTIONS)
        if name is None:
            raise d.unknown("the reduction operation is missing")
        reduction = _REDUCTIONS[name] + 1
    mods.finish()
    map_text, coordinate_text = split_operands(s.operands[0][1:-1])
    coordinates = split_operands(coordinate_text[1:-1])
    if len(coordinates) != (5 if scatter else rank) or len(s.operands) != 2 + (hint is not None):
        raise d.unknown("wrong number of operands")
    source, offset = _smem(d, s.operands[1])
    d.emit(
        "tma.store",
        [d.source(map_text, "b64"), *(d.source(c, "b32") for c in coordinates), source],
        (len(coordinates), offset, reduction, 0, 0, int(scatter is not None)),
    )


@family("cp", r"cp(?P<reduce>\.reduce)?\.async\.bulk(?P<rest>\.(?:shared|global)[\w.:]*)")
def _bulk(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    mods = _Modifiers(d, m["rest"])
    hint = mods.take("L2::cache_hint")
    direction = mods.left[:2]
    mods.left = mods.left[2:]
    reduction, kind = 0, "u32"
    if m["reduce"]:
        mods.take("noftz")
        kind = mods.take(*_REDUCTION_TYPES) or ""
        name = mods.take(*_REDUCTIONS)
        if name is None or not kind:
            raise d.unknown("the reduction operation is missing")
        reduction = _REDUCTIONS[name] + 1
    operands = list(s.operands)
    if direction == ["global", "shared::cta"]:
        if not mods.take("bulk_group"):
            raise d.unknown("a store needs .bulk_group")
        mods.finish()
        if len(operands) != 3 + (hint is not None):
            raise d.unknown("wrong number of operands")
        dst, dst_offset = d.address(operands[0])
        src, src_offset = d.address(operands[1])
        d.emit(
            "bulk.store",
            [dst, src, d.source(operands[2], "b32")],
            (dst_offset, src_offset, reduction, _REDUCTION_TYPES[kind], _TYPE_BYTES[kind]),
        )
        return
    if not mods.take("mbarrier::complete_tx::bytes"):
        raise d.unknown("a load needs .mbarrier::complete_tx::bytes")
    multicast = mods.take("multicast::cluster")
    mods.finish()
    dst, dst_offset = d.address(operands[0])
    src, src_offset = d.address(operands[1])
    barrier, barrier_offset = d.address(operands[3])
    size = d.source(operands[2], "b32")
    if direction in (["shared::cluster", "global"], ["shared::cta", "global"]) and not m["reduce"]:
        if len(operands) != 4 + (multicast is not None) + (hint is not None):
            raise d.unknown("wrong number of operands")
        mask = _mask(d, operands[4]) if multicast else NONE
        d.emit(
            "bulk.load",
            [dst, src, size, barrier, mask],
            (dst_offset, src_offset, barrier_offset, int(multicast is not None)),
        )
    elif direction == ["shared::cluster", "shared::cta"] and len(operands) == 4:
        d.emit(
            "bulk.peer",
            [dst, src, size, barrier],
            (dst_offset, src_offset, barrier_offset, reduction, _REDUCTION_TYPES[kind]),
        )
    else:
        raise d.unknown("this direction is not modelled")


@family("cp", r"cp\.async\.(?:ca|cg)\.shared(?:::cta)?\.global(?P<hint>\.L2::cache_hint)?(?:\.L2::(?:64|128|256)B)?")
def _cp_async(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operands = list(s.operands)
    if m["hint"]:
        operands.pop()
    dst, dst_offset = d.address(operands[0])
    src, src_offset = d.address(operands[1])
    nbytes = d.immediate(operands[2])
    if nbytes not in (4, 8, 16) or len(operands) > 4:
        raise d.unknown("4, 8 or 16 bytes and at most one more operand expected")
    rows, mode = [dst, src], 0
    if len(operands) == 4:
        third = d.register(operands[3].lstrip("!"))
        mode = 2 if third is not None and (third >> 29 & 3) == 3 else 1
        rows.append(d.predicate(operands[3]) if mode == 2 else d.source(operands[3], "b32"))
    d.emit("cp.async", rows, (nbytes, dst_offset, src_offset, mode))


@family("cp", r"cp\.async\.commit_group")
def _cp_commit(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("cp.async.commit_group", [])


@family("cp", r"cp\.async\.wait_(?P<kind>group|all)")
def _cp_wait(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("cp.async.wait_group", [], (d.immediate(s.operands[0]) if m["kind"] == "group" else -1,))


@family("cp", r"cp\.async\.mbarrier\.arrive(?P<noinc>\.noinc)?(?:\.shared(?:::cta)?)?\.b64")
def _cp_arrive(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    d.emit("cp.async.mbarrier.arrive", [operand], (offset, int(m["noinc"] is not None)))


@family(
    "st",
    r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes"
    r"(?:\.v(?P<vec>[24]))?\.(?P<type>[bus](?:32|64)|f32|f64)",
)
def _st_async(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    values = split_operands(s.operands[1][1:-1]) if s.operands[1].startswith("{") else [s.operands[1]]
    if len(values) != int(m["vec"] or 1):
        raise d.unknown("wrong number of values")
    dst, offset = d.address(s.operands[0])
    barrier, barrier_offset = d.address(s.operands[2])
    nbytes = _TYPE_BYTES[m["type"]]
    d.emit(
        "st.async",
        [*(d.source(v, f"b{8 * nbytes}") for v in values), dst, barrier],
        (offset, len(values), nbytes, barrier_offset),
    )


@family(
    "red",
    r"red\.async(?:\.relaxed\.cluster)?\.shared::cluster\.mbarrier::complete_tx::bytes"
    r"\.(?P<op>\w+)\.(?P<type>u32|s32|u64|b32)",
)
def _red_async(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    dst, offset = d.address(s.operands[0])
    barrier, barrier_offset = d.address(s.operands[2])
    nbytes = _TYPE_BYTES[m["type"]]
    d.emit(
        "st.async",
        [d.source(s.operands[1], f"b{8 * nbytes}"), dst, barrier],
        (offset, 1, nbytes, barrier_offset, _REDUCTIONS[m["op"]] + 1, _REDUCTION_TYPES[m["type"]]),
    )


@family(
    "clusterlaunchcontrol",
    r"clusterlaunchcontrol\.try_cancel\.async"
    r"(?:\.shared::cta)?\.mbarrier::complete_tx::bytes"
    r"(?P<all>\.multicast::cluster::all)?\.b128",
)
def _try_cancel(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    dst, offset = d.address(s.operands[0])
    barrier, barrier_offset = d.address(s.operands[1])
    d.emit("clc.try_cancel", [dst, barrier], (offset, barrier_offset, int(m["all"] is not None)))


@family("clusterlaunchcontrol", r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128")
def _is_canceled(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("clc.is_canceled", [d.destination(s.operands[0], "pred"), d.source(s.operands[1], "b128")])


@family(
    "clusterlaunchcontrol",
    r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid"
    r"(?:::(?P<dim>[xyz])\.b32|\.v4\.b32)\.b128",
)
def _first_cta(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    names = split_operands(s.operands[0][1:-1]) if s.operands[0].startswith("{") else [s.operands[0]]
    operands = [*(d.destination(n, "b32") for n in names), d.source(s.operands[1], "b128")]
    d.emit("clc.first_cta", operands, ("xyz".index(m["dim"] or "x"),))


_MAP_FIELDS = {"global_address": 0, "global_dim": 1, "global_stride": 2}


@family(
    "tensormap",
    r"tensormap\.replace\.tile\.(?P<field>\w+)\.(?P<space>global|shared::cta)\.b1024\.(?P<type>b32|b64)",
)
def _replace(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    field = _MAP_FIELDS.get(m["field"])
    if field is None or (m["type"] == "b32") != (m["field"] == "global_dim"):
        raise d.unknown(f"replacing {m['field']} as {m['type']} is not modelled")
    address, offset = d.address(s.operands[0])
    dimension = 0
    if m["field"] != "global_address":
        dimension = d.immediate(s.operands[1])
        if dimension is None or not 0 <= dimension < (5 if m["field"] == "global_dim" else 4):
            raise d.unknown("the dimension is an immediate below the rank")
    rows = [address, d.source(s.operands[-1], m["type"])]
    d.emit("tensormap.replace", rows, (int(m["space"] != "global"), offset, field, dimension))


@family(
    "tensormap",
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.(?:cta|cluster|gpu|sys)\.sync\.aligned",
)
def _copy_map(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    if d.immediate(s.operands[2]) != 128:
        raise d.unknown("a tensor map has 128 bytes")
    to, to_offset = d.address(s.operands[0])
    source, source_offset = d.address(s.operands[1])
    d.emit("tensormap.cp_fenceproxy", [to, source], (to_offset, source_offset))
