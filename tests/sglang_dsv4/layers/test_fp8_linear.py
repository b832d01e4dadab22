"""FP8 linear layers of few tokens by our product, without a GPU: SGLang's method, and the choice of the product."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.model_shapes import Option
from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.determinism import checks, sglang_operators
from sglang_dsv4.layers import data_parallel, fp8_linear, sequence_parallel
from sglang_dsv4.layers.linear import Fp8Input, ReferenceLinearConfig, quantised_linear_config
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.seam import compat
from sglang_dsv4.warmup.model_shapes import model_shapes

N, K = 256, 384


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build modules as if for a Hopper GPU."""
    from sglang_dsv4.layers import linear

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(linear, "builds_on_cpu", lambda: False)
    yield


def config() -> Config:
    return Config.from_hf(SimpleNamespace(**hf_config(PRESETS["flash"])))


# ---- the product


def operands(tokens: int) -> tuple[Fp8Input, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-8, 0, (N // 128, K // 128), generator=generator).float())
    return Fp8Input.of(torch.randn(tokens, K, generator=generator)), weight, scale


def multiplies(calls: list[dict[str, Any]]) -> fp8_linear.FewTokensProduct:
    """A layer whose first product, which is SGLang's, has been made."""

    def many(*arguments: object, **others: object) -> str:
        calls.append({"arguments": arguments, "others": others})
        return "SGLang's"

    product = fp8_linear.FewTokensProduct(many)
    product.takes_few[torch.Size((N, K))] = True
    return product


def test_the_first_product_is_sglang_s() -> None:
    """SGLang compiles DeepGEMM's kernels of the shape in it."""
    calls: list[dict[str, Any]] = []
    x, weight, scale = operands(3)
    product = fp8_linear.FewTokensProduct(multiplies(calls).many)
    call = functools.partial(product, x.codes, weight, [128, 128], scale, x.scales)
    assert call() == "SGLang's" and isinstance(call(), Tensor) and isinstance(call(), Tensor)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("rows", "channels", "block", "dtype"),
    [
        (N + 4, K, [128, 128], torch.float32),
        (N, K - 64, [128, 128], torch.float32),
        (N, K, [32, 32], torch.float32),
        (N, K, [128, 128], torch.int32),
    ],
    ids=["rows", "channels", "blocks", "scales"],
)
def test_layers_that_the_kernel_is_not_made_for_are_sglang_s(
    rows: int, channels: int, block: list[int], dtype: torch.dtype
) -> None:
    calls: list[dict[str, Any]] = []
    x, _, scale = operands(3)
    product = fp8_linear.FewTokensProduct(multiplies(calls).many)
    weight = torch.zeros(rows, channels).to(torch.float8_e4m3fn)
    for _ in range(3):
        assert product(x.codes[:, :channels], weight, block, scale.to(dtype), x.scales) == "SGLang's"
    assert len(calls) == 3


@pytest.mark.parametrize("tokens", [1, 63, 64])
def test_few_quantised_tokens_are_ours(tokens: int) -> None:
    calls: list[dict[str, Any]] = []
    x, weight, scale = operands(tokens)
    out = multiplies(calls)(
        input=x.codes, weight=weight, block_size=[128, 128], weight_scale=scale, input_scale=x.scales, bias=None
    )
    exact_x = x.codes.double() * x.scales.double().repeat_interleave(128, 1)
    exact_weight = weight.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact_out = exact_x @ exact_weight.T
    assert not calls and out.dtype == torch.bfloat16
    assert (out.double() - exact_out).norm() <= 2.0**-8 * exact_out.norm()


@pytest.mark.parametrize(("tokens", "quantised"), [(65, True), (1, False), (64, False)])
def test_all_else_is_sglang_s(tokens: int, quantised: bool) -> None:
    """All arguments are passed on unchanged."""
    calls: list[dict[str, Any]] = []
    x, weight, scale = operands(tokens)
    scales = x.scales if quantised else None
    call = functools.partial(multiplies(calls), input=x.codes, weight=weight, block_size=[128, 128])
    assert call(weight_scale=scale, input_scale=scales, bias=None, weight_bf16=scale) == "SGLang's"
    (made,) = calls
    expected = (x.codes, weight, [128, 128], scale, scales, None)
    assert all(a is b or a == b for a, b in zip(made["arguments"], expected, strict=True))
    assert made["others"] == {"weight_bf16": scale}


def test_sglang_still_sees_whose_product_it_is() -> None:
    """SGLang arranges weights by the wrapped function, with or without bound arguments."""
    from sglang.srt.layers.quantization import fp8_utils

    deep_gemm = getattr(fp8_utils, sglang_operators.DEEP_GEMM)
    for product in (deep_gemm, functools.partial(deep_gemm, act_scale_ue8m0=True)):
        assert fp8_linear.FewTokensProduct(product).func is deep_gemm


# ---- SGLang's method, by a config


class Checkpoints:
    """A stand-in for SGLang's config that answers our questions."""

    packed_modules_mapping = {"a": ["b"]}  # noqa: RUF012

    def __init__(self, **attributes: object) -> None:
        self.method = SimpleNamespace(**attributes)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> object:
        self.asked = layer, prefix
        return self.method


def test_the_method_stays_sglang_s_but_for_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def product() -> None: ...

    monkeypatch.setattr(product, "__name__", sglang_operators.DEEP_GEMM)
    inner, layer = Checkpoints(w8a8_block_fp8_linear=product), nn.Module()
    wrapped = fp8_linear.OurProductConfig(inner)
    assert wrapped.get_quant_method(layer, "wq_b") is inner.method and inner.asked == (layer, "wq_b")
    assert isinstance(inner.method.w8a8_block_fp8_linear, fp8_linear.FewTokensProduct)
    assert inner.method.w8a8_block_fp8_linear.many is product
    assert wrapped.packed_modules_mapping == {"a": ["b"]}
    unquantised = Checkpoints()
    method = fp8_linear.OurProductConfig(unquantised).get_quant_method(layer, "gate")
    assert method is unquantised.method and not vars(method)


def test_a_real_method_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's `Fp8LinearMethod.apply` with the pair that our layers pass; nothing is copied."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    x, weight, scale = operands(3)
    method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    for name in ("use_marlin", "use_mxfp8", "block_fp8_as_mxfp8"):
        setattr(method, name, False)
    method.block_quant, method.weight_block_size = True, [128, 128]
    seen: list[tuple[Tensor, ...]] = []

    def ours(*tensors: Tensor) -> str:
        seen.append(tensors)
        return "ours"

    monkeypatch.setattr(fp8_linear, "linear_fp8", ours)
    method.w8a8_block_fp8_linear = multiplies([])
    layer = nn.Module()
    layer.weight, layer.weight_scale_inv = (nn.Parameter(tensor, requires_grad=False) for tensor in (weight, scale))
    assert method.apply(layer, x) == "ours"
    expected = (x.codes, x.scales, layer.weight, layer.weight_scale_inv)
    assert all(a is b for a, b in zip(seen[0], expected, strict=True))


def test_only_deep_gemm_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Our product has DeepGEMM's bits, not another product's."""

    def triton() -> None: ...

    caplog.set_level("INFO", fp8_linear.__name__)
    fp8_linear.say.cache_clear()
    inner = Checkpoints(w8a8_block_fp8_linear=triton)
    wrapped = fp8_linear.OurProductConfig(inner)
    for _ in range(2):
        assert wrapped.get_quant_method(nn.Module(), "wq_b").w8a8_block_fp8_linear is triton
    assert caplog.messages == ["FP8 linear layers: by SGLang's product, which is not DeepGEMM"]


@pytest.mark.usefixtures("hopper")
def test_linear_layers_get_it_on_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Checkpoints()
    wrapped = quantised_linear_config(config(), inner)
    assert isinstance(wrapped, fp8_linear.OurProductConfig) and wrapped.of_checkpoint is inner
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert quantised_linear_config(config(), inner) is inner


def test_a_cpu_has_no_such_product() -> None:
    assert isinstance(quantised_linear_config(config(), None), ReferenceLinearConfig)


# ---- the flag, and what is compiled ahead


@pytest.fixture
def required() -> Iterator[None]:
    registry.require_batch_invariance()
    yield
    registry.require_batch_invariance(False)


@pytest.mark.usefixtures("hopper", "required")
def test_under_the_flag_its_op_must_be_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's kernel is batch-invariant."""
    dims = torch.device("cuda", 0), torch.bfloat16, 512
    assert not checks.problems_of_ops(*dims)
    assert registry.chosen("linear_fp8", *dims[:2]).name == "sm90"
    of_op = registry._table["linear_fp8"]
    monkeypatch.setitem(of_op, "sm90", replace(of_op["sm90"], batch_invariant=False))
    (problem,) = checks.problems_of_ops(*dims)
    assert "op 'linear_fp8' has no batch-invariant implementation" in problem


def test_under_the_flag_more_tokens_must_be_deep_gemm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM has the bits of our product; another product would give a long prompt other bits than a decode step."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization import fp8_utils

    monkeypatch.setattr(compat, "deep_gemm_serves", lambda *arguments: True)
    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.weight, model = torch.empty(N, K), nn.Module()
    model.wq_b = layer
    for name, problems in ((sglang_operators.DEEP_GEMM, 0), ("triton_w8a8_block_fp8_linear", 1)):
        product = fp8_linear.FewTokensProduct(getattr(fp8_utils, name))
        method = SimpleNamespace(w8a8_block_fp8_linear=product, weight_block_size=[128, 128])
        layer.quant_method = method
        found = sglang_operators.problems_of_modules(model)
        assert len(found) == problems and all(name in problem for problem in found)


@pytest.mark.usefixtures("hopper")
def test_its_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of calls with any weight and up to 64 tokens, which the kernel's tests compare."""
    from model.small_geometry import GEOMETRY

    cuda = torch.device("cuda")

    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.host import launch
    from dsv4_kernels.linear import fp8, fp8_plan

    made: list[object] = []
    monkeypatch.setattr(launch, "load_or_compile", lambda name, plan, arch, compile: made.append((name, plan, arch)))
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(sequence_parallel, "may_be", lambda: False)
    monkeypatch.setattr(data_parallel, "is_on", lambda: False)
    monkeypatch.setattr("sglang_dsv4.warmup.model_shapes.get_parallel", lambda: SimpleNamespace(tp_size=1))
    for job in fp8.compile_jobs(model_shapes(config(), GEOMETRY, 64, cuda), "sm_90a"):
        job()
    calls = {fp8_plan.chosen(tokens, width, 132) for tokens in (1, 9, 17, 64) for width in (1536, 4096, 32768)}
    assert {plan for _, plan, _ in made} == calls and {rest[::2] for rest in made} == {("linear_fp8", "sm_90a")}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert Option.FP8_LINEAR not in model_shapes(config(), GEOMETRY, 64, cuda).options
