"""Translates statements to the core's instructions: registers become rows, immediates constants, labels indices.

Element-wise forms come from the table in forms.py. The decode_*.py modules register decoders for the families with
structured modifiers, by regular expressions over the whole opcode; an opcode without a match raises UnknownInstruction.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.front_end.forms import FORMS, THREE_INPUT
from ptx_emulator.front_end.parser import (
    TYPE_BYTES,
    Function,
    Module,
    Param,
    Scope,
    Statement,
    Variable,
    split_operands,
)

NONE = 0xFFFFFFFF
TRUE_PREDICATE = 3 << 29
RESERVED_SMEM = 1024
AUX = 10

SPECIAL_REGISTERS = {
    name: i
    for i, name in enumerate(
        "tid.x tid.y tid.z ctaid.x ctaid.y ctaid.z ntid.x ntid.y ntid.z nctaid.x nctaid.y nctaid.z laneid warpid "
        "cluster_ctarank cluster_nctarank cluster_ctaid.x cluster_ctaid.y cluster_ctaid.z cluster_nctaid.x "
        "cluster_nctaid.y "
        "cluster_nctaid.z clusterid.x clusterid.y clusterid.z nclusterid.x nclusterid.y nclusterid.z clock smid nsmid "
        "dynamic_smem_size total_smem_size lanemask_lt lanemask_le lanemask_eq lanemask_ge lanemask_gt nwarpid "
        "is_explicit_cluster reserved_smem_offset_end reserved_smem_offset_begin".split()
    )
}
SPECIAL_REGISTERS |= {"clock64": 28, "globaltimer": 42, "globaltimer_lo": 42}

SPACES = {
    "global": 0,
    "const": 0,
    "shared": 1,
    "shared::cta": 1,
    "shared::cluster": 1,
    "": 2,
    "local": 3,
    "param": 4,
    "param::entry": 4,
    "param::func": 4,
}
SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}  # memory scopes
ORDERS = {"": 0, "weak": 0, "volatile": 1, "relaxed": 1, "acquire": 2, "release": 3, "acq_rel": 4}


class Instruction:
    """One instruction for the core: a handler, operands, auxiliary integers, and a guard predicate."""

    __slots__ = ("aux", "guard", "handler", "label", "line", "opcode", "operands", "scope", "shape", "source", "text")

    def __init__(
        self, handler: str, operands: list[int], aux: tuple[int, ...], guard: int, statement: Statement
    ) -> None:
        self.handler, self.operands, self.guard = handler, operands, guard
        self.aux = [int(a) for a in aux] + [0] * (AUX - len(aux))
        self.line, self.source, self.text = statement.line, statement.source, statement.text
        self.opcode = statement.opcode
        self.scope = statement.scope
        self.label: str | None = None
        self.shape = ""  # for the coverage report: distinguishes uses of one opcode


def _width_class(nbytes: int) -> int:
    return {4: 0, 8: 1, 16: 2}[max(nbytes, 4)]


Family = tuple[re.Pattern[str], Callable[["Decoder", Statement, re.Match[str]], None]]
FAMILIES: dict[str, list[Family]] = {}


def family(words: str, pattern: str) -> Callable:
    """A decorator that registers a decoder for opcodes that begin with one of `words` and match `pattern` as a
    whole."""

    def register(f: Callable) -> Callable:
        for word in words.split():
            FAMILIES.setdefault(word, []).append((re.compile(pattern), f))
        return f

    return register


class Decoder:
    """The instructions, constants and register layout of one function."""

    def __init__(self, function: Function, module: Module, global_addresses: dict[str, int]) -> None:
        self.function, self.module = function, module
        self.global_addresses = global_addresses
        self.params: dict[str, Param] = {p.name: p for p in function.params}
        self.instructions: list[Instruction] = []
        self.constants = bytearray()
        self.constant_rows: dict[tuple[int, int], int] = {}
        self.register_bytes = 0
        self.predicates = 1  # predicate 0 is constantly true
        self.local_bytes = 0
        self.rows: dict[tuple[int, str], int] = {}  # (scope, register) -> operand
        self.types: dict[int, str] = {}  # operand -> declared type
        self.variables: dict[tuple[int, str], int] = {}
        self.jump_tables: list[int] = []
        self.jump_labels: list[tuple[list[str], Scope]] = []
        self.carry: int | None = None
        self.start_of: list[int] = []  # statement index -> instruction index
        self.static_smem_bytes = 0
        self.shared_offsets: dict[str, int] = {}
        self._place_shared()
        for statement in function.statements:
            self.start_of.append(len(self.instructions))
            self.statement = statement
            try:
                self.decode(statement)
            except UnknownInstruction:
                raise
            except (KeyError, ValueError, IndexError, AttributeError, TypeError) as e:
                raise UnknownInstruction(
                    statement.text, statement.line, f"not understood ({type(e).__name__}: {e})"
                ) from e
        self.start_of.append(len(self.instructions))
        self._resolve_labels()

    # ---- variables ---------------------------------------------------------------------------------------------

    def _place_shared(self) -> None:
        """Assigns offsets to shared variables: static ones first, then the extern one, aligned as declared."""
        offset = RESERVED_SMEM
        extern: list[Variable] = []
        seen: list[Variable] = [v for v in self.module.variables.values() if v.space == "shared"]
        scopes = {id(s.scope): s.scope for s in self.function.statements}
        for scope in list(scopes.values()):
            while scope is not None:
                for v in scope.variables.values():
                    if v.space == "shared" and v not in seen:
                        seen.append(v)
                scope = scope.parent
        used = " ".join(s.text for s in self.function.statements) if seen else ""
        for v in seen:
            if v.nbytes is None:
                extern.append(v)
            elif v.name in used:
                offset = -(-offset // v.align) * v.align
                self.shared_offsets[v.name] = offset
                offset += v.nbytes
        for v in extern:
            self.shared_offsets[v.name] = -(-offset // v.align) * v.align
        if extern and any(v.name in used for v in extern):
            offset = max(self.shared_offsets[v.name] for v in extern)
        self.static_smem_bytes = offset - RESERVED_SMEM

    def _local_offset(self, v: Variable) -> int:
        key = (0, v.name)
        if key not in self.variables:
            self.local_bytes = -(-self.local_bytes // v.align) * v.align
            self.variables[key] = self.local_bytes
            self.local_bytes += v.nbytes or 0
        return self.variables[key]

    def find_variable(self, name: str) -> Variable | None:
        scope: Scope | None = self.statement.scope
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return self.module.variables.get(name)

    def symbol_address(self, name: str) -> int | None:
        """The address of a variable within its state space (shared: its offset in the CTA), or None."""
        v = self.find_variable(name)
        if v is None:
            return None
        if v.space == "shared":
            return self.shared_offsets[name]
        if v.space == "local":
            return self._local_offset(v)
        return self.global_addresses[name]

    # ---- registers and constants -------------------------------------------------------------------------------

    def temporary(self, kind: str) -> int:
        if kind == "pred":
            self.predicates += 1
            return TRUE_PREDICATE | (self.predicates - 1)
        nbytes = max(TYPE_BYTES[kind], 4)
        row = 32 * nbytes
        self.register_bytes = -(-self.register_bytes // row) * row
        operand = self.register_bytes | _width_class(nbytes) << 29
        self.register_bytes += row
        return operand

    def register(self, name: str) -> int | None:
        """The operand of a register, allocated at first use; None if no register of this name is declared."""
        scope: Scope | None = self.statement.scope
        while scope is not None:
            kind = scope.registers.get(name)
            if kind is None:
                m = re.fullmatch(r"(.*?\D)(\d+)", name)
                if m and m.group(1) in scope.register_ranges:
                    declared, count = scope.register_ranges[m.group(1)]
                    if int(m.group(2)) < count:
                        kind = declared
            if kind is not None:
                key = (id(scope), name)
                if key not in self.rows:
                    self.rows[key] = self.temporary(kind)
                    self.types[self.rows[key]] = kind
                return self.rows[key]
            scope = scope.parent
        return None

    def constant(self, value: int, nbytes: int) -> int:
        nbytes = max(nbytes, 4)
        value &= (1 << (8 * nbytes)) - 1
        key = (value, nbytes)
        if key not in self.constant_rows:
            row = 32 * nbytes
            while len(self.constants) % row:
                self.constants.append(0)
            self.constant_rows[key] = len(self.constants)
            self.constants += value.to_bytes(nbytes, "little") * 32
        return 1 << 31 | _width_class(nbytes) << 29 | self.constant_rows[key]

    @staticmethod
    def immediate(text: str, kind: str = "b32") -> int | None:
        """The bits of an immediate operand of type `kind`, or None if the text is no immediate."""
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            bits = int(text[2:], 16)
            if kind == "f64":
                return struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
            return bits
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            bits = int(text[2:], 16)
            if kind == "f32":
                return struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]
            return bits
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            value = text.rstrip("U")
            sign = -1 if value[0] == "-" else 1
            digits = value.lstrip("-")
            number = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
            return sign * number
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
            return (
                struct.unpack("<I", struct.pack("<f", float(text)))[0]
                if kind == "f32"
                else struct.unpack("<Q", struct.pack("<d", float(text)))[0]
            )
        return None

    def unknown(self, reason: str) -> UnknownInstruction:
        return UnknownInstruction(self.statement.text, self.statement.line, reason)

    def source(self, text: str, kind: str) -> int:
        """The operand for a source of type `kind`: register, immediate or address of a variable."""
        if kind == "pred":
            return self.predicate(text)
        operand = self.register(text)
        if operand is not None:
            self.check_width(operand, kind, text)
            return operand
        value = self.immediate(text, kind)
        if value is not None:
            nbytes = TYPE_BYTES[kind]
            return self.constant(value & ((1 << (8 * nbytes)) - 1), nbytes)
        address = self.symbol_address(text)
        if address is not None:
            return self.symbol(text, kind)
        raise self.unknown(f"operand {text!r} is not understood")

    def check_width(self, operand: int, kind: str, text: str) -> None:
        if (operand >> 29 & 3) != _width_class(TYPE_BYTES[kind]):
            raise self.unknown(
                f"operand {text} is declared .{self.types.get(operand)}, but the instruction takes .{kind}"
            )

    def destination(self, text: str, kind: str) -> int:
        if text == "_":
            return NONE
        operand = self.register(text)
        if operand is None:
            raise self.unknown(f"destination {text!r} is not a register")
        if kind == "pred":
            if (operand >> 29 & 3) != 3:
                raise self.unknown(f"{text} is not a predicate")
        else:
            self.check_width(operand, kind, text)
        return operand

    def predicate(self, text: str) -> int:
        negated = text.startswith("!")
        name = text.lstrip("!")
        operand = self.register(name)
        if operand is None:
            value = self.immediate(name)
            if value is None or value not in (0, 1, -1):
                raise self.unknown(f"{text} is not a predicate")
            operand = TRUE_PREDICATE
            negated ^= value == 0
        elif (operand >> 29 & 3) != 3:
            raise self.unknown(f"{text} is not a predicate")
        return operand ^ (1 << 28 if negated else 0)

    def symbol(self, name: str, kind: str) -> int:
        """An operand that holds a variable's address (shared variables: in the executing CTA)."""
        v = self.find_variable(name)
        address = self.symbol_address(name)
        if v.space != "shared":
            return self.constant(address, TYPE_BYTES[kind])
        t = self.temporary(kind)
        self.emit("mov.shared", [t], (address, TYPE_BYTES[kind]))
        return t

    def address(self, text: str, space: int | None = None) -> tuple[int, int]:
        """(operand, byte offset) of an address such as `[register+offset]`."""
        if not (text.startswith("[") and text.endswith("]")):
            raise self.unknown(f"{text} is not an address")
        m = re.fullmatch(r"([%\w$.]+?)\s*(?:\+\s*(-?\w+))?", text[1:-1].strip())
        if not m:
            raise self.unknown(f"address {text} is not understood")
        base, offset = m.group(1), int(m.group(2), 0) if m.group(2) else 0
        operand = self.register(base)
        if operand is not None:
            return operand, offset
        value = self.immediate(base)
        if value is not None:
            return self.constant(value, 8), offset
        v = self.find_variable(base)
        if v is None:
            raise self.unknown(f"address {text} names no declared variable")
        if v.space == "shared":
            return self.symbol(base, "b32"), offset
        return self.constant(self.symbol_address(base), 8), offset

    def emit(self, handler: str, operands: list[int], aux: tuple[int, ...] = (), guarded: bool = True) -> Instruction:
        guard = self.guard if guarded else TRUE_PREDICATE
        instruction = Instruction(handler, operands, aux, guard, self.statement)
        self.instructions.append(instruction)
        return instruction

    # ---- statements --------------------------------------------------------------------------------------------

    def decode(self, s: Statement) -> None:
        self.guard = TRUE_PREDICATE
        if s.guard is not None:
            self.guard = self.predicate(("!" if s.guard_negated else "") + s.guard)
        # mov has a method for its special operands; its other forms are in the table.
        head = s.opcode.split(".", 1)[0]
        if head == "mov" and self.special_mov(s):
            return
        form = FORMS.get(s.opcode)
        if form is not None and (len(s.operands) == len(form.types) or s.opcode not in THREE_INPUT):
            self.element_wise(s, form.handler, form.types, form.aux)
            return
        if s.opcode in THREE_INPUT and len(s.operands) == 4:
            form = THREE_INPUT[s.opcode]
            self.element_wise(s, form.handler, form.types, form.aux)
            return
        for pattern, decode in FAMILIES.get(head, ()):
            m = pattern.fullmatch(s.opcode)
            if m:
                decode(self, s, m)
                return
        raise UnknownInstruction(s.text, s.line)

    def element_wise(self, s: Statement, handler: str, types: tuple[str, ...], aux: tuple[int, ...]) -> None:
        if len(s.operands) != len(types):
            raise self.unknown(f"{len(types)} operands expected")
        if s.opcode.startswith("cvt."):
            self.conversion(s, handler, types, aux)
            return
        sources = [self.source(t, k) for t, k in zip(s.operands[1:], types[1:], strict=True)]
        self.emit(handler, [self.destination(s.operands[0], types[0]), *sources], aux)

    def conversion(self, s: Statement, handler: str, types: tuple[str, ...], aux: tuple[int, ...]) -> None:
        """Decodes cvt, whose registers may be wider than its types: the source is truncated, the result extended by its
        type."""
        sources = []
        for text, kind in zip(s.operands[1:], types[1:], strict=True):
            operand = self.register(text)
            if operand is None:
                operand = self.source(text, kind)
            elif (operand >> 29 & 3) == 1 and TYPE_BYTES[kind] <= 4:
                t = self.temporary("b32")
                self.emit("cvt.u32.u64", [t, operand])
                operand = t
            elif (operand >> 29 & 3) != _width_class(TYPE_BYTES[kind]):
                raise self.unknown(f"operand {text} is narrower than .{kind}")
            sources.append(operand)
        dst = self.register(s.operands[0])
        if dst is None:
            raise self.unknown(f"destination {s.operands[0]!r} is not a register")
        m = re.fullmatch(r"cvt(?:\.sat)?\.([su])(8|16|32)\.[su]\d+", s.opcode)
        declared = TYPE_BYTES[self.types[dst]]
        if (dst >> 29 & 3) == 1 and TYPE_BYTES[types[0]] <= 4:
            t = self.temporary("b32")
            self.emit(handler, [t, *sources], aux)
            signed = m is not None and m.group(1) == "s"
            self.emit(
                {
                    True: {"8": "cvt.s64.s8", "16": "cvt.s64.s16", "32": "cvt.s64.s32"}[m.group(2)] if m else "",
                    False: "cvt.u64.u32",
                }[signed],
                [dst, t],
            )
            return
        if (dst >> 29 & 3) != _width_class(TYPE_BYTES[types[0]]):
            raise self.unknown(f"destination {s.operands[0]} does not hold .{types[0]}")
        self.emit(handler, [dst, *sources], aux)
        if m and m.group(1) == "s" and declared > TYPE_BYTES[f"b{m.group(2)}"]:
            self.emit("cvt.u16.s8" if declared == 2 else f"cvt.u32.s{m.group(2)}", [dst, dst])

    def special_mov(self, s: Statement) -> bool:
        dst, src = s.operands[0], s.operands[1]
        kind = s.opcode.split(".")[-1]
        if src.startswith("{"):
            parts = split_operands(src[1:-1])
            bits = TYPE_BYTES[kind] * 8 // len(parts)
            element = f"b{bits}"
            operands = [self.destination(dst, kind), *(self.source(x, element) for x in parts)]
            self.emit("pack.2x32" if bits == 32 and len(parts) == 2 else "pack", operands, (bits,))
            return True
        if dst.startswith("{"):
            parts = split_operands(dst[1:-1])
            bits = TYPE_BYTES[kind] * 8 // len(parts)
            operands = [*(self.destination(x, f"b{bits}") for x in parts), self.source(src, kind)]
            self.emit("unpack.2x32" if bits == 32 and len(parts) == 2 else "unpack", operands, (bits,))
            return True
        if src.startswith("%") and src[1:] in SPECIAL_REGISTERS and self.register(src) is None:
            operand = self.destination(dst, kind)
            self.emit("mov.special", [operand], (SPECIAL_REGISTERS[src[1:]], TYPE_BYTES[kind]))
            return True
        if self.register(src) is not None or self.immediate(src, kind) is not None:
            return False
        if src in self.params:
            self.emit("mov.param", [self.destination(dst, kind)], (self.params[src].offset,))
            return True
        m = re.fullmatch(r"([\w$]+)\s*\+\s*(\d+)", src)
        name, offset = (m.group(1), int(m.group(2))) if m else (src, 0)
        v = self.find_variable(name)
        if v is None:
            return False
        operand = self.destination(dst, kind)
        if v.space == "shared":
            self.emit("mov.shared", [operand], (self.shared_offsets[name] + offset, TYPE_BYTES[kind]))
        else:
            self.emit(
                "mov.b64" if TYPE_BYTES[kind] == 8 else "mov.b32",
                [operand, self.constant(self.symbol_address(name) + offset, TYPE_BYTES[kind])],
            )
        return True

    def _resolve_labels(self) -> None:
        for instruction in self.instructions:
            if instruction.label is not None:
                instruction.aux[0] = self.target(instruction.label, instruction.scope)
        for labels, scope in self.jump_labels:
            self.jump_tables += [self.target(x, scope) for x in labels]

    def target(self, label: str, scope: Scope | None) -> int:
        while scope is not None:
            if label in scope.labels:
                return self.start_of[scope.labels[label]]
            scope = scope.parent
        raise UnknownInstruction(label, 0, "no such label")
