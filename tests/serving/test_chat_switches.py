"""Switches of the chat, Responses, Anthropic and completion routes are honoured or refused by name; a budget ends the
thinking, and usage reports its tokens.

Prompts are compared by their token ids, which end with `<think>` where thinking is on.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from serving.server import Server

from sglang_dsv4.requests.chat import reasoning_effort, switches
from sglang_dsv4.requests.chat.thinking_budget import budget_of

TIMEOUT_S = 300
ON, OFF = {"thinking": True}, {"thinking": False}


def chat(server: Server, **fields: Any) -> requests.Response:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi there"}],
        **{"max_tokens": 2, "temperature": 0, "return_prompt_token_ids": True, "ignore_eos": True},
        **fields,
    }
    return requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)


def prompt_of(response: requests.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["prompt_token_ids"]


SWITCHES: dict[str, tuple[bool, dict[str, Any]]] = {
    "enabled": (True, {"thinking": {"type": "enabled"}}),
    "disabled": (False, {"thinking": {"type": "disabled"}}),
    "adaptive": (True, {"thinking": {"type": "adaptive"}}),
    "enable_thinking": (True, {"chat_template_kwargs": {"enable_thinking": True}}),
    "no-enable_thinking": (False, {"chat_template_kwargs": {"enable_thinking": False}}),
    "both": (True, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
    "an-effort": (True, {"reasoning_effort": "high"}),
    "an-effort-but-disabled": (False, {"reasoning_effort": "high", "thinking": {"type": "disabled"}}),
    "an-effort-but-no-enable_thinking": (
        False,
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "no-effort": (False, {"reasoning_effort": "none"}),
    "no-effort-but-enabled": (True, {"reasoning_effort": "none", "thinking": {"type": "enabled"}}),
    "an-effort-among-options": (True, {"chat_template_kwargs": {"reasoning_effort": "high", "thinking": True}}),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_honoured(server: Server, name: str) -> None:
    expected, fields = SWITCHES[name]
    assert prompt_of(chat(server, **fields)) == prompt_of(chat(server, chat_template_kwargs=ON if expected else OFF))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "on-and-off": (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
        "switched on and off",
    ),
    "two-toggles": ({"chat_template_kwargs": {"enable_thinking": False, "thinking": True}}, "switched on and off"),
    "a-text": ({"chat_template_kwargs": {"enable_thinking": "false"}}, "must be true or false"),
    "a-text-for-thinking": ({"chat_template_kwargs": {"thinking": "off"}}, "must be true or false"),
    "another-type": ({"thinking": {"type": "on"}}, "thinking must be"),
    "no-object": ({"thinking": True}, "thinking must be"),
    "another-field": ({"thinking": {"type": "enabled", "tokens": 5}}, "thinking must be"),
    "a-budget-when-disabled": ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "budget_tokens must be"),
    "a-negative-budget": ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens must be"),
    "a-budget-of-sglangs": ({"custom_params": {"thinking_budget": "5"}}, "thinking_budget must be"),
    "two-budgets": (
        {"thinking": {"type": "enabled", "budget_tokens": 5}, "custom_params": {"thinking_budget": 6}},
        "send one",
    ),
    "ultra": ({"reasoning_effort": "ultra"}, "got 'ultra': this checkpoint was trained with high and max"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_unknown_or_contradictory_is_refused_by_name(server: Server, name: str) -> None:
    fields, reason = REFUSED[name]
    response = chat(server, **fields)
    assert response.status_code == 400 and reason in response.text, response.text


BUDGETS: dict[str, dict[str, Any]] = {
    "of-the-chat-route": {"thinking": {"type": "enabled", "budget_tokens": 5}},
    "of-sglang": {"thinking": {"type": "enabled"}, "custom_params": {"thinking_budget": 5}},
}


@pytest.mark.parametrize("fields", BUDGETS.values(), ids=BUDGETS)
def test_a_budget_closes_the_block(server: Server, fields: dict[str, Any]) -> None:
    """Five tokens of reasoning, then `</think>`, then content; the free answer begins with the same five tokens."""
    common = {"max_tokens": 14, "logprobs": True}
    free = chat(server, thinking={"type": "enabled"}, **common).json()
    limited = chat(server, **fields, **common).json()
    of_free, of_limited = ([t["token"] for t in one["choices"][0]["logprobs"]["content"]] for one in (free, limited))
    assert "</think>" not in of_free
    assert of_limited.index("</think>") == 5 and of_limited[:5] == of_free[:5]
    assert limited["choices"][0]["message"]["content"]
    assert limited["usage"]["reasoning_tokens"] == 6  # with </think>
    assert free["usage"]["reasoning_tokens"] == 14


# ---- usage, and budgets on the other routes

PATHS = {"chat": "chat/completions", "responses": "responses", "anthropic": "messages"}
THINKING = {
    "chat": {"thinking": {"type": "enabled"}, "max_tokens": 8, "ignore_eos": True},
    "responses": {"thinking": {"type": "enabled"}, "max_output_tokens": 8},
    "anthropic": {"thinking": {"type": "adaptive"}, "max_tokens": 8},
}


def model_of(server: Server) -> str:
    """The name that the Responses route asks for; other routes take any."""
    return requests.get(f"{server.url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]


def used(
    server: Server, route: str, stream: bool, say: str = "Hi there", **fields: Any
) -> tuple[dict[str, Any], str, str]:
    """The usage that a client of a route is told at the end, with the reasoning and the text of the answer."""
    body = {"stream": stream, "temperature": 0, **THINKING[route], **fields}
    if route == "responses":
        body |= {"model": model_of(server), "input": say}
    else:
        body |= {"model": "tiny", "messages": [{"role": "user", "content": say}]}
    if route == "chat" and stream:
        body["stream_options"] = {"include_usage": True}
    response = requests.post(f"{server.url}/v1/{PATHS[route]}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    if not stream:
        return USAGE[route](response.json())
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ") and line[6:] != "[DONE]"]
    return STREAMED[route]([json.loads(line) for line in lines])


def chat_usage(answer: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    message = answer["choices"][0]["message"]
    return answer["usage"], message["reasoning_content"], message["content"]


def chat_stream_usage(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str, str]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    said = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    return events[-1]["usage"], *said


def responses_usage(answer: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    said = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
    return answer["usage"], said.get("reasoning", ""), said.get("message", "")


def anthropic_usage(answer: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    blocks = answer["content"]
    said = ("".join(block.get(name, "") for block in blocks) for name in ("thinking", "text"))
    return answer["usage"], *said


def anthropic_stream_usage(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str, str]:
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    (first,) = (event["message"] for event in events if event["type"] == "message_start")
    (last,) = (event for event in events if event["type"] == "message_delta")
    assert "output_tokens_details" not in first["usage"]
    said = ("".join(delta.get(name, "") for delta in deltas) for name in ("thinking", "text"))
    return {"input_tokens": first["usage"]["input_tokens"], **last["usage"]}, *said


USAGE = {"chat": chat_usage, "responses": responses_usage, "anthropic": anthropic_usage}
STREAMED = {
    "chat": chat_stream_usage,
    "responses": lambda events: responses_usage(events[-1]["response"]),
    "anthropic": anthropic_stream_usage,
}


def reasoning_tokens(route: str, usage: dict[str, Any]) -> int:
    if route == "chat":
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["reasoning_tokens"]
        return usage["reasoning_tokens"]
    return usage["output_tokens_details"]["thinking_tokens" if route == "anthropic" else "reasoning_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", PATHS)
def test_usage_reports_reasoning_tokens(server: Server, route: str, stream: bool) -> None:
    usage, reasoning, text = used(server, route, stream)
    assert reasoning and not text
    assert reasoning_tokens(route, usage) == 8 == usage.get("output_tokens", usage.get("completion_tokens"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", BUDGETS.values(), ids=BUDGETS)
def test_a_budget_closes_the_block_on_the_responses_route(server: Server, fields: dict[str, Any], stream: bool) -> None:
    """SGLang's model of a Responses request has neither field."""
    _, free, _ = used(server, "responses", stream, max_output_tokens=14)
    usage, reasoning, text = used(server, "responses", stream, max_output_tokens=14, **fields)
    assert reasoning and free.startswith(reasoning) and text
    assert (reasoning_tokens("responses", usage), usage["output_tokens"]) == (6, 14)


