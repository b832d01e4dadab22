"""The place of late system messages in prompts, as texts of token ids; the encoder of the checkpoints wrote some of
them."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from lib.chat_adapter import chat_adapter
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_deepseek_recipe import DeepSeekRecipeChatEncodingAdapter
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_dsv4.cpu.random_tokenizer import write_tokenizer
from sglang_dsv4.requests.chat import late_system
from sglang_dsv4.requests.chat.late_system import FRONT, IN_PLACE, REMINDER

NAMES = {
    "<｜begin▁of▁sentence｜>": "<B>",
    "<｜end▁of▁sentence｜>": "<E>",
    "<｜User｜>": "<U>",
    "<｜Assistant｜></think>": "<A>",
    "<｜latest_reminder｜>": "<R>",
}
CALLS = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("1", "2")]


def said(*messages: str) -> list[dict[str, Any]]:
    """`("s:text", "u:text")` as messages; `c:` is an assistant's turn of two calls, `t:` its two results."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "r": "latest_reminder"}
    made: list[dict[str, Any]] = []
    for message in messages:
        role, _, text = message.partition(":")
        if role == "c":
            made.append({"role": "assistant", "content": text, "tool_calls": CALLS})
        elif role == "t":
            made += [{"role": "tool", "tool_call_id": name, "content": f"{text}{name}"} for name in ("1", "2")]
        else:
            made.append({"role": roles[role], "content": text})
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 1024, 4096)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def adapter(tokenizer: PreTrainedTokenizerFast) -> DeepSeekRecipeChatEncodingAdapter:
    return chat_adapter(tokenizer)


def prompt(
    adapter: DeepSeekRecipeChatEncodingAdapter,
    messages: list[dict[str, Any]],
    place: str | None,
    thinking: bool = False,
    **fields: Any,
) -> str:
    """The rendered prompt with short names for its markers."""
    options = {} if place is None else {late_system.OPTION: place}
    request = ChatCompletionRequest(model="m", messages=messages, chat_template_kwargs=options, **fields)
    late_system.gather_tools(SimpleNamespace(chat_encoding_spec="dsv4"), request)
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    before = request.model_dump_json()
    original = DeepSeekRecipeChatEncodingAdapter.encode_messages
    ids = late_system.encode(
        getattr(original, "__wrapped__", original),
        adapter,
        request=request,
        messages=[],
        tools=tools,
        thinking=thinking,
        image_data=[],
    )
    assert request.model_dump_json() == before  # SGLang reads the request again when it parses the answer
    text = adapter.deepseek_recipe.hf_tokenizer.decode(ids, skip_special_tokens=False)
    for marker, name in NAMES.items():
        text = text.replace(marker, name)
    return text


