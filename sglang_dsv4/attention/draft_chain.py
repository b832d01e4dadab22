"""Attention backends of an MTP draft: for its chain of decode steps, and for the extend step after a verify step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.model_executor.forward_context import get_attn_backend, has_forward_context

from sglang_dsv4.attention.backend import Dsv4AttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory


class Dsv4DraftBackend:
    """Backends of a multi-step draft (MTP chained with itself): SGLang runs step i on `attn_backends[i]`."""

    def __init__(self, runner: ModelRunner, steps: int) -> None:
        self.attn_backends = [Dsv4AttentionBackend(runner, draft_step=i) for i in range(steps)]
        self.needs_cpu_seq_lens = any(backend.needs_cpu_seq_lens for backend in self.attn_backends)

    @property
    def _running(self) -> list[Dsv4AttentionBackend]:
        """Backends of the steps that run a forward; the last step only samples."""
        return self.attn_backends[:-1]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Derive every step's metadata, eagerly."""
        for backend in self._running:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Store the largest number of requests of a graph; all steps are in one graph."""
        self.attn_backends[0].init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Do the host's work before a replay, once for all steps: they read the same lengths and request slots."""
        self.attn_backends[0].init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Derive every step's metadata, in the graph."""
        for backend in self._running:
            backend.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        """Do nothing: the buffers are inputs only, so the warm-up left nothing to restore."""


def create_draft_decode_backend(factory: DraftBackendFactory) -> tuple[str, Dsv4DraftBackend]:
    """The backend of a draft chain; replaces `DraftBackendFactory._create_dsv4_decode_backend`.

    Raises:
        ValueError: SGLang was asked for trees of drafts.
    """
    if factory.topk != 1:
        raise ValueError(f"sglang-dsv4 drafts chains only: --speculative-eagle-topk must be 1, not {factory.topk}")
    return "dsv4", Dsv4DraftBackend(factory.draft_model_runner, factory.speculative_num_steps)


def create_draft_extend_backend(factory: DraftBackendFactory) -> tuple[str, Dsv4AttentionBackend]:
    """The backend of a draft's extend step; replaces `DraftBackendFactory._create_dsv4_prefill_backend`."""
    return "dsv4", Dsv4AttentionBackend(factory.draft_model_runner)


def plan_padded_batch(result: None, batch: ForwardBatch, runner: ModelRunner) -> None:
    """After `ForwardBatch.prepare_mlp_sync_batch`: derive the metadata of a draft's step anew, if the batch has grown.

    SGLang asks for the metadata of a draft's eager steps before it pads the batch, and pads it before each step. If a
    group has no requests, it asks the runner's own backend, which is none of a chain's: a step would have the metadata
    of the last one with requests.
    """
    rows, planned = len(batch.input_ids), batch.forward_metadata_planned_num_tokens
    if batch.forward_mode.is_idle():
        if not rows or not has_forward_context():
            return
    elif not batch.forward_metadata_ready or rows == planned:
        return
    backend = get_attn_backend()
    if isinstance(backend, Dsv4AttentionBackend):
        backend.init_forward_metadata(batch)
