"""wo_a in FP8: loaded unchanged, on several ranks too; in the emulator its products have the bits of bf16 wo_a.

Modules are built as on a GPU: a CPU keeps no weight in FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ops.number_formats import same_bits
from ops.row_kernels import poisoned
from torch import Tensor, nn

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.number_formats import quantise_fp8_weight
from dsv4_kernels.rope import rope_frequencies
from sglang_dsv4.layers import grouped_projection
from sglang_dsv4.layers.grouped_projection import GroupedProjection
from sglang_dsv4.layers.linear import Fp8Input
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.model_config.config import ConfigError
from sglang_dsv4.weights.loader import CheckpointError, load_checkpoint
from sglang_dsv4.weights.tensor_table import Format, TensorSpec, TensorTable

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
MOST_TOKENS, FEW_TOKENS = 9, 3
IN_FP8 = ("fp8", "both")

Build = Callable[..., nn.Module]


@pytest.fixture(autouse=True)
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention data parallelism is off."""
    monkeypatch.setattr(grouped_projection.data_parallel, "is_on", lambda: False)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """A rank's loaded model with one projection."""
    torch.set_default_dtype(torch.bfloat16)
    monkeypatch.setattr(grouped_projection, "_expanded", grouped_projection._expanded.__wrapped__)

    def build(kept: str, tp_size: int = 1, tp_rank: int = 0, weights: dict[str, Tensor] | None = None) -> nn.Module:
        parallel = SimpleNamespace(attn_tp_size=tp_size, attn_tp_rank=tp_rank)
        monkeypatch.setattr(grouped_projection, "get_parallel", lambda: parallel)
        monkeypatch.setattr(grouped_projection, "kept", lambda *_: kept)
        model = nn.Module()
        model.attn, model.config = nn.Module(), None
        model.attn.wo_a = GroupedProjection(CONFIG)
        load(model, weights or checkpoint())
        return model

    yield build
    torch.set_default_dtype(torch.float32)


