"""A 400 for token ids outside the vocabulary, and for prompts, seeds and options that this server can't serve.

SGLang 0.5.23 leaves some token ids unchecked, and an index outside the vocabulary would end the server. The check runs
in the scheduler, which knows the vocabulary, the sampling backend and the speculative algorithm.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from sglang_dsv4.determinism import flag, refused_requests
from sglang_dsv4.pipeline.this_stage import is_divided
from sglang_dsv4.requests.refused import guards, stop_patterns
from sglang_dsv4.requests.sampling import sampler
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def refuse_unknown_token_ids(error: str | None, req: Req, *args: object, **kwargs: object) -> str | None:
    """The reason for a 400, or None; runs after SGLang's ``validate_input_length``.

    SGLang still computes one token of a refused request, in a batch with others. Therefore this also removes the values
    from the request that its sampling would use as an index.

    Args:
        error: SGLang's own reason, or None.
        req: the request.
        args, kwargs: the other arguments of SGLang's function.
    """
    if live_parts() is None:
        return error
    # The first stage of a pipeline sends the parameters on after this: the next stage must find them as they came, or
    # it would not refuse the request.
    req.sampling_params = copy.copy(req.sampling_params)
    for what, ids in (("Token", req.origin_input_ids), ("Stop token", req.sampling_params.stop_token_ids)):
        unknown = [token for token in (min(ids), max(ids)) if not 0 <= token < req.vocab_size] if ids else []
        if unknown:
            last = req.vocab_size - 1
            error = error or f"{what} id {unknown[0]} is not in the vocabulary; valid ids are 0 to {last}."
            if what == "Stop token":
                req.sampling_params.stop_token_ids = None  # the penaliser of min_new_tokens indexes with them
    error = error or guards.check_input_embeds(req)
    if not len(req.origin_input_ids):  # `"text": ""`; SGLang itself refuses an empty list of ids
        error = error or "The prompt is empty: it has no token."
    if req.sampling_params.sampling_seed is not None:
        if sampler.seed_of(req) is not None and (reason := sampler.reason_against_seeds(*sampling_setup())):
            error = error or reason
            req.sampling_params.sampling_seed = None
    if sampler.uses_min_p(req):
        error = error or sampler.reason_against_min_p(sampling_setup()[1])
    if req.sampling_params.stop_regex_strs and is_divided():
        error = error or stop_patterns.REASON_AGAINST_STAGES
        req.sampling_params.stop_regex_strs = []
    if flag.is_on():
        error = error or refused_requests.reason_against(req, *accelerator_setup())
    if req.logprob.top_logprobs_num > req.vocab_size:
        error = error or f"top_logprobs_num is {req.logprob.top_logprobs_num}; the vocabulary has {req.vocab_size}."
        req.logprob.top_logprobs_num = 0
    if transfers():
        error = error or reason_against_transfer(req)
        req.logprob.top_logprobs_num = min(req.logprob.top_logprobs_num, CARRIED_TOP_LOGPROBS)
    return error


CARRIED_TOP_LOGPROBS = 128
"""Top log-probabilities of the first token that SGLang carries from a prefill server to a decode server."""


def reason_against_transfer(req: Req) -> str | None:
    """Why a prefill and a decode server can't answer a request together, or None.

    More top log-probabilities would end SGLang's prefill server, the chosen tokens' log-probabilities of the first
    token would be left out without a word, and all answers of ``n`` above 1 would have the number of one transfer.
    """
    if req.sampling_params.n > 1:
        return (
            f"n is {req.sampling_params.n}; with --disaggregation-mode it is 1, since each answer needs a transfer of "
            "its own. Send as many requests."
        )
    if req.logprob.top_logprobs_num > CARRIED_TOP_LOGPROBS:
        asked = req.logprob.top_logprobs_num
        return f"top_logprobs_num is {asked}; with --disaggregation-mode it is at most {CARRIED_TOP_LOGPROBS}."
    if req.logprob.token_ids_logprob is not None:
        return (
            "token_ids_logprob is not supported with --disaggregation-mode: the first token's do not travel. Ask for "
            f"top_logprobs_num, at most {CARRIED_TOP_LOGPROBS}, or a server without --disaggregation-mode."
        )
    return None


def transfers() -> bool:
    """Whether this server is a prefill or a decode server."""
    from sglang.srt.runtime_context import get_disagg

    return get_disagg().disaggregation_mode != "null"


def sampling_setup() -> tuple[str, str | None]:
    """The server's sampling backend, and its speculative algorithm if drafts change how tokens are drawn."""
    from sglang.srt.runtime_context import get_device, get_exec, get_server_args

    algorithm = get_server_args().speculative_algorithm
    # On a CPU, EAGLE draws as a decode step does, see `cpu.speculation`.
    if get_device().device == "cpu" and algorithm != "DSPARK":
        algorithm = None
    return get_exec().kernel.sampling_backend, algorithm


def accelerator_setup() -> tuple[bool, str | None]:
    """Whether the model is on a GPU, and the server's speculative algorithm."""
    from sglang.srt.runtime_context import get_device, get_server_args

    return get_device().device != "cpu", get_server_args().speculative_algorithm
