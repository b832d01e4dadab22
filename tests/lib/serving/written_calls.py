"""Tool calls as a model writes them, right and broken, and a grammar of answers with them.

:data:`MARK` stands for the marker where the model samples it as one token.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from sglang_dsv4.requests.tool_calls.arguments import Fault
from sglang_dsv4.requests.tool_calls.dsml import BLOCK_CLOSE, BLOCK_OPEN, INVOKE_CLOSE, MARK, MARKER

SCHEMAS = {
    "bash": {"properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}}, "required": ["command"]},
    "write": {
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "array"},
            "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "options": {"$ref": "#/$defs/options"},
        },
        "$defs": {"options": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
    "free": {},
    "literal": {"properties": {"arguments": {"type": "object"}}},
}


def marked(tag: str) -> str:
    return tag.replace(MARKER, MARK)


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([marked(f'<｜DSML｜invoke name="{name}">'), *parameters, INVOKE_CLOSE])


def parameter(name: str, value: str, string: bool | None = True) -> str:
    mark = "" if string is None else f' string="{str(string).lower()}"'
    return f'<{MARK}parameter name="{name}"{mark}>{value}</{MARK}parameter>'


def block(*calls: str) -> str:
    return "\n".join([BLOCK_OPEN, *calls, BLOCK_CLOSE])


GOOD = invoke("bash", parameter("command", "ls"))
BROKEN = {
    "json-that-is-none": (Fault.NO_JSON, invoke("other", parameter("a", 'echo "a"', False))),
    "an-open-array": (Fault.NO_JSON, invoke("write", parameter("lines", "[1, 2", False))),
    "an-open-string": (Fault.NO_JSON, invoke("bash", parameter("command", '"ls', False))),
    "a-string-with-a-bad-escape": (Fault.NO_JSON, invoke("bash", parameter("command", r'"C:\x"', False))),
    "not-a-number": (Fault.NO_JSON, invoke("bash", parameter("seconds", "NaN", False))),
    "an-infinity": (Fault.NO_JSON, invoke("free", parameter("a", "[-Infinity]", False))),
    "no-value": (Fault.NO_JSON, invoke("bash", parameter("seconds", "", False))),
    "deep-json": (Fault.NO_JSON, invoke("free", parameter("a", "[" * 200 + "]" * 200, False))),
    "very-deep-json": (Fault.NO_JSON, invoke("free", parameter("a", "[" * 10**5, False))),
    "no-mark-and-a-number": (Fault.AMBIGUOUS, invoke("free", parameter("a", "5", None))),
    "no-mark-and-quotes": (Fault.AMBIGUOUS, invoke("bash", parameter("command", '"ls"', None))),
    "twice": (Fault.TWICE, invoke("bash", parameter("command", "a"), parameter("command", "b"))),
    "a-body-that-is-no-object": (Fault.TEXT, invoke("bash", '["ls"]')),
    "a-body-that-is-open": (Fault.NO_JSON, invoke("bash", '{"command": "ls"')),
    "text-for-parameters": (Fault.TEXT, invoke("bash", "ls -l")),
    "text-between-parameters": (
        Fault.TEXT,
        invoke("bash", parameter("command", "ls"), "and", parameter("seconds", "1")),
    ),
    "a-tag-without-a-name": (Fault.TAG, marked("<｜DSML｜invoke>\n</｜DSML｜invoke>")),
    "an-empty-name": (Fault.TAG, invoke("")),
    "another-attribute": (
        Fault.TAG,
        invoke("bash", marked('<｜DSML｜parameter name="command" type="x">ls</｜DSML｜parameter>')),
    ),
    "another-mark": (
        Fault.TAG,
        invoke("bash", marked('<｜DSML｜parameter name="command" string="yes">ls</｜DSML｜parameter>')),
    ),
    "a-name-with-markup": (
        Fault.TAG,
        invoke("bash", marked('<｜DSML｜parameter name="command>ls</｜DSML｜parameter>')),
    ),
    "a-parameter-that-is-not-closed": (
        Fault.TAG_IN_VALUE,
        invoke("bash", parameter("command", f'ls\n<{MARK}parameter name="seconds" string="false">5')),
    ),
    "a-call-in-a-value": (Fault.TAG_IN_VALUE, invoke("bash", parameter("command", GOOD))),
    "a-call-that-is-not-closed": (Fault.TEXT, GOOD.removesuffix(INVOKE_CLOSE)),
}


@dataclass
class Written:
    """An answer of the grammar, with the text and calls that a client should get of each prefix of it."""

    text: str = ""
    calls: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)  # end, name, arguments
    markup: list[tuple[int, int]] = field(default_factory=list)  # [begin, end), dropped once its call is final

    def expected(self, end: int) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """The text and the calls of the answer's first `end` characters."""
        calls = [(name, arguments) for last, name, arguments in self.calls if last <= end]
        said, done = "", 0
        for begin, until in self.markup:
            if until <= end:
                said, done = said + self.text[done:begin], until
        rest = self.text[done:end]
        # `markup` ends with a call or with its block; an unfinished closing tag of the block is dropped.
        if done and self.text.endswith(INVOKE_CLOSE, 0, done) and BLOCK_CLOSE.startswith(rest.lstrip(" \t\r\n")):
            rest = ""
        return (said + rest).replace(MARK, MARKER), calls


