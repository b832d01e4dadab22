"""Token ids, sampling numbers and seeds that SGLang accepts and this model can't serve: they get a 400 with the reason.

SGLang 0.5.23 leaves some token ids unchecked, and an index outside the vocabulary would end the server, as would a
number that the dtype of a batch's tensor can't hold. `RANGES` lists such numbers and where SGLang makes the tensor; a
row can go when SGLang checks the number itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_dsv4.determinism import flag, refused_requests
from sglang_dsv4.requests import guards, sampling
from sglang_dsv4.requests.guards import INT32_MAX
from sglang_dsv4.seam.live import live_parts, serves_deepseek_v4

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

FP32_MAX, FP32_MIN = 3.4028234663852886e38, 2.0**-126


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
    for name in ("temperature", "repetition_penalty"):  # both divide logits, in fp32
        value = getattr(params, name)
        if not is_fp32(value) or (value != 0 and abs(value) < FP32_MIN):
            raise ValueError(f"{name} must be a number that fp32 can hold, got {value}.")
    for token_id, bias in (params.logit_bias or {}).items():
        if not is_fp32(bias):
            raise ValueError(f"logit_bias of token {token_id} must be a number that fp32 can hold, got {bias!r}.")


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
