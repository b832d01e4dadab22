"""Requests of the Responses API: what SGLang 0.5.23 changes or drops of them.

SGLang serves `max_output_tokens` less two, and drops `thinking` and `custom_params`, which its model of the request
does not have. Here :func:`read_switches` reads both from the body, :func:`hand_over` gives them to the chat request
that SGLang makes of a Responses request, and :func:`complete_sampling` gives the engine what `requests.chat.switches`
made of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.live import serves_deepseek_v4

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest


@dataclass
class Switches:
    """Fields of the chat route in the body of a Responses request."""

    thinking: Any = None
    custom_params: Any = None


_switches: ContextVar[Switches | None] = ContextVar("switches", default=None)


async def read_switches(
    original: Callable[..., Awaitable[Any]], serving: object, request: object, raw_request: Request | None = None
) -> Any:
    """SGLang's answer to a Responses request, with the body's switches; runs around ``create_responses``.

    Args:
        original: SGLang's method.
        serving: the route's handler.
        request: SGLang's model of the request, without the switches.
        raw_request: the HTTP request; None if there is none.
    """
    body = await raw_request.json() if raw_request is not None and serves_deepseek_v4() else {}
    token = _switches.set(Switches(body.get("thinking"), body.get("custom_params")))
    try:
        return await original(serving, request, raw_request)
    finally:
        _switches.reset(token)


def hand_over(request: ChatCompletionRequest) -> None:
    """Give a Responses request's switches to the chat request that is made of it; does nothing for a chat request.

    Raises:
        ValueError: `custom_params` is no object; SGLang answers 400.
    """
    switches = _switches.get()
    if switches is None:
        return
    if not isinstance(switches.custom_params, dict | None):
        raise ValueError(f"custom_params must be an object, got {switches.custom_params!r:.100}.")
    request.thinking, request.custom_params = switches.thinking, switches.custom_params


def keep(custom_params: dict[str, Any] | None) -> None:
    """Keep what became of `custom_params`, for :func:`complete_sampling`; does nothing for a chat request."""
    if (switches := _switches.get()) is not None:
        switches.custom_params = custom_params


def complete_sampling(
    parameters: dict[str, Any], request: Any, default_max_tokens: int | None = None, *args: object, **kwargs: object
) -> dict[str, Any]:
    """The sampling parameters of a Responses request, with as many tokens as it asks for and its `custom_params`.

    Runs after ``ResponsesRequest.to_sampling_params``, which takes two tokens off for tokens that the engine does not
    add: ``max_output_tokens`` of 1 became -1.

    Args:
        parameters: SGLang's.
        request: the request.
        default_max_tokens: most tokens of any answer, if SGLang says so.
        args, kwargs: the other arguments of SGLang's method.
    """
    if not serves_deepseek_v4():
        return parameters
    limits = [limit for limit in (request.max_output_tokens, default_max_tokens) if limit is not None]
    switches = _switches.get()
    if switches is not None and switches.custom_params:
        parameters = {**parameters, "custom_params": switches.custom_params}
    return {**parameters, "max_new_tokens": min(limits)} if limits else parameters
