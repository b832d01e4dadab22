"""Token ids, sampling numbers and seeds that SGLang accepts and this model can't serve: they get a 400 with the reason.

SGLang 0.5.23 leaves some token ids unchecked, and an index outside the vocabulary would end the server, as would a
number that the dtype of a batch's tensor can't hold. `RANGES` lists such numbers and where SGLang makes the tensor; a
row can go when SGLang checks the number itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_dsv4.determinism import flag, refused_requests
from sglang_dsv4.requests import guards, sampling, thinking_budget
from sglang_dsv4.requests.guards import INT32_MAX
from sglang_dsv4.seam.live import live_parts, serves_deepseek_v4

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

FP32_MAX, FP32_MIN = 3.4028234663852886e38, 2.0**-126
LARGEST_BIAS, LEAST_DIVISOR = 1e20, 1e-6
"""With logits of at most 1e20 (`layers.logits`) and a temperature of at least 1e-6, below which SGLang draws nothing, a
biased and penalised logit stays finite in fp32: beyond, softmax would be inf - inf."""


class Range(NamedTuple):
    """The largest value of a sampling parameter, which SGLang does not check."""

    highest: int
    upstream: str  # SGLang's code that would fail


RANGES = {
    "top_k": Range(INT32_MAX, "SamplingBatchInfo.from_schedule_batch: torch.int32"),
    "min_new_tokens": Range(INT32_MAX, "penaltylib.min_new_tokens: torch.int32"),
    "max_new_tokens": Range(INT32_MAX, "as min_new_tokens, which it bounds"),
}


def check_sampling_parameters(params: SamplingParams, *args: object, **kwargs: object) -> None:
    """Check a request's sampling parameters, before SGLang's ``SamplingParams.verify``.

    Args:
        params: the request's.
        args, kwargs: the other arguments of SGLang's method.

    Raises:
        ValueError: a number that would end the server; SGLang answers 400.
    """
    if not serves_deepseek_v4():
        return
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if value is not None and value > allowed.highest:
            raise ValueError(f"{name} must be at most {allowed.highest}, got {value}.")
    if not is_fp32(params.temperature) or 0 != abs(params.temperature) < FP32_MIN:
        raise ValueError(f"temperature must be a number that fp32 can hold, got {params.temperature}.")
    if not is_fp32(params.repetition_penalty) or 0 != abs(params.repetition_penalty) < LEAST_DIVISOR:
        raise ValueError(f"repetition_penalty must be at least {LEAST_DIVISOR:g}, got {params.repetition_penalty}.")
    thinking_budget.budget_of(params)
    for token_id, bias in (params.logit_bias or {}).items():
        if not is_fp32(bias) or abs(bias) > LARGEST_BIAS:
            raise ValueError(
                f"logit_bias of token {token_id} must be a number from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, "
                f"got {bias!r}."
            )


def is_fp32(value: object) -> bool:
    """Whether a value is a number that is finite in fp32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= FP32_MAX


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
        if sampling.seed_of(req) is not None and (reason := sampling.reason_against_seeds(*sampling_setup())):
            error = error or reason
            req.sampling_params.sampling_seed = None
    if sampling.uses_min_p(req):
        error = error or sampling.reason_against_min_p(sampling_setup()[1])
    if flag.is_on():
        error = error or refused_requests.reason_against(req, *accelerator_setup())
    if req.logprob.top_logprobs_num > req.vocab_size:
        error = error or f"top_logprobs_num is {req.logprob.top_logprobs_num}; the vocabulary has {req.vocab_size}."
        req.logprob.top_logprobs_num = 0
    return error


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
