"""Penalties count every token of a request's answer once, independent of the other requests, of overlap and of drafts.

SGLang 0.5.23 updates a penaliser while it prepares a decode step, with the last token whose result it has processed
(``ScheduleBatch.cumulate_penalty_output_tokens``). Under overlapped scheduling that token is one decode step old, at
first the last token of the prompt. When other requests make the scheduler wait for a result, a token is skipped or
counted twice; with drafts one token of a block is counted. A request that was retracted comes back with nothing
counted. Here

* tokens are counted on the device, on the stream that sampled or accepted them;
* a new batch first counts the tokens of the answers that its requests already have;
* :func:`adjust_rows` gives every row of a block of drafts the penalties that it would have without drafts.

The scheduler filters and merges penalisers on another stream than the one that counts. :func:`wait_for_counts` orders
the two on a GPU; the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.requests.chat.thinking_budget import NO_LIMIT, budget_of, left_at_start, think_tokens
from sglang_dsv4.seam.bases import RowPenaliser
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

COUNTS: dict[str, Callable[[Any], Tensor]] = {
    "BatchedFrequencyPenalizer": lambda penaliser: penaliser.cumulated_frequency_penalties,
    "BatchedPresencePenalizer": lambda penaliser: penaliser.cumulated_presence_penalties,
    "BatchedRepetitionPenalizer": lambda penaliser: penaliser.cumulated_repetition_penalties,
    "BatchedMinNewTokensPenalizer": lambda penaliser: penaliser.len_output_tokens,
    "BatchedThinkingBudget": lambda penaliser: penaliser.rows["left"],
}
"""The tensor [B, ...] of each penaliser that changes with every counted token."""
SCALING = "BatchedRepetitionPenalizer"
"""The penaliser that scales logits; the others add to them."""


class BatchedThinkingBudget(RowPenaliser):
    """The thinking budgets of a batch, see :mod:`sglang_dsv4.requests.chat.thinking_budget`.

    Its rows: `left [B, 1]` int32, the tokens until the block must end, and `end [B, 1]` int64, the id of `</think>`.
    """

    def is_needed_by(self, req: Req) -> bool:
        """Whether the request has a budget."""
        return budget_of(req.sampling_params) is not None

    def rows_of(self, reqs: list[Req], device: str) -> dict[str, Tensor]:
        """The budgets of requests that have no answer yet."""
        ends = [(think_tokens(req.tokenizer) or (0, 0))[1] if req.tokenizer is not None else 0 for req in reqs]
        left = torch.tensor([left_at_start(req) for req in reqs], dtype=torch.int32)
        return {
            "left": left.to(device, non_blocking=True).unsqueeze(1),
            "end": torch.tensor(ends, dtype=torch.int64).to(device, non_blocking=True).unsqueeze(1),
        }

    def count(self, tokens: Tensor) -> None:
        """Count a next token [B]; `</think>` ends the block."""
        left, end = self.rows["left"], self.rows["end"]
        left.copy_(torch.where((left < NO_LIMIT) & (tokens.unsqueeze(1) != end), left - 1, NO_LIMIT))

    def penalise(self, logits: Tensor) -> None:
        """Forbid every token but `</think>` where no reasoning token is left."""
        left, end = self.rows["left"], self.rows["end"]
        kept = logits.gather(1, end)
        logits.masked_fill_(left <= 0, -torch.inf).scatter_(1, end, kept)


@dataclass
class Rows:
    """The part of a batch that a penaliser reads."""

    reqs: list[Req]
    device: str


def counts_of(orchestrator: BatchedPenalizerOrchestrator) -> Iterator[Tensor]:
    """The tensors of a batch's penalisers that change with every counted token, always in the same order."""
    for penaliser in orchestrator.penalizers.values():
        if penaliser.is_prepared():
            yield COUNTS[type(penaliser).__name__](penaliser)


def remember_source(copy: SamplingBatchInfo, info: SamplingBatchInfo) -> None:
    """Store its source in a copy; runs after ``SamplingBatchInfo.copy_for_forward``, which omits the penalisers."""
    copy.source = info


def counting(info: SamplingBatchInfo | None) -> SamplingBatchInfo | None:
    """The batch's sampling parameters, which hold the penalisers, of those that a forward has.

    A forward has a copy of them, but without overlap and drafts the batch's own. None if the batch has no penalisers,
    or if SGLang counts for them.
    """
    source = getattr(info, "source", info)
    if source is None or live_parts() is None or not source.penalizer_orchestrator.is_required:
        return None
    return source


def count_sampled(
    tokens: Tensor, runner: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
) -> None:
    """Count the sampled `tokens [batch]` for the next decode step's penalties; runs after ``ModelRunner.sample``."""
    source = counting(forward_batch.sampling_info)
    if source is not None:
        source.penalizer_orchestrator.cumulate_output_tokens(tokens.long())
        _note_counts(source)


