"""A request whose logits are not finite ends with a reason. SGLang 0.5.23 answers token 0, or its sampler ends the
server.

The logits processor marks a row of the model's logits that holds NaN, an infinity or a value beyond 1e20
(`layers.logits.mark_rows_not_finite`), inside CUDA graphs too. The marks of a forward are copied to the host together
with its tokens, so nothing waits for them, and the request is ended when SGLang processes the forward's results. Its
token is not part of the answer, and its KV is not kept for other requests.

The last stage of a pipeline has the logits; `sglang_dsv4.pipeline.marks` brings the marks to the other stages.

Penalties, biases, a grammar and a custom logit processor may leave a row without any token, or put NaN into it:
:func:`mark_adjusted_rows` looks at such batches only.

    SGLANG_DSV4_FIND_NOT_FINITE    on: the log names the first layer with values that are not finite (`layers.finite`)

With `--enable-metrics`: `sglang_dsv4:not_finite_requests_total{cause}`, cause being `model` or `adjusted`.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.layers.finite import VARIABLE
from sglang_dsv4.layers.logits import LARGEST_LOGIT, NOT_FINITE
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from prometheus_client import Counter
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

logger = logging.getLogger(__name__)

METRIC = "sglang_dsv4:not_finite_requests"
MODEL, ADJUSTED = "model", "adjusted"
REASONS = {
    MODEL: (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"the model's logits are not finite (NaN, or beyond {LARGEST_LOGIT:g}): the answer ends here. Start the server "
        f"with {VARIABLE}=on to find the layer; weights and `input_embeds` are the usual causes.",
    ),
    ADJUSTED: (
        HTTPStatus.BAD_REQUEST,
        "no token can be drawn: penalties, logit_bias, min_new_tokens, the grammar and the custom logit processor "
        "forbid every token, or one of them gives a value that is not finite. Change or leave out one of them.",
    ),
}
"""Cause -> status of the answer, and its reason."""

_counter: tuple[Counter, dict[str, str]] | None = None


def start(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Declare the metric; runs after ``Scheduler.__init__``."""
    global _counter
    if live_parts() is None or not scheduler.metrics_reporter.enable_metrics:
        return
    from prometheus_client import Counter

    labels = scheduler.metrics_collector.labels
    counter = Counter(METRIC, "Requests that ended because logits were not finite.", [*labels, "cause"])
    for cause in REASONS:
        counter.labels(**labels, cause=cause)  # shown from the start, as 0
    _counter = counter, labels


def note_rows(output: ModelRunnerOutput, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
    """Copy the marks of a forward of the target to the host; runs after ``ModelRunner.forward``.

    All logits of a marked row are equal, so the first one is enough. It is copied before penalties and sampling change
    the logits.
    """
    if live_parts() is None or runner.is_draft_worker:
        return
    logits = getattr(output.logits_output, "next_token_logits", None)
    if logits is not None:
        output.logits_output.marks = kept(logits[:, 0])


def kept(marks: Tensor) -> Tensor:
    """A copy of marks: on the host, or on their device if it is to travel to the other stages of a pipeline."""
    from sglang.srt.runtime_context import get_parallel

    return to_host(marks) if get_parallel().pp_size == 1 else marks.clone()


def to_host(values: Tensor) -> Tensor:
    """A copy on the host; from a GPU it is complete when the results of this forward are."""
    if values.device.type == "cpu":
        return values.clone()
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)


def is_adjusted(info: SamplingBatchInfo) -> bool:
    """Whether penalties, biases, grammars or custom logit processors change the logits of a batch."""
    tensors = (info.acc_additive_penalties, info.acc_scaling_penalties, info.logit_bias, info.grammars)
    penalisers = info.penalizer_orchestrator  # a forward's without overlap and drafts; else the tensors hold penalties
    return (
        info.has_custom_logit_processor
        or (penalisers is not None and penalisers.is_required)
        or any(values is not None for values in tensors)
    )


def mark_adjusted_rows(logits: Tensor, info: SamplingBatchInfo) -> None:
    """Set all logits of a row of `logits [rows, V]` to 0 if no token can be drawn from it; note these rows in `info`.

    A token can be drawn if a logit is finite and none is NaN or +inf; -inf forbids a token.
    """
    if is_adjusted(info):
        largest = logits.amax(-1)  # NaN if a logit is NaN
        unusable = ~(largest.abs() < torch.inf)
        logits.masked_fill_(unusable.unsqueeze(-1), 0.0)
        info.unusable = unusable


def after_preprocessing(logits: Tensor, sampler: object, _: Tensor, sampling_info: SamplingBatchInfo) -> None:
    """:func:`mark_adjusted_rows` for a batch without drafts; runs after ``Sampler._preprocess_logits``."""
    if live_parts() is not None:
        mark_adjusted_rows(logits, sampling_info)


def note_adjusted_rows(
    tokens: Tensor, runner: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: Any
) -> None:
    """Copy the rows that :func:`mark_adjusted_rows` noted to the host; runs after ``ModelRunner.sample``."""
    copy_adjusted_marks(logits_output, forward_batch.sampling_info)


def copy_adjusted_marks(logits_output: LogitsProcessorOutput, info: SamplingBatchInfo) -> None:
    """Copy the rows that `info` notes to the host, once, and keep them with the logits."""
    unusable = getattr(info, "unusable", None)
    if unusable is not None:
        logits_output.unusable = kept(unusable)
        info.unusable = None


def end_requests(processor: object, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """End the requests of a forward whose row was marked.

    Runs before ``process_batch_result_prefill`` and ``process_batch_result_decode``.
    """
    marks = getattr(getattr(result, "logits_output", None), "marks", None)
    if marks is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    unusable = getattr(result.logits_output, "unusable", None)
    end_marked(batch, result, marks >= NOT_FINITE, MODEL)
    if unusable is not None:
        end_marked(batch, result, unusable, ADJUSTED)


def end_marked(batch: ScheduleBatch, result: GenerationBatchResult, marked: Tensor, cause: str) -> None:
    """End the requests that have a marked row among the rows of their tokens; `marked [rows]` bool, on the host.

    With drafts a request has a row for each draft and one more, of which the first `accept_lens` gave tokens.
    """
    if not marked.any():
        return
    rows = marked.view(len(batch.reqs), -1)
    lengths = [1] * len(rows) if result.accept_lens is None else result.accept_lens.tolist()
    for req, row, length in zip(batch.reqs, rows.tolist(), lengths, strict=True):
        if any(row[:length]) and not req.finished() and not req.is_retracted:
            end(req, cause, batch)


def end(req: Req, cause: str, batch: ScheduleBatch) -> None:
    """End one request without the token of this forward."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    status, reason = REASONS[cause]
    where = f"token {len(req.output_ids)} of the answer"
    mode = batch.forward_mode.name.lower()
    logger.warning(
        "sglang_dsv4: request %s ends at %s (%s, forward %s): %s", *(req.rid, where, mode, batch.forward_iter, reason)
    )
    if _counter is not None:
        counter, labels = _counter
        counter.labels(**labels, cause=cause).inc()
    finish = FINISH_ABORT(f"{where}: {reason}", status, "NotFinite")
    if batch.forward_mode.is_extend():
        req.discard_output_reason = finish
    else:
        req.finished_len = len(req.output_ids)
        req.skip_radix_cache_insert = True
        req.to_finish = finish
