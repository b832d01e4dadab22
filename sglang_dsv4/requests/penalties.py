"""Penalties count every token of a request's answer once, independent of the other requests in the batch.

SGLang 0.5.23 updates a penaliser while it prepares a decode step, with the last token whose result it has processed
(``ScheduleBatch.cumulate_penalty_output_tokens``). Under overlapped scheduling that token is one decode step old, at
first the last token of the prompt. When other requests make the scheduler wait for a result, a token is skipped or
counted twice. A request that was retracted comes back with nothing counted. Here

* tokens are counted where they are sampled;
* a new batch first counts the tokens of the answers that its requests already have.

This is done on a CPU only, where a forward has ended when its call returns. On a GPU, where the counts would be written
on one stream and read on another, SGLang counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@dataclass
class Rows:
    """The part of a batch that a penaliser reads."""

    reqs: list[Req]
    device: str


def are_counted_here(device: str) -> bool:
    """Whether this module, and not SGLang, counts in this process."""
    return torch.device(device).type == "cpu" and live_parts() is not None


def remember_source(copy: SamplingBatchInfo, info: SamplingBatchInfo) -> None:
    """Let a copy lead to its source; runs after ``SamplingBatchInfo.copy_for_forward``, which omits the penalisers."""
    copy.source = info


def count_sampled(
    tokens: Tensor, runner: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
) -> None:
    """Count the sampled `tokens [batch]` for the next decode step's penalties; runs after ``ModelRunner.sample``."""
    info = getattr(forward_batch.sampling_info, "source", None)
    if info is not None and info.penalizer_orchestrator.is_required and are_counted_here(info.device):
        info.penalizer_orchestrator.cumulate_output_tokens(tokens.long())


def leave_out_processed(original: Callable[[ScheduleBatch], None], batch: ScheduleBatch) -> None:
    """Don't count tokens twice: skip ``ScheduleBatch.cumulate_penalty_output_tokens`` where this module counts."""
    if not are_counted_here(batch.device):
        original(batch)


def count_earlier(result: None, info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """Count the earlier answers of retracted requests; runs after a new batch's penalisers are made."""
    orchestrator = info.penalizer_orchestrator
    if are_counted_here(info.device) and orchestrator.is_required and any(req.output_ids for req in batch.reqs):
        info.penalizer_orchestrator = recount(orchestrator, batch)


def recount(orchestrator: BatchedPenalizerOrchestrator, batch: ScheduleBatch) -> BatchedPenalizerOrchestrator:
    """Penalisers of `batch` that have counted the ``output_ids`` of each request.

    A penaliser counts one token of every row at once, and answers differ in length. Therefore each request is counted
    by a penaliser of its own, and the penalisers are merged.
    """
    make, kinds = type(orchestrator), set(orchestrator.penalizers)
    merged: BatchedPenalizerOrchestrator | None = None
    rows = Rows([], batch.device)
    for req in batch.reqs:
        one = Rows([req], batch.device)
        counted = make(orchestrator.vocab_size, one, kinds)
        for token in req.output_ids:
            counted.cumulate_output_tokens(torch.tensor([token], device=batch.device))
        if merged is None:
            merged, rows = counted, one
        else:
            merged.merge(counted)
            rows.reqs.append(
                req
            )  # after the merge, which prepares penalisers that only this row needs for the earlier rows
    assert merged is not None, "a batch has a request"
    merged.batch = batch
    return merged
