"""The arguments of a tool call as a JSON object, made of the values that the model wrote and the tool's schema.

The model marks each value as a string or as JSON. The mark decides, and JSON is kept as written: numbers keep their
digits. The schema decides only if it rules the mark out and leaves one other reading. Arguments are not checked against
the schema: that is the client's task, whose tool result tells the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

DEEPEST_JSON = 128
"""Most nested arrays and objects in a value, so that every client's JSON parser can read it."""
WRAPPERS = ("arguments", "parameters")
"""Names of a parameter around all arguments, which some models write."""
MOST_REFERENCES = 16
"""Longest chain of references, and most nested alternatives, that are followed in a schema."""
BLANKS = " \t\r\n"
"""JSON's blanks."""
NO_JSON = object()
"""The value of a text that is no JSON."""
JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_KINDS = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
_CONSTANTS = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_WRAPPED = re.compile(
    rf'\{{\s*(?:"name"\s*:\s*(?P<name>{_STRING.pattern})\s*,\s*)?"(?P<key>{"|".join(WRAPPERS)})"\s*:\s*'
    r"(?P<inner>\{.*\})\s*\}",
    re.DOTALL,
)


class Fault(Enum):
    """A deviation from the format. The value is its name in metrics and in the log."""

    # with one reading: repaired
    MARKED_JSON = "a string marked as JSON"
    MARKED_STRING = "JSON marked as a string"
    QUOTED = "JSON in quotes"
    CONTROL = "control characters in JSON"
    CONSTANT = "a constant of Python"
    UNMARKED = "a parameter without string="
    BODY = "JSON in place of parameters"
    WRAPPED = "arguments in a wrapper"
    SELF_CLOSED = "a call without a body"
    BARE = "a call outside of a block"
    REASONING = "a call in reasoning"
    # with none, or several: the call stays text
    NO_JSON = "a value that is no JSON"
    AMBIGUOUS = "a value with two readings"
    TWICE = "a parameter given twice"
    TAG = "a damaged tag"
    TEXT = "text between tags"
    TAG_IN_VALUE = "a tag in a value"
    CUT = "the answer ended"


class Refused(Exception):
    """A call with no reading, or with several."""

    def __init__(self, fault: Fault) -> None:
        """Refuse a call for a fault."""
        super().__init__(fault.value)
        self.fault = fault


class Schema:
    """The part of a tool's JSON schema that decides how a value is read: the types of its parameters."""

    def __init__(self, schema: object) -> None:
        """Take the schema that the client sent, any JSON value; a schema without types allows everything."""
        self._root = schema
        node = self._resolved(schema)
        properties = node.get("properties")
        self._properties: dict[str, Any] | None = properties if isinstance(properties, dict) else None
        self._others = node.get("additionalProperties")

    def types(self, key: str) -> frozenset[str] | None:
        """The JSON types that a parameter may have; None if the schema does not say."""
        return self._types((self._properties or {}).get(key, self._others))

    def is_wrapper(self, key: str) -> bool:
        """Whether a key is a usual wrapper of all arguments and no parameter of this tool."""
        return key in WRAPPERS and self._properties is not None and key not in self._properties

    def takes(self, text: str) -> bool:
        """Whether a text is a JSON object with parameters of this tool only."""
        try:
            value = parse(text)
        except ValueError:
            return False
        return isinstance(value, dict) and value.keys() <= (self._properties or {}).keys()

    def _resolved(self, node: object) -> dict[str, Any]:
        """The schema that a node's `$ref` leads to, or the node itself; {} if it is no object."""
        for _ in range(MOST_REFERENCES):
            reference = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            node = self._root
            for part in reference.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                node = node.get(part) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}

    def _types(self, node: object, depth: int = 0) -> frozenset[str] | None:
        schema = self._resolved(node)
        named = schema.get("type")
        types: frozenset[str] | None = None
        if isinstance(named, str | list):
            names = [named] if isinstance(named, str) else named
            types = frozenset(names) if all(isinstance(name, str) and name in JSON_TYPES for name in names) else None
        elif "const" in schema:
            types = kinds_of(schema["const"])
        elif isinstance(schema.get("enum"), list):
            types = frozenset().union(*map(kinds_of, schema["enum"]))
        elif depth < MOST_REFERENCES:
            for key in ("anyOf", "oneOf"):
                if isinstance(schema.get(key), list):
                    parts = [self._types(part, depth + 1) for part in schema[key]]
                    types = None if None in parts else frozenset().union(*parts)
            if isinstance(schema.get("allOf"), list):
                known = [part for part in (self._types(part, depth + 1) for part in schema["allOf"]) if part]
                types = frozenset.intersection(*known) if known else None
        return types | {"null"} if types and schema.get("nullable") is True else types or None


def kinds_of(value: object) -> frozenset[str]:
    """The types of JSON schema that a parsed value has."""
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return _KINDS[type(value)]


