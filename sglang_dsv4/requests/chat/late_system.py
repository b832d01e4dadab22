"""The place of a system message that follows other messages, as agent programs send one each turn.

DeepSeek has two encoders. `encoding/encoding_dsv4.py` of the checkpoints writes a system message's text where it was
sent, without a marker; after a user's turn it then leaves out the answer's header, so the prompt is incomplete.
`deepseek-recipe`, which SGLang renders with, moves the text to the front, where each new message changes the prompt's
first page and so everything after it. `chat_template_kwargs.late_system` chooses:

============  ====================================  ====================================
value         after an answer                       in a user's turn, tool results too
============  ====================================  ====================================
`in_place`    `…<EOS>TEXT<User>…`                   `…<User>QUESTION`, a blank line, `TEXT<Assistant>…`
`reminder`    `…<EOS><latest_reminder>TEXT<User>…`  `…<User>QUESTION<latest_reminder>TEXT<Assistant>…`
`front`       after the first system message        after the first system message
============  ====================================  ====================================

`in_place` is the default. It is the checkpoint's own rendering where that gives a complete prompt; elsewhere the text
is added to the turn in which it was sent, joined as both encoders join the texts of one turn. Role `developer` is role
`system`. A message between tool calls and their results moves after the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_dsv4.requests.chat.switches import ENCODING

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageParam, ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_deepseek_recipe import DeepSeekRecipeChatEncodingAdapter

OPTION = "late_system"
IN_PLACE, REMINDER, FRONT = "in_place", "reminder", "front"
MARKER = "<｜latest_reminder｜>"
MODEL = "DeepSeek-V4-Pro"  # SGLang's name for every model of this encoding
BETWEEN = "\n\n"  # between two texts of one turn
INSTRUCTIONS = ("system", "developer")
RESULTS = ("tool", "function")


def keep_inline(supported: bool, serving: OpenAIServingChat) -> bool:
    """True for this model: the Anthropic and Responses routes leave system messages where they were sent.

    Runs after ``OpenAIServingChat._resolve_inline_system_support``, while the server starts.

    Raises:
        ValueError: `--default-chat-template-kwargs` has another value of `late_system`.
    """
    if serving.chat_encoding_spec != ENCODING:
        return supported
    mode_of(serving.default_chat_template_kwargs)
    return True


def gather_tools(serving: OpenAIServingChat, request: ChatCompletionRequest, *args: Any, **kwargs: Any) -> None:
    """Move the tools of system messages to the request's; runs before ``OpenAIServingChat._process_messages``.

    SGLang would parse calls of these tools, but not tell the model of them.
    """
    if serving.chat_encoding_spec != ENCODING:
        return
    for message in request.messages:
        if message.role in INSTRUCTIONS and message.tools:
            request.tools = [*(request.tools or []), *message.tools]
            message.tools = None
            message.model_fields_set.discard("tools")


def encode(
    original: Callable[..., list[int]],
    adapter: DeepSeekRecipeChatEncodingAdapter,
    *,
    request: ChatCompletionRequest,
    **rest: Any,
) -> list[int]:
    """The prompt's token ids, with late system messages at their place; runs around `encode_messages`.

    Args:
        original: SGLang's method.
        adapter: SGLang's, for this encoding or another model's.
        request: the request, with SGLang's default options in `chat_template_kwargs`.
        rest: the other arguments of SGLang's method.

    Raises:
        ValueError: `late_system` has another value; SGLang answers 400.
    """
    recipe = adapter.deepseek_recipe
    mode = mode_of(request.chat_template_kwargs) if recipe.model == MODEL else FRONT
    messages, marked = (request.messages, []) if mode == FRONT else placed(request.messages, mode == REMINDER)
    if all(new is old for new, old in zip(messages, request.messages, strict=False)):
        return original(adapter, request=request, **rest)  # no late message: they are never the first to differ
    ids = original(adapter, request=request.model_copy(update={"messages": messages}), **rest)
    return without_markers(ids, recipe.hf_tokenizer.token_to_id(MARKER), marked)


def mode_of(options: dict[str, Any] | None) -> str:
    """The value of `late_system` among a request's or a server's template options.

    Raises:
        ValueError: it is none of the three.
    """
    mode = (options or {}).get(OPTION, IN_PLACE)
    if mode not in (IN_PLACE, REMINDER, FRONT):
        raise ValueError(
            f"chat_template_kwargs.{OPTION} must be {IN_PLACE!r}, {REMINDER!r} or {FRONT!r}, got {mode!r} "
            "(docs/prefix_reuse.md)."
        )
    return mode


def placed(
    messages: Sequence[ChatCompletionMessageParam], as_reminders: bool
) -> tuple[list[ChatCompletionMessageParam], list[bool]]:
    """The messages with each late system message in a role that the renderer leaves at its place.

    Args:
        messages: a request's.
        as_reminders: whether late system messages become reminders; else texts without a marker.

    Returns:
        The messages, and for each message of role `latest_reminder` among them whether its marker stays in the prompt.
    """
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionMessageGenericParam,
        ChatCompletionMessageUserParam,
    )

    found: list[ChatCompletionMessageParam] = []
    marked: list[bool] = []
    waiting: list[str] = []  # texts of late messages, until the message after them is known

    def remind(text: str, stays: bool) -> None:
        found.append(ChatCompletionMessageGenericParam(role="latest_reminder", content=text))
        marked.append(stays)

    def place() -> None:
        text = BETWEEN.join(waiting)
        if as_reminders:
            for one in waiting:
                remind(one, True)
        elif waiting and found[-1].role == "latest_reminder":
            remind(BETWEEN.join((text_of(found.pop().content), text)), marked.pop())
        elif waiting and found[-1].role == "assistant":
            remind(text, False)
        elif waiting:
            found.append(ChatCompletionMessageUserParam(role="user", content=text))
        waiting.clear()

    leading = True
    for message in messages:
        leading = leading and message.role in INSTRUCTIONS
        if message.role in INSTRUCTIONS and not leading:
            waiting.extend(filter(None, [text_of(message.content)]))
            continue
        if message.role not in RESULTS:
            place()
        found.append(message)
        marked.extend([True] if message.role == "latest_reminder" else [])
    place()
    return found, marked


def text_of(content: Any) -> str:
    """The text of a message: its parts, joined as the renderer joins the parts of other messages."""
    if content is None or isinstance(content, str):
        return content or ""
    return BETWEEN.join(part.text for part in content)


def without_markers(ids: list[int], marker: int, stays: Sequence[bool]) -> list[int]:
    """The prompt without the markers of texts that have none.

    Args:
        ids: token ids; text never has the marker's.
        marker: the id of `<｜latest_reminder｜>`.
        stays: for each marker in the prompt whether it stays.
    """
    assert ids.count(marker) == len(stays), f"{ids.count(marker)} markers of {len(stays)} reminders"
    left = iter(stays)
    return [token for token in ids if token != marker or next(left)]
