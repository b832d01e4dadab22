"""Ops that keep a step out of CUDA graphs, and the capture of DSpark's draft acceptance."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, Phase, PhaseConfig

from sglang_dsv4.warmup import cuda_graphs


@pytest.mark.usefixtures("own_registry")
def test_cuda_graphs_wait_for_kernels() -> None:
    """References read lengths on the host; an op with a graph-safe kernel is not on the list."""
    from dsv4_kernels import registry

    for name, priority, graph_safe in (("waiting", 1000, False), ("capturable", 1001, True)):
        registry.register(
            "index_topk", name, "nowhere:nothing", lambda device, dtype: True, priority, graph_safe=graph_safe
        )
        assert ("index_topk" in cuda_graphs.uncapturable_ops("cuda", 512)) == (not graph_safe)


Declared = dict[str, Any]


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Declared]:
    """Resolves graphs whose backends the user's flags have chosen; returns what was declared."""

    def resolve(
        uncapturable: list[str], sizes: list[int] | None = None, beside: Declared | None = None, **backends: str
    ) -> Declared:
        config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], head_dim=64)
        declared: Declared = {}
        monkeypatch.setattr(cuda_graphs, "uncapturable_ops", lambda device, head_dim: uncapturable)
        for name, function in (
            ("resolving_view", lambda arguments: arguments),
            ("model_config_of", lambda arguments: SimpleNamespace(hf_config=config)),
            ("declare_resolution", lambda arguments, source, **values: declared.update(values)),
        ):
            monkeypatch.setattr(cuda_graphs.compat, name, function, raising=False)
        phases = (PhaseConfig(backend=backends.get(phase, "disabled"), bs=sizes) for phase in Phase.ALL)
        others = {"pp_size": 1, "attn_dp_size": 1} | (beside or {})
        arguments = SimpleNamespace(device="cuda", cuda_graph_config=CudaGraphConfig(*phases), **others)
        cuda_graphs.resolve_cuda_graphs(arguments, lambda arguments: None)
        return declared

    return resolve


@pytest.mark.parametrize(("phase", "steps"), [("decode", "decode steps"), ("prefill", "prefills")])
def test_graphs_that_cannot_be_captured_are_not_asked_for(
    phase: str, steps: str, resolved: Callable[..., Declared]
) -> None:
    """A flag that chooses a backend wins over the flag that switches these graphs off."""
    assert resolved(["one_op"]) == {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}
    with pytest.raises(ValueError, match=rf"of {steps} \(breakable\) here: one_op can't be captured"):
        resolved(["one_op"], **{phase: "breakable"})


def test_breakable_graphs_of_prefills_are_ours(resolved: Callable[..., Declared]) -> None:
    """SGLang's runner of prefills is off, and what the user chose stays known."""
    assert resolved([], decode="full") == {"disable_prefill_cuda_graph": True}
    found = resolved([], decode="full", prefill="breakable")
    graphs = found["cuda_graph_config"]
    assert (graphs.decode.backend, graphs.prefill.backend) == ("full", "disabled")
    assert found["cuda_graph_backend_prefill"] == "breakable"


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"pp_size": 2}, "--pp-size 2 with CUDA graphs of prefills .* last layer; leave one"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2 with CUDA graphs of prefills .* one group; leave one"),
        ({}, "SGLANG_MEMORY_SAVER_CUDA_GRAPH with CUDA graphs of prefills .*: unset it"),
    ],
    ids=["stages", "groups", "memory saver"],
)
def test_graphs_of_prefills_are_refused_beside(
    beside: Declared, named: str, resolved: Callable[..., Declared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the launcher, whether the flag or --cuda-graph-config has chosen the graphs."""
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", str(not beside))
    assert "cuda_graph_backend_prefill" not in resolved([], beside=beside, decode="full")
    with pytest.raises(ValueError, match=named):
        resolved([], beside=beside, prefill="breakable")


def test_prefills_of_few_tokens_are_not_recorded(resolved: Callable[..., Declared]) -> None:
    """A forward of up to 32 tokens has a second stream."""
    resolved([], [33, 64], prefill="breakable")
    resolved([], [32, 64], decode="full")
    with pytest.raises(ValueError, match=r"must be numbers of tokens above 32, got \[32, 64\]"):
        resolved([], [32, 64], prefill="breakable")


@pytest.mark.parametrize(
    ("architecture", "switch", "ranks", "named"),
    [
        ("DeepseekV4ForCausalLM", None, 1, "deepseek_v41"),
        ("DeepseekV4ForCausalLM", None, 2, "deepseek_v4"),
        ("DeepseekV4ForCausalLM", "off", 1, "deepseek_v4"),
        ("DeepseekV4ForCausalLM", "on", 2, "deepseek_v41"),
        ("DeepseekV3ForCausalLM", "on", 1, "deepseek_v4"),
    ],
)
def test_verify_steps_end_as_asked(
    architecture: str, switch: str | None, ranks: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang decides by the model type, which we change for our models only; the test lists all its uses in SGLang."""
    from sglang.srt import runtime_context
    from sglang.srt.speculative.dspark_components import dspark_verify, dspark_worker_v2

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=ranks, attn_dp_size=1))

    monkeypatch.delenv(cuda_graphs.VERIFY_EPILOGUE, raising=False)
    if switch is not None:
        monkeypatch.setenv(cuda_graphs.VERIFY_EPILOGUE, switch)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
    assert cuda_graphs.model_type_for_epilogue("deepseek_v4", worker) == named
    monkeypatch.setenv(cuda_graphs.VERIFY_EPILOGUE, "perhaps")
    if architecture == "DeepseekV4ForCausalLM":
        with pytest.raises(ValueError, match=r"SGLANG_DSV4_VERIFY_EPILOGUE must be 'on' or 'off', got 'perhaps'"):
            cuda_graphs.model_type_for_epilogue("deepseek_v4", worker)
    sources = (inspect.getsource(module) for module in (dspark_worker_v2, dspark_verify))
    asked = [line.strip() for source in sources for line in source.splitlines() if "target_model_type(" in line]
    assert asked == [
        'target_is_dsv41 = target_model_type(self.target_worker) == "deepseek_v41"',
        "def target_model_type(target_worker) -> Optional[str]:",
        "return target_model_type(target_worker) in _FUSED_ARGMAX_TARGETS",
        'self._target_is_dsv41 = target_model_type(target_worker) == "deepseek_v41"',
    ]


def test_groups_of_ranks_have_no_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=2, attn_dp_size=2))
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"]))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
    monkeypatch.delenv(cuda_graphs.VERIFY_EPILOGUE, raising=False)
    assert cuda_graphs.model_type_for_epilogue("deepseek_v4", worker) == "deepseek_v4"
    monkeypatch.setenv(cuda_graphs.VERIFY_EPILOGUE, "on")
    with pytest.raises(ValueError, match=r"SGLANG_DSV4_VERIFY_EPILOGUE=on with --attn-dp-size above 1: unset it"):
        cuda_graphs.model_type_for_epilogue("deepseek_v4", worker)


def test_cuda_graphs_do_not_wait_for_an_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper has an attention kernel for the release's head_dim; for another one the reference serves, which waits."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert cuda_graphs.uncapturable_ops("cuda", 512) == []
    assert cuda_graphs.uncapturable_ops("cuda", 64) == ["sparse_attention"]
