"""Items `json` and `json values`: answers to a JSON schema are JSON that it allows, with the values asked for.

The schemas bound every value, so that a model of random weights ends its answer, too.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from sglang_dsv4.acceptance.client import Answer, Refused, Server
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import TOO_WEAK, Served, Weights

NAME, VALUES = "json", "json values"
ASK = "Copy this text: "
LONGEST = len('{"open":{"day":false,"night":false},"rooms":99}')
"""Characters of the longest answer that a schema allows, without white space between values."""
CITIES = ("Rome", "Oslo", "Lima", "Cairo")
MOST_WRONG = 0.05
"""The share of wrong values that released weights may give."""


def is_allowed(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a schema allows a value; the keywords are those that these checks use."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    kind = schema["type"]
    if not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool)):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if kind == "object":
        properties = schema["properties"]
        return set(schema.get("required", properties)) <= value.keys() <= properties.keys() and all(
            is_allowed(inner, properties[name]) for name, inner in value.items()
        )
    if kind == "array":
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
            is_allowed(inner, schema["items"]) for inner in value
        )
    if kind == "string":
        return re.fullmatch(schema.get("pattern", "(?s:.*)"), value) is not None
    if kind == "integer":
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
CITY = {"type": "string", "enum": list(CITIES)}
SCHEMAS = (
    _object(city=CITY, days=COUNT),
    _object(open=_object(day={"type": "boolean"}, night={"type": "boolean"}), rooms=COUNT),
    _object(cities={"type": "array", "items": CITY, "minItems": 2, "maxItems": 3}),
    _object(code={"type": "string", "pattern": "[a-z]{1,6}"}, city=CITY),
)


def drawn(schema: dict[str, Any], draw: random.Random) -> Any:
    """A value that the schema allows."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return {name: drawn(inner, draw) for name, inner in schema["properties"].items()}
        case "array":
            return [drawn(schema["items"], draw) for _ in range(draw.randint(schema["minItems"], schema["maxItems"]))]
        case "boolean":
            return draw.random() < 0.5
        case "integer":
            return draw.randint(schema["minimum"], schema["maximum"])
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 6)))


def _is_streamed(index: int) -> bool:
    """Whether an answer is streamed: half of them, of each schema in both ways."""
    return bool((index + index // len(SCHEMAS)) % 2)


def _ask(server: Server, index: int, seed: int) -> tuple[Answer | None, str, Any, dict[str, Any]]:
    """Return (the answer, or None and the refusal; the values asked for; the schema)."""
    schema = SCHEMAS[index % len(SCHEMAS)]
    values = drawn(schema, random.Random(f"{seed} {index}"))
    anchored = json.loads(json.dumps(schema).replace('"[a-z]{1,6}"', '"^[a-z]{1,6}$"'))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": anchored, "strict": True}}
    text = f"{ASK}{json.dumps(values)}"
    send = server.stream if _is_streamed(index) else server.chat
    try:
        return send(text, response_format=form, max_tokens=256), "", values, schema
    except Refused as error:
        return None, str(error), values, schema


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The items: `json` is red if an answer is not JSON of its schema; `json values` if the values are others.

    Since the schemas bound every value, only white space between values, which JSON allows, makes an answer endless.
    The model writes it, not the server: `json` is red for released weights; for others the values count as wrong.
    """
    asked = server.together(lambda index: _ask(server, index, plan.seed), range(plan.documents))
    invalid, other, cut = [], [], []
    for index, (answer, refusal, values, schema) in enumerate(asked):
        if answer is None:
            invalid.append(f"request {index}: {refusal}")
            continue
        try:
            said = json.loads(answer.text)
            valid = is_allowed(said, schema)
        except ValueError:
            said, valid = None, False
        if valid:
            if said != values:
                other.append(f"request {index}: expected {json.dumps(values)}, got {answer.text[:100]!r}")
        else:
            endless = answer.finish == "length" and len("".join(answer.text.split())) <= LONGEST < len(answer.text)
            why = "cut at the token limit" if endless else "not JSON of its schema"
            how = "streamed" if _is_streamed(index) else "whole"
            where = cut if endless and not served.weights.released else invalid
            where.append(f"request {index} ({how}): {why}: {answer.text[:100]!r}")
    judged = len(asked) - len(cut)
    notes = [f"{len(cut)} answers were cut at the token limit, after white space of the model's"] if cut else []
    summary = f"{judged - len(invalid)} of {judged} answers are JSON of their schema"
    if not judged:
        first = not_judged(NAME, "every answer was cut at the token limit", notes)
    else:
        first = (red if invalid else green)(NAME, summary, invalid + notes, asked=judged, invalid=len(invalid))
    return [first, _values(served, len(asked) - len(invalid), other + cut)]


def _values(served: Served, asked: int, wrong: list[str]) -> Result:
    """The item `json values`: of `asked` answers, JSON of their schema or cut, those in `wrong` have other values."""
    if served.weights is Weights.RANDOM:
        return not_judged(VALUES, "random weights")
    if not asked:
        return not_judged(VALUES, "no answer was JSON")
    summary = f"{asked - len(wrong)} of {asked} answers have the values that were asked for"
    if served.weights.released and len(wrong) > MOST_WRONG * asked:
        return red(VALUES, summary, wrong, asked=asked, wrong=len(wrong))
    if not served.weights.released and len(wrong) > TOO_WEAK * asked:
        return not_judged(VALUES, f"{summary}: the model is too weak", wrong, asked=asked, wrong=len(wrong))
    return green(VALUES, summary, wrong, asked=asked, wrong=len(wrong))