def count_accepted(info: SamplingBatchInfo, tokens: Tensor, lengths: Tensor) -> None:
    """Count the first `lengths [B]` of each request's `tokens [B, k]`, which a verify step accepted.

    Args:
        info: the forward's copy of the batch's sampling parameters.
        tokens: any integer where a request has fewer.
        lengths: at least 1.
    """
    source = counting(info)
    if source is None:
        return
    orchestrator = source.penalizer_orchestrator
    for column in range(tokens.shape[1]):
        before = [counts.clone() for counts in counts_of(orchestrator)]
        accepted = column < lengths
        orchestrator.cumulate_output_tokens(torch.where(accepted, tokens[:, column], 0).long())
        # Written in place: the scheduler's stream reads these tensors.
        for counts, earlier in zip(counts_of(orchestrator), before, strict=True):
            counts.copy_(torch.where(accepted.unsqueeze(1), counts, earlier))
    _note_counts(source)


def adjust_rows(logits: Tensor, info: SamplingBatchInfo, candidates: Tensor) -> None:
    """Apply penalties to the rows of a verify step, each as if the tokens before it had been sampled one by one.

    Args:
        logits: [B * k, V], changed.
        info: the forward's copy of the batch's sampling parameters.
        candidates: [B, k] integers, each request's last token and its drafts.
    """
    source = counting(info)
    if source is None:
        return
    orchestrator = source.penalizer_orchestrator
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    rows = logits.view(*candidates.shape, -1)
    before = [counts.clone() for counts in counts_of(orchestrator)]
    for column in range(candidates.shape[1]):
        if column:
            orchestrator.cumulate_output_tokens(candidates[:, column].long())
        added = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32, device=rows.device)
        orchestrator.accumulate_additive_penalties(added)
        rows[:, column].add_(added)
        if (scaling := orchestrator.accumulate_scaling_penalties()) is not None:
            apply_scaling_penalties(rows[:, column], scaling)
    for counts, earlier in zip(counts_of(orchestrator), before, strict=True):
        counts.copy_(earlier)


def _note_counts(source: SamplingBatchInfo) -> None:
    """Mark the point on this stream after which the counts are complete."""
    if source.temperatures.is_cuda:
        stream = torch.cuda.current_stream()
        for counts in counts_of(source.penalizer_orchestrator):
            counts.record_stream(stream)
        source.counted = stream.record_event()


def wait_for_counts(info: SamplingBatchInfo, *others: object) -> None:
    """Let this stream wait until the counts of these batches are complete; the host goes on.

    Runs before ``SamplingBatchInfo.copy_for_forward``, ``filter_batch`` and ``merge_batch``.
    """
    for one in (info, *others):
        if (counted := getattr(one, "counted", None)) is not None:
            torch.cuda.current_stream().wait_event(counted)


def leave_out_processed(original: Callable[[ScheduleBatch], None], batch: ScheduleBatch) -> None:
    """Don't count tokens twice: skip ``ScheduleBatch.cumulate_penalty_output_tokens`` where this module counts."""
    if live_parts() is None:
        original(batch)


def complete(result: None, info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """Complete a new batch's penalisers; runs after ``SamplingBatchInfo.adjusted_from_schedule_batch``.

    They get the thinking budget and a fixed order, and count the earlier answers of retracted requests.
    """
    if live_parts() is None:
        return
    orchestrator = info.penalizer_orchestrator
    orchestrator.penalizers = additive_first(orchestrator.penalizers)
    budget = BatchedThinkingBudget(orchestrator)
    orchestrator.penalizers[BatchedThinkingBudget] = budget
    orchestrator.is_required |= budget.prepare_if_required()
    if orchestrator.is_required and any(req.output_ids for req in batch.reqs):
        info.penalizer_orchestrator = recount(orchestrator, batch)


def additive_first(penalisers: dict[type, Any]) -> dict[type, Any]:
    """The penalisers of a batch in the order in which a forward with overlapped scheduling applies them.

    SGLang makes them from a set of classes, whose order differs from process to process, and without overlap applies
    them in that order: a logit with a repetition penalty and a frequency penalty would differ, too.
    """
    return dict(sorted(penalisers.items(), key=lambda one: (one[0].__name__ == SCALING, one[0].__name__)))


def recount(orchestrator: BatchedPenalizerOrchestrator, batch: ScheduleBatch) -> BatchedPenalizerOrchestrator:
    """Penalisers of `batch` that have counted the ``output_ids`` of each request.

    A penaliser counts one token of every row at once, and answers differ in length. Therefore each request is counted
    by a penaliser of its own, and the penalisers are merged.
    """
    make, kinds = type(orchestrator), list(orchestrator.penalizers)  # in their order
    merged: BatchedPenalizerOrchestrator | None = None
    rows = Rows([], batch.device)
    for req in batch.reqs:
        one = Rows([req], batch.device)
        counted = make(orchestrator.vocab_size, one, kinds)
        answer = torch.tensor(list(req.output_ids), dtype=torch.int64, device=batch.device)
        for place in range(len(answer)):
            counted.cumulate_output_tokens(answer[place : place + 1])
        if merged is None:
            merged, rows = counted, one
        else:
            merged.merge(counted)
            # After the merge: it prepares, for the earlier rows, the penalisers that only this row needs.
            rows.reqs.append(req)
    assert merged is not None, "a batch has a request"
    merged.batch = batch
    return merged
