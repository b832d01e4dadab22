"""Items `tools`, `tool arguments` and `tool results`: calls with given arguments, and answers that use their results.

`tools` asks everyday questions, whose calls have words and small numbers. The arguments of `tool arguments` can
break a parser: arrays, objects, texts with quotes, tags, backslashes, line breaks and other scripts, and texts that
look like numbers or JSON. A small model may make the calls of `tools` only. Half of the answers are streamed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.acceptance.client import Answer, Call, Refused, Server
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import TOO_WEAK, Served, Weights

NAME, ARGUMENTS, RESULTS = "tools", "tool arguments", "tool results"
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
PLAIN_TOOLS = (
    _tool("search", "Search for a text.", query=TEXT),
    _tool("order", "Order an item.", item=TEXT, count=NUMBER),
    _tool("get_forecast", "Get the forecast of a city for some days.", city=TEXT, days=NUMBER),
    _tool("set_timer", "Set a timer.", minutes=NUMBER),
)
PLAIN_QUESTIONS = {
    "search": "Search for {query}. Then tell me the result.",
    "order": "Order {count} of the item {item}. Then tell me the result.",
    "get_forecast": "What is the forecast for {city} for {days} days? Then tell me the result.",
    "set_timer": "Set a timer for {minutes} minutes. Then tell me the result.",
}
ITEMS = ("apple", "candle", "garden", "lantern", "mirror", "pencil", "ticket", "window")
CITIES = ("Berlin", "Cairo", "Lima", "London", "Madrid", "Oslo", "Paris", "Rome")


@dataclass(frozen=True)
class Task:
    """A call to ask for.

    Attributes:
        item: the item that judges the call.
        question: the user's turn.
        tools: the tools that are offered.
        name: the tool to call.
        arguments: of the call.
        result: the number that the tool returns; the question doesn't hold it.
    """

    item: str
    question: str
    tools: tuple[dict[str, Any], ...]
    name: str
    arguments: dict[str, Any]
    result: str


def plain_task(index: int, seed: int) -> Task:
    """An everyday question."""
    draw = random.Random(f"{seed} plain {index}")
    made = (
        ("search", {"query": " ".join(draw.sample(ITEMS, draw.randint(1, 3)))}),
        ("order", {"item": draw.choice(ITEMS), "count": draw.randrange(1, 51)}),
        ("get_forecast", {"city": draw.choice(CITIES), "days": draw.randrange(1, 15)}),
        ("set_timer", {"minutes": draw.randrange(1, 91)}),
    )
    name, arguments = made[index % len(made)]
    question = PLAIN_QUESTIONS[name].format(**arguments)
    return Task(NAME, question, PLAIN_TOOLS, name, arguments, str(draw.randrange(100, 1000)))


def hard_task(index: int, seed: int) -> Task:
    """A call with arguments that break parsers."""
    draw = random.Random(f"{seed} {index}")
    text, number = TEXTS[(index // len(TOOLS)) % len(TEXTS)], draw.randrange(1, 1000)
    made = (
        ("count_visitors", {"place": text, "days": number}),
        ("search", {"query": text, "exact": draw.random() < 0.5}),
        ("add_all", {"numbers": [draw.randrange(1, 1000) for _ in range(draw.randint(1, 4))]}),
        ("store", {"item": {"title": text, "copies": number}}),
    )
    name, arguments = made[index % len(made)]
    question = (
        f"Call the tool {name} with exactly these arguments: {json.dumps(arguments, ensure_ascii=False)}. "
        "Then answer with the number that it returns, in digits only."
    )
    return Task(ARGUMENTS, question, TOOLS, name, arguments, str(draw.randrange(100_000, 1_000_000)))


@dataclass
class Trip:
    """A request for a call, and what came of it; a text is empty if all is well."""

    item: str
    fault: str = ""  # the server's, whatever the model wrote
    leak: str = ""  # the model may have written it: parts of the format in the text, a tool that was not offered
    other: str = ""  # no call, or one with other arguments
    unused: str = ""  # an answer without the result
    answered: bool = False  # the result was sent, and there is an answer


def _trip(server: Server, task: Task, number: int) -> Trip:
    streamed = bool((number + number // len(task.tools)) % 2)  # each tool's calls in both ways
    where = f"{task.item}, request {number} ({'streamed' if streamed else 'whole'}): "
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    send = server.stream if streamed else server.chat
    try:
        answer = send(messages, tools=list(task.tools), max_tokens=512)
        found = {"fault": fault(answer), "leak": leak(answer, task.tools), "other": _other(answer, task)}
        for kind, text in found.items():
            if text:
                return Trip(task.item, **{kind: where + text})
        (call,) = answer.calls
        function = {"name": call.name, "arguments": call.arguments}
        made = {"id": call.id or "call_1", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": answer.text, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": task.result},
        ]
        last = send(messages, tools=list(task.tools), max_tokens=64)
    except Refused as error:
        return Trip(task.item, fault=f"{where}{error}")
    if task.result in last.text.replace(",", "").replace(" ", ""):
        return Trip(task.item, answered=True)
    unused = f"{where}the tool returned {task.result}, the answer is {last.text[:80]!r}"
    return Trip(task.item, answered=True, unused=unused)


def fault(answer: Answer) -> str:
    """The server's fault in an answer, whatever its model wrote; empty if there is none."""
    for call in answer.calls:
        if _parsed(call) is None:
            return f"arguments that are no JSON object: {call.arguments[:100]!r}"
    if answer.calls and answer.finish != "tool_calls":
        return f"a call with finish_reason {answer.finish!r}, expected 'tool_calls'"
    return ""


