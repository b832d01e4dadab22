"""A request's penalties count the tokens that it was answered with, each once, whatever else is in the batch.

SGLang 0.5.23 feeds a penaliser while it prepares a decode step, with the last token whose result it has processed
(``ScheduleBatch.cumulate_penalty_output_tokens``). Under overlapped scheduling that is one token behind, at first the
last of the prompt; and where others make the scheduler wait for a result, a token is left out or counted again. And a
request that was retracted comes back with nothing counted. Here

* the tokens are counted where they are sampled;
* a batch of new requests counts what they were answered with before.

On a CPU only, where a forward is through when its call returns: on a GPU the counts would be written on one stream and
read on another. There SGLang's own way stays.
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
    """All that a penaliser reads of a batch."""

    reqs: list[Req]
    device: str


def are_counted_here(device: str) -> bool:
    """Whether this module counts, in this process."""
    return torch.device(device).type == "cpu" and live_parts() is not None


def remember_source(copy: SamplingBatchInfo, info: SamplingBatchInfo) -> None:
    """After ``SamplingBatchInfo.copy_for_forward``, which leaves the penalisers out of the copy."""
    copy.source = info


def count_sampled(
    tokens: Tensor, runner: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
) -> None:
    """After ``ModelRunner.sample``: `tokens [batch]` are what the next step's penalties are due for."""
    info = getattr(forward_batch.sampling_info, "source", None)
    if info is not None and info.penalizer_orchestrator.is_required and are_counted_here(info.device):
        info.penalizer_orchestrator.cumulate_output_tokens(tokens.long())


def leave_out_processed(original: Callable[[ScheduleBatch], None], batch: ScheduleBatch) -> None:
    """Around ``ScheduleBatch.cumulate_penalty_output_tokens``: those tokens are counted already."""
    if not are_counted_here(batch.device):
        original(batch)


def count_earlier(result: None, info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """After a new batch's penalisers are made, with nothing counted: those of retracted requests go on."""
    orchestrator = info.penalizer_orchestrator
    if are_counted_here(info.device) and orchestrator.is_required and any(req.output_ids for req in batch.reqs):
        info.penalizer_orchestrator = recount(orchestrator, batch)


def recount(orchestrator: BatchedPenalizerOrchestrator, batch: ScheduleBatch) -> BatchedPenalizerOrchestrator:
    """Penalisers of `batch` that have counted the ``output_ids`` of each request.

    A penaliser takes a token of every row or of none, so each request is counted by itself and then they are merged.
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
            rows.reqs.append(req)  # after it: a penaliser that none of the rows before needed is prepared for those
    assert merged is not None, "a batch has a request"
    merged.batch = batch
    return merged
