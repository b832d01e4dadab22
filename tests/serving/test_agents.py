"""Agent programs on every route: a system message late in a conversation leaves the prefix before it stored, and a
response says at which token its prompt leaves the stored ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import requests
from serving.server import Server, flush

from sglang_dsv4.cpu.random_tokenizer import WORDS
from sglang_dsv4.requests.chat.late_system import FRONT, IN_PLACE, OPTION, REMINDER

PAGE = 256
Turn = tuple[str, str, str]  # the answer before it, the question, the late system message


def words(rng: random.Random, count: int) -> str:
    """One token a word."""
    return " ".join(rng.choices(WORDS, k=count))


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = requests.post(f"{server.url}/v1/{path}", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: Server, front: str, turns: list[Turn], place: str = IN_PLACE) -> tuple[int, int]:
    """Send a conversation; returns the tokens of its prompt, and how many of them were cached."""
    messages = [{"role": "system", "content": front}]
    for answer, question, late in turns:
        messages += [{"role": "assistant", "content": answer}] if answer else []
        messages += [{"role": "user", "content": question}, {"role": "system", "content": late}]
    options = {"chat_template_kwargs": {OPTION: place}}
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0, **options}
    usage = post(server, "chat/completions", body)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def anthropic(server: Server, front: str, turns: list[Turn]) -> tuple[int, int]:
    messages = []
    for answer, question, late in turns:
        messages += [{"role": "assistant", "content": answer}] if answer else []
        blocks = [{"type": "text", "text": late}]
        messages += [{"role": "user", "content": question}, {"role": "system", "content": blocks}]
    body = {"model": "tiny", "system": front, "messages": messages, "max_tokens": 1, "temperature": 0}
    usage = post(server, "messages", body)["usage"]
    cached = usage.get("cache_read_input_tokens", 0)  # which `input_tokens` does not count
    return usage["input_tokens"] + cached, cached


def responses(server: Server, front: str, turns: list[Turn]) -> tuple[int, int]:
    items = []
    for answer, question, late in turns:
        items += [{"role": "assistant", "content": answer}] if answer else []
        items += [{"role": "user", "content": question}, {"role": "developer", "content": late}]
    (model,) = requests.get(f"{server.url}/v1/models", timeout=300).json()["data"]  # this route refuses other names
    body = {"model": model["id"], "instructions": front, "input": items, "max_output_tokens": 1, "temperature": 0}
    usage = post(server, "responses", body)["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


ROUTES: dict[str, Callable[..., tuple[int, int]]] = {
    "chat": chat,
    "chat-as-reminders": lambda server, *sent: chat(server, *sent, place=REMINDER),
    "messages": anthropic,
    "responses": responses,
}


def conversation(route: Callable[..., tuple[int, int]], server: Server, seed: int) -> list[tuple[int, int]]:
    """Two turns, each with a reminder."""
    flush(server)
    rng = random.Random(seed)
    front, turns, found = words(rng, 300), [], []
    for turn in range(2):
        turns.append((words(rng, 20) if turn else "", words(rng, 260), words(rng, 30)))
        found.append(route(server, front, turns))
    return found


@pytest.mark.parametrize(
    "route", [pytest.param(name, marks=[pytest.mark.slow] if name == "chat-as-reminders" else []) for name in ROUTES]
)
def test_a_reminder_each_turn_leaves_the_prefix_stored(server: Server, route: str) -> None:
    """Each request hits up to the last full page of the one before."""
    found = conversation(ROUTES[route], server, 11)
    assert found[0][1] == 0
    for (before, _), (prompt, cached) in itertools.pairwise(found):
        # The prompt before ended with an answer's header of two tokens; a page may have been full with these.
        assert cached in ((before - 2) // PAGE * PAGE, before // PAGE * PAGE) and 0 < cached < prompt


@pytest.mark.slow
def test_in_front_a_reminder_changes_the_first_pages(server: Server) -> None:
    found = conversation(lambda *sent: chat(*sent, place=FRONT), server, 12)
    assert all(cached <= PAGE for _, cached in found)  # of the front's 300 tokens


def test_a_response_names_the_token_that_differs(server: Server) -> None:
    """An edit of an old turn, by the chat route: SGLang shows meta_info where `return_meta_info` asks for it."""
    flush(server)
    rng = random.Random(13)
    front, first, second = (words(rng, count) for count in (300, 300, 200))

    def ask(middle: str) -> dict[str, Any]:
        turns = [("user", f"{first} {middle}"), ("assistant", "fine"), ("user", second)]
        messages = [{"role": "system", "content": front}, *({"role": r, "content": text} for r, text in turns)]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0, "return_meta_info": True}
        return post(server, "chat/completions", body)["choices"][0]["meta_info"]["prefix_cache"][0]

    assert ask("left")["why"] == "no stored prompt begins with the prompt's tokens"
    report = ask("right")
    end = report["differs_at"]  # <bos>, the two texts, whose first words have no blank before them, and <User>
    assert 600 < end < 620 and report["stored_tokens"] == end
    assert report["why"].startswith(f"prompt differs from the stored one at token {end}; reused up to token 512: ")
    again = ask("right")
    assert (again["differs_at"], again["why"]) == (None, "prompt is stored up to token 768")


def test_the_tools_of_a_system_message_are_the_requests(server: Server) -> None:
    """SGLang parses calls of these tools, but does not tell the model of them."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    late = {"role": "system", "content": "now look"}
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def ask(message: dict[str, Any], **fields: Any) -> list[int]:
        messages = [*before, message, {"role": "user", "content": "c"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, "return_prompt_token_ids": True, **fields}
        return post(server, "chat/completions", body)["choices"][0]["prompt_token_ids"]

    assert ask({**late, "tools": [tool]}) == ask(late, tools=[tool]) != ask(late)


def test_another_place_gets_a_400(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {OPTION: "end"}}
    response = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 400 and "late_system must be" in response.text
