"""The table of element-wise instruction forms: full opcode -> core handler, operand types, auxiliaries.

An opcode that is neither a key here nor matched by a registered family is refused. A type gives the encoding of an
operand's immediate and the width of its register row; "pred" is a predicate.
"""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    handler: str
    types: tuple[str, ...]  # destination first
    aux: tuple[int, ...] = ()


FORMS: dict[str, Form] = {}


def _add(opcode: str, handler: str, types: str, aux: tuple[int, ...] = ()) -> None:
    assert opcode not in FORMS, opcode
    FORMS[opcode] = Form(handler, tuple(types.split()), aux)


def _same(opcodes: str, handler: str, types: str, aux: tuple[int, ...] = ()) -> None:
    for opcode in opcodes.split():
        _add(opcode, handler, types, aux)


def _integers() -> None:
    for op in ("add", "sub"):
        for w in (16, 32, 64):
            _same(f"{op}.s{w} {op}.u{w}", f"{op}.u{w}", f"b{w} b{w} b{w}")
        _add(f"{op}.sat.s32", f"{op}.sat.s32", "b32 b32 b32")
    for w in (16, 32, 64):
        _same(f"mul.lo.s{w} mul.lo.u{w}", f"mul.lo.u{w}", f"b{w} b{w} b{w}")
        _same(f"mad.lo.s{w} mad.lo.u{w}", f"mad.lo.u{w}", f"b{w} b{w} b{w} b{w}")
        for s in "su":
            _add(f"mul.hi.{s}{w}", f"mul.hi.{s}{w}", f"b{w} b{w} b{w}")
            _add(f"div.{s}{w}", f"div.{s}{w}", f"b{w} b{w} b{w}")
            _add(f"rem.{s}{w}", f"rem.{s}{w}", f"b{w} b{w} b{w}")
    for s in "su":
        for w in (16, 32):
            _add(f"mul.wide.{s}{w}", f"mul.wide.{s}{w}", f"b{2 * w} b{w} b{w}")
            _add(f"mad.wide.{s}{w}", f"mad.wide.{s}{w}", f"b{2 * w} b{w} b{w} b{2 * w}")
        _add(f"mad.hi.{s}32", f"mad.hi.{s}32", "b32 b32 b32 b32")
        _add(f"sad.{s}32", f"sad.{s}32", "b32 b32 b32 b32")
        _add(f"dp4a.{s}32.{s}32", f"dp4a.{s}32.{s}32", "b32 b32 b32 b32")
    for half in ("lo", "hi"):
        _add(f"dp2a.{half}.u32.u32", f"dp2a.{half}.u32.u32", "b32 b32 b32 b32")
    _add("mul24.lo.u32", "mul24.lo.u32", "b32 b32 b32")
    for op in ("min", "max"):
        for t in ("s32", "u32", "s64", "u64", "s16"):
            _add(f"{op}.{t}", f"{op}.{t}", f"b{t[1:]} b{t[1:]} b{t[1:]}")
        _add(f"{op}.u16", f"{op}.u32", "b16 b16 b16")
        for t in ("s16x2", "u16x2"):
            _add(f"{op}.{t}", f"{op}.{t}", "b32 b32 b32")
        _add(f"{op}.relu.s32", f"{op}.relu.s32", "b32 b32 b32")
    for op in ("neg", "abs"):
        for w in (16, 32, 64):
            _add(f"{op}.s{w}", f"{op}.s{w}", f"b{w} b{w}")
    for op in ("and", "or", "xor"):
        _add(f"{op}.b16", f"{op}.b32", "b16 b16 b16")
        _add(f"{op}.b32", f"{op}.b32", "b32 b32 b32")
        _add(f"{op}.b64", f"{op}.b64", "b64 b64 b64")
        _add(f"{op}.pred", f"{op}.pred", "pred pred pred")
    for w in (16, 32, 64):
        _add(f"not.b{w}", f"not.b{w}", f"b{w} b{w}")
        _add(f"shl.b{w}", f"shl.b{w}", f"b{w} b{w} b32")
        _same(f"shr.u{w} shr.b{w}", f"shr.u{w}", f"b{w} b{w} b32")
        _add(f"shr.s{w}", f"shr.s{w}", f"b{w} b{w} b32")
    _add("not.pred", "not.pred", "pred pred")
    _add("mov.pred", "mov.pred", "pred pred")
    _add("cnot.b32", "cnot.b32", "b32 b32")
    _add("cnot.b64", "cnot.b64", "b64 b64")
    for d in "lr":
        for m in ("wrap", "clamp"):
            _add(f"shf.{d}.{m}.b32", f"shf.{d}.{m}", "b32 b32 b32 b32")
    for op in ("popc", "clz"):
        for w in (32, 64):
            _add(f"{op}.b{w}", f"{op}.b{w}", f"b32 b{w}")
    for w in (32, 64):
        _add(f"brev.b{w}", f"brev.b{w}", f"b{w} b{w}")
        for s in "su":
            _add(f"bfe.{s}{w}", f"bfe.{s}{w}", f"b{w} b{w} b32 b32")
        _add(f"bfi.b{w}", f"bfi.b{w}", f"b{w} b{w} b{w} b32 b32")
    for t in ("u32", "s32", "u64"):
        _add(f"bfind.{t}", f"bfind.{t}", f"b32 b{t[1:]}")
    _add("bfind.shiftamt.u32", "bfind.shiftamt.u32", "b32 b32")
    _add("prmt.b32", "prmt.b32", "b32 b32 b32 b32")
    for i, mode in enumerate(("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")):
        _add(f"prmt.b32.{mode}", "prmt.mode", "b32 b32 b32 b32", (i,))
    _add("lop3.b32", "lop3.b32", "b32 b32 b32 b32 b32")