# Conversation -> the prompt with late system messages in place, as reminders, in front.
PROMPTS: dict[str, tuple[list[dict[str, Any]], str, str, str]] = {
    "leading": (said("s:S", "d:D", "u:q"), *["<B>S\n\nD<U>q<A>"] * 3),
    "after-an-answer": (  # in place as the checkpoint's encoder writes it
        said("s:S", "u:q", "a:x", "s:L", "u:p"),
        "<B>S<U>q<A>x<E>L<U>p<A>",
        "<B>S<U>q<A>x<E><R>L<U>p<A>",
        "<B>S\n\nL<U>q<A>x<E><U>p<A>",
    ),
    "after-a-question": (
        said("s:S", "u:q", "a:x", "u:p", "s:L"),
        "<B>S<U>q<A>x<E><U>p\n\nL<A>",
        "<B>S<U>q<A>x<E><U>p<R>L<A>",
        "<B>S\n\nL<U>q<A>x<E><U>p<A>",
    ),
    "every-turn": (
        said("s:S", "u:q", "s:L", "a:x", "u:p", "s:M", "a:y", "s:N"),
        "<B>S<U>q\n\nL<A>x<E><U>p\n\nM<A>y<E>N<A>",
        "<B>S<U>q<R>L<A>x<E><U>p<R>M<A>y<E><R>N<A>",
        "<B>S\n\nL\n\nM\n\nN<U>q<A>x<E><U>p<A>y<E><A>",
    ),
    "several-at-once": (
        said("s:S", "u:q", "a:x", "s:L", "d:M", "s:", "u:p"),
        "<B>S<U>q<A>x<E>L\n\nM<U>p<A>",
        "<B>S<U>q<A>x<E><R>L<R>M<U>p<A>",
        "<B>S\n\nL\n\nM<U>q<A>x<E><U>p<A>",
    ),
    "between-questions": (
        said("u:q", "s:L", "u:p"),
        "<B><U>q\n\nL\n\np<A>",
        "<B><U>q<R>L<U>p<A>",
        "<B>L<U>q\n\np<A>",
    ),
    "beside-a-reminder": (
        said("u:q", "a:x", "s:K", "r:R", "s:L", "u:p"),
        "<B><U>q<A>x<E>K<R>R\n\nL<U>p<A>",
        "<B><U>q<A>x<E><R>K<R>R<R>L<U>p<A>",
        "<B>K\n\nL<U>q<A>x<E><R>R<U>p<A>",
    ),
    "first-but-not-leading": (
        said("r:R", "s:L", "u:q"),
        "<B><R>R\n\nL<U>q<A>",
        "<B><R>R<R>L<U>q<A>",
        "<B>L<R>R<U>q<A>",
    ),
    "the-markers-text": (
        said("s:S", "u:q", "a:x", "s:<｜latest_reminder｜>", "u:p"),
        "<B>S<U>q<A>x<E><R><U>p<A>",
        "<B>S<U>q<A>x<E><R><R><U>p<A>",
        "<B>S\n\n<R><U>q<A>x<E><U>p<A>",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_late_message_stays_where_it_was_sent(adapter: DeepSeekRecipeChatEncodingAdapter, name: str) -> None:
    messages, in_place, reminder, front = PROMPTS[name]
    assert prompt(adapter, messages, None) == in_place
    assert prompt(adapter, messages, IN_PLACE) == in_place
    assert prompt(adapter, messages, REMINDER) == reminder
    assert prompt(adapter, messages, FRONT) == front


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_message_beside_tool_results_goes_after_them(adapter: DeepSeekRecipeChatEncodingAdapter, where: str) -> None:
    """The renderer refuses calls whose results do not follow at once."""
    call, one, two = said("c:", "t:r")
    late = said("s:L")
    turns = {"before": [call, *late, one, two], "between": [call, one, *late, two], "after": [call, one, two, *late]}
    results = "<U><tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>"
    messages = said("s:S", "u:q") + turns[where]
    assert prompt(adapter, messages, IN_PLACE).endswith(f"{results}\n\nL<A>")
    assert prompt(adapter, messages, REMINDER).endswith(f"{results}<R>L<A>")
    assert prompt(adapter, messages + said("a:x", "u:p"), IN_PLACE).endswith(f"{results}\n\nL<A>x<E><U>p<A>")


def test_a_conversation_keeps_its_prefix(adapter: DeepSeekRecipeChatEncodingAdapter) -> None:
    """Each prompt of a conversation with a reminder a turn begins with the one before; in front it does not."""
    turns = [("u:q", "s:L"), ("a:x", "u:p", "s:M"), ("a:y", "s:K", "u:o", "s:N"), ("c:z", "t:r", "s:P")]
    for place, kept in ((IN_PLACE, True), (REMINDER, True), (FRONT, False)):
        history, before = said("s:S"), ""
        for turn in turns:
            history += said(*turn)
            text = prompt(adapter, history, place)
            assert text.startswith(before) == kept or not before, place
            before = text


@pytest.mark.parametrize("seed", range(4))
def test_any_conversation_keeps_its_texts_in_order(adapter: DeepSeekRecipeChatEncodingAdapter, seed: int) -> None:
    """Every text is there once, in the order in which it was sent, but for texts between calls and their results; with
    these SGLang alone refuses the conversation."""
    rng = random.Random(seed)
    for _ in range(40):
        turns = [f"{rng.choice('ssduuaarc')}:" for _ in range(rng.randrange(1, 9))]
        messages = [message for turn in turns for message in said(turn, *(["t:"] if turn == "c:" else []))]
        if rng.random() < 0.5:
            messages.insert(rng.randrange(len(messages) + 1), *said("s:"))
        for number, message in enumerate(messages):
            message["content"] = f"{{{number}}}"
        thinking = rng.random() < 0.5
        for place in (IN_PLACE, REMINDER):
            numbers = [int(found) for found in re.findall(r"{(\d+)}", prompt(adapter, messages, place, thinking))]
            assert sorted(numbers) == list(range(len(messages))), (place, messages)
            moved = [n for n, _ in enumerate(messages) if goes_after_results(messages, n)]
            assert [n for n in numbers if n not in moved] == [n for n in range(len(messages)) if n not in moved]


def goes_after_results(messages: list[dict[str, Any]], number: int) -> bool:
    """Whether a message is of role system, and tool results follow it with only such messages between them."""
    rest = [m["role"] for m in messages[number:] if m["role"] not in late_system.INSTRUCTIONS]
    return messages[number]["role"] in late_system.INSTRUCTIONS and rest[:1] == ["tool"]


def test_parts_of_a_message_are_joined(adapter: DeepSeekRecipeChatEncodingAdapter) -> None:
    parts = [{"type": "text", "text": "L"}, {"type": "text", "text": "M"}]
    messages = [*said("s:S", "u:q", "a:x"), {"role": "system", "content": parts}, *said("u:p")]
    assert prompt(adapter, messages, IN_PLACE) == "<B>S<U>q<A>x<E>L\n\nM<U>p<A>"
    nothing = [*said("s:S", "u:q", "a:x"), {"role": "system", "content": None}, *said("u:p")]
    assert prompt(adapter, nothing, REMINDER) == "<B>S<U>q<A>x<E><U>p<A>"


TOOL = {"type": "function", "function": {"name": "late", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_tools_of_a_message_are_the_requests(adapter: DeepSeekRecipeChatEncodingAdapter, thinking: bool) -> None:
    """SGLang parses calls of these tools, but its renderer leaves them out. With tools, thoughts stay in the prompt."""
    history = said("s:S", "u:q", "a:x", "s:L", "u:p")
    history[2]["reasoning_content"] = "T"
    with_tools = [*history[:3], {**history[3], "tools": [TOOL]}, history[4]]
    text = prompt(adapter, with_tools, IN_PLACE, thinking)
    assert '"name": "late"' in text and text == prompt(adapter, history, IN_PLACE, thinking, tools=[TOOL])
    assert text.index('"name": "late"') < text.index("<U>q") and ("T</think>x<E>L<U>p" in text) == thinking


def test_a_continued_answer_follows_the_message(adapter: DeepSeekRecipeChatEncodingAdapter) -> None:
    messages = said("u:q", "s:L", "a:x")
    assert (
        prompt(adapter, messages, IN_PLACE, continue_final_message=True, add_generation_prompt=False)
        == "<B><U>q\n\nL<A>x"
    )


def test_another_place_is_refused(adapter: DeepSeekRecipeChatEncodingAdapter) -> None:
    with pytest.raises(ValueError, match="late_system must be 'in_place', 'reminder' or 'front', got 'end'"):
        prompt(adapter, said("u:q"), "end")
    serving = SimpleNamespace(chat_encoding_spec="dsv4", default_chat_template_kwargs={"late_system": True})
    with pytest.raises(ValueError, match="got True"):
        late_system.keep_inline(False, serving)


def test_another_models_encoding_is_left_alone() -> None:
    request = SimpleNamespace(chat_template_kwargs={"late_system": 7}, messages=[])
    adapter = SimpleNamespace(deepseek_recipe=SimpleNamespace(model="DeepSeek-V4.1-Flash"))
    assert late_system.encode(lambda adapter, request: [request], adapter, request=request) == [request]
    serving = SimpleNamespace(chat_encoding_spec="dsv41", default_chat_template_kwargs={"late_system": 7})
    assert late_system.keep_inline(False, serving) is False
