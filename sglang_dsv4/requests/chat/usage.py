"""The number of reasoning tokens in the usage of Anthropic's route: `usage.output_tokens_details.thinking_tokens`.

SGLang 0.5.23 reports `reasoning_tokens` on the chat and Responses routes; its usage of Anthropic's route has no field
for it. The field is Anthropic's own: in a whole message, and in a stream's last `message_delta`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.live import serves_deepseek_v4
from sglang_dsv4.seam.rows.clients import MESSAGE, MESSAGE_DELTA

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicUsage


def start(result: None, serving: object, *args: object, **kwargs: object) -> None:
    """Let messages and their deltas carry the field; runs after ``AnthropicServing.__init__``."""
    if serves_deepseek_v4():
        from sglang.srt.entrypoints.anthropic import serving as module

        set_attribute(module, MESSAGE)
        set_attribute(module, MESSAGE_DELTA)


@functools.cache
def with_details() -> type[AnthropicUsage]:
    """SGLang's usage of Anthropic's route, with `output_tokens_details`."""
    from pydantic import create_model
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicUsage

    details = create_model("OutputTokensDetails", thinking_tokens=(int, ...))
    return create_model("Usage", __base__=AnthropicUsage, output_tokens_details=(details, ...))


@functools.cache
def _carrier(model: type[Any]) -> type[Any]:
    from pydantic import SerializeAsAny, create_model

    field = model.model_fields["usage"]
    return create_model(model.__name__, __base__=model, usage=(SerializeAsAny[field.annotation], field))


def carrying_details(model: type[Any], owner: object) -> type[Any]:
    """SGLang's model of a message or of a message's delta, whose JSON has all fields of its usage.

    Without it pydantic writes the fields of :class:`AnthropicUsage` only. A model of ours is returned as it is.
    """
    return model if model.__module__ == __name__ else _carrier(model)


def add_thinking_tokens(
    result: AnthropicUsage, usage: Any, *, include_output: bool, force_zero_output: bool = False, **kwargs: object
) -> AnthropicUsage | None:
    """The usage with the number of reasoning tokens, if there are any; runs after ``_anthropic_usage_from_openai``.

    Args:
        result: SGLang's.
        usage: the chat route's.
        include_output: whether output tokens are reported.
        force_zero_output: whether they are reported as 0, as in the beginning of a stream.
        kwargs: the other arguments of SGLang's function.
    """
    tokens = getattr(usage, "reasoning_tokens", 0)
    if not tokens or not include_output or force_zero_output or not serves_deepseek_v4():
        return None
    return with_details()(**result.model_dump(), output_tokens_details={"thinking_tokens": tokens})
