"""The OpenAI API through SGLang's HTTP server, as a user of a chat model sees it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving.chat_tests import (  # noqa: F401 - collected here
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

PROMPTS = [f"Tell me about number {index}. " + "and the water " * (7 * index) for index in range(16)]


def test_reasoning_is_parsed(server: Server, checkpoint: Path) -> None:
    assert reasoned(server, checkpoint) == (" because", "It is 42.")


def test_the_responses_api_answers_as_chat_does(server: Server) -> None:
    """The Responses API answers as chat does. Where a package of SGLang's is missing, it is off with one warning in the
    log.

    SGLang ends an answer of the Responses API a few tokens before chat's.
    """
    client = server.client()
    model = client.models.list().data[0].id
    response = client.responses.create(model=model, input="Hello!", max_output_tokens=12, temperature=0)
    assert len(response.output_text) > 20
    assert text_of(server.chat("Hello!", max_tokens=12)).startswith(response.output_text)


def test_greedy_answers_are_the_same_alone_and_in_a_batch_of_16(server: Server) -> None:
    """Prompts of 10 to about 330 tokens, so that chunks, pages and compression groups have different ends."""
    alone = [text_of(server.chat(prompt)) for prompt in PROMPTS]
    with ThreadPoolExecutor(16) as pool:
        together = [text_of(response) for response in pool.map(server.chat, PROMPTS)]
    assert together == alone
    assert len(set(alone)) > 8  # the answers depend on the prompts


def test_models_and_info_endpoints(server: Server) -> None:
    assert server.client().models.list().data[0].max_model_len == 16384
