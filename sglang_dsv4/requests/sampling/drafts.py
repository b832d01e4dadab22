"""Sampling options with drafts: a request's tokens have the bits of a server without drafts.

A verify step computes a row for a request's last token and for each draft. Row i belongs to the token after i accepted
drafts, so it gets the penalties of an answer that has these drafts, and custom logit processors see such an answer.
SGLang 0.5.23 gives all rows the penalties of the last token it has processed (EAGLE), or none, because it reads a field
that was renamed (DSPARK); with EAGLE it leaves out custom logit processors. Here one function, :func:`adjust`, does
what SGLang does without drafts, in its order: penalties, grammar, biases, processors. Then accepted tokens are counted.

`docs/speculation.md` has the table of options and paths.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.requests import not_finite
from sglang_dsv4.requests.sampling import penalties
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.dspark_components.dspark_verify import AcceptOuts, TargetVerifyResult
    from sglang.srt.speculative.eagle_info import EagleVerifyInput


class AnswerWithDrafts:
    """A request as a custom logit processor sees it before the token after some accepted drafts."""

    def __init__(self, req: Req, drafts: list[int]) -> None:
        """Append drafts to a copy of the request's answer."""
        self._req = req
        self.output_ids = copy.copy(req.output_ids)
        self.output_ids.extend(drafts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def adjust(logits: Tensor, info: SamplingBatchInfo, candidates: Tensor, grammar_mask: GrammarMask | None) -> None:
    """Apply everything that changes a token's logits to the rows of a verify step.

    Args:
        logits: [B * k, V], changed.
        info: the forward's copy of the batch's sampling parameters.
        candidates: [B, k] integers, each request's last token and its drafts.
        grammar_mask: of all rows; None if there is none, or if it has been applied.
    """
    penalties.adjust_rows(logits, info, candidates)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        rows = logits.view(*candidates.shape, -1)
        rows.add_(info.logit_bias.unsqueeze(1))
    if info.has_custom_logit_processor:
        _process(logits, info, candidates[:, 1:].tolist())
    not_finite.mark_adjusted_rows(logits, info)


def _process(logits: Tensor, info: SamplingBatchInfo, drafts: list[list[int]]) -> None:
    """Run custom logit processors on all rows of their requests."""
    columns = len(drafts[0]) + 1
    for entry in info.custom_logit_processor.values():
        rows = [(request, column) for request in entry.rows for column in range(columns)]
        index = torch.tensor([request * columns + column for request, column in rows], device=logits.device)
        parameters = [_seen(info.custom_params[request], drafts[request][:column]) for request, column in rows]
        logits.index_copy_(0, index, entry.processor(logits.index_select(0, index), parameters).to(logits.dtype))


def _seen(parameters: dict[str, Any] | None, drafts: list[int]) -> dict[str, Any] | None:
    if parameters is None or "__req__" not in parameters:
        return parameters
    return {**parameters, "__req__": AnswerWithDrafts(parameters["__req__"], drafts)}


def process_results_first(
    disable: bool, scheduler: Scheduler, batch: ScheduleBatch | None, *args: Any, **kwargs: Any
) -> bool:
    """Whether a batch waits for the results of the batch before: also if a custom logit processor may read an answer,
    which is a token late otherwise. Runs after ``Scheduler.is_disable_overlap_for_batch``."""
    if live_parts() is None or not batch or not scheduler.result_queue:
        return disable
    return disable or (batch.sampling_info is not None and batch.sampling_info.has_custom_logit_processor)


# ------------------------------------------------------------------------------ EAGLE


def before_eagle_sample(
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: GrammarMask | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Adjust the rows, and take everything that SGLang would adjust out of the batch; runs before ``eagle_sample``."""
    if live_parts() is None or batch.forward_mode.is_idle():
        return None
    info = batch.sampling_info
    candidates = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    adjust(logits_output.next_token_logits, info, candidates, grammar_mask)
    not_finite.copy_adjusted_marks(logits_output, info)
    done = dataclasses.replace(info, acc_additive_penalties=None, acc_scaling_penalties=None, logit_bias=None)
    done.source = getattr(info, "source", None)
    batch.sampling_info = done  # SGLang restores the batch after the forward
    return (verify_input, batch, logits_output, None, *args), kwargs


def after_eagle_sample(
    accepted: tuple[Tensor, Tensor, Tensor],
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Count the accepted tokens; runs after ``eagle_sample``."""
    if live_parts() is not None and not batch.forward_mode.is_idle():
        predicted, lengths, rows = accepted
        penalties.count_accepted(batch.sampling_info, predicted[rows.clamp(min=0).long()], lengths)


# ------------------------------------------------------------------------------ DSPARK


def leave_rows(
    original: Callable[..., TargetVerifyResult], executor: object, *, sampling_info: SamplingBatchInfo, **kwargs: Any
) -> TargetVerifyResult:
    """The result of a verify step with rows as the model computed them; :func:`before_accept` adjusts them.

    Runs around ``TargetVerifyExecutor.run_non_compact``.
    """
    if live_parts() is None or sampling_info is None:
        return original(executor, sampling_info=sampling_info, **kwargs)
    result = original(executor, sampling_info=None, **kwargs)
    sampling_info.verified = result.logits_output
    return result


def before_accept(
    executor: object,
    *,
    folded_accept: bool,
    verify_ids_2d: Tensor,
    target_logits: Tensor,
    sampling_info: SamplingBatchInfo | None,
    **kwargs: Any,
) -> None:
    """Adjust the rows, to which SGLang has applied the grammar; runs before ``accept_and_finalize``."""
    if live_parts() is not None and sampling_info is not None and not folded_accept:
        adjust(target_logits, sampling_info, verify_ids_2d, None)
        not_finite.copy_adjusted_marks(sampling_info.verified, sampling_info)


def after_accept(outs: AcceptOuts, executor: object, *, sampling_info: SamplingBatchInfo | None, **kwargs: Any) -> None:
    """Count the accepted tokens; runs after ``accept_and_finalize``."""
    if live_parts() is not None and sampling_info is not None:
        penalties.count_accepted(sampling_info, outs.out_tokens.view(len(outs.commit_lens), -1), outs.commit_lens)


def rows_stay(noop: bool, sampling_info: SamplingBatchInfo | None) -> bool:
    """Whether a verify step may accept drafts inside its CUDA graph: nothing changes the logits.

    Runs after ``verify_logits_adjustments_are_noop``, which looks for a field that was renamed.
    """
    if live_parts() is None or sampling_info is None:
        return noop
    return noop and sampling_info.acc_additive_penalties is None and sampling_info.acc_scaling_penalties is None
