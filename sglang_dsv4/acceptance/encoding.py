"""Item `encoding`: the token ids of conversations, against the prompts of DeepSeek's own encoder.

The expected text is turned into ids by the server's tokenizer, so that any tokenizer will do. Rendered ids come from
`/tokenize`, and from the chat route where it reports them (`return_prompt_token_ids`), or at least their number
(`usage.prompt_tokens`): the two routes of one server may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dsv4.acceptance.client import Refused, Server
from sglang_dsv4.acceptance.encoding_cases import CASES, Case
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.served import Served, Weights

NAME = "encoding"
LATER = {Weights.FLASH_0731: True, Weights.PRO_0813: True, Weights.FLASH_APRIL: False, Weights.PRO_APRIL: False}
"""Whether a release has the effort texts of July and August."""


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item: red if a conversation becomes other ids than the release's encoder makes."""
    try:
        server.tokenize({"prompt": "a", "add_special_tokens": False})
    except Refused as error:
        return [not_judged(NAME, f"the prompts' text can't be turned into ids without a route for it: {error}")]
    cases = [case for case in CASES if case.later is None or served.weights in LATER]
    wrong: list[str] = []
    compared = {"/tokenize": 0, "the chat route, ids": 0, "the chat route, number of ids": 0}
    for case in cases:
        text = case.later if LATER.get(served.weights) and case.later is not None else case.prompt
        expected = server.tokenize({"prompt": text, "add_special_tokens": False})
        rendered, why_not = _rendered(server, case)
        if rendered is not None:
            compared["/tokenize"] += 1
            wrong += _differences(f"{case.name}: /tokenize", expected, rendered)
        if rendered is None or plan.encodings_by_chat is None or case.name in plan.encodings_by_chat:
            try:
                answer = server.chat(case.messages, max_tokens=1, return_prompt_token_ids=True, **case.body())
            except Refused as error:
                wrong.append(f"{case.name}: {error}" if rendered is not None else f"{case.name}: {error}; {why_not}")
                continue
            if answer.prompt_ids is not None:
                compared["the chat route, ids"] += 1
                wrong += _differences(f"{case.name}: the chat route", expected, answer.prompt_ids)
            elif answer.prompt_tokens is not None:
                compared["the chat route, number of ids"] += 1
                if answer.prompt_tokens != len(expected):
                    wrong.append(
                        f"{case.name}: the chat route: {answer.prompt_tokens} prompt tokens, expected {len(expected)}"
                    )
    if not any(compared.values()) and not wrong:
        return [not_judged(NAME, "the server reports neither prompt ids nor their number")]
    how = ", ".join(f"{count} by {route}" for route, count in compared.items() if count)
    summary = f"{len(cases)} conversations ({how})"
    left = [case.name for case in CASES if case not in cases]
    notes = [f"not compared: {', '.join(left)} (which release this is is not known)"] if left else []
    made = red if wrong else green
    return [
        made(NAME, f"{len(wrong)} differences in {summary}" if wrong else summary, wrong + notes, compared=compared)
    ]


def _rendered(server: Server, case: Case) -> tuple[list[int] | None, str]:
    """The ids that /tokenize makes of the conversation; else None and why."""
    try:
        return server.tokenize({"messages": case.messages, **case.body()}), ""
    except Refused as error:
        return None, str(error)


def _differences(where: str, expected: Sequence[int], found: Sequence[int]) -> list[str]:
    if list(expected) == list(found):
        return []
    at = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    if at is None:
        return [f"{where}: {len(found)} ids, expected {len(expected)}, equal up to the shorter one's end"]
    there = slice(at, at + 4)
    return [
        f"{where}: {len(found)} ids, expected {len(expected)}; from index {at} on {list(found[there])}, expected "
        f"{list(expected[there])}"
    ]