def _floats() -> None:
    for ftz in ("", ".ftz"):
        for op in ("add", "sub", "mul"):
            for rn in ("", ".rn"):
                _add(f"{op}{rn}{ftz}.f32", f"{op}{ftz}.f32", "f32 f32 f32")
                _add(f"{op}{rn}{ftz}.sat.f32", f"{op}.sat{ftz}.f32", "f32 f32 f32")
                _add(f"{op}{rn}{ftz}.f32x2", f"{op}{ftz}.f32x2", "b64 b64 b64")
            for r in ("rz", "rm", "rp"):
                _add(f"{op}.{r}{ftz}.f32", f"{op}.{r}.f32", "f32 f32 f32", (1 if ftz else 0,))
        _add(f"fma.rn{ftz}.f32", f"fma{ftz}.f32", "f32 f32 f32 f32")
        _add(f"fma.rn{ftz}.sat.f32", f"fma.sat{ftz}.f32", "f32 f32 f32 f32")
        _add(f"fma.rn{ftz}.f32x2", f"fma{ftz}.f32x2", "b64 b64 b64 b64")
        for r in ("rz", "rm", "rp"):
            _add(f"fma.{r}{ftz}.f32", f"fma.{r}.f32", "f32 f32 f32 f32", (1 if ftz else 0,))
        for d in ("rn", "full", "approx"):
            _add(f"div.{d}{ftz}.f32", f"div{ftz}.f32", "f32 f32 f32")
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                _add(f"{op}{ftz}{nan}.f32", f"{op}{nan}{ftz}.f32", "f32 f32 f32")
        for op in ("neg", "abs"):
            _add(f"{op}{ftz}.f32", f"{op}{ftz}.f32", "f32 f32")
        for op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos"):
            _add(f"{op}.approx{ftz}.f32", f"{op}{ftz}.f32", "f32 f32")
        for op in ("rcp", "sqrt"):
            _add(f"{op}.rn{ftz}.f32", f"{op}{ftz}.f32", "f32 f32")
    for r in ("rm", "rz", "rp"):
        for ftz in ("", ".ftz"):
            _add(f"add.{r}{ftz}.f32x2", f"add.{r}.f32x2", "b64 b64 b64")
        _add(f"div.{r}.f32", f"div.{r}.f32", "f32 f32 f32")
    _add("tanh.approx.f32", "tanh.f32", "f32 f32")
    _add("fma.rn.relu.f32", "fma.relu.f32", "f32 f32 f32 f32")
    _add("copysign.f32", "copysign.f32", "f32 f32 f32")
    for op in ("add", "sub", "mul"):
        _same(f"{op}.f64 {op}.rn.f64", f"{op}.f64", "f64 f64 f64")
    _add("div.rn.f64", "div.f64", "f64 f64 f64")
    _add("fma.rn.f64", "fma.f64", "f64 f64 f64 f64")
    for op in ("min", "max"):
        _add(f"{op}.f64", f"{op}.f64", "f64 f64 f64")
    for op in ("neg", "abs"):
        _add(f"{op}.f64", f"{op}.f64", "f64 f64")
    _add("rcp.rn.f64", "rcp.f64", "f64 f64")
    _add("sqrt.rn.f64", "sqrt.f64", "f64 f64")
    for t in ("f16", "bf16", "f16x2", "bf16x2"):
        w = "b32" if t.endswith("x2") else "b16"
        for op in ("add", "sub", "mul"):
            _same(f"{op}.{t} {op}.rn.{t}", f"{op}.{t}", f"{w} {w} {w}")
        for op in ("min", "max"):
            _add(f"{op}.{t}", f"{op}.{t}", f"{w} {w} {w}")
            _add(f"{op}.NaN.{t}", f"{op}.NaN.{t}", f"{w} {w} {w}")
        _add(f"fma.rn.{t}", f"fma.{t}", f"{w} {w} {w} {w}")
        if t.endswith("x2"):
            _add(f"fma.rn.relu.{t}", f"fma.relu.{t}", f"{w} {w} {w} {w}")
        layout = "f16x2" if t.endswith("x2") else "f16"
        for op in ("neg", "abs"):
            _add(f"{op}.{t}", f"{op}.{layout}", f"{w} {w}")
        _add(f"tanh.approx.{t}", f"tanh.{t}", f"{w} {w}")
        _add(f"ex2.approx.{t}" if t.startswith("f16") else f"ex2.approx.ftz.{t}", f"ex2.{t}", f"{w} {w}")
    for t in ("f16", "bf16"):
        _same(f"add.f32.{t} add.rn.f32.{t}", f"add.f32.{t}", "f32 b16 f32")
        _same(f"sub.f32.{t} sub.rn.f32.{t}", f"sub.f32.{t}", "f32 b16 f32")
        _add(f"fma.rn.f32.{t}", f"fma.f32.{t}", "f32 b16 b16 f32")
    for i, p in enumerate(("finite", "infinite", "number", "notanumber", "normal", "subnormal")):
        _add(f"testp.{p}.f32", "testp.f32", "pred f32", (i,))