RESPONSES_REFUSED = {
    "on-and-off": REFUSED["on-and-off"],
    "another-type": REFUSED["another-type"],
    "a-budget-of-sglangs": REFUSED["a-budget-of-sglangs"],
    "two-budgets": REFUSED["two-budgets"],
    "no-object": ({"custom_params": "thinking_budget"}, "custom_params must be an object"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", RESPONSES_REFUSED)
def test_the_responses_route_refuses_by_name(server: Server, name: str, stream: bool) -> None:
    fields, reason = RESPONSES_REFUSED[name]
    body = {"model": model_of(server), "input": "Hi", "max_output_tokens": 2, "stream": stream, **fields}
    response = requests.post(f"{server.url}/v1/responses", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 400 and reason in response.text, response.text


def test_the_responses_route_honours_a_switch(server: Server) -> None:
    usage, reasoning, text = used(server, "responses", False, thinking={"type": "disabled"})
    assert text and not reasoning and reasoning_tokens("responses", usage) == 0


@pytest.mark.slow  # the route's least budget is 1,024 tokens
def test_a_budget_closes_the_block_on_anthropics_route(server: Server) -> None:
    budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1040}
    # After "Hi there" the model ends its answer before; the route can't ignore the end.
    answers = [used(server, "anthropic", stream, "Hello", **budget) for stream in (False, True)]
    assert answers[0] == answers[1]
    usage, reasoning, text = answers[0]
    assert reasoning and text
    assert (usage["output_tokens"], reasoning_tokens("anthropic", usage)) == (1040, 1025)
    assert "the budget is not enforced" not in server.log


def test_a_budget_without_thinking_does_nothing(server: Server) -> None:
    common = {"max_tokens": 8, "chat_template_kwargs": OFF}
    plain = chat(server, **common).json()["choices"][0]["message"]
    limited = chat(server, custom_params={"thinking_budget": 2}, **common).json()["choices"][0]["message"]
    assert limited == plain


def test_a_grammar_begins_behind_the_block(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    response = chat(
        server,
        thinking={"type": "enabled", "budget_tokens": 4},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        max_tokens=40,
        ignore_eos=False,
    ).json()
    assert json.loads(response["choices"][0]["message"]["content"]).keys() == {"n"}
    assert response["usage"]["reasoning_tokens"] == 5


def test_usage_reports_cached_tokens(server: Server) -> None:
    messages = [{"role": "user", "content": "and the water " * 200}]
    usage = [chat(server, messages=messages).json()["usage"] for _ in range(2)]
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] >= 256


# ---- without a server


def test_efforts_of_a_release_are_a_closed_list(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SimpleNamespace(model="DeepSeek-V4-Pro")

    def rendered(recipe: object, body: dict[str, Any]) -> str:
        return body["reasoning_effort"]

    for tiers in reasoning_effort.Tiers:
        monkeypatch.setattr(reasoning_effort, "_tiers", tiers)
        for word in ("ultra", "maximum", 0.5):
            with pytest.raises(ValueError, match="reasoning_effort must be one of none, minimal"):
                reasoning_effort.render(rendered, recipe, {"reasoning_effort": word})
        assert reasoning_effort.render(rendered, recipe, {"reasoning_effort": "low"}) == "low"


def test_another_models_requests_are_left_alone() -> None:
    request = SimpleNamespace(chat_template_kwargs={"enable_thinking": "yes"})
    switches.settle(SimpleNamespace(chat_encoding_spec="glm47"), request)  # type: ignore[arg-type]
    assert request.chat_template_kwargs == {"enable_thinking": "yes"}


def test_a_servers_default_is_used_where_a_request_says_nothing() -> None:
    def settled(defaults: dict[str, Any], **fields: Any) -> dict[str, Any]:
        unset = dict.fromkeys(("chat_template_kwargs", "reasoning_effort", "thinking", "custom_params"))
        request = SimpleNamespace(**(unset | fields))
        serving = SimpleNamespace(chat_encoding_spec="dsv4", default_chat_template_kwargs=defaults)
        switches.settle(serving, request)  # type: ignore[arg-type]
        return request.chat_template_kwargs

    assert settled({"enable_thinking": True}) == {"thinking": True, "enable_thinking": True}
    assert settled({"enable_thinking": True}, thinking={"type": "disabled"})["thinking"] is False
    assert settled({}) is None


@pytest.mark.parametrize("value", [True, 1.5, "5", -1, [5]])
def test_a_budget_is_a_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match="thinking_budget must be a whole number"):
        budget_of(SimpleNamespace(custom_params={"thinking_budget": value}))
    assert budget_of(SimpleNamespace(custom_params={"other": value})) is None


def test_anthropics_switch_is_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through SGLang's own conversion of a request, with the plugin's hook. Its least budget is 1,024 tokens."""
    import sglang.srt.managers.scheduler  # noqa: F401 - plugins are loaded once a process; other tests need it before
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.plugins import load_plugins

    load_plugins()
    chat_serving = SimpleNamespace(
        supports_inline_system=True,
        apply_reasoning_enabled=lambda request, enabled: None,
        chat_encoding_spec="dsv4",
    )
    request = AnthropicMessagesRequest(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    made = AnthropicServing(chat_serving)._convert_to_chat_completion_request(request)
    serving = SimpleNamespace(chat_encoding_spec="dsv4", default_chat_template_kwargs={})
    switches.settle(serving, made)  # type: ignore[arg-type]
    assert made.chat_template_kwargs["thinking"] is True
    assert budget_of(SimpleNamespace(**made.to_sampling_params([], {}, None))) == 1024
    chat_serving.chat_encoding_spec = "glm47"
    made = AnthropicServing(chat_serving)._convert_to_chat_completion_request(request)
    assert made.thinking is None
