"""A 400 for sampling parameters that the dtype of a batch's tensor can't hold, or that make a logit infinite.

SGLang 0.5.23 accepts these numbers, and the tensor of a batch then ends the server. `RANGES` names SGLang's code that
makes the tensor; a row can go when SGLang checks the number itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_dsv4.requests.chat import thinking_budget
from sglang_dsv4.requests.refused.guards import INT32_MAX
from sglang_dsv4.seam.live import serves_deepseek_v4

if TYPE_CHECKING:
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
