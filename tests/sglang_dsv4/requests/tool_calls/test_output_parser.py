"""Tool calls on the chat, Responses and Anthropic routes: whole and streamed, in every piece size."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.forced_answers import Given, Routes, hooked
from serving.written_calls import SCHEMAS, Written, some_answer

from sglang_dsv4.requests.tool_calls import output_parser
from sglang_dsv4.requests.tool_calls.dsml import MARK, MARKER

ROUTES = ("chat", "responses", "anthropic")
TOOLS = {
    "bash": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
    "open": {"type": "object"},
}
FINISH = {
    "chat": {"stop": "stop", "tool_calls": "tool_calls", "length": "length", "abort": "abort"},
    "responses": {"stop": "completed", "tool_calls": "completed", "length": "incomplete"},
    "anthropic": {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"},
}


@pytest.fixture(scope="module")
def routes(checkpoint: Path) -> Routes:
    return Routes(checkpoint)


@pytest.fixture(autouse=True)
def with_our_hooks() -> Iterator[None]:
    with hooked("output_parser", "responses"):
        yield


def invoke(name: str, *inside: str) -> str:
    return "\n".join([f'<｜DSML｜invoke name="{name}">', *inside, "</｜DSML｜invoke>"])


def parameter(name: str, value: str, mark: str = ' string="true"') -> str:
    return f'<｜DSML｜parameter name="{name}"{mark}>{value}</｜DSML｜parameter>'


def block(*calls: str) -> str:
    return "\n".join(["<｜DSML｜tool_calls>", *calls, "</｜DSML｜tool_calls>"])


JSON = ' string="false"'
LS = invoke("bash", parameter("command", "ls"))
LS_CALL = ("bash", '{"command": "ls"}')
CUT = block(invoke("bash", parameter("command", "rm -rf /tmp/x"))).split("/x")[0]

CASES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "a-call": (f"Let me see.\n\n{block(LS)}", "Let me see.", [LS_CALL]),
    "two-calls": (
        block(LS, invoke("open", parameter("a", "é 語 🙂"), parameter("b", '["é", 2.50]', JSON))),
        "",
        [LS_CALL, ("open", '{"a": "é 語 🙂", "b": ["é", 2.50]}')],
    ),
    "no-call": ("Just text 🙂.\n\n", "Just text 🙂.\n\n", []),
    "json-that-is-none": (block(invoke("open", parameter("a", 'echo "a"', JSON))), "", []),
    "an-open-array": (block(invoke("open", parameter("a", "[1, 2", JSON))), "", []),
    "not-a-number": (block(invoke("bash", parameter("n", "NaN", JSON))), "", []),
    "a-string-marked-as-json": (
        block(invoke("bash", parameter("command", 'echo "a"', JSON))),
        "",
        [("bash", '{"command": "echo \\"a\\""}')],
    ),
    "json-marked-as-a-string": (block(invoke("bash", parameter("n", "5"))), "", [("bash", '{"n": 5}')]),
    "no-mark": (
        block(invoke("bash", parameter("command", "ls", ""), parameter("n", "5", JSON))),
        "",
        [("bash", '{"command": "ls", "n": 5}')],
    ),
    "a-body-of-json": (block(invoke("bash", '{"command": "ls"}')), "", [LS_CALL]),
    "a-wrapper": (block(invoke("bash", parameter("arguments", '{"command": "ls"}', JSON))), "", [LS_CALL]),
    "the-end-in-a-value": (f"I clean up.\n\n{CUT}", "", []),
    "the-end-after-a-name": (f"{block(LS)[: block(LS).index('string=')]}string=", "", []),
    "an-opener-and-nothing": ("<｜DSML｜tool_calls>", "", []),
    "a-marker-in-prose": ("A block opens with <｜DSML｜tool_calls> and so on.", "", []),
    "text-after-a-call": (f"{block(LS)}\n\nDone.", "\n\nDone.", [LS_CALL]),
    "a-broken-call-after-a-right-one": (
        f"{block(LS, invoke('bash', parameter('n', '[', JSON)))}",
        block(LS, invoke("bash", parameter("n", "[", JSON))).split(LS)[1],
        [LS_CALL],
    ),
}


def sizes(draw: random.Random) -> list[int]:
    """Sizes of pieces: one token each, or random ones."""
    return draw.choice(
        [[1] * 500, [draw.randrange(1, 5) for _ in range(300)], [draw.randrange(1, 90) for _ in range(9)]]
    )


def on(route: str, calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Calls as a route gives them: Anthropic's whole answers have objects in place of JSON texts."""
    return [(name, json.dumps(json.loads(text)) if route == "anthropic" else text) for name, text in calls]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_an_answer_streamed_and_whole(routes: Routes, case: str, route: str) -> None:
    """An answer has either calls, or the whole text and a finish reason other than `tool_calls`."""
    said, text, calls = CASES[case]
    draw = random.Random(case + route)
    for finish in ("stop", "length", "abort") if route == "chat" else ("stop", "length"):
        reason = "tool_calls" if calls and finish == "stop" else finish
        expected = Given("", text if calls else said, on(route, calls), FINISH[route][reason])
        for stream in (False, True):
            routes.say(said, sizes=sizes(draw), finish=finish)
            assert routes.ask(route, stream, TOOLS) == expected, stream


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_string_in_a_value_makes_no_call(routes: Routes, route: str) -> None:
    """SGLang cuts the text at the stop string and ends the answer as one that the model ended."""
    said = block(invoke("bash", parameter("command", "ls STOP")))
    cut = said.split("STOP")[0]
    field = {"anthropic": "stop_sequences"}.get(route, "stop")
    for stream in (False, True):
        routes.say(cut + "STOP", sizes=[2] * 200, matched="STOP")
        given = routes.ask(route, stream, TOOLS, **{field: ["STOP"]})
        assert (given.text, given.calls) == (cut, [])
        assert given.finish == FINISH[route]["stop"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_in_reasoning(routes: Routes, route: str) -> None:
    """If the model ends its answer with a call and without `</think>`, the call is made. If it goes on, the call was a
    draft: deepseek-recipe would make the call and drop the rest."""
    thinking: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
    if route == "anthropic":
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    for stream in (False, True):
        routes.say(block(LS), finish="length")
        given = routes.ask(route, stream, TOOLS, **thinking)
        assert given == Given(block(LS), "", [], FINISH[route]["length"])  # it might have gone on
    draft = f"I could do\n\n{block(LS)}"
    for said, reasoning, text, calls in (
        (draft, "I could do", "", [LS_CALL]),
        (f"{draft} but no.</think>No.", f"{draft} but no.", "No.", []),
        (f"{draft}</think>No.", draft, "No.", []),
        (f"{draft}</think>{block(LS)}", draft, "", [LS_CALL]),
        (draft[:-60], draft[:-60], "", []),
    ):
        for stream in (False, True):
            routes.say(said, sizes=[3] * 100)
            given = routes.ask(route, stream, TOOLS, **thinking)
            assert (given.reasoning, given.text, given.calls) == (reasoning, text, calls), stream
            if route == "chat":
                given = routes.ask(route, stream, TOOLS, separate_reasoning=False, **thinking)
                assert (given.reasoning, given.text, given.calls) == ("", reasoning + text, calls), stream


def test_a_marker_that_is_spelled_is_text(routes: Routes) -> None:
    """A model that quotes a call writes the marker with other tokens than a call has."""
    spelled = [part for piece in block(LS).split("｜DSML｜") for part in (piece, "｜DS", "ML｜")][:-2]
    before, after = block(LS).split(">ls<")
    in_a_value = [before + ">", "</｜DS", "ML｜parameter>", "<" + after]
    for stream in (False, True):
        routes.say(*spelled, sizes=[1] * 500)
        assert routes.ask("chat", stream, TOOLS) == Given("", block(LS), [], "stop")
        routes.say(*in_a_value, sizes=[1] * 500)
        assert routes.ask("chat", stream, TOOLS).calls == [("bash", '{"command": "</｜DSML｜parameter>"}')]


@pytest.mark.parametrize("case", ["a-call", "two-calls", "no-call"])
@pytest.mark.parametrize("route", ROUTES)
def test_right_answers_are_those_of_deepseek_recipe(routes: Routes, case: str, route: str) -> None:
    routes.say(CASES[case][0])
    ours = routes.ask(route, False, TOOLS)
    with hooked():
        assert routes.ask(route, False, TOOLS) == ours
        routes.say(CASES["not-a-number"][0])
        assert routes.ask("chat", False, TOOLS).calls == [("bash", '{"n": NaN}')]  # the reason for all this


def test_the_switch_leaves_calls_as_text_that_would_be_repaired(
    routes: Routes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word, calls in (("repair", [LS_CALL]), ("refuse", [])):
        monkeypatch.setenv(output_parser.SWITCH, word)
        for case in ("a-wrapper", "a-call"):
            said = CASES[case][0]
            routes.say(said)
            given = routes.ask("chat", False, TOOLS)
            assert given.calls == (calls if case == "a-wrapper" else [LS_CALL])
            assert given.calls or (given.text, given.finish) == (said, "stop")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("schemas", [TOOLS, {}], ids=["tools", "no-tools"])
def test_an_answer_that_ends_inside_a_letter(routes: Routes, route: str, schemas: dict[str, Any]) -> None:
    """The limit of tokens cuts a letter of four tokens; deepseek-recipe gave a whole answer no text, and a stream none
    of its last piece."""
    ids = routes.engine.tokenizer.encode("An answer 🙂🙂", add_special_tokens=False)
    for cut in (1, 2, 3):
        for stream, piece in ((False, 1), (True, 1), (True, 3), (True, 100)):
            routes.say_ids(ids[:-cut], [piece] * 20, "length")
            given = routes.ask(route, stream, schemas)
            assert given == Given("", "An answer 🙂", [], FINISH[route]["length"]), (cut, stream, piece)


def test_what_was_repaired_and_refused_is_counted_and_logged(
    routes: Routes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[tuple[str, list[str]]] = []

    class Counts:
        def add(self, outcome: str, faults: list[str]) -> None:
            counted.append((outcome, list(faults)))

    monkeypatch.setattr(output_parser, "_metrics", Counts())
    caplog.set_level(logging.INFO, output_parser.__name__)
    for case in ("two-calls", "no-call", "a-wrapper", "a-broken-call-after-a-right-one"):
        routes.say(CASES[case][0], sizes=[7] * 20)
        routes.ask("chat", True, TOOLS)
    assert counted == [
        ("as written", []),
        ("as written", []),
        ("repaired", ["arguments in a wrapper"]),
        ("as written", []),
        ("refused", ["a value that is no JSON"]),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "A tool call is repaired: arguments in a wrapper",
        "A tool call is refused: a value that is no JSON",
    ]


def test_text_of_the_parsing_route(routes: Routes) -> None:
    """`/parse_function_call` reads a text as an answer is read."""
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    tools = [Tool(function=Function(name=name, parameters=schema)) for name, schema in TOOLS.items()]
    text, calls = routes.chat.encoding_adapter.parse_function_call_text(CASES["no-mark"][0] + " and more", tools)
    assert text == " and more"
    assert [(call.tool_index, call.name, call.parameters) for call in calls] == [(0, *CASES["no-mark"][2][0])]


def test_tools_of_messages_and_custom_tools_have_their_schemas(routes: Routes) -> None:
    """A value marked as JSON, and a schema that says that it is a string."""
    call = block(invoke("write", parameter("input", "a: [", JSON)))
    tool = {
        "type": "function",
        "function": {"name": "write", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}}},
    }
    routes.say(call)
    messages = [{"role": "developer", "content": "x", "tools": [tool]}, {"role": "user", "content": "hi"}]
    given = routes.ask("chat", False, {}, messages=messages)
    assert given.calls == [("write", '{"input": "a: ["}')]
    others = [{"type": "web_search"}, {**tool, "name": "x", "parameters": {"type": "object"}}]
    given = routes.ask("responses", False, {}, tools=[*others, {"type": "custom", "name": "write"}])
    assert given.calls == [("write", "a: [")]


def test_a_call_in_place_of_a_json_answer(routes: Routes) -> None:
    """deepseek-recipe replaces the text around JSON by blanks; calls would be replaced, too."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": False}}
    call = block(invoke("open", parameter("a", '{"b": 1}', JSON)))
    for stream in (False, True):
        routes.say(call, sizes=[3] * 90)
        given = routes.ask("chat", stream, TOOLS, response_format=schema)
        assert given == Given("", "", [("open", '{"a": {"b": 1}}')], "tool_calls")
        routes.say('{"x": 1}', sizes=[3] * 90)
        assert routes.ask("chat", stream, TOOLS, response_format=schema).text == '{"x": 1}'


def test_another_models_answers_are_left_to_sglang(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes.chat.encoding_adapter.deepseek_recipe, "model", "DeepSeek-V4.1-Flash")
    routes.say(CASES["not-a-number"][0])
    assert routes.ask("chat", False, TOOLS).calls == [("bash", '{"n": NaN}')]


@pytest.mark.parametrize("limit", [1, 2, 12])
def test_a_responses_request_gets_its_tokens(routes: Routes, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asked for two tokens fewer: a limit of 1 became an error about -1."""
    from sglang_dsv4.seam import live

    routes.say("Hello")
    routes.ask("responses", False, {}, max_output_tokens=limit)
    assert routes.engine.requests[-1].sampling_params["max_new_tokens"] == limit
    routes.ask("responses", False, {})
    assert routes.engine.requests[-1].sampling_params["max_new_tokens"] is None
    monkeypatch.setattr(live, "_answers_clients", False)  # another model's server
    routes.ask("responses", False, {}, max_output_tokens=limit)
    assert routes.engine.requests[-1].sampling_params["max_new_tokens"] == limit - 2


def tokens_of(routes: Routes, text: str) -> list[tuple[int, int]]:
    """The tokens of a text of the grammar, each with the number of characters that are complete after it."""
    encode, decode = routes.engine.tokenizer.encode, routes.engine.tokenizer.decode
    marker = routes.engine.tokenizer.convert_tokens_to_ids(MARKER)
    tokens, begin = [], 0
    for part in text.split(MARK):
        spelled = part.replace(MARKER, "｜DS\0ML｜").split("\0")  # else it would become the marker's token
        ids = [token for piece in spelled for token in encode(piece, add_special_tokens=False)]
        tokens += [(token, begin + len(decode(ids[: i + 1]).rstrip("\ufffd"))) for i, token in enumerate(ids)]
        begin += len(part) + 1
        tokens.append((marker, begin))
    return tokens[:-1]


def check_tokens(routes: Routes, seed: int, cuts: int) -> int:
    """Check an answer of the grammar, cut after every token; most letters have several tokens, one a byte.

    Returns:
        Its number of calls.
    """
    draw = random.Random(seed)
    written = some_answer(draw)
    # A letter in front, because deepseek-recipe leaves out newlines at the beginning of a content.
    written = Written(
        "A" + written.text.replace("\0", "?"),
        [(end + 1, name, arguments) for end, name, arguments in written.calls],
        [(begin + 1, end + 1) for begin, end in written.markup],
    )
    tokens = tokens_of(routes, written.text)
    for end in (*draw.choices(range(1, len(tokens)), k=cuts), len(tokens)):
        given = []
        for stream in (False, True):
            routes.say_ids([token for token, _ in tokens[:end]], sizes=sizes(draw), finish="length")
            given.append(routes.ask("chat", stream, {name: {"type": "object", **SCHEMAS[name]} for name in SCHEMAS}))
        assert given[0] == given[1], (seed, end)
        text, calls = written.expected(tokens[end - 1][1])
        assert [(name, json.loads(arguments)) for name, arguments in given[0].calls] == calls, (seed, end)
        assert given[0].text.rstrip("\ufffd") == text, (seed, end)  # the bytes of half a letter
    return len(calls)


def test_generated_answers_cut_behind_any_token(routes: Routes) -> None:
    assert sum(check_tokens(routes, seed, cuts=4) for seed in range(8)) > 8


@pytest.mark.slow
def test_many_generated_answers_cut_behind_any_token(routes: Routes) -> None:
    for seed in range(100, 400):
        check_tokens(routes, seed, cuts=12)
