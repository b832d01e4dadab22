"""`--enable-deterministic-inference`: operators that are accepted or refused by name, requests that get a 400."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsv4_kernels import registry
from dsv4_kernels.ops import MODEL_DTYPES, forward_ops
from sglang_dsv4.attention.metadata import ForwardMetadata
from sglang_dsv4.determinism import checks, refused_requests, sglang_operators
from sglang_dsv4.determinism import flag as determinism_flag
from sglang_dsv4.seam import compat, live

ROOT = Path(__file__).resolve().parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def required() -> Iterator[None]:
    registry.require_batch_invariance()
    yield
    registry.require_batch_invariance(False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def of_generation(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    return of_generation


# ---- our operators


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize("dtype", MODEL_DTYPES, ids=["fp32", "bf16"])
def test_a_cpu_has_all_operators(dtype: torch.dtype) -> None:
    assert not checks.problems_of_ops(CPU, dtype, 64)
    assert registry.chosen("linear", CPU, dtype).name == "tiled"


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize(("major", "name"), [(9, "sm90"), (10, "sm100")])
def test_hopper_and_blackwell_have_all_operators(gpu: Callable[[int], None], major: int, name: str) -> None:
    gpu(major)
    assert not checks.problems_of_ops(CUDA, torch.bfloat16, 512)
    taken = {registry.chosen(op, CUDA, torch.bfloat16).name for op in forward_ops("cuda")}
    assert taken == {name}


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize(
    ("major", "dtype", "head_dim", "named"),
    [
        (8, torch.bfloat16, 512, ["linear_fp32", "rms_norm", "sparse_attention"]),
        (9, torch.float32, 512, ["linear_fp32", "grouped_linear"]),
        (9, torch.bfloat16, 64, ["sparse_attention"]),
    ],
    ids=["ampere", "fp32", "head_dim"],
)
def test_a_missing_operator_is_named(
    gpu: Callable[[int], None], major: int, dtype: torch.dtype, head_dim: int, named: list[str]
) -> None:
    gpu(major)
    problems = checks.problems_of_ops(CUDA, dtype, head_dim)
    for op in named:
        assert any(f"op {op!r} has no batch-invariant implementation" in problem for problem in problems), op
    if len(named) == 1:
        assert len(problems) == 1


@pytest.mark.usefixtures("required")
def test_an_implementation_that_is_not_batch_invariant_is_refused_by_name_too(gpu: Callable[[int], None]) -> None:
    gpu(9)
    with pytest.raises(NotImplementedError, match=r"'linear_fp32' has no batch-invariant .* the batch in 'cublas'"):
        registry.chosen("linear_fp32", CUDA, torch.bfloat16, "cublas")
    assert registry.chosen("rms_norm", CPU, torch.float32, "ref").name == "ref"
    with pytest.raises(NotImplementedError, match="'ref'"):
        registry.chosen("rms_norm", CUDA, torch.bfloat16, "ref")


def test_a_choice_made_before_the_flag_is_made_again() -> None:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    registry.select("linear", CPU, torch.float32, "ref")(x, weight, None)
    registry.require_batch_invariance()
    try:
        with pytest.raises(NotImplementedError, match="op 'linear'"):
            registry.select("linear", CPU, torch.float32, "ref")
    finally:
        registry.require_batch_invariance(False)
    assert callable(registry.select("linear", CPU, torch.float32, "ref"))


@pytest.mark.parametrize("asked", [True, False])
def test_the_flag_decides(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    from sglang.srt import runtime_context

    flag = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=asked))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: flag)
    config = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(head_dim=64))
    try:
        checks.start(SimpleNamespace(device="cpu", model_config=config))  # type: ignore[arg-type]
        assert determinism_flag.is_on() is asked
    finally:
        registry.require_batch_invariance(False)


def test_a_comparison_with_the_reference_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    flag = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: flag)
    monkeypatch.setenv("SGLANG_DSV4_COMPARE_ATTENTION", "distances.jsonl")
    config = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(head_dim=64))
    try:
        with pytest.raises(compat.StartupError, match="SGLANG_DSV4_COMPARE_ATTENTION has the reference"):
            checks.start(SimpleNamespace(device="cpu", model_config=config))  # type: ignore[arg-type]
    finally:
        registry.require_batch_invariance(False)


def test_a_prefill_is_divided_as_decode_is() -> None:
    """A decoded token may be computed again in a prefill, which beyond 128K of context splits keys as decode does."""
    split_keys = ForwardMetadata.split_keys.fget
    prefill, decode = SimpleNamespace(window_in_ring=False), SimpleNamespace(window_in_ring=True)
    assert split_keys(prefill) is None and split_keys(decode)
    registry.require_batch_invariance()
    try:
        assert split_keys(prefill) == split_keys(decode)
    finally:
        registry.require_batch_invariance(False)


# ---- SGLang's operators


def linear(product: object = None, method: str = "Fp8LinearMethod", shape: tuple[int, int] = (256, 256)) -> nn.Module:
    from sglang.srt.layers.linear import LinearBase

    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.quant_method = type(method, (), {"w8a8_block_fp8_linear": product, "weight_block_size": [128, 128]})()
    layer.weight = torch.empty(*shape)
    return layer


def experts() -> nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    layer = FusedMoE.__new__(FusedMoE)
    nn.Module.__init__(layer)
    layer.quant_method = type("Mxfp4MarlinMoEMethod", (), {})()
    return layer


def model(**layers: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, layer in layers.items():
        made.add_module(name, layer)
    return made


@pytest.fixture
def bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("bf16")
def test_sglangs_operators_are_accepted_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import partial

    from sglang.srt.layers import moe
    from sglang.srt.layers.quantization import fp8_utils

    monkeypatch.setattr(moe, "get_moe_runner_backend", lambda: SimpleNamespace(value="marlin"))
    deep_gemm = getattr(fp8_utils, sglang_operators.DEEP_GEMM)
    good = model(a=linear(deep_gemm), b=linear(partial(deep_gemm, act_scale_ue8m0=True)), c=nn.Linear(2, 2))
    good.d = linear(method="UnquantizedLinearMethod")
    good.e, good.f = linear(), experts()
    for layer in (good.e, good.f):  # a method of this package computes by the registry
        layer.quant_method = type("Ours", (), {"__module__": "sglang_dsv4.layers.some"})()
    assert not sglang_operators.problems_of_modules(good)
    bad = model(
        attn=linear(fp8_utils.triton_w8a8_block_fp8_linear),
        also=linear(fp8_utils.triton_w8a8_block_fp8_linear),
        odd=linear(deep_gemm, shape=(72, 256)),
        other=linear(method="AWQLinearMethod"),
        experts=experts(),
    )
    triton, odd, other, marlin = sglang_operators.problems_of_modules(bad)
    assert "FP8 linear layer 'attn' is SGLang's triton_w8a8_block_fp8_linear" in triton and "deep_gemm" in triton
    assert "'odd' is SGLang's Triton product ((72, 256) in blocks of [128, 128])" in odd
    assert "linear layer 'other' is SGLang's AWQLinearMethod" in other
    assert "routed experts 'experts' is SGLang's MoE runner 'marlin' (Mxfp4MarlinMoEMethod)" in marlin
    assert "--moe-runner-backend dsv4 does, the default here" in marlin


@pytest.mark.usefixtures("bf16", "required")
def test_a_model_with_such_an_operator_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers import moe

    monkeypatch.setattr(moe, "get_moe_runner_backend", lambda: SimpleNamespace(value="marlin"))
    with pytest.raises(compat.StartupError, match=r"(?s)same bits in every batch:.*'marlin'.*Or leave --enable-det"):
        checks.check_model(model(experts=experts()))
    registry.require_batch_invariance(False)
    checks.check_model(model(experts=experts()))


# ---- requests


def request(**params: float) -> SimpleNamespace:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(sampling_params=SimpleNamespace(**neutral | {"top_k": 1} | params))


@pytest.mark.parametrize(
    ("params", "algorithm", "named"),
    [
        ({}, None, None),
        ({"top_k": 50}, None, None),
        ({"frequency_penalty": 0.5}, None, "frequency_penalty"),
        ({"presence_penalty": -0.5}, None, "presence_penalty"),
        ({"repetition_penalty": 1.1}, None, "repetition_penalty"),
        ({"min_new_tokens": 3}, None, "min_new_tokens"),
        ({}, "EAGLE", None),
        ({"top_k": 50}, "EAGLE", "temperature 0"),
    ],
    ids=str,
)
def test_a_request_whose_bits_depend_on_others_gets_a_reason(
    params: dict[str, float], algorithm: str | None, named: str | None
) -> None:
    reason = refused_requests.reason_against(request(**params), True, algorithm)  # type: ignore[arg-type]
    assert (reason is None) if named is None else (named in str(reason))
    assert refused_requests.reason_against(request(**params), False, algorithm) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("on", [True, False])
def test_the_reason_is_given_under_the_flag(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4.requests.refused import token_ids

    monkeypatch.setattr(live, "_live", object())
    monkeypatch.setattr(token_ids, "accelerator_setup", lambda: (True, None))
    monkeypatch.setattr(token_ids, "transfers", lambda: False)
    req = request(presence_penalty=1.0, sampling_seed=None, stop_token_ids=None, stop_regex_strs=[])  # type: ignore[arg-type]
    req.origin_input_ids, req.input_embeds, req.vocab_size = [5], None, 10
    req.logprob = SimpleNamespace(top_logprobs_num=0)
    registry.require_batch_invariance(on)
    try:
        error = token_ids.refuse_unknown_token_ids(None, req)  # type: ignore[arg-type]
    finally:
        registry.require_batch_invariance(False)
    assert ("presence_penalty" in error) if on else (error is None)
