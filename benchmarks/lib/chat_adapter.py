"""SGLang's encoder of chat requests for DeepSeek-V4, without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.serving_deepseek_recipe import DeepSeekRecipeChatEncodingAdapter
    from transformers import PreTrainedTokenizerBase


def chat_adapter(tokenizer: PreTrainedTokenizerBase) -> DeepSeekRecipeChatEncodingAdapter:
    """Return the adapter that renders a request's messages to token ids, as a server without chat options does."""
    from sglang.srt.entrypoints.openai.serving_deepseek_recipe import DeepSeekRecipeChatEncodingAdapter

    return DeepSeekRecipeChatEncodingAdapter(
        chat_encoding_spec="dsv4",
        tokenizer=tokenizer,
        reasoning_parser=None,
        tool_call_parser=None,
        chat_hooks=None,
        default_chat_template_kwargs=None,
    )
