"""Gives a model in this process recorded prefills, see `serving.replayed_graphs.recorded_prefill`."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from serving.replayed_graphs import References, no_stream, recorded_prefill

from dsv4_kernels import registry
from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.warmup import prefill_graphs
from sglang_dsv4.warmup.prefill_graphs import PrefillGraphs


def record(model: DeepseekV4ForCausalLM, sizes: list[int], with_streams: bool = False) -> None:
    """Record prefills of these numbers of tokens."""
    references = References()  # filled by the passes before the recordings

    def recorded(forward: Callable[[], None], stream: object) -> Callable[[], None]:
        return mock.patch.object(registry, "_resolved", references)(recorded_prefill(forward))

    graphs = PrefillGraphs(model.model, sizes, with_streams)
    with (
        mock.patch.object(registry, "_resolved", references),
        mock.patch.multiple(prefill_graphs, graph_capture=no_stream, _capture_stream=lambda: None, recorded=recorded),
    ):
        graphs.record()
    model.prefill_graphs = graphs