def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load as SGLang's loaders do."""
    load_checkpoint(model, CONFIG, TABLE, iter(weights.items()))
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """A weight whose blocks all have different scales."""
    matrix = torch.randn(*SPEC.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    matrix *= torch.exp2(torch.arange(16.0).view(4, 4) - 9).repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes, scale = quantise_fp8_weight(matrix)
    return {NAME: codes, "attn.wo_a.scale": scale}


def expanded(model: nn.Module) -> Tensor:
    """The bf16 weight of many tokens; with `both` it is made once, after loading."""
    layer = model.attn.wo_a
    return layer.expanded if layer.kept == "both" else layer.expand()


@pytest.mark.parametrize("in_fp8", IN_FP8)
@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_the_weight_kept_in_bf16_is_the_dequantised_one(build: Build, tp_size: int, tp_rank: int, in_fp8: str) -> None:
    """Bitwise, for a rank's own output groups; the codes are the file's."""
    kept, plain = build(in_fp8, tp_size, tp_rank), build("bf16", tp_size, tp_rank)
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
    assert same_bits(expanded(build("fp8", weights=turned)), expanded(build("fp8")))


@pytest.mark.parametrize("in_fp8", IN_FP8)
def test_loading_again_replaces_all(build: Build, in_fp8: str) -> None:
    model = build(in_fp8)
    read = [*model.parameters(), model.attn.wo_a.expanded]  # by a CUDA graph
    pointers = [tensor.data_ptr() for tensor in read]
    load(model, checkpoint(1))
    assert pointers == [tensor.data_ptr() for tensor in (*model.parameters(), model.attn.wo_a.expanded)]
    assert same_bits(expanded(model), build("bf16", weights=checkpoint(1)).attn.wo_a.weight.data)


def test_the_expanded_weight_is_no_tensor_of_the_checkpoint(build: Build) -> None:
    """The expanded weight is a buffer, because SGLang keeps buffers while a server sleeps."""
    model = build("both")
    assert "attn.wo_a.expanded" not in model.state_dict()
    assert "attn.wo_a.expanded" in dict(model.named_buffers())


def test_fp8_that_can_not_be_kept_is_an_error(build: Build) -> None:
    with pytest.raises(CheckpointError, match=r"wo_a.weight' is bfloat16; its layer was built for quantised weights"):
        build("both", weights={NAME: torch.zeros(SPEC.shape, dtype=torch.bfloat16)})
    odd = checkpoint()
    odd["attn.wo_a.scale"] = odd["attn.wo_a.scale"].float() * 1.5
    with pytest.raises(ValueError, match=r"not powers of two: SGLANG_DSV4_WO_A=bf16 accepts any"):
        build("both", weights=odd)


def test_dummy_weights(build: Build) -> None:
    """SGLang's `--load-format dummy` sets scales to one, as in its own FP8 layers."""
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    model = build("fp8")
    initialize_dummy_weights(model)
    assert (model.attn.wo_a.weight_scale_inv == 1).all()
    assert model.attn.wo_a.weight.float().isfinite().all()


# ---- choice of the format


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], str | None]:
    def ask(value: str | None) -> str | None:
        monkeypatch.delenv(grouped_projection.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(grouped_projection.VARIABLE, value)
        return grouped_projection.asked()

    return ask


def test_the_variable(asked: Callable[[str | None], str | None]) -> None:
    assert [asked(value) for value in (None, "bf16", " FP8 ", "both")] == [None, "bf16", "fp8", "both"]
    with pytest.raises(ValueError, match="SGLANG_DSV4_WO_A must be 'both' or 'fp8' or 'bf16', got 'on'"):
        asked("on")


@pytest.mark.parametrize(("value", "on_gpu"), [(None, "both"), ("bf16", "bf16"), ("fp8", "fp8"), ("both", "both")])
def test_what_is_kept_where(asked: Callable[[str | None], str | None], value: str | None, on_gpu: str) -> None:
    """Asking for FP8 by name where it can't be kept is an error, except on a CPU."""
    asked(value)
    for generation in (9, 10):
        assert grouped_projection.kept(CONFIG, generation, torch.bfloat16) == on_gpu
    assert grouped_projection.kept(CONFIG, None, torch.bfloat16) == "bf16"
    if value in IN_FP8:
        message = (
            f"'SGLANG_DSV4_WO_A' is '{value}'; accepted: bf16: its kernels are Hopper's and Blackwell's; the GPU has "
            r"compute capability 12\.x"
        )
        with pytest.raises(ConfigError, match=message):
            grouped_projection.kept(CONFIG, 12, torch.bfloat16)
    else:
        assert grouped_projection.kept(CONFIG, 12, torch.bfloat16) == "bf16"


@pytest.mark.parametrize(("ranks_of_a_group", "kept"), [(1, "fp8"), (2, "fp8"), (4, "both")])
def test_groups_of_ranks_keep_memory_for_kv(ranks_of_a_group: int, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pro's sizes: the bf16 form takes 7.6 GiB over the ranks of a group; Flash's 2.7 stay."""
    sizes = {"num_hidden_layers": 61, "num_attention_heads": 128, "o_groups": 16, "o_lora_rank": 1024}
    pro = SimpleNamespace(**vars(CONFIG) | sizes)
    flash = SimpleNamespace(
        **vars(CONFIG) | sizes | {"num_hidden_layers": 43, "num_attention_heads": 64, "o_groups": 8}
    )
    monkeypatch.delenv(grouped_projection.VARIABLE, raising=False)
    monkeypatch.setattr(grouped_projection, "get_parallel", lambda: SimpleNamespace(attn_tp_size=ranks_of_a_group))
    assert grouped_projection.kept(pro, 9, torch.bfloat16) == "both"
    monkeypatch.setattr(grouped_projection.data_parallel, "is_on", lambda: True)
    assert grouped_projection.kept(pro, 9, torch.bfloat16) == kept
    assert grouped_projection.kept(flash, 9, torch.bfloat16) == "both"
    monkeypatch.setenv(grouped_projection.VARIABLE, "both")
    assert grouped_projection.kept(pro, 9, torch.bfloat16) == "both"


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
    assert reason in grouped_projection.reason_against(SimpleNamespace(**vars(CONFIG) | change), 9, torch.bfloat16)
    assert grouped_projection.reason_against(CONFIG, 9, torch.bfloat16) is None
    assert "not torch.float16" in grouped_projection.reason_against(CONFIG, 9, torch.float16)


# ---- products


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops run Hopper's batch-invariant kernels."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(grouped_projection, "MOST_TOKENS", MOST_TOKENS)
    monkeypatch.setattr(grouped_projection, "FEW_TOKENS", FEW_TOKENS)
    monkeypatch.setattr(registry, "chosen", lambda op, device, dtype, impl: registry._implementation(op, "sm90"))
    monkeypatch.setattr(registry, "_resolved", {})


def rope() -> Rotation:
    layer = Rotation.__new__(Rotation)
    nn.Module.__init__(layer)
    layer.register_buffer("frequencies", rope_frequencies(64, 10000.0, None).float())
    return layer


def projected(model: nn.Module, tokens: int, quantises: bool) -> tuple[Tensor | Fp8Input, int]:
    """wo_b's input, and the launches that made it."""
    from ptx_emulator import emulated

    heads = model.attn.wo_a.weight.shape[0] * CHANNELS // 512
    o = torch.randn(tokens, HEADS, 512, generator=torch.Generator().manual_seed(2), dtype=torch.float32).bfloat16()
    with emulated(arch="sm_90a") as device, mock.patch.object(torch, "empty", poisoned):
        made = model.attn.wo_a(o[:, :heads].contiguous(), torch.arange(tokens) * 1000, rope(), quantises)
    return made, len(device.reports)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize(
    ("in_fp8", "tokens", "one_launch"),
    [
        *(("fp8", 1, True), ("fp8", MOST_TOKENS, True), ("fp8", MOST_TOKENS + 1, False)),
        *(("both", FEW_TOKENS, True), ("both", FEW_TOKENS + 1, False)),
    ],
)
def test_all_have_the_same_bits(build: Build, in_fp8: str, tokens: int, one_launch: bool, quantises: bool) -> None:
    """Few tokens need one launch; many need the launches of a bf16 weight, expanded first where it is not kept."""
    expected, launches = projected(build("bf16"), tokens, quantises)
    got, few_launches = projected(build(in_fp8), tokens, quantises)
    assert launches == (3 if quantises else 2)
    assert few_launches == (1 if one_launch else launches)
    if quantises:
        assert isinstance(got, Fp8Input)
        assert same_bits(got.codes, expected.codes) and same_bits(got.scales, expected.scales)
        assert got.scales.stride() == expected.scales.stride()
    else:
        assert same_bits(got, expected)


@pytest.mark.usefixtures("on_hopper")
def test_ranks_have_their_groups(build: Build) -> None:
    whole, _ = projected(build("both"), 3, False)
    part, _ = projected(build("both", 2, 0), 3, False)
    assert same_bits(part, whole[:, : GROUPS * ROWS // 2].contiguous())


def test_the_buffer_is_one_for_all_layers() -> None:
    shapes = [grouped_projection._expanded((2, 128, 512), torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    assert shapes[0].data_ptr() == shapes[1].data_ptr()
    grouped_projection._expanded.cache_clear()


def test_its_kernels_are_compiled_ahead(
    asked: Callable[[str | None], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles of all numbers of tokens that are multiplied in FP8."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    compiled = []
    monkeypatch.setattr(gpu, "compile", lambda configuration, arch: compiled.append((configuration, arch)))
    for value, most in (("bf16", 0), ("fp8", 512), ("both", 16), (None, 16)):
        asked(value)
        compiled.clear()
        kept = grouped_projection.kept(CONFIG, 9, torch.bfloat16)
        model = SimpleNamespace(fp8_wo_a_tokens=grouped_projection.most_tokens_in_fp8(kept))
        for job in gpu.compile_jobs(model, "sm_90a"):
            job()
        of_few_groups = {gpu.chosen(tokens, 1, 8, 132) for tokens in range(1, min(most, 16) + 1)}
        tiles = {gpu.chosen(tokens) for tokens in range(1, most + 1)} | of_few_groups
        assert {configuration.tile for configuration, _ in compiled} == tiles and len(compiled) == len(tiles)
        assert all(configuration.rotates and configuration.quantises for configuration, _ in compiled)
