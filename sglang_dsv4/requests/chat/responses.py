"""Requests of the Responses API that SGLang 0.5.23 serves with other numbers than the client gave."""

from __future__ import annotations

from typing import Any

from sglang_dsv4.seam.live import serves_deepseek_v4


def keep_output_tokens(
    parameters: dict[str, Any], request: Any, default_max_tokens: int | None = None, *args: object, **kwargs: object
) -> dict[str, Any]:
    """The sampling parameters of a Responses request, with as many tokens as it asks for.

    Runs after ``ResponsesRequest.to_sampling_params``, which takes two off for tokens that the engine does not add:
    ``max_output_tokens`` of 1 became -1.

    Args:
        parameters: SGLang's.
        request: the request.
        default_max_tokens: most tokens of any answer, if SGLang says so.
        args, kwargs: the other arguments of SGLang's method.
    """
    limits = [limit for limit in (request.max_output_tokens, default_max_tokens) if limit is not None]
    return {**parameters, "max_new_tokens": min(limits)} if limits and serves_deepseek_v4() else parameters
