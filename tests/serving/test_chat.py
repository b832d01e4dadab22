"""The OpenAI API through SGLang's HTTP server, as a user of a chat model sees it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from serving.chat_tests import (  # noqa: F401 - collected here
    WEATHER,
    reasoned,
    test_a_tool_call_is_parsed,
    test_chat_answers_with_the_tokens_asked_for,
    test_constrained_output_is_valid_json,
    test_conversation_of_several_turns_is_reproducible,
    test_logprobs_are_of_the_tokens_and_ordered,
    test_stream_gives_the_same_text_in_pieces,
    test_stream_reports_usage_last,
    test_thinking_mode_ends_the_prompt_with_a_think_token,
    text_of,
)
from serving.server import Server
from transformers import AutoTokenizer

PROMPTS = [f"Tell me about number {index}. " + "and the water " * (7 * index) for index in range(16)]


def test_reasoning_is_parsed(server: Server, checkpoint: Path) -> None:
    assert reasoned(server, checkpoint) == (" because", "It is 42.")


def test_the_responses_api_answers_as_chat_does(server: Server) -> None:
    """The Responses API answers as chat does, with as many tokens; SGLang gave two fewer, and an error for one. Where a
    package of SGLang's is missing, it is off with one warning in the log."""
    client = server.client()
    model = client.models.list().data[0].id
    for tokens in (1, 12):
        response = client.responses.create(model=model, input="Hello!", max_output_tokens=tokens, temperature=0)
        assert response.output_text == text_of(server.chat("Hello!", max_tokens=tokens)) != ""
        assert (response.status, response.usage.total_tokens) == ("incomplete", 10 + tokens)


CALLS = re.compile(r'^sglang_dsv4:tool_call(?:s|_faults)_total\{.*(?:outcome|fault)="([^"]+)".*\} ([0-9.]+)$', re.M)


def test_a_damaged_call_is_text_and_is_counted(server: Server, checkpoint: Path) -> None:
    """The model is forced to generate a call whose value is no JSON."""
    call = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="false">"Rome'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    marker = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids("｜DSML｜")
    options = {"max_tokens": 200, "tools": [WEATHER], "logit_bias": {str(marker): 100}, "stream": True}
    before = calls_counted(server)
    chunks = server.chat("Rain?", extra_body={"regex": re.escape(call)}, **options)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == call
    assert not any(choice.delta.tool_calls for choice in choices) and choices[-1].finish_reason == "stop"
    new = {name: count - before.get(name, 0) for name, count in calls_counted(server).items()}
    assert {name: count for name, count in new.items() if count} == {"refused": 1, "a value that is no JSON": 1}


def calls_counted(server: Server) -> dict[str, float]:
    """The metrics of tool calls: outcome or fault -> count."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    return {name: float(count) for name, count in CALLS.findall(text)}


@pytest.mark.slow
def test_greedy_answers_are_the_same_alone_and_in_a_batch_of_16(server: Server) -> None:
    """Prompts of 10 to about 330 tokens, so that chunks, pages and compression groups have different ends."""
    alone = [text_of(server.chat(prompt)) for prompt in PROMPTS]
    with ThreadPoolExecutor(16) as pool:
        together = [text_of(response) for response in pool.map(server.chat, PROMPTS)]
    assert together == alone
    assert len(set(alone)) > 8  # the answers depend on the prompts


def test_models_and_info_endpoints(server: Server) -> None:
    assert server.client().models.list().data[0].max_model_len == 16384
