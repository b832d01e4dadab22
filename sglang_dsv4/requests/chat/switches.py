"""Switches of the chat, Responses and Anthropic routes that SGLang 0.5.23 ignores for this model.

===================================  ==========================================  ===============================
request                              what SGLang does                            here
===================================  ==========================================  ===============================
`thinking: {"type": "enabled"}`      ignored: only models whose template has it  as `chat_template_kwargs.thinking`
`chat_template_kwargs`:              ignored, `thinking` alone is read; "false"  as `thinking`; a 400 unless true or
`enable_thinking`                    (a text) switches thinking on               false
`thinking.budget_tokens`             ignored; a log line on Anthropic's route    a thinking budget
the three above on `/v1/responses`   dropped (`requests.chat.responses`)         as on the chat route
switches that contradict each other  one of them is ignored                      a 400
===================================  ==========================================  ===============================

An effort implies thinking (and `none` no thinking); an explicit switch wins over that, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.requests.chat import responses
from sglang_dsv4.requests.chat.thinking_budget import PARAMETER, budget_of

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

ENCODING = "dsv4"
"""SGLang's name of this model's chat encoding."""
TYPES = {"enabled": True, "adaptive": True, "disabled": False}
TOGGLES = ("thinking", "enable_thinking")


def settle(serving: OpenAIServingChat, request: ChatCompletionRequest, *args: Any, **kwargs: Any) -> None:
    """Write a request's switches to the fields that SGLang reads; runs before ``OpenAIServingChat._process_messages``.

    It also runs for the chat requests that SGLang makes of requests to the Responses and Anthropic routes.

    Raises:
        ValueError: a switch has an unknown value, or two contradict each other; SGLang answers 400.
    """
    if serving.chat_encoding_spec != ENCODING:
        return
    responses.hand_over(request)
    options = dict(request.chat_template_kwargs or {})
    switch, budget = thinking_of(request.thinking)
    thinking = toggle_of(options, switch, request.reasoning_effort)
    if thinking is None:
        thinking = toggle_of(dict(serving.default_chat_template_kwargs or {}), None, None)
    if thinking is not None:
        request.chat_template_kwargs = {**options, **dict.fromkeys(TOGGLES, thinking)}
    if budget is not None:
        params = dict(request.custom_params or {})
        if params.setdefault(PARAMETER, budget) != budget:
            raise ValueError(
                f"thinking.budget_tokens is {budget} and custom_params.{PARAMETER} is {params[PARAMETER]}: send one."
            )
        request.custom_params = params
    budget_of(request)  # a stream would report a wrong budget inside of a 200
    responses.keep(request.custom_params)


def thinking_of(value: Any) -> tuple[bool | None, int | None]:
    """Whether `thinking` switches thinking on, and its budget; None where it says nothing.

    Raises:
        ValueError: it has another form than `{"type": "enabled", "budget_tokens": N}`.
    """
    if value is None:
        return None, None
    known = {"type", "budget_tokens", "display"}  # display is Anthropic's: the text is shown in every case
    if not isinstance(value, dict) or value.get("type") not in TYPES or value.keys() - known:
        raise ValueError(
            f'thinking must be {{"type": "enabled"}} or {{"type": "disabled"}}, with "budget_tokens" if enabled, got '
            f"{value!r}."
        )
    budget = value.get("budget_tokens")
    if budget is not None and (value["type"] != "enabled" or type(budget) is not int or budget < 0):
        raise ValueError(
            f'thinking.budget_tokens must be a whole number of at least 0, with "type": "enabled", got {value!r}.'
        )
    return TYPES[value["type"]], budget


def toggle_of(options: dict[str, Any], switch: bool | None, effort: Any) -> bool | None:
    """Whether a request wants thinking; None if it does not say.

    Args:
        options: `chat_template_kwargs`, to which SGLang has added the toggles that the effort implies.
        switch: what `thinking` says.
        effort: the reasoning effort.

    Raises:
        ValueError: a toggle is neither true nor false, or two contradict each other.
    """
    given = {f"chat_template_kwargs.{name}": options[name] for name in TOGGLES if options.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}.")
    implied = None if effort is None else effort != "none"
    said = {name: value for name, value in given.items() if value is not implied}
    if switch is not None:
        said["thinking.type"] = switch
    if len(set(said.values())) > 1:
        raise ValueError(f"thinking is switched on and off: {said}. Send one switch.")
    return next(iter(said.values()), implied if given else None)


def carry_budget(
    original: Callable[..., ChatCompletionRequest],
    serving: AnthropicServing,
    request: AnthropicMessagesRequest,
    *args: Any,
    **kwargs: Any,
) -> ChatCompletionRequest:
    """SGLang's chat request, with Anthropic's `thinking`; runs around ``_convert_to_chat_completion_request``.

    SGLang does not see the budget: it would log that nothing enforces it.
    """
    thinking = request.thinking
    if thinking is None or serving.openai_serving_chat.chat_encoding_spec != ENCODING:
        return original(serving, request, *args, **kwargs)
    without_budget = thinking.model_copy(update={"budget_tokens": None})
    chat = original(serving, request.model_copy(update={"thinking": without_budget}), *args, **kwargs)
    chat.thinking = thinking.model_dump(exclude_none=True)
    return chat
