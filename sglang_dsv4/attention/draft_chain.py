"""The attention backends of an MTP draft: of its chain of decode steps, and of the extend step behind a verify step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsv4.attention.backend import Dsv4AttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory


class Dsv4DraftBackend:
    """The steps of a multi-step draft (MTP chained with itself): SGLang runs step i on `attn_backends[i]`."""

    def __init__(self, runner: ModelRunner, steps: int) -> None:
        self.attn_backends = [Dsv4AttentionBackend(runner, draft_step=i) for i in range(steps)]
        self.needs_cpu_seq_lens = any(backend.needs_cpu_seq_lens for backend in self.attn_backends)

    @property
    def _running(self) -> list[Dsv4AttentionBackend]:
        """Of the steps that run a forward: the last one only samples."""
        return self.attn_backends[:-1]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Metadata of every step."""
        for backend in self._running:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Note how many requests a graph has at most; all steps are in one."""
        self.attn_backends[0].init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """What the host does before a replay, once for all steps: they read the same lengths and slots."""
        self.attn_backends[0].init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Derive every step's metadata."""
        for backend in self._running:
            backend.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing to restore: buffers are inputs only."""


def create_draft_decode_backend(factory: DraftBackendFactory) -> tuple[str, Dsv4DraftBackend]:
    """In place of `DraftBackendFactory._create_dsv4_decode_backend`: the steps of a draft chain."""
    if factory.topk != 1:
        raise ValueError(f"sglang-dsv4 drafts chains only: --speculative-eagle-topk must be 1, not {factory.topk}")
    return "dsv4", Dsv4DraftBackend(factory.draft_model_runner, factory.speculative_num_steps)


def create_draft_extend_backend(factory: DraftBackendFactory) -> tuple[str, Dsv4AttentionBackend]:
    """In place of `DraftBackendFactory._create_dsv4_prefill_backend`."""
    return "dsv4", Dsv4AttentionBackend(factory.draft_model_runner)