LETTERS = [*'ab ;"\\\n\t{}[]<>/=', "é", "語", "🙂", "｜", MARKER, "</", "null", "1", "\n\n", "string=", "tool_calls>"]


def some_text(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randrange(most)))


def some_prose(draw: random.Random) -> str:
    """Text between blocks; each tag of the format in it is followed by a letter, so that it opens nothing."""
    parts = [some_text(draw, 12)]
    for _ in range(draw.randrange(3)):
        tag = draw.choice([BLOCK_OPEN, BLOCK_CLOSE, INVOKE_CLOSE, MARK, f"<{MARK}invoke", f"<{MARK}tool"])
        parts += [tag, draw.choice("ab.`"), some_text(draw, 12)]
    return "".join(parts)


def some_json(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.randrange(7 if depth else 5)
    if kind == 5:
        return [some_json(draw, depth - 1) for _ in range(draw.randrange(3))]
    if kind == 6:
        return {some_text(draw, 3): some_json(draw, depth - 1) for _ in range(draw.randrange(3))}
    return (None, draw.random() < 0.5, draw.randrange(10**6), draw.uniform(-9, 9), some_text(draw, 6))[kind]


def right_call(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    name = draw.choice(["free", "other", "now"])
    arguments: dict[str, Any] = {}
    parameters = []
    for key in draw.sample(["a", "b", "$c", "d e", "語"], draw.randrange(4)):
        value = some_text(draw, 10) if draw.random() < 0.5 else some_json(draw)
        as_string = isinstance(value, str) and draw.random() < 0.8
        written = (
            value if as_string else json.dumps(value, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        )
        arguments[key] = value
        parameters.append(
            f'<{MARK}parameter name="{key}" string="{str(as_string).lower()}">{written}</{MARK}parameter>'
        )
    return invoke(name, *parameters), name, arguments


def broken_call(draw: random.Random) -> str:
    """A call with one fault: of :data:`BROKEN`, or a tag damaged in one character."""
    if draw.random() < 0.5:
        return draw.choice([call for fault, call in BROKEN.values() if len(call) < 500])
    call = invoke("free", parameter("a", "x"), parameter("b", "[1]", False))
    places = [i for i, letter in enumerate(call) if letter in "<>/=" or letter == MARK]
    place = draw.choice(places)
    return call[:place] + draw.choice(["", "x", "\x00"]) + call[place + 1 :]


def some_answer(draw: random.Random) -> Written:
    written = Written()
    broken = False
    for _ in range(draw.randrange(1, 4)):
        written.text += some_prose(draw)
        bare = draw.random() < 0.2
        written.text += "\n" if bare else draw.choice(["", "\n\n"])
        begin = len(written.text.rstrip("\n"))
        written.text += "" if bare else BLOCK_OPEN
        whole = False
        for _ in range(draw.randrange(1, 3)):
            written.text += "" if bare else draw.choice(["\n", "", " \n"])
            if draw.random() < 0.15 and not bare:
                call = broken_call(draw)
                written.text += call
                broken = broken or call.startswith(f"<{MARK}invoke")  # other text ends the block
                whole = False
                break
            call, name, arguments = right_call(draw)
            written.text += call
            whole = True
            if not broken:
                written.calls.append((len(written.text), name, arguments))
                written.markup.append((begin, len(written.text)))
                begin = len(written.text)
        if bare:
            written.text += "."  # else prose could begin with the end of a block
        else:
            written.text += draw.choice(["\n", ""]) + BLOCK_CLOSE
            if whole and not broken:
                written.markup.append((begin, len(written.text)))
    written.text += some_prose(draw)
    return written
