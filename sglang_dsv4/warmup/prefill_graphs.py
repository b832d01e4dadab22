"""CUDA graphs of prefills: for some numbers of tokens, all of a forward but each layer's attention.

A prefill of V4-Flash launches some 40 kernels a layer from Python. Where several ranks share the work, or a prompt is
short, the host takes longer for the launches than the GPU for the kernels, and ranks wait for the slowest host. The
work between two attention steps depends on the number of tokens only, so it is recorded once: from a layer's output
projection over its experts to the next layer's projections. What depends on the batch (rows to store, entries to read,
the indexer's choice) runs from Python between two graphs, by SGLang's breakable graphs (`layers.graph_breaks`).

A batch is padded to the next recorded number of tokens. Padding tokens have id 0 at position 0; they store nothing, and
no token reads them. Graphs share SGLang's memory pool of graphs, which holds the activations of the largest one.

Flags of SGLang choose them:

    --cuda-graph-backend-prefill    breakable: as above. disabled (default): Python launches each kernel of a prefill.
    --cuda-graph-bs-prefill         the numbers of tokens that are recorded; by default two in each octave.
    --cuda-graph-max-bs-prefill     the largest of these; by default the tokens of a chunk.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_dsv4.layers import sequence_parallel
from sglang_dsv4.layers.graph_breaks import Pass, running
from sglang_dsv4.warmup.cuda_graphs import BREAKABLE, prefill_sizes

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MOST_PADDING = 1 / 3
"""Most padding tokens of a replay, as a share of the batch's tokens."""


class Outputs(NamedTuple):
    """Results of `DeepseekV4Model.forward`, from which the logits and a draft are made."""

    hidden_states: Tensor
    streams: Tensor | None
    taps: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """The results in a fixed order."""
        return [self.hidden_states, *([] if self.streams is None else [self.streams]), *self.taps]

    def first(self, tokens: int) -> Outputs:
        """The rows of the first tokens, copied where they outlive the logits."""
        streams = None if self.streams is None else self.streams[:tokens].clone()
        return Outputs(self.hidden_states[:tokens], streams, [tap[:tokens].clone() for tap in self.taps])


class PrefillGraphs:
    """Recorded prefills of a model.

    Args:
        model: a `DeepseekV4Model` without stages.
        numbers_of_tokens: to record.
        with_streams: whether a draft reads the streams, [T, n * d].
    """

    def __init__(self, model: nn.Module, numbers_of_tokens: Iterable[int], with_streams: bool) -> None:
        self.model, self.with_streams = model, with_streams
        self.sizes = sorted(numbers_of_tokens)
        self._input_ids = torch.zeros(self.sizes[-1], dtype=torch.int64, device=model.embed.weight.device)
        self._positions = torch.zeros_like(self._input_ids)
        self._outputs: Outputs | None = None
        self._replays: dict[int, Callable[[], None]] = {}
        self._replayed: set[int] = set()

    def size_of(self, tokens: int) -> int | None:
        """The number of tokens to which a batch is padded; None if it runs without graphs. Where rows are sharded,
        every rank has a token."""
        i = bisect.bisect_left(self.sizes, tokens)
        if i == len(self.sizes):
            return None
        rows = sequence_parallel.of_forward(ForwardMode.EXTEND, self.sizes[i])
        reaches_the_last_rank = tokens > (rows.count - 1) * rows.size
        is_near = self.sizes[i] - tokens <= MOST_PADDING * tokens
        return self.sizes[i] if is_near and reaches_the_last_rank else None

    def record(self) -> None:
        """Record all sizes, the largest first: the others fit into its memory."""
        with torch.no_grad(), graph_capture(stream=_capture_stream()) as context:
            for size in reversed(self.sizes):
                self._replays[size] = self._recorded(size, context.stream)

    def _recorded(self, size: int, stream: torch.cuda.Stream) -> Callable[[], None]:
        with running(Pass.WARM_UP):
            outputs = self._forward(size)
            if self._outputs is None:  # the largest one's
                self._outputs = outputs
        return recorded(lambda: self._write(size), stream)

    def _forward(self, size: int) -> Outputs:
        rows = sequence_parallel.of_forward(ForwardMode.EXTEND, size)
        ids, positions = self._input_ids[:size], self._positions[:size]
        hidden_states, streams, taps = self.model(self.model.first_streams(ids, None, rows), positions, ids, rows)
        return Outputs(hidden_states, rows.gather(streams) if self.with_streams else None, taps)

    def _write(self, size: int) -> None:
        for kept, made in zip(self._outputs.tensors(), self._forward(size).tensors(), strict=True):
            kept[:size].copy_(made)

    def replay(self, input_ids: Tensor, positions: Tensor) -> Outputs:
        """The outputs of a batch whose attention metadata is set; `size_of` its tokens is not None.

        Args:
            input_ids: [T] integer.
            positions: [T] int64.
        """
        tokens = len(positions)
        size = self.size_of(tokens)
        for buffer, values in ((self._input_ids, input_ids), (self._positions, positions)):
            buffer[:tokens].copy_(values)
            buffer[tokens:size].zero_()
        self._replays[size]()
        if size not in self._replayed:
            self._replayed.add(size)
            if get_parallel().tp_rank == 0:
                logger.info("first replay of the CUDA graphs of %d tokens, for a batch of %d", size, tokens)
        return self._outputs.first(tokens)


def _capture_stream() -> torch.cuda.Stream:
    from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_capture_stream

    return get_or_create_global_graph_capture_stream()


def recorded(forward: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Record a forward as CUDA graphs with breaks; return its replay. Both tell SGLang, which lends free memory of its
    graphs' pool to other work (SGLANG_ENABLE_GRAPH_POOL_BORROW)."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        BreakableCUDAGraph,
        BreakableCUDAGraphCapture,
    )
    from sglang.srt.model_executor.runner_utils.pool import (
        get_or_create_global_graph_memory_pool,
        graph_pool_capture_scope,
        graph_pool_replay_scope,
    )

    graph, group = BreakableCUDAGraph(), get_parallel().tp_group
    torch.cuda.synchronize()
    group.barrier()
    capture = BreakableCUDAGraphCapture(
        graph, get_or_create_global_graph_memory_pool(torch.cuda), stream, barrier_fn=group.barrier
    )
    with graph_pool_capture_scope(), capture, running(Pass.RECORDED):
        forward()

    def replay() -> None:
        with graph_pool_replay_scope():
            graph.replay()

    return replay


def record_prefills(runner: ModelRunner) -> None:
    """Record the prefills of a target model, a `DeepseekV4ForCausalLM`, after the graphs of decode steps."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_exec

    model, graph = runner.model, get_exec().graph
    if graph.cuda_graph_backend_prefill != BREAKABLE or not current_platform.capabilities.graph_capture:
        return
    begin, free = time.perf_counter(), _free_bytes(runner)
    numbers = prefill_sizes(graph.cuda_graph_config.prefill)
    graphs = PrefillGraphs(model.model, numbers, runner.spec_algorithm.is_eagle())
    graphs.record()
    model.prefill_graphs = graphs
    if get_parallel().tp_rank != 0:
        return
    logger.info(
        "CUDA graphs of prefills of %s tokens: %.1f s, %.2f GB",
        ", ".join(map(str, graphs.sizes)),
        time.perf_counter() - begin,
        (free - _free_bytes(runner)) / 1e9,
    )


def _free_bytes(runner: ModelRunner) -> int:
    return torch.cuda.mem_get_info(runner.gpu_id)[0] if torch.cuda.is_available() else 0