def parse(text: str) -> Any:
    """The value of a JSON text. Whole numbers are 0, since only types and keys are used: their digits can be many.

    Raises:
        ValueError: the text is no JSON, NaN and infinities included, or has more than :data:`DEEPEST_JSON` levels.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=lambda digits: 0)
    except RecursionError as error:
        raise ValueError("more levels than Python's stack") from error
    level = [value]
    for _ in range(DEEPEST_JSON):
        level = [inner for outer in level if isinstance(outer, list | dict) for inner in _parts(outer)]
        if not level:
            return value
    raise ValueError(f"more than {DEEPEST_JSON} levels")


def _parts(outer: list | dict) -> list:
    return list(outer.values()) if isinstance(outer, dict) else outer


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def read_parameters(parameters: Mapping[str, tuple[str, bool | None]], schema: Schema, repairs: set[Fault]) -> str:
    """The arguments of a call as a JSON object.

    Args:
        parameters: name -> value as written, and whether it is marked as a string; None without a mark.
        schema: of the tool's parameters.
        repairs: gets the faults that were repaired.

    Raises:
        Refused: a value has no reading, or several.
    """
    if len(parameters) == 1:
        ((key, (value, _)),) = parameters.items()
        if schema.is_wrapper(key) and schema.takes(value):
            repairs.add(Fault.WRAPPED)
            return value.strip(BLANKS)
    read = {key: read_value(value, mark, schema.types(key), repairs) for key, (value, mark) in parameters.items()}
    return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in read.items()) + "}"


def read_object(body: str, name: str, schema: Schema, repairs: set[Fault]) -> str:
    """The arguments of a call that has a JSON object in place of parameters.

    Args:
        body: the object as written.
        name: of the tool.
        schema, repairs: as in :func:`read_parameters`.

    Raises:
        Refused: the body is no JSON object.
    """
    written = body.strip(BLANKS)
    text, value = _read(written)
    if not isinstance(value, dict):
        raise Refused(Fault.NO_JSON)
    repairs |= {Fault.CONTROL} if text != written else set()
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped and schema.is_wrapper(wrapped["key"]) and wrapped["name"] in (None, _quoted(name)):
        if schema.takes(wrapped["inner"]):
            repairs.add(Fault.WRAPPED)
            return wrapped["inner"]
    return text


def read_value(raw: str, mark: bool | None, types: frozenset[str] | None, repairs: set[Fault]) -> str:
    """A value as JSON.

    Args:
        raw: as written.
        mark: whether it is marked as a string; None without a mark.
        types: the JSON types that the schema allows; None if it does not say.
        repairs: gets the faults that were repaired.

    Raises:
        Refused: the value has no reading, or several.
    """
    may_be_string = types is None or "string" in types
    if mark is True and may_be_string:
        return _quoted(raw)
    written = raw.strip(BLANKS)
    constant, kind = _CONSTANTS.get(written, ("", ""))
    if types is not None and not may_be_string and kind in types:
        repairs.add(Fault.CONSTANT)
        return constant
    text, value = _read(written)
    kinds = frozenset() if value is NO_JSON else kinds_of(value)
    fits = bool(kinds) if types is None else bool(kinds & types)
    escaped = {Fault.CONTROL} if text != written else set()
    if mark is True:  # and the schema allows no string
        repairs |= {Fault.MARKED_STRING, *escaped} if fits else set()
        return text if fits else _quoted(raw)
    if mark is False:
        if fits:
            repairs |= escaped
            return text
        if isinstance(value, str) and _fits(value, types):
            repairs.add(Fault.QUOTED)
            return value.strip(BLANKS)
        if types is not None and may_be_string and value is not None and not _may_mean_json(written, value, types):
            repairs.add(Fault.MARKED_JSON)
            return _quoted(raw)
        if value is NO_JSON:
            raise Refused(Fault.NO_JSON)
        repairs |= escaped
        return text
    repairs.add(Fault.UNMARKED)
    if fits and not may_be_string:
        repairs |= escaped
        return text
    only_string = types is not None and types <= {"string", "null"} and value is not None
    if may_be_string and (value is NO_JSON or only_string) and not _may_mean_json(written, value, types):
        return _quoted(raw)
    raise Refused(Fault.NO_JSON if value is NO_JSON else Fault.AMBIGUOUS)


def _read(text: str) -> tuple[str, Any]:
    """A JSON text, with control characters in its strings escaped, and its value; :data:`NO_JSON` if it is none."""
    try:
        return text, parse(text)
    except ValueError:
        escaped = _STRING.sub(lambda string: _CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", string[0]), text)
    try:
        return escaped, parse(escaped)
    except ValueError:
        return text, NO_JSON


def _fits(text: str, types: frozenset[str] | None) -> bool:
    """Whether a text is JSON of one of some types."""
    try:
        return bool(kinds_of(parse(text)) & (types or frozenset()))
    except ValueError:
        return False


def _may_mean_json(written: str, value: object, types: frozenset[str] | None) -> bool:
    """Whether a text may be meant as JSON where a string is allowed: in quotes, or damaged JSON of an allowed type."""
    if value is not NO_JSON:
        return isinstance(value, str)
    means = {"[": "array", "{": "object", "N": "number", "I": "number", "-": "number"}.get(written[:1])
    if means == "number" and written not in ("NaN", "Infinity", "-Infinity"):
        means = None
    in_quotes = written.startswith('"') and (written.endswith('"') or not _STRING.match(written))
    return in_quotes or (means is not None and (types is None or means in types))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
