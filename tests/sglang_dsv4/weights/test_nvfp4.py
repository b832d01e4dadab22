"""NVFP4 experts as NVIDIA's modelopt exports them: loaded values are right, and mistakes are named.

The values are compared with `oracle.read_dequantised`, which takes the bytes apart by itself and rounds once.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model.checkpoint_tensors import (
    Checkpoint,
    assert_same,
    e8m0,
    loaded,
    read,
    unfilled,
    with_last,
    with_tensor,
    without,
)
from model.harness import Harness
from model.oracle import read_dequantised
from torch import Tensor, nn

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config, write_checkpoint
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.weights.loader import CheckpointError, load_checkpoint
from sglang_dsv4.weights.tensor_table import TensorTable, main_model_tensors

SHAPE = replace(PRESETS["nvfp4"], moe_intermediate_size=128)  # the messages below name shapes
EXPERT = "layers.2.ffn.experts.3.w2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvfp4")
    write_checkpoint(path, SHAPE, seed=5)
    return path


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return read(folder)


@pytest.fixture(scope="module")
def main(folder: Path) -> nn.Module:
    return Harness(folder, dtype="bfloat16", max_total_tokens=1024, max_requests=2).model


def test_the_files_have_modelopt_s_layout(folder: Path, checkpoint: Checkpoint) -> None:
    """Names, dtypes and shapes are those of nvidia/DeepSeek-V4-*-NVFP4; the draft's experts are as released."""
    d, inner = SHAPE.hidden_size, SHAPE.moe_intermediate_size
    weight, scale = checkpoint[f"{EXPERT}.weight"], checkpoint[f"{EXPERT}.weight_scale"]
    assert (weight.dtype, weight.shape) == (torch.uint8, (d, inner // 2))
    assert (scale.dtype, scale.shape) == (torch.float8_e4m3fn, (d, inner // 16))
    for last in ("weight_scale_2", "input_scale"):
        w1, w3 = (checkpoint[f"layers.2.ffn.experts.3.{matrix}.{last}"] for matrix in ("w1", "w3"))
        assert (w1.dtype, w1.shape) == (torch.float32, ()) and w1 == w3
    assert f"{EXPERT}.scale" not in checkpoint
    assert checkpoint["mtp.0.ffn.experts.3.w2.weight"].dtype == torch.int8
    assert "mtp.0.ffn.experts.3.w2.scale" in checkpoint and "mtp.0.ffn.experts.3.w2.weight_scale" not in checkpoint
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "fp8" and declared["weight_block_size"] == [128, 128]
    assert (declared["quant_algo"], declared["moe_quant_algo"], declared["group_size"]) == (
        "MIXED_PRECISION", "NVFP4", 16
    )  # fmt: skip
    manifest = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert manifest["quantized_layers"]["layers.3.ffn.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert "mtp.*" in declared["ignore"] and "mtp.*" in manifest["exclude_modules"]


def test_loaded_weights_are_the_dequantised_values(folder: Path, main: nn.Module, checkpoint: Checkpoint) -> None:
    expected = read_dequantised(folder)
    parameters = loaded(main, checkpoint)
    assert unfilled(main) == []
    for layer in range(len(SHAPE.compress_ratios)):
        for expert in range(SHAPE.n_routed_experts):
            w1, w2, w3 = (expected[f"layers.{layer}.ffn.experts.{expert}.{m}.weight"] for m in ("w1", "w2", "w3"))
            experts = f"model.layers.{layer}.ffn.experts."
            assert torch.equal(parameters[f"{experts}w13_weight"][expert], torch.cat((w1, w3)).bfloat16())
            assert torch.equal(parameters[f"{experts}w2_weight"][expert], w2.bfloat16())


@pytest.mark.parametrize("order", ["scales-first", "weights-first", "shuffled"])
def test_order_does_not_matter(main: nn.Module, checkpoint: Checkpoint, order: str) -> None:
    expected = loaded(main, checkpoint)
    names = sorted(checkpoint, key=lambda name: name.endswith("weight"), reverse=order == "weights-first")
    if order == "shuffled":
        names = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(1))]
    assert_same(loaded(main, {name: checkpoint[name] for name in names}), expected)


def test_experts_in_the_releases_format_load_too(main: nn.Module, checkpoint: Checkpoint) -> None:
    """The dtype of each matrix tells its format."""
    mixed = dict(checkpoint)
    for last in ("weight_scale", "weight_scale_2", "input_scale"):
        del mixed[f"{EXPERT}.{last}"]
    mixed[f"{EXPERT}.weight"] = checkpoint["mtp.0.ffn.experts.3.w2.weight"]
    mixed[f"{EXPERT}.scale"] = checkpoint["mtp.0.ffn.experts.3.w2.scale"]
    assert unfilled(main) == [] and loaded(main, mixed)
    assert unfilled(main) == []


def e4m3(byte: int) -> Callable[[Tensor], Tensor]:
    return lambda scale: with_last(scale.view(torch.uint8), byte).view(torch.float8_e4m3fn)


def number(value: float) -> Callable[[Tensor], Tensor]:
    return lambda _: torch.tensor(value)


MISTAKES: dict[str, tuple[Callable[[Checkpoint], None], str]] = {
    "missing-block-scales": (
        without(f"{EXPERT}.weight_scale"),
        r"1 missing tensors: 'layers\.2\.ffn\.experts\.3\.w2\.weight_scale' \(256, 8\) of uint8 '.*w2\.weight'",
    ),
    "missing-global-scale": (
        without(f"{EXPERT}.weight_scale_2"),
        r"missing.*'layers\.2\.ffn\.experts\.3\.w2\.weight_scale_2' \(\) of uint8",
    ),
    "missing-input-scale": (without(f"{EXPERT}.input_scale"), r"missing.*3\.w2\.input_scale' \(\) of uint8"),
    "missing-weight": (without(f"{EXPERT}.weight"), r"1 missing tensors: '.*\.3\.w2\.weight' \(256, 128\)"),
    "weight-shape": (
        with_tensor(f"{EXPERT}.weight", lambda t: t[:, :-1]),
        r"3\.w2\.weight' is uint8 \(256, 63\); expected int8/uint8 \(256, 64\) or",
    ),
    "block-scale-shape": (
        with_tensor(f"{EXPERT}.weight_scale", lambda t: t[:, ::2].contiguous()),
        r"3\.w2\.weight_scale' is float8_e4m3fn \(256, 4\); expected float8_e4m3fn \(256, 8\)",
    ),
    "block-scale-dtype": (
        with_tensor(f"{EXPERT}.weight_scale", lambda t: t.view(torch.uint8)),
        r"3\.w2\.weight_scale' is uint8 \(256, 8\); expected float8_e4m3fn \(256, 8\)",
    ),
    "global-scales-of-rows": (
        with_tensor(f"{EXPERT}.weight_scale_2", lambda t: t.expand(256).contiguous()),
        r"3\.w2\.weight_scale_2' is float32 \(256,\); expected float32 \(\) or float32 \(1,\)",
    ),
    "scale-of-the-release": (
        with_tensor(f"{EXPERT}.scale", lambda _: torch.ones(256, 4).to(torch.float8_e8m0fnu)),
        r"3\.w2\.scale' has no use: '.*\.3\.w2\.weight' is",
    ),
    "nvfp4-scale-of-mxfp4": (
        with_tensor("layers.1.ffn.shared_experts.w2.weight_scale", lambda _: torch.ones(1)),
        r"1 unknown tensors: 'layers\.1\.ffn\.shared_experts\.w2\.weight_scale'",
    ),
    "nan-block-scale": (with_tensor(f"{EXPERT}.weight_scale", e4m3(0x7F)), r"1 tensors hold.*weight_scale' \(NaN\)"),
    "minus-nan-block-scale": (with_tensor(f"{EXPERT}.weight_scale", e4m3(0xFF)), r"weight_scale' \(NaN\)"),
    "negative-block-scale": (with_tensor(f"{EXPERT}.weight_scale", e4m3(0x81)), r"weight_scale' \(negative\)"),
    "nan-global-scale": (with_tensor(f"{EXPERT}.weight_scale_2", number(math.nan)), r"weight_scale_2' \(NaN\)"),
    "infinite-global-scale": (with_tensor(f"{EXPERT}.weight_scale_2", number(math.inf)), r"_scale_2' \(infinite\)"),
    "negative-global-scale": (with_tensor(f"{EXPERT}.weight_scale_2", number(-1.0)), r"_scale_2' \(negative\)"),
    "global-scale-that-overflows": (
        with_tensor(f"{EXPERT}.weight_scale_2", number(2.0**117)),
        r"weight_scale_2' \(a scale of 1\.66e\+35, with which weights can be infinite\)",
    ),
    "nan-input-scale": (with_tensor(f"{EXPERT}.input_scale", number(math.nan)), r"input_scale' \(NaN\)"),
    "input-scale-of-zero": (with_tensor(f"{EXPERT}.input_scale", number(0.0)), r"input_scale' \(not positive\)"),
    "nan-scale-of-the-draft-is-not-ours": (
        with_tensor("mtp.0.ffn.experts.3.w2.scale", e8m0(255)),
        "",  # the draft names it when it loads
    ),
}


@pytest.mark.parametrize("order", ["sorted", "reversed"])
@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(
    main: nn.Module, checkpoint: Checkpoint, mistake: Callable[[Checkpoint], None], message: str, order: str
) -> None:
    damaged = dict(checkpoint)
    mistake(damaged)
    names = sorted(damaged, reverse=order == "reversed")
    if not message:
        main.load_weights((name, damaged[name]) for name in names)
        return
    with pytest.raises(CheckpointError, match=message):
        main.load_weights((name, damaged[name]) for name in names)


@pytest.mark.parametrize("first", ["weight", "scale"])
def test_scales_without_their_weight_are_named(main: nn.Module, checkpoint: Checkpoint, first: str) -> None:
    """An MXFP4 weight and scale replace the NVFP4 weight, and its NVFP4 scales stay."""
    mixed = dict(checkpoint)
    mixed[f"{EXPERT}.weight"] = checkpoint["mtp.0.ffn.experts.3.w2.weight"]
    mixed[f"{EXPERT}.scale"] = checkpoint["mtp.0.ffn.experts.3.w2.scale"]
    names = sorted(mixed, key=lambda name: not name.endswith(f".{first}"))
    with pytest.raises(CheckpointError, match=r"3\.w2\.(weight_scale' has no use|input_scale').*"):
        main.load_weights((name, mixed[name]) for name in names)


def test_the_largest_numbers_are_no_mistake(main: nn.Module, checkpoint: Checkpoint) -> None:
    """The largest values that bf16 can hold; scales of zero; a global scale of one entry."""
    large = dict(checkpoint)
    large[f"{EXPERT}.weight"] = with_last(checkpoint[f"{EXPERT}.weight"], 0x7F)
    large[f"{EXPERT}.weight_scale"] = e4m3(0x7E)(checkpoint[f"{EXPERT}.weight_scale"])
    large[f"{EXPERT}.weight_scale"].view(torch.uint8)[0, 0] = 0
    large[f"{EXPERT}.weight_scale_2"] = torch.tensor([2.0**116])
    other = EXPERT.replace("w2", "w1")
    large[f"{other}.weight_scale_2"] = torch.tensor(0.0)
    parameters = loaded(main, large)
    assert parameters["model.layers.2.ffn.experts.w2_weight"][3, -1, -1] == 6 * 448 * 2.0**116
    assert not parameters["model.layers.2.ffn.experts.w2_weight"][3, 0, :16].any()
    assert not parameters["model.layers.2.ffn.experts.w13_weight"][3, : SHAPE.moe_intermediate_size].any()


def test_nvfp4_tensors_that_the_config_does_not_declare_are_refused(main: nn.Module, checkpoint: Checkpoint) -> None:
    config = replace(main.dsv4_config, nvfp4_experts=False)
    with pytest.raises(CheckpointError, match=r"is NVFP4, but the quantization_config .*MIXED_PRECISION"):
        load_checkpoint(main, config, main_model_tensors(config), iter(checkpoint.items()))


class SglangsExperts(nn.Module):
    """One layer's expert parameters, made by SGLang's NVFP4 method and filled by SGLang's loader."""

    def __init__(self) -> None:
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptNvFp4FusedMoEMethod

        super().__init__()
        experts, d, inner = SHAPE.n_routed_experts, SHAPE.hidden_size, SHAPE.moe_intermediate_size
        method = object.__new__(ModelOptNvFp4FusedMoEMethod)  # its constructor asks for a GPU
        method.quant_config = ModelOptFp4Config(True, group_size=16)
        method.enable_flashinfer_trtllm_moe, method.use_flashinfer_trtllm_weight_layout = True, False
        layer = object.__new__(FusedMoE)
        nn.Module.__init__(layer)
        layer.num_experts = layer.num_local_experts = experts
        layer.moe_runner_config = SimpleNamespace(is_gated=True, intermediate_size_per_partition=inner)
        for field, value in dict(
            quant_method=method, quant_config=method.quant_config, scheme=None, uses_expert_location=False,
            moe_tp_rank=0, moe_tp_size=1, moe_ep_rank=0, moe_ep_size=1, use_triton_kernels=False,
            use_presharded_weights=False, use_flashinfer_trtllm_moe=False, num_fused_shared_experts=0,
            _has_fused_shared=False, _num_global_routed=experts, _num_local_routed=experts,
            _expert_storage_rank=0, _expert_storage_size=1,
        ).items():  # fmt: skip
            setattr(layer, field, value)
        method.create_weights(layer, experts, d, inner, torch.bfloat16, weight_loader=layer.weight_loader)
        self.experts = layer
        self.config = SimpleNamespace(_name_or_path="")


def experts_only(config: Config) -> TensorTable:
    specs = {
        name: replace(spec, parameter=spec.parameter.removeprefix("model.layers.2.ffn."))
        for name, spec in main_model_tensors(config).specs.items()
        if name.startswith("layers.2.ffn.experts.")
    }
    return TensorTable(specs, lambda name: name.startswith("layers.2.ffn.experts."))


def test_sglang_s_nvfp4_experts_get_the_files_bytes(checkpoint: Checkpoint) -> None:
    """On a GPU weights are not dequantised: SGLang's method holds codes and all scales, under SGLang's names."""
    config = Config.from_hf(SimpleNamespace(**hf_config(SHAPE)))
    model = SglangsExperts()
    load_checkpoint(model, config, experts_only(config), iter(checkpoint.items()))
    parameters = {name.removeprefix("experts."): p.data for name, p in model.named_parameters()}
    for expert in range(SHAPE.n_routed_experts):
        w1, w2, w3 = (f"layers.2.ffn.experts.{expert}.{matrix}." for matrix in ("w1", "w2", "w3"))
        for last in ("weight", "weight_scale"):
            gate, down, up = (checkpoint[matrix + last].view(torch.uint8) for matrix in (w1, w2, w3))
            assert torch.equal(parameters[f"w13_{last}"][expert].view(torch.uint8), torch.cat((gate, up)))
            assert torch.equal(parameters[f"w2_{last}"][expert].view(torch.uint8), down)
        for last in ("weight_scale_2", "input_scale"):
            assert parameters[f"w13_{last}"][expert].tolist() == [checkpoint[w1 + last], checkpoint[w3 + last]]
            assert parameters[f"w2_{last}"][expert] == checkpoint[w2 + last]


def test_experts_of_another_format_than_the_layer_s_are_refused(checkpoint: Checkpoint) -> None:
    config = Config.from_hf(SimpleNamespace(**hf_config(SHAPE)))
    mixed = dict(checkpoint)
    for last in ("weight_scale", "weight_scale_2", "input_scale"):
        del mixed[f"{EXPERT}.{last}"]
    mixed[f"{EXPERT}.weight"] = checkpoint["mtp.0.ffn.experts.3.w2.weight"]
    mixed[f"{EXPERT}.scale"] = checkpoint["mtp.0.ffn.experts.3.w2.scale"]
    with pytest.raises(CheckpointError, match=r"3\.w2\.weight' is int8; its layer was built .* uint8"):
        load_checkpoint(SglangsExperts(), config, experts_only(config), iter(mixed.items()))
