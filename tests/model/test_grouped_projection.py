"""wo_a kept in FP8: loaded as it is, by ranks too, and multiplied by the emulator with the bits of the dequantised one.

On a CPU nothing keeps FP8; here modules are built as on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ops.number_formats import same_bits
from ops.row_kernels import poisoned
from torch import Tensor, nn

from dsv4_kernels import compile_cache, registry
from dsv4_kernels.linear import expand_fp8_weight
from dsv4_kernels.quant import quantise_fp8_weight
from dsv4_kernels.rope import rope_frequencies
from sglang_dsv4 import compile_ahead
from sglang_dsv4.config import ConfigError
from sglang_dsv4.layers import grouped_projection
from sglang_dsv4.layers.grouped_projection import GroupedProjection
from sglang_dsv4.layers.linear import Fp8Input
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.tensor_table import Format, TensorSpec, TensorTable
from sglang_dsv4.weights import CheckpointError, load_checkpoint

GROUPS, ROWS, CHANNELS, HEADS = 4, 128, 512, 4
CONFIG = SimpleNamespace(
    o_groups=GROUPS,
    o_lora_rank=ROWS,
    num_attention_heads=HEADS,
    head_dim=512,
    qk_rope_head_dim=64,
    quantised_checkpoint=True,
    n_routed_experts=1,
    nvfp4_experts=False,
)
NAME = "attn.wo_a.weight"
SPEC = TensorSpec(NAME, (GROUPS * ROWS, CHANNELS), Format.LINEAR, NAME)
TABLE = TensorTable({NAME: SPEC}, lambda name: True)
MOST_TOKENS = 9

Build = Callable[..., nn.Module]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """A model of one projection, of a rank, and loaded."""
    torch.set_default_dtype(torch.bfloat16)
    monkeypatch.setattr(grouped_projection, "_expanded", grouped_projection._expanded.__wrapped__)

    def build(fp8: bool, tp_size: int = 1, tp_rank: int = 0, weights: dict[str, Tensor] | None = None) -> nn.Module:
        parallel = SimpleNamespace(tp_size=tp_size, tp_rank=tp_rank)
        monkeypatch.setattr(grouped_projection, "get_parallel", lambda: parallel)
        monkeypatch.setattr(grouped_projection, "keeps_fp8", lambda config: fp8)
        model = nn.Module()
        model.attn, model.config = nn.Module(), None
        model.attn.wo_a = GroupedProjection(CONFIG)
        load_checkpoint(model, CONFIG, TABLE, iter((weights or checkpoint()).items()))
        return model

    yield build
    torch.set_default_dtype(torch.float32)


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Every block has a scale of its own."""
    matrix = torch.randn(*SPEC.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    matrix *= torch.exp2(torch.arange(16.0).view(4, 4) - 9).repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes, scale = quantise_fp8_weight(matrix)
    return {NAME: codes, "attn.wo_a.scale": scale}


def expanded(model: nn.Module) -> Tensor:
    layer = model.attn.wo_a
    return expand_fp8_weight(layer.weight.data, layer.weight_scale_inv.data, layer.expanded)


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_what_is_kept_is_the_dequantised_weight(build: Build, tp_size: int, tp_rank: int) -> None:
    """To the bit, of a rank's own groups; the codes are the file's."""
    kept, plain = build(True, tp_size, tp_rank), build(False, tp_size, tp_rank)
    assert kept.attn.wo_a.weight.dtype == torch.float8_e4m3fn and plain.attn.wo_a.weight.dtype == torch.bfloat16
    assert kept.attn.wo_a.weight.shape == (GROUPS // tp_size, ROWS, CHANNELS)
    assert same_bits(expanded(kept), plain.attn.wo_a.weight.data)
    rows = slice(tp_rank * GROUPS * ROWS // tp_size, (tp_rank + 1) * GROUPS * ROWS // tp_size)
    assert torch.equal(
        kept.attn.wo_a.weight.flatten(0, 1).view(torch.uint8), checkpoint()[NAME][rows].view(torch.uint8)
    )


def test_scales_may_be_fp32_and_come_first(build: Build) -> None:
    first = checkpoint()
    turned = {name: first[name].float() if name.endswith("scale") else first[name] for name in reversed(first)}
    assert same_bits(expanded(build(True, weights=turned)), expanded(build(True)))


def test_loading_again_replaces_all(build: Build) -> None:
    model = build(True)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    load_checkpoint(model, CONFIG, TABLE, iter(checkpoint(1).items()))
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]  # what a CUDA graph reads
    assert same_bits(expanded(model), build(False, weights=checkpoint(1)).attn.wo_a.weight.data)


def test_what_can_not_be_kept_is_said(build: Build) -> None:
    with pytest.raises(CheckpointError, match=r"wo_a.weight' is bfloat16; its layer was built for quantised weights"):
        build(True, weights={NAME: torch.zeros(SPEC.shape, dtype=torch.bfloat16)})
    odd = checkpoint()
    odd["attn.wo_a.scale"] = odd["attn.wo_a.scale"].float() * 1.5
    with pytest.raises(ValueError, match=r"no powers of two: SGLANG_DSV4_WO_A=bf16 takes any"):
        build(True, weights=odd)


def test_dummy_weights(build: Build) -> None:
    """SGLang's `--load-format dummy`: scales are ones, as those of its own FP8 layers."""
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    model = build(True)
    initialize_dummy_weights(model)
    assert (model.attn.wo_a.weight_scale_inv == 1).all()
    assert model.attn.wo_a.weight.float().isfinite().all()


# ---- which of the two


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], bool]]:
    def ask(value: str) -> bool:
        monkeypatch.setenv(grouped_projection.VARIABLE, value)
        grouped_projection.is_chosen.cache_clear()
        return grouped_projection.is_chosen()

    yield ask
    grouped_projection.is_chosen.cache_clear()