# Forms with one more operand than the table's entry of the same opcode.
THREE_INPUT: dict[str, Form] = {
    f"{op}{ftz}{nan}.f32": Form(f"{op}3{nan}{ftz}.f32", ("f32",) * 4)
    for op in ("min", "max")
    for ftz in ("", ".ftz")
    for nan in ("", ".NaN")
    if not (ftz and nan)
}

_BITS = {"u8": 8, "s8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}


def _integer_conversion(dst: str, src: str) -> str:
    """The handler of cvt.dst.src without saturation: sign- or zero-extends the source, then truncates."""
    d, s, signed = _BITS[dst], _BITS[src], src[0] == "s"
    if d == 64:
        if s == 64:
            return "mov.b64"
        return f"cvt.s64.s{s}" if signed else f"cvt.u64.u{s}"
    if s == 64:
        return f"cvt.u{d}.u64"
    if d < s or (d == s and d < 32):
        return f"cvt.u{d}"
    if d == s:
        return "mov.b32"
    if signed:
        return "cvt.u16.s8" if d == 16 else f"cvt.u32.s{s}"
    return f"cvt.u{s}"


def _conversions() -> None:
    for dst in _BITS:
        for src in _BITS:
            _add(f"cvt.{dst}.{src}", _integer_conversion(dst, src), f"b{_BITS[dst]} b{_BITS[src]}")
    for dst in ("u8", "s8", "u16", "s16", "u32"):
        _add(f"cvt.sat.{dst}.s32", f"cvt.sat.{dst}.s32", f"b{_BITS[dst]} b32")
    for src in _BITS:
        for dst in ("f32", "f64", "f16", "bf16"):
            if src in ("u64", "s64") and dst in ("f16", "bf16"):
                continue
            if dst == "f64" and _BITS[src] < 32:
                continue
            _add(f"cvt.rn.{dst}.{src}", f"cvt.{dst}.{src}", f"{'b16' if dst.endswith('16') else dst} b{_BITS[src]}")
    for i, r in enumerate(("rni", "rzi", "rmi", "rpi")):
        for dst in _BITS:
            _same(f"cvt.{r}.{dst}.f32 cvt.{r}.ftz.{dst}.f32", f"cvt.{dst}.f32", f"b{_BITS[dst]} f32", (i,))
            if _BITS[dst] >= 32:
                _add(f"cvt.{r}.{dst}.f64", f"cvt.{dst}.f64", f"b{_BITS[dst]} f64", (i,))
            if dst in ("s32", "u32", "s16", "u16"):
                _add(f"cvt.{r}.{dst}.f16", f"cvt.{dst}.f16", f"b{_BITS[dst]} b16", (i,))
        _same(f"cvt.{r}.f32.f32 cvt.{r}.ftz.f32.f32", "cvt.round.f32", "f32 f32", (i,))
        _add(f"cvt.{r}.f64.f64", "cvt.round.f64", "f64 f64", (i,))
    _same("cvt.f32.f16 cvt.ftz.f32.f16", "cvt.f32.f16", "f32 b16")
    _same("cvt.f32.bf16 cvt.ftz.f32.bf16", "cvt.f32.bf16", "f32 b16")
    _add("cvt.f64.f32", "cvt.f64.f32", "f64 f32")
    _add("cvt.rn.f32.f64", "cvt.f32.f64", "f32 f64")
    _add("cvt.f32.f32", "cvt.f32.f32", "f32 f32")
    _add("cvt.ftz.f32.f32", "cvt.ftz.f32.f32", "f32 f32")
    _same("cvt.sat.f32.f32 cvt.sat.ftz.f32.f32", "cvt.sat.f32.f32", "f32 f32")
    _add("cvt.rn.f16.f64", "cvt.f16.f64", "b16 f64")
    _add("cvt.f64.f16", "cvt.f64.f16", "f64 b16")
    _add("cvt.rn.bf16.f16", "cvt.bf16.f16", "b16 b16")
    _add("cvt.rn.f16.bf16", "cvt.f16.bf16", "b16 b16")
    for t in ("f16", "bf16"):
        for mode in ("rn", "rz", "rn.relu", "rn.satfinite"):
            _add(f"cvt.{mode}.{t}.f32", f"cvt.{mode}.{t}.f32", "b16 f32")
            _add(f"cvt.{mode}.{t}x2.f32", f"cvt.{mode}.{t}x2.f32", "b32 f32 f32")
    for mode in ("rna", "rn", "rz", "rn.relu"):
        _add(f"cvt.{mode}.tf32.f32", f"cvt.{mode}.tf32.f32", "b32 f32")
    for i, t in enumerate(("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")):
        packed, bits = ("b8", 4) if t == "e2m1" else ("b16", 8)
        for relu in (0, 1):
            r = ".relu" if relu else ""
            _add(f"cvt.rn.satfinite{r}.{t}x2.f32", "cvt.small.from_f32", f"{packed} f32 f32", (i, relu, bits))
            _add(f"cvt.rn.satfinite{r}.{t}x2.f16x2", "cvt.small.from_half2", f"{packed} b32", (i, relu, bits, 0))
            _add(f"cvt.rn.satfinite{r}.{t}x2.bf16x2", "cvt.small.from_half2", f"{packed} b32", (i, relu, bits, 1))
            _add(f"cvt.rn{r}.f16x2.{t}x2", "cvt.small.to_half2", f"b32 {packed}", (i, relu, bits, 0))
            _add(f"cvt.rn{r}.bf16x2.{t}x2", "cvt.small.to_half2", f"b32 {packed}", (i, relu, bits, 1))
    for i, r in enumerate(("rz", "rp")):
        _add(f"cvt.{r}.satfinite.ue8m0x2.f32", "cvt.ue8m0x2.f32", "b16 f32 f32", (i,))
        _add(f"cvt.{r}.ue8m0x2.f32", "cvt.ue8m0x2.f32", "b16 f32 f32", (i,))
        _add(f"cvt.{r}.satfinite.ue8m0x2.bf16x2", "cvt.ue8m0x2.bf16x2", "b16 b32", (i,))
        _add(f"cvt.{r}.ue8m0x2.bf16x2", "cvt.ue8m0x2.bf16x2", "b16 b32", (i,))
    _add("cvt.rn.bf16x2.ue8m0x2", "cvt.bf16x2.ue8m0x2", "b32 b16")
    _add("cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2", "cvt.scaled.bf16x2.s2f6x2", "b32 b16 b16")
    _add("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", "cvt.scaled.bf16x2.e4m3x2", "b32 b16 b16")


def _moves() -> None:
    for t in ("b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32"):
        _add(f"mov.{t}", "mov.b32", f"{t} {t}")
        if t not in ("f16", "bf16"):
            _add(f"selp.{t}", "selp.b32", f"{t} {t} {t} pred")
    for t in ("b64", "u64", "s64", "f64"):
        _add(f"mov.{t}", "mov.b64", f"{t} {t}")
        _add(f"selp.{t}", "selp.b64", f"{t} {t} {t} pred")
    _add("mov.b128", "mov.b128", "b128 b128")
    _same("slct.b32.s32 slct.s32.s32 slct.u32.s32 slct.f32.s32", "slct.b32.s32", "b32 b32 b32 b32")
    for space in ("global", "param", "const"):
        _same(f"cvta.{space}.u64 cvta.to.{space}.u64", "mov.b64", "b64 b64")
    _same("cvta.shared.u64 cvta.shared::cta.u64 cvta.shared::cluster.u64", "cvta.shared", "b64 b64")
    _same("cvta.to.shared.u64 cvta.to.shared::cta.u64 cvta.to.shared::cluster.u64", "cvta.to.shared", "b64 b64")
    _add("cvta.local.u64", "cvta.local", "b64 b64")
    _add("cvta.to.local.u64", "cvta.to.local", "b64 b64")
    for space in ("shared::cluster",):
        _add(f"mapa.{space}.u32", "mapa.u32", "b32 b32 b32")
        _add(f"mapa.{space}.u64", "mapa.u64", "b64 b64 b32")
        _add(f"getctarank.{space}.u32", "getctarank.u32", "b32 b32")
        _add(f"getctarank.{space}.u64", "getctarank.u64", "b32 b64")
    _add("mapa.u32", "mapa.u32", "b32 b32 b32")
    _add("mapa.u64", "mapa.u64", "b64 b64 b32")
    for i, space in enumerate(("global", "shared", "local")):
        _add(f"isspacep.{space}", "isspacep", "pred b64", (i, 0))
    _add("isspacep.shared::cluster", "isspacep", "pred b64", (1, 0))
    _add("isspacep.shared::cta", "isspacep", "pred b64", (1, 1))
    _add("activemask.b32", "activemask", "b32")


_integers()
_floats()
_conversions()
_moves()

# Handlers of comparisons: setp.<op>.<type> and set.<op>.<dtype>.<type>.
_ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
COMPARISONS: dict[str, tuple[str, str]] = {}  # "op.type" -> (handler suffix, operand type)
for _w in (16, 32, 64):
    for _op in _ORDERED:
        for _t in ("s", "u", "b"):
            if _t == "b" and _op not in ("eq", "ne"):
                continue
            # 16-bit rows are zero-extended, so equality and unsigned order are the same as for 32 bits.
            _suffix = f"s{_w}" if _t == "s" and (_w != 16 or _op not in ("eq", "ne")) else f"u{max(_w, 32)}"
            COMPARISONS[f"{_op}.{_t}{_w}"] = (f"{_op}.{_suffix}", f"b{_w}")
for _op, _old in (("lt", "lo"), ("le", "ls"), ("gt", "hi"), ("ge", "hs")):
    for _w in (16, 32, 64):
        COMPARISONS[f"{_old}.u{_w}"] = COMPARISONS[f"{_op}.u{_w}"]
for _op in (*_ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
    for _t, _k in (("f32", "f32"), ("ftz.f32", "f32"), ("f64", "f64"), ("f16", "b16"), ("bf16", "b16")):
        COMPARISONS[f"{_op}.{_t}"] = (f"{_op}.{_t}", _k)
