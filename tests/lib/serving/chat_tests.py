"""Tests of chat that hold for a server on a CPU and on a GPU; `test_chat` and `test_chat_gpu` collect them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from serving.server import Server
from transformers import AutoTokenizer


def text_of(response: object) -> str:
    return response.choices[0].message.content  # type: ignore[attr-defined]


def test_chat_answers_with_the_tokens_asked_for(server: Server) -> None:
    response = server.chat("Hello!", max_tokens=12, extra_body={"ignore_eos": True})
    assert text_of(response)
    assert response.usage.completion_tokens == 12
    # <bos> <User> H e l l o ! <Assistant> </think>: one token a byte, because "Hello" is not a word of the tokenizer
    assert response.usage.prompt_tokens == 10
    assert response.choices[0].finish_reason == "length"


def test_stream_gives_the_same_text_in_pieces(server: Server) -> None:
    whole = text_of(server.chat("Hello stream", max_tokens=24))
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in server.chat("Hello stream", max_tokens=24, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 3


def test_stream_reports_usage_last(server: Server) -> None:
    chunks = list(server.chat("usage", max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 5


@pytest.mark.slow
def test_conversation_of_several_turns_is_reproducible(server: Server) -> None:
    def converse() -> list[str]:
        messages: list[dict[str, str]] = [{"role": "system", "content": "You are brief."}]
        answers = []
        for question in ("who are you", "what did I ask", "and before that"):
            messages.append({"role": "user", "content": question})
            response = server.client().chat.completions.create(
                model="tiny", messages=messages, max_tokens=10, temperature=0
            )
            answers.append(text_of(response))
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    first = converse()
    assert first == converse()
    assert len(set(first)) == 3  # each turn saw another history


THINKING = {"chat_template_kwargs": {"thinking": True}}


def test_thinking_mode_ends_the_prompt_with_a_think_token(server: Server) -> None:
    """A random model does not end its thought, so its whole answer is reasoning."""
    plain = server.chat("ponder", max_tokens=8)
    thinking = server.chat("ponder", max_tokens=8, extra_body=THINKING)
    assert text_of(plain) and not text_of(thinking)
    assert thinking.choices[0].message.reasoning_content not in ("", text_of(plain))
    assert thinking.usage.prompt_tokens >= plain.usage.prompt_tokens


def reasoned(server: Server, checkpoint: Path) -> tuple[str, str]:
    """Return the reasoning and the answer that the model is forced to give, streamed and not: one word, the end of its
    thought, and then the string of a regular expression.

    The word has the highest bias, by 4. Its penalties are 4 once it has been generated, and 6 after a second time: then
    `</think>` is the likeliest token, after the first time only if the logits make it so. The expression applies after
    `</think>`, which SGLang knows through its reasoning parser alone.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    (word,), (end,) = (tokenizer.encode(text, add_special_tokens=False) for text in (" because", "</think>"))
    forced: dict[str, Any] = {
        "max_tokens": 24,
        "logit_bias": {str(word): 100, str(end): 96},
        "presence_penalty": 2,
        "frequency_penalty": 2,
        "extra_body": {**THINKING, "regex": "It is 42[.]"},
    }
    message = server.chat("ponder", **forced).choices[0].message
    streamed = [chunk.choices[0].delta for chunk in server.chat("ponder", stream=True, **forced) if chunk.choices]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in streamed)
    said = "".join(delta.content or "" for delta in streamed)
    assert (message.reasoning_content, message.content) == (thought, said)
    return thought, said


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def test_a_tool_call_is_parsed(server: Server, checkpoint: Path) -> None:
    """The model is forced to generate a call as the release writes it."""
    call = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    marker = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids(
        "｜DSML｜"
    )  # else it may generate the marker's bytes
    response = server.chat(
        "Rain?", max_tokens=200, tools=[WEATHER], logit_bias={str(marker): 100}, extra_body={"regex": call}
    )
    (parsed,) = response.choices[0].message.tool_calls
    assert (parsed.function.name, json.loads(parsed.function.arguments)) == ("weather", {"city": "Rome"})
    assert not text_of(response)
    assert response.choices[0].finish_reason == "tool_calls"


def test_logprobs_are_of_the_tokens_and_ordered(server: Server) -> None:
    response = server.chat("log", max_tokens=6, logprobs=True, top_logprobs=5)
    entries = response.choices[0].logprobs.content
    assert len(entries) == response.usage.completion_tokens
    for entry in entries:
        alternatives = [top.logprob for top in entry.top_logprobs]
        assert alternatives == sorted(alternatives, reverse=True)
        assert entry.logprob == alternatives[0]  # greedy sampling chooses the likeliest
        assert sum(math.exp(value) for value in alternatives) <= 1 + 1e-5


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_constrained_output_is_valid_json(server: Server, checkpoint: Path, kind: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    if kind == "json_schema":
        response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
        value = json.loads(text_of(server.chat("Who?", max_tokens=200, response_format=response_format)))
        jsonschema.validate(value, schema)
    else:  # a random model would not close its object, so a bias makes it: the grammar alone demands the "{"
        close = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids("}")
        options = {"response_format": {"type": "json_object"}, "logit_bias": {str(close): 100}}
        assert json.loads(text_of(server.chat("Who? In json.", max_tokens=24, **options))) == {}
