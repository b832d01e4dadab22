"""Marks of rows without a usable token travel with the tokens, so that all stages end the same requests.

See `sglang_dsv4.requests.not_finite`. SGLang sends a forward's tokens from the last stage to the first, and from there
to the others, as a dict of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsv4.requests.not_finite import to_host

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_pp_mixin import PPBatchMetadata
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
    from torch import Tensor

PREFIX = "sglang_dsv4_"
MARKS = ("marks", "unusable")
"""Attributes of a logits output that `requests.not_finite` sets."""


def send_marks(
    tensors: dict[str, Tensor], scheduler: Scheduler, result: GenerationBatchResult, batch: ScheduleBatch
) -> None:
    """Add the marks to the tensors of a forward's tokens; runs after `SchedulerPPMixin._pp_prepare_tensor_dict`."""
    for name in MARKS:
        marks = getattr(result.logits_output, name, None)
        if marks is not None:
            tensors[PREFIX + name] = marks


def receive_marks(
    result: GenerationBatchResult,
    scheduler: Scheduler,
    batch: ScheduleBatch,
    metadata: PPBatchMetadata,
    outputs: PPProxyTensors,
) -> None:
    """Copy the marks among a forward's tokens to the host; runs after `SchedulerPPMixin._pp_prep_batch_result`.

    SGLang waits for this stream before it processes the result.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    marks, unusable = (outputs.tensors.get(PREFIX + name) for name in MARKS)
    if marks is None:
        return
    if result.logits_output is None:
        result.logits_output = LogitsProcessorOutput(next_token_logits=None)
    result.logits_output.marks = to_host(marks)
    if unusable is not None:
        result.logits_output.unusable = to_host(unusable)
