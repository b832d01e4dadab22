"""CUDA graphs of prefills on a CPU: a replay calls the recorded forward again, with the tensors of the recording.

Work between two breaks may read nothing of the batch, and nothing back to the host. A break must write each row of the
memory that it gets, since the experts route padding rows, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

from serving.replayed_graphs import NoHostReads, References
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dsv4_kernels import registry
from sglang_dsv4.layers import attention, compressor, graph_breaks, indexer
from sglang_dsv4.layers.attention import Attention
from sglang_dsv4.layers.graph_breaks import Pass
from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.warmup import prefill_graphs
from sglang_dsv4.warmup.prefill_graphs import PrefillGraphs


def record(model: DeepseekV4ForCausalLM, sizes: list[int], with_streams: bool = False) -> None:
    """Give a model recorded prefills of these numbers of tokens."""

    @contextlib.contextmanager
    def no_capture(stream: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(stream=stream)

    references = References()  # filled by the passes before the recordings
    graphs = PrefillGraphs(model.model, sizes, with_streams)
    with (
        mock.patch.object(registry, "_resolved", references),
        mock.patch.object(prefill_graphs, "graph_capture", no_capture),
        mock.patch.object(prefill_graphs, "_capture_stream", lambda: None),
        mock.patch.object(prefill_graphs, "recorded", lambda forward, stream: _recorded(forward, references)),
    ):
        graphs.record()
    model.prefill_graphs = graphs


def _recorded(forward: Callable[[], None], references: References) -> Callable[[], None]:
    def replay() -> None:
        in_break = False

        def backend(original: Callable[[], object]) -> Callable[[], object]:
            def get() -> object:
                assert in_break, "work between two breaks reads the batch"
                return original()

            return get

        def attend_into(self: Attention, o: Tensor, *arguments: object) -> None:
            nonlocal in_break
            in_break = True
            o.fill_(float("nan"))
            with _disable_current_modes():
                original(self, o, *arguments)
                assert not o.isnan().any(), "a break leaves rows as they were"
            in_break = False

        original = Attention._attend_into
        with contextlib.ExitStack() as stack:
            for module in (attention, compressor, indexer):
                if hasattr(module, "get_attn_backend"):
                    guarded = backend(module.get_attn_backend)
                    stack.enter_context(mock.patch.object(module, "get_attn_backend", guarded))
            stack.enter_context(mock.patch.object(Attention, "_attend_into", attend_into))
            stack.enter_context(graph_breaks.running(Pass.RECORDED))
            stack.enter_context(mock.patch.object(registry, "_resolved", references))
            stack.enter_context(NoHostReads())
            forward()

    return replay
