"""A model as a server on a B200 builds it, without one: whose operators run between token ids and logits.

Modules are built on PyTorch's meta device while the GPU is said to be of compute capability 10.0; kernels of the
operators are tested in the emulator, op by op.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from model.served import Served
from model.small_geometry import GEOMETRY
from torch import nn

from dsv4_kernels import registry
from dsv4_kernels.model_shapes import ModelShapes
from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.determinism import checks, sglang_operators
from sglang_dsv4.layers import packed_experts
from sglang_dsv4.model_config.layer_kinds import SWA_RATIO
from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang_dsv4.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
from sglang_dsv4.seam.compat import StartupError
from sglang_dsv4.warmup.model_shapes import model_shapes
from sglang_dsv4.warmup.operators import log_operators_of_sglang, operators_of

CUDA = torch.device("cuda", 0)
SHAPE = replace(
    PRESETS["flash"], hidden_size=4096, moe_intermediate_size=2048, compress_ratios=(0, 4, 128), num_hash_layers=1,
    n_routed_experts=8, num_nextn_predict_layers=0,
)  # fmt: skip
DRAFTS = {
    DeepseekV4ForCausalLMNextN: (replace(SHAPE, num_nextn_predict_layers=1), 1),
    DeepseekV4ForCausalLMDSpark: (
        replace(SHAPE, dspark_markov_rank=256, dspark_target_layer_ids=(0, 1, 2)), 3,
    ),
}  # fmt: skip
"""Class of a draft -> the checkpoint, and the draft's layers."""
EMBEDDING = "embedding: a gather of rows"
Built = tuple[nn.Module, ModelShapes]
DEEP_GEMM = f"FP8 linear layer: {sglang_operators.DEEP_GEMM}"


@pytest.fixture
def built(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Built]]:
    """A function that builds a model or a draft: `runner` of the experts, whether under the deterministic flag, and the
    words of switches."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    harness = serve("flash-like").harness  # SGLang's parallel state and arguments of a server
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    monkeypatch.setattr(sglang_operators.compat, "deep_gemm_serves", lambda *arguments: True)
    monkeypatch.setattr(packed_experts, "random_codes", lambda *shape: torch.empty(shape, dtype=torch.int8))

    @contextmanager
    def on_meta() -> Iterator[None]:
        with harness._active(), torch.device("meta"), monkeypatch.context() as patch:
            patch.setenv("SGLANG_DSV4_QAT", "full")  # the harness's model is not quantised
            torch.set_default_dtype(torch.bfloat16)
            try:
                yield
            finally:
                torch.set_default_dtype(torch.float32)

    def build(
        runner: str = "dsv4", deterministic: bool = False, of: type[nn.Module] = DeepseekV4ForCausalLM, **switches: str
    ) -> Built:
        shape, layers = DRAFTS.get(of, (SHAPE, 0))
        geometry = replace(GEOMETRY, ratios=(SWA_RATIO,) * layers) if layers else GEOMETRY
        for name, word in switches.items():
            monkeypatch.setenv(name, word)
        monkeypatch.setattr(packed_experts, "get_moe_runner_backend", lambda: SimpleNamespace(value=runner))
        registry.require_batch_invariance(deterministic)
        with on_meta():
            fp8 = Fp8Config(True, weight_block_size=[128, 128])
            model = of(SimpleNamespace(**hf_config(shape)), fp8)
            return model, model_shapes(model.dsv4_config, replace(geometry, dtype=torch.bfloat16), 64, CUDA)

    yield build
    registry.require_batch_invariance(False)


def test_under_the_flag_all_operators_are_ours_but_the_embedding(
    built: Callable[..., Built], caplog: pytest.LogCaptureFixture
) -> None:
    model, shapes = built(deterministic=True)
    found = operators_of(model, shapes)
    assert found.of_sglang == {EMBEDDING: "model.embed"}
    assert set(found.ours.values()) == {"sm100"}
    wanted = {"linear_fp8", "mxfp4_experts_forward", "sparse_attention", "linear_fp32", "grouped_linear_fp8_weight"}
    assert wanted <= set(found.ours)
    checks.check_model(model)
    with caplog.at_level(logging.INFO):
        log_operators_of_sglang(model)
    assert caplog.messages[-1] == f"operators of SGLang's in a forward: {EMBEDDING} (model.embed)"


@pytest.mark.parametrize("of", DRAFTS, ids=["EAGLE", "DSPARK"])
def test_under_the_flag_all_operators_of_a_draft_are_ours(built: Callable[..., Built], of: type[nn.Module]) -> None:
    """A DSpark draft has no embedding of its own."""
    model, shapes = built(deterministic=True, of=of)
    found = operators_of(model, shapes)
    assert found.of_sglang == ({} if of is DeepseekV4ForCausalLMDSpark else {EMBEDDING: "model.embed"})
    assert set(found.ours.values()) == {"sm100"}
    assert {"linear_fp8", "mxfp4_experts_forward", "sparse_attention", "linear_fp32"} <= set(found.ours)
    checks.check_model(model)


def test_without_the_flag_products_are_deep_gemm_s_and_cublas_s(built: Callable[..., Built]) -> None:
    model, shapes = built()
    found = operators_of(model, shapes)
    assert found.of_sglang == {EMBEDDING: "model.embed", DEEP_GEMM: "model.layers.0.attn.wqkv_a"}
    assert {op for op, name in found.ours.items() if name != "sm100"} == {"linear_fp32", "grouped_linear"}
    assert "linear_fp8" not in found.ours and found.ours["mxfp4_experts_forward"] == "sm100"


def test_the_switch_takes_our_product_without_the_flag(built: Callable[..., Built]) -> None:
    model, shapes = built(SGLANG_DSV4_FP8_LINEAR="ours")
    found = operators_of(model, shapes)
    assert found.of_sglang == {EMBEDDING: "model.embed"} and found.ours["linear_fp8"] == "sm100"


def test_the_flag_still_stops_sglang_s_experts(built: Callable[..., Built]) -> None:
    model, _ = built(deterministic=True)
    experts = model.model.layers[1].ffn.experts
    assert experts.kernels == "sm100"
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    foreign = FusedMoE.__new__(FusedMoE)
    nn.Module.__init__(foreign)
    foreign.quant_method = type("Mxfp4FlashinferMoEMethod", (), {"__module__": "sglang.srt"})()
    model.model.layers[1].ffn.experts = foreign
    with pytest.raises(StartupError, match=r"routed experts 'model\.layers\.1\.ffn\.experts' is SGLang's MoE runner"):
        checks.check_model(model)