def leak(answer: Answer, tools: Sequence[dict[str, Any]]) -> str:
    """A part of the call format in an answer's text, or a call of a tool that was not offered; empty if there is
    none."""
    names = {tool["function"]["name"] for tool in tools}
    mark = next((mark for mark in MARKS if mark in answer.text), None)
    if mark is not None:
        return f"{mark!r} in the answer's text: {answer.text[:100]!r}"
    return next(
        (f"a call of {call.name!r}, which was not offered" for call in answer.calls if call.name not in names), ""
    )


def _parsed(call: Call) -> dict[str, Any] | None:
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _other(answer: Answer, task: Task) -> str:
    """How the calls differ from the one that was asked for; empty if they don't."""
    if len(answer.calls) != 1:
        return f"{len(answer.calls)} calls, expected one of {task.name}; the text is {answer.text[:80]!r}"
    call = answer.calls[0]
    if (call.name, _parsed(call)) != (task.name, task.arguments):
        expected = f"{task.name}({json.dumps(task.arguments, ensure_ascii=False)})"
        return f"expected {expected}, got {call.name}({call.arguments[:100]})"
    return ""


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The items: `tools` and `tool arguments` are red for damaged calls or other arguments, `tool results` for answers
    without the result."""
    if served.weights is Weights.RANDOM:
        return [not_judged(name, "random weights") for name in (NAME, ARGUMENTS, RESULTS)]
    tasks = [plain_task(index, plan.seed) for index in range(plan.plain_calls)]
    tasks += [hard_task(index, plan.seed) for index in range(plan.calls)]
    trips = server.together(lambda number: _trip(server, tasks[number], number), range(len(tasks)))
    unused = [trip.unused for trip in trips if trip.unused]
    answered = sum(trip.answered for trip in trips)
    summary = f"{answered - len(unused)} of {answered} answers have the tool's result"
    return [
        *(_calls(name, served, [trip for trip in trips if trip.item == name]) for name in (NAME, ARGUMENTS)),
        _judged(RESULTS, summary, served, answered, unused, []),
    ]


def _calls(name: str, served: Served, trips: list[Trip]) -> Result:
    """The result of an item of calls."""
    faults = [trip.fault for trip in trips if trip.fault]
    leaks = [trip.leak for trip in trips if trip.leak]
    others = [trip.other for trip in trips if trip.other]
    good = len(trips) - len(faults) - len(leaks) - len(others)
    if served.weights.released:
        faults, leaks = faults + leaks, []
    return _judged(name, f"{good} of {len(trips)} calls as asked for", served, len(trips), leaks + others, faults)


def _judged(name: str, summary: str, served: Served, asked: int, wrong: list[str], faults: list[str]) -> Result:
    findings, figures = faults + wrong, {"asked": asked, "faults": len(faults), "wrong": len(wrong)}
    if not asked:
        return not_judged(name, "no call was as asked for", **figures)
    if faults or (served.weights.released and len(wrong) > MOST_WRONG * asked):
        return red(name, summary, findings, **figures)
    if not served.weights.released and len(wrong) > TOO_WEAK * asked:
        return not_judged(name, f"{summary}: the model is too weak", findings, **figures)
    return green(name, summary, findings, **figures)
