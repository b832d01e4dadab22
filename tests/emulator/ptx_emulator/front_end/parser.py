"""Parses PTX text to functions that consist of statements. No instruction is interpreted here.

It understands module directives, `.entry` functions with parameters, nested scopes, register, local and shared
variables, labels, branch target lists, `.loc` line information, and statements `[@[!]p] opcode operand, operand, ...;`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptx_emulator.errors import UnknownInstruction

TYPE_BYTES = {
    "pred": 0,
    "b8": 1,
    "s8": 1,
    "u8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
}


@dataclass(frozen=True)
class Param:
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Variable:
    """A variable in shared, local, global or constant memory."""

    name: str
    space: str
    align: int
    nbytes: int | None  # None: extern, sized at launch
    data: bytes | None = None


class Scope:
    """A pair of braces, with the registers, labels and variables declared inside."""

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, str] = {}  # name -> type
        self.register_ranges: dict[str, tuple[str, int]] = {}  # prefix -> type, count
        self.vectors: dict[str, list[str]] = {}  # name of a vector register -> its scalar registers
        self.labels: dict[str, int] = {}
        self.variables: dict[str, Variable] = {}
        self.call_params: set[str] = set()
        self.branch_targets: dict[str, list[str]] = {}

    def spelled_out(self, operand: str) -> str:
        """The list of scalar registers for the name of a vector register; other operands unchanged."""
        scope: Scope | None = self
        while scope is not None:
            if operand in scope.vectors:
                return "{" + ", ".join(scope.vectors[operand]) + "}"
            scope = scope.parent
        return operand


@dataclass(slots=True)
class Statement:
    opcode: str
    operands: list[str]
    guard: str | None
    guard_negated: bool
    line: int
    source: str | None
    scope: Scope
    text: str


@dataclass
class Function:
    name: str
    params: list[Param]
    statements: list[Statement] = field(default_factory=list)
    required_threads: tuple[int, ...] | None = None
    cluster_shape: tuple[int, ...] | None = None

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.nbytes for p in self.params), default=0)


@dataclass
class Module:
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]


_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.S)
_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*([^{;]*)\{", re.S)
_FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern)\s+)?\.func\b[^;{]*([;{])", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    r"([\w$]+)(?:\[(\d+)\])?$"
)
_LABEL = re.compile(r"([$A-Za-z_%][\w$]*)\s*:(?!:)")
_OPCODE = re.compile(r"[a-z][\w.:]*")
_REG_RANGE = re.compile(r"([%\w$]+)<(\d+)>$")
_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)?\.(shared|local|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


def _strip_comments(text: str) -> str:
    def replace(m: re.Match[str]) -> str:
        s = m.group(0)
        return s if s[0] == '"' else "\n" * s.count("\n") or " "

    return _COMMENT.sub(replace, text)


def split_operands(text: str) -> list[str]:
    """The operands, split at the commas outside brackets."""
    if not any(c in text for c in "{[("):
        return [x.strip() for x in text.split(",")] if text.strip() else []
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return [*out, tail] if tail else out


def _variable(text: str, line: int) -> Variable:
    m = _VARIABLE.match(text)
    if not m:
        raise UnknownInstruction(text, line, "this variable declaration is not understood")
    space, align, kind, name, dims, init = m.groups()
    size = TYPE_BYTES[kind]
    nbytes: int | None = size
    for d in re.findall(r"\[(\d*)\]", dims):
        nbytes = None if d == "" or nbytes is None else nbytes * int(d)
    data = None
    if init is not None:
        values = [v.strip() for v in init.strip().strip("{}").split(",")]
        if all(re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", v) for v in values):
            data = b"".join((int(v.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little") for v in values)
            data = data.ljust(nbytes or len(data), b"\0")
    return Variable(name, space, int(align or size), nbytes, data)


def _params(text: str, line: int) -> list[Param]:
    params, offset = [], 0
    for item in split_operands(text or ""):
        m = _PARAM.match(item)
        if not m:
            raise UnknownInstruction(item, line, "this parameter is not understood")
        align, kind, name, count = m.groups()
        element = TYPE_BYTES[kind]
        nbytes = element * int(count) if count else element
        boundary = int(align) if align else element
        offset = -(-offset // boundary) * boundary
        params.append(Param(name, offset, nbytes))
        offset += nbytes
    return params


class _Body:
    """Scans one function body."""

    def __init__(self, function: Function, text: str, line: int, files: dict[int, str]) -> None:
        self.function, self.text, self.line, self.files = function, text, line, files
        self.scope = Scope(None)
        self.source: str | None = None

    def scan(self) -> None:
        text, i, n = self.text, 0, len(self.text)
        while i < n:
            c = text[i]
            if c == "\n":
                self.line += 1
                i += 1
            elif c.isspace():
                i += 1
            elif c == "{":
                self.scope = Scope(self.scope)
                i += 1
            elif c == "}":
                if self.scope.parent is not None:
                    self.scope = self.scope.parent
                i += 1
            elif text.startswith((".loc ", ".loc\t"), i):
                end = text.find("\n", i)
                end = n if end < 0 else end
                parts = text[i:end].replace(",", " ").split()
                self.source = f"{self.files.get(int(parts[1]), parts[1])}:{parts[2]}"
                i = end
            else:
                m = _LABEL.match(text, i)
                if m:
                    i = self.label(m)
                    continue
                end = text.index(";", i)
                statement = text[i:end]
                if c == ".":
                    self.directive(statement.strip())
                else:
                    self.statement(statement)
                self.line += statement.count("\n")
                i = end + 1

    def label(self, m: re.Match[str]) -> int:
        rest = re.compile(r"\s*\.(branchtargets|calltargets|callprototype)\s+([^;]*);").match(self.text, m.end())
        if rest:
            self.scope.branch_targets[m.group(1)] = [x.strip() for x in rest.group(2).split(",")]
            self.line += self.text.count("\n", m.start(), rest.end())
            return rest.end()
        self.scope.labels[m.group(1)] = len(self.function.statements)
        self.line += self.text.count("\n", m.start(), m.end())
        return m.end()

    def directive(self, text: str) -> None:
        if text.startswith(".reg"):
            m = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", text, re.S)
            if not m or m.group(2) not in TYPE_BYTES:
                raise UnknownInstruction(text, self.line, "this register declaration is not understood")
            for name in split_operands(m.group(3)):
                r = _REG_RANGE.match(name)
                if m.group(1):
                    parts = [f"{name}.{part}" for part in "xyzw"[: int(m.group(1))]]
                    self.scope.vectors[name] = parts
                    self.scope.registers.update(dict.fromkeys(parts, m.group(2)))
                elif r:
                    self.scope.register_ranges[r.group(1)] = (m.group(2), int(r.group(2)))
                else:
                    self.scope.registers[name] = m.group(2)
        elif text.startswith(".pragma"):
            pass  # hints to the compiler: nounroll, used_bytes_mask, ...
        elif text.startswith(".param"):
            m = re.search(r"([\w$]+)(?:\[\d+\])?$", text)
            if m:
                self.scope.call_params.add(m.group(1))
        elif re.match(r"\.(shared|local)\b", text):
            v = _variable(text, self.line)
            self.scope.variables[v.name] = v
        else:
            raise UnknownInstruction(text, self.line, "this directive is not understood")

    def statement(self, raw: str) -> None:
        text = raw.strip()
        guard, negated = None, False
        m = _GUARD.match(text)
        body = text
        if m:
            guard, negated = m.group(2), bool(m.group(1))
            body = text[m.end() :]
        opcode = _OPCODE.match(body)
        if not opcode:
            raise UnknownInstruction(text, self.line, "this is not a statement")
        # Inline assembly may write the operands directly after the opcode.
        operands = [self.scope.spelled_out(operand) for operand in split_operands(body[opcode.end() :].strip())]
        self.function.statements.append(
            Statement(opcode.group(0), operands, guard, negated, self.line, self.source, self.scope, text)
        )


def _matching_brace(text: str, start: int) -> int:
    depth = 1
    for m in re.compile(r'"(?:[^"\\]|\\.)*"|[{}]').finditer(text, start):
        s = m.group(0)
        if s == "{":
            depth += 1
        elif s == "}":
            depth -= 1
            if depth == 0:
                return m.start()
    raise UnknownInstruction(text[start : start + 80], 0, "a brace is not closed")


def parse(ptx: str) -> Module:
    text = _strip_comments(ptx)
    files = {int(m.group(1)): m.group(2) for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    target = re.search(r"\.target\s+(\w+)", text)
    module = Module(target.group(1) if target else "", {}, {})
    outside = []  # the text between functions holds the module's variables
    at = 0
    while True:
        entry = _ENTRY.search(text, at)
        func = _FUNCTION.search(text, at)
        m = min((x for x in (entry, func) if x), key=lambda x: x.start(), default=None)
        if m is None:
            outside.append((text[at:], text.count("\n", 0, at) + 1))
            break
        outside.append((text[at : m.start()], text.count("\n", 0, at) + 1))
        if m is func:
            at = m.end() if m.group(1) == ";" else _matching_brace(text, m.end()) + 1
            continue
        line = text.count("\n", 0, m.end()) + 1
        end = _matching_brace(text, m.end())
        function = Function(m.group(1), _params(m.group(2), line))
        for key, attribute in (("reqntid", "required_threads"), ("reqnctapercluster", "cluster_shape")):
            d = re.search(rf"\.{key}\s+([\d,\s]+)", m.group(3))
            if d:
                setattr(function, attribute, tuple(int(x) for x in d.group(1).split(",") if x.strip()))
        _Body(function, text[m.end() : end], line, files).scan()
        module.functions[function.name] = function
        at = end + 1
    for chunk, line in outside:
        # Debug sections and directives without a semicolon are ignored.
        chunk = re.sub(r"\.section\s+[\w.$]+\s*\{.*?\}", "", chunk, flags=re.S)
        for m in re.finditer(r"(?:\.(?:visible|weak|extern)\s+)?\.(?:shared|global|const)\b[^;]*", chunk):
            v = _variable(m.group(0).strip(), line + chunk.count("\n", 0, m.start()))
            module.variables[v.name] = v
    return module
