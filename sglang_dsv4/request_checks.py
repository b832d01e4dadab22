"""Requests that SGLang would take and this model can't serve: they get a 400 with the reason.

SGLang leaves some token ids unchecked, and an index outside the vocabulary would end the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsv4 import compat, sampling

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def refuse_unknown_token_ids(error: str | None, req: Req, *args: object, **kwargs: object) -> str | None:
    """After SGLang's ``validate_input_length``: the reason for a 400, or None.

    A refused request still runs one token, beside others: so what its sampling would index with is taken out as well.

    Args:
        error: SGLang's reason.
        req: the request.
        args, kwargs: what else SGLang's function takes.
    """
    if compat.live_parts() is None:
        return error
    for what, ids in (("Token", req.origin_input_ids), ("Stop token", req.sampling_params.stop_token_ids)):
        unknown = [token for token in (min(ids), max(ids)) if not 0 <= token < req.vocab_size] if ids else []
        if unknown:
            last = req.vocab_size - 1
            error = error or f"{what} id {unknown[0]} is not in the vocabulary; valid ids are 0 to {last}."
            if what == "Stop token":
                req.sampling_params.stop_token_ids = None  # read by the penaliser of min_new_tokens
    if not len(req.origin_input_ids):  # `"text": ""`; of no input ids SGLang itself says so
        error = error or "The prompt is empty: it has no token."
    if req.sampling_params.sampling_seed is not None:
        if sampling.seed_of(req) is not None and (reason := sampling.reason_against_seeds(*sampling_setup())):
            error = error or reason
            req.sampling_params.sampling_seed = None
    if req.logprob.top_logprobs_num > req.vocab_size:
        error = error or f"top_logprobs_num is {req.logprob.top_logprobs_num}; the vocabulary has {req.vocab_size}."
        req.logprob.top_logprobs_num = 0
    return error


def sampling_setup() -> tuple[str, str | None]:
    """The server's sampling backend, and its speculative algorithm if that draws in a way of its own."""
    from sglang.srt.runtime_context import get_device, get_exec, get_server_args

    algorithm = get_server_args().speculative_algorithm
    if get_device().device == "cpu" and algorithm != "DSPARK":  # see `cpu.speculation`
        algorithm = None
    return get_exec().kernel.sampling_backend, algorithm