def test_the_variable(asked: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not asked("bf16") and asked(" FP8 ")
    with pytest.raises(ValueError, match="SGLANG_DSV4_WO_A must be 'bf16' or 'fp8', got 'on'"):
        asked("on")
    asked("fp8")
    assert not grouped_projection.keeps_fp8(CONFIG)  # a CPU
    monkeypatch.setattr(grouped_projection, "builds_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert grouped_projection.keeps_fp8(CONFIG)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    with pytest.raises(ConfigError, match="'SGLANG_DSV4_WO_A' is 'fp8'; accepted: bf16: its kernel is Hopper's"):
        grouped_projection.keeps_fp8(CONFIG)
    asked("bf16")
    assert not grouped_projection.keeps_fp8(CONFIG)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantised_checkpoint": False}, "not FP8"),
        ({"o_lora_rank": 192}, "got 192, 512, 512 and 64"),
        ({"num_attention_heads": 2}, "got 128, 256, 512 and 64"),
        ({"qk_rope_head_dim": 32}, "got 128, 512, 512 and 32"),
    ],
    ids=["plain", "rows", "channels", "rope"],
)
def test_what_the_kernel_does_not_take(change: dict, reason: str) -> None:
    assert reason in grouped_projection.reason_against(SimpleNamespace(**vars(CONFIG) | change), 9)
    assert grouped_projection.reason_against(CONFIG, 9) is None


# ---- products


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops take Hopper's kernels, those that do not depend on the batch."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(grouped_projection, "MOST_TOKENS", MOST_TOKENS)
    monkeypatch.setattr(registry, "chosen", lambda op, device, dtype, impl: registry._implementation(op, "sm90"))
    monkeypatch.setattr(registry, "_resolved", {})


def rope() -> Rotation:
    layer = Rotation.__new__(Rotation)
    nn.Module.__init__(layer)
    layer.register_buffer("frequencies", rope_frequencies(64, 10000.0, None).float())
    return layer


def projected(model: nn.Module, tokens: int, quantises: bool) -> tuple[Tensor | Fp8Input, int]:
    """What wo_b would take, and launches."""
    from host import emulated

    heads = model.attn.wo_a.weight.shape[0] * CHANNELS // 512
    o = torch.randn(tokens, HEADS, 512, generator=torch.Generator().manual_seed(2), dtype=torch.float32).bfloat16()
    with emulated(arch="sm_90a") as device, mock.patch.object(torch, "empty", poisoned):
        made = model.attn.wo_a(o[:, :heads].contiguous(), torch.arange(tokens) * 1000, rope(), quantises)
    return made, len(device.reports)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize("tokens", [1, MOST_TOKENS, MOST_TOKENS + 1])
def test_both_have_the_same_bits(build: Build, tokens: int, quantises: bool) -> None:
    """Few tokens take one launch; many those of the other one, behind an expansion."""
    expected, launches = projected(build(False), tokens, quantises)
    got, few_launches = projected(build(True), tokens, quantises)
    assert launches == (3 if quantises else 2)
    assert few_launches == (1 if tokens <= MOST_TOKENS else launches)
    if quantises:
        assert isinstance(got, Fp8Input)
        assert same_bits(got.codes, expected.codes) and same_bits(got.scales, expected.scales)
        assert got.scales.stride() == expected.scales.stride()
    else:
        assert same_bits(got, expected)


@pytest.mark.usefixtures("on_hopper")
def test_ranks_have_their_groups(build: Build) -> None:
    whole, _ = projected(build(True), 3, False)
    part, _ = projected(build(True, 2, 0), 3, False)
    assert same_bits(part, whole[:, : GROUPS * ROWS // 2].contiguous())


def test_the_buffer_is_one_for_all_layers() -> None:
    shapes = [grouped_projection._expanded((2, 128, 512), torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    assert shapes[0].data_ptr() == shapes[1].data_ptr()
    grouped_projection._expanded.cache_clear()


def test_its_kernels_are_compiled_ahead(asked: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import fp8_weight_gpu

    monkeypatch.setattr(compile_ahead, "_KERNELS", {})
    monkeypatch.setattr(compile_ahead.packed_experts, "is_chosen", lambda: False)
    compiled = []
    monkeypatch.setattr(fp8_weight_gpu, "compile", lambda configuration, arch: compiled.append((configuration, arch)))
    geometry = SimpleNamespace(dtype=torch.bfloat16)
    for value, count in (("bf16", 0), ("fp8", len(fp8_weight_gpu.TILES))):
        asked(value)
        found = compile_ahead.kernels(CONFIG, geometry, torch.device("cuda", 0))
        assert [op for op, _ in found] == ["grouped_linear_fp8_weight"] * count
        for _, compile in found:
            compile()
    assert {arch for _, arch in compiled} == {"sm_90a"}
    assert all(configuration.rotates and configuration.quantises for configuration, _ in compiled)
