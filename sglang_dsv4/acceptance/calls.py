"""Items `tools` and `tool results`: calls with the arguments that were asked for, and answers that use their results.

The texts among the arguments hold what breaks a parser: quotes, tags, backslashes, line breaks, other scripts, and
texts that look like numbers or JSON. Every other answer is streamed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.acceptance.client import Answer, Call, Refused, Server
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import TOO_WEAK, Served, Weights

NAME, RESULTS = "tools", "tool results"
MOST_WRONG = 0.05
"""The share of calls with other arguments, or of answers without the result, that released weights may give."""
TEXTS = (
    "Rome",
    'Tom & "Jerry"',
    "a < b > c",
    r"C:\temp\new",
    "two\nlines",
    "München 東京",
    "007",
    "true",
    '{"a": 1}',
    "it's 5 o'clock",
)
MARKS = ("DSML", "<tool_calls", "</invoke")
"""Parts of the call format that must not reach the text of an answer."""


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = (
    _tool("count_visitors", "Count the visitors of a place.", place=TEXT, days=NUMBER),
    _tool("search", "Count the hits of a query.", query=TEXT, exact={"type": "boolean"}),
    _tool("add_all", "Add numbers.", numbers={"type": "array", "items": NUMBER}),
    _tool("store", "Store an item.", item={"type": "object", "properties": {"title": TEXT, "copies": NUMBER}}),
)
NAMES = {tool["function"]["name"] for tool in TOOLS}


def arguments(index: int, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A tool's name and the arguments to ask for."""
    text, number = TEXTS[(index // len(TOOLS)) % len(TEXTS)], draw.randrange(1, 1000)
    made = (
        ("count_visitors", {"place": text, "days": number}),
        ("search", {"query": text, "exact": draw.random() < 0.5}),
        ("add_all", {"numbers": [draw.randrange(1, 1000) for _ in range(draw.randint(1, 4))]}),
        ("store", {"item": {"title": text, "copies": number}}),
    )
    return made[index % len(made)]


@dataclass
class Trip:
    """A request for a call, and what came of it; a text is empty if all is well."""

    fault: str = ""  # the server's, whatever the model wrote
    leak: str = ""  # the model may have written it: parts of the format in the text, a tool that was not offered
    other: str = ""  # no call, or one with other arguments
    unused: str = ""  # an answer without the result
    answered: bool = False  # the result was sent, and there is an answer


def _trip(server: Server, index: int, seed: int) -> Trip:
    draw = random.Random(f"{seed} {index}")
    name, wanted = arguments(index, draw)
    streamed = bool(index % 2)
    where = f"request {index} ({'streamed' if streamed else 'whole'}): "
    ask = f"Call the tool {name} with exactly these arguments: {json.dumps(wanted, ensure_ascii=False)}. "
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"{ask}Then answer with the number that it returns, in digits only."}
    ]
    send = server.stream if streamed else server.chat
    try:
        answer = send(messages, tools=list(TOOLS), max_tokens=512)
        for kind, text in (("fault", fault(answer)), ("leak", leak(answer)), ("other", _other(answer, name, wanted))):
            if text:
                return Trip(**{kind: where + text})
        call, result = answer.calls[0], str(draw.randrange(100_000, 1_000_000))
        function = {"name": call.name, "arguments": call.arguments}
        made = {"id": call.id or "call_1", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": answer.text, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": result},
        ]
        last = send(messages, tools=list(TOOLS), max_tokens=64)
    except Refused as error:
        return Trip(fault=f"{where}{error}")
    if result in last.text.replace(",", "").replace(" ", ""):
        return Trip(answered=True)
    return Trip(answered=True, unused=f"{where}the tool returned {result}, the answer is {last.text[:80]!r}")


def fault(answer: Answer) -> str:
    """The server's fault in an answer, whatever its model wrote; empty if there is none."""
    for call in answer.calls:
        if _parsed(call) is None:
            return f"arguments that are no JSON object: {call.arguments[:100]!r}"
    if answer.calls and answer.finish != "tool_calls":
        return f"a call with finish_reason {answer.finish!r}, expected 'tool_calls'"
    return ""


def leak(answer: Answer) -> str:
    """A part of the call format in an answer's text, or a call of a tool that was not offered; empty if there is
    none."""
    mark = next((mark for mark in MARKS if mark in answer.text), None)
    if mark is not None:
        return f"{mark!r} in the answer's text: {answer.text[:100]!r}"
    return next(
        (f"a call of {call.name!r}, which was not offered" for call in answer.calls if call.name not in NAMES), ""
    )


def _parsed(call: Call) -> dict[str, Any] | None:
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _other(answer: Answer, name: str, wanted: dict[str, Any]) -> str:
    """How the calls differ from the one that was asked for; empty if they don't."""
    if len(answer.calls) != 1:
        return f"{len(answer.calls)} calls, expected one of {name}; the text is {answer.text[:80]!r}"
    call = answer.calls[0]
    if (call.name, _parsed(call)) != (name, wanted):
        return f"expected {name}({json.dumps(wanted, ensure_ascii=False)}), got {call.name}({call.arguments[:100]})"
    return ""


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The items: `tools` is red for damaged calls or other arguments, `tool results` for answers without the result."""
    if served.weights is Weights.RANDOM:
        return [not_judged(NAME, "random weights"), not_judged(RESULTS, "random weights")]
    trips = server.together(lambda index: _trip(server, index, plan.seed), range(plan.calls))
    faults = [trip.fault for trip in trips if trip.fault]
    leaks = [trip.leak for trip in trips if trip.leak]
    others = [trip.other for trip in trips if trip.other]
    unused = [trip.unused for trip in trips if trip.unused]
    answered = sum(trip.answered for trip in trips)
    good = len(trips) - len(faults) - len(leaks) - len(others)
    if served.weights.released:
        faults, leaks = faults + leaks, []
    return [
        _judged(NAME, f"{good} of {len(trips)} calls as asked for", served, len(trips), leaks + others, faults),
        _judged(
            RESULTS,
            f"{answered - len(unused)} of {answered} answers have the tool's result",
            served,
            answered,
            unused,
            [],
        ),
    ]


def _judged(name: str, summary: str, served: Served, asked: int, wrong: list[str], faults: list[str]) -> Result:
    findings, figures = faults + wrong, {"asked": asked, "faults": len(faults), "wrong": len(wrong)}
    if not asked:
        return not_judged(name, "no call was as asked for", **figures)
    if faults or (served.weights.released and len(wrong) > MOST_WRONG * asked):
        return red(name, summary, findings, **figures)
    if not served.weights.released and len(wrong) > TOO_WEAK * asked:
        return not_judged(name, f"{summary}: the model is too weak", findings, **figures)
    return green(name, summary, findings, **figures)
