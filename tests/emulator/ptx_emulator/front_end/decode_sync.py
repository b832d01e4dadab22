"""Decoders of barriers, fences, mbarriers and warp collectives."""

from __future__ import annotations

import re

from ptx_emulator.front_end.decoder import NONE, SCOPES, Decoder, family
from ptx_emulator.front_end.parser import Statement


def _flag(x: str | None) -> int:
    return int(x is not None)


@family("bar", r"bar\.warp\.sync")
def _bar_warp(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("bar.warp", [d.source(s.operands[0], "b32")])


@family("bar barrier", r"(?P<word>bar|barrier)(?:\.cta)?\.(?P<kind>sync|arrive)(?P<aligned>\.aligned)?")
def _bar(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    arrive = m["kind"] == "arrive"
    if arrive and len(s.operands) != 2:
        raise d.unknown("bar.arrive needs a thread count")
    count = d.source(s.operands[1], "b32") if len(s.operands) > 1 else NONE
    unaligned = m["word"] == "barrier" and m["aligned"] is None
    d.emit("bar", [d.source(s.operands[0], "b32"), count], (int(arrive), 0, int(unaligned)))


@family("bar barrier", r"(?:bar|barrier)(?:\.cta)?\.red\.(?P<op>and|or|popc)(?:\.aligned)?\.(?P<type>pred|u32)")
def _bar_red(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    a = s.operands
    count = d.source(a[2], "b32") if len(a) > 3 else NONE
    result = d.destination(a[0], "b32" if m["op"] == "popc" else "pred")
    d.emit(
        "bar.red",
        [d.source(a[1], "b32"), count, result, d.predicate(a[-1])],
        (0, {"and": 0, "or": 1, "popc": 2}[m["op"]]),
    )


@family("barrier", r"barrier\.cluster\.arrive(?:\.(?P<order>release|relaxed))?(?:\.aligned)?")
def _cluster_arrive(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("barrier.cluster.arrive", [], (int(m["order"] == "relaxed"),))


@family("barrier", r"barrier\.cluster\.wait(?:\.(?P<order>acquire|relaxed))?(?:\.aligned)?")
def _cluster_wait(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("barrier.cluster.wait", [], (int(m["order"] == "relaxed"),))


@family("fence", r"fence(?:\.(?P<order>sc|acq_rel|acquire|release))?\.(?P<scope>cta|cluster|gpu|sys)")
@family("membar", r"membar\.(?P<scope>cta|gl|sys|gpu)(?P<order>)")
def _fence(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    scope = SCOPES["gpu" if m["scope"] == "gl" else m["scope"]]
    d.emit("fence", [], ({"acquire": 1, "release": 2}.get(m["order"] or "", 0), scope))


@family("fence", r"fence\.acquire\.sync_restrict::shared::cluster\.cluster")
def _fence_acquire_restricted(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("fence", [], (1, SCOPES["cluster"]))


@family("fence", r"fence\.release\.sync_restrict::shared::cta\.cluster")
def _fence_release_restricted(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("fence", [], (2, SCOPES["cluster"]))


@family("fence", r"fence\.mbarrier_init\.release\.cluster")
def _fence_init(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("fence.mbarrier_init", [])


@family("fence", r"fence\.proxy\.async(?:\.(?P<space>global|shared::cta|shared::cluster))?")
def _fence_proxy(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("nop" if m["space"] == "global" else "fence.proxy.async", [])


@family("fence", r"fence\.proxy\.(?:alias|tensormap::generic\.(?:acquire|release)\.(?:cta|cluster|gpu|sys))")
def _fence_proxy_other(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("nop", [])


# ---- mbarrier. The default state space is shared::cta.

_MB_SPACE = r"(?:\.shared(?:::cta|::cluster)?)?\.b64"
_MB_SCOPE = r"(?:\.(?P<scope>cta|cluster))?"  # default: .cta


@family("mbarrier", r"mbarrier\.init" + _MB_SPACE)
def _init(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    d.emit("mbarrier.init", [operand, d.source(s.operands[1], "b32")], (offset,))


@family("mbarrier", r"mbarrier\.inval" + _MB_SPACE)
def _inval(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    d.emit("mbarrier.inval", [operand], (offset,))


@family(
    "mbarrier",
    r"mbarrier\.(?P<kind>arrive|arrive_drop)(?P<tx>\.expect_tx)?(?:\.(?P<order>release|relaxed))?"
    + _MB_SCOPE
    + _MB_SPACE,
)
def _arrive(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    a = list(s.operands)
    state = NONE
    if not a[0].startswith("["):
        state = d.destination(a.pop(0), "b64")
    operand, offset = d.address(a[0])
    value = d.source(a[1], "b32") if len(a) > 1 else NONE
    if m["tx"] and value == NONE:
        raise d.unknown("expect_tx needs a byte count")
    d.emit(
        "mbarrier.arrive",
        [operand, value, state],
        (
            offset,
            int(value != NONE and not m["tx"]),
            _flag(m["tx"]),
            int(m["order"] == "relaxed"),
            int(state != NONE),
            int(m["kind"] == "arrive_drop"),
            SCOPES[m["scope"] or "cta"],
        ),
    )


@family(
    "mbarrier",
    r"mbarrier\.(?P<kind>expect_tx|complete_tx)(?:\.shared::cluster)?"
    r"(?:\.relaxed)?" + _MB_SCOPE + r"(?:\.shared(?:::cta|::cluster)?)?\.b64",
)
def _tx(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[0])
    d.emit("mbarrier." + m["kind"], [operand, d.source(s.operands[1], "b32")], (offset,))


@family(
    "mbarrier",
    r"mbarrier\.(?P<kind>try_wait|test_wait)(?P<parity>\.parity)?(?:\.(?P<order>acquire|relaxed))?"
    + _MB_SCOPE
    + _MB_SPACE,
)
def _wait(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    operand, offset = d.address(s.operands[1])
    phase = d.source(s.operands[2], "b32" if m["parity"] else "b64")
    d.emit(
        "mbarrier.wait",
        [d.destination(s.operands[0], "pred"), operand, phase],
        (
            offset,
            _flag(m["parity"]),
            int(m["order"] == "relaxed"),
            int(m["kind"] == "test_wait"),
            SCOPES[m["scope"] or "cta"],
        ),
    )


# ---- warp collectives


@family("shfl", r"shfl\.sync\.(?P<mode>idx|up|down|bfly)\.b32")
def _shfl(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    dst, _, p = s.operands[0].partition("|")
    d.emit(
        "shfl",
        [
            d.destination(dst.strip(), "b32"),
            d.destination(p.strip(), "pred") if p else NONE,
            *(d.source(x, "b32") for x in s.operands[1:5]),
        ],
        (["idx", "up", "down", "bfly"].index(m["mode"]),),
    )


@family("elect", r"elect\.sync")
def _elect(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    dst, _, p = s.operands[0].partition("|")
    d.emit(
        "elect", [d.destination(dst.strip(), "b32"), d.destination(p.strip(), "pred"), d.source(s.operands[1], "b32")]
    )


@family("vote", r"vote\.sync\.(?P<mode>all|any|uni)\.pred|vote\.sync\.(?P<ballot>ballot)\.b32")
def _vote(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    mode = ["all", "any", "uni"].index(m["mode"]) if m["mode"] else 3
    d.emit(
        "vote",
        [
            d.destination(s.operands[0], "b32" if mode == 3 else "pred"),
            d.predicate(s.operands[1]),
            d.source(s.operands[2], "b32"),
        ],
        (mode,),
    )


@family("match", r"match\.(?P<mode>any|all)\.sync\.b(?P<bits>32|64)")
def _match(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    dst, _, p = s.operands[0].partition("|")
    d.emit(
        "match",
        [
            d.destination(dst.strip(), "b32"),
            d.destination(p.strip(), "pred") if p else NONE,
            d.source(s.operands[1], f"b{m['bits']}"),
            d.source(s.operands[2], "b32"),
        ],
        (int(m["mode"] == "all"), 0, int(m["bits"] == "64")),
    )


_REDUX = {
    "add.s32": 0,
    "add.u32": 0,
    "max.s32": 1,
    "min.s32": 2,
    "max.u32": 3,
    "min.u32": 4,
    "and.b32": 5,
    "or.b32": 6,
    "xor.b32": 7,
    "max.f32": 8,
    "min.f32": 9,
    "max.NaN.f32": 10,
    "min.NaN.f32": 11,
    "max.abs.f32": 12,
    "min.abs.f32": 13,
    "max.abs.NaN.f32": 14,
    "min.abs.NaN.f32": 15,
}


@family("redux", r"redux\.sync\.(?P<op>[\w.]+)")
def _redux(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit(
        "redux",
        [d.destination(s.operands[0], "b32"), *(d.source(x, "b32") for x in s.operands[1:3])],
        (_REDUX[m["op"]],),
    )


@family("setmaxnreg", r"setmaxnreg\.(?P<op>inc|dec)\.sync\.aligned\.u32")
def _setmaxnreg(d: Decoder, s: Statement, m: re.Match[str]) -> None:
    d.emit("setmaxnreg", [], (int(m["op"] == "inc"), d.immediate(s.operands[0])))
