"""Loading official checkpoints: every tensor is used, every parameter is filled, and mistakes are named.

The model has the `tiny` preset's layers: every kind, both routers and an MTP module. A checkpoint is a dict of tensors
here; only the cut-short files go through SGLang's reader.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model.checkpoint_tensors import (
    SMALL,
    Checkpoint,
    assert_same,
    e8m0,
    empty,
    loaded,
    read,
    unfilled,
    with_last,
    with_tensor,
    without,
)
from model.harness import Harness
from safetensors.torch import load_file
from sglang.srt.model_loader.weight_utils import (
    buffered_multi_thread_safetensors_weights_iterator,
    safetensors_weights_iterator,
)
from torch import Tensor, nn

from dsv4_kernels.number_formats import dequantise_fp4_weight, dequantise_fp8_weight, quantise_fp8_weight
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.weights.loader import CheckpointError, cut_tensors, load_checkpoint
from sglang_dsv4.weights.tensor_table import main_model_tensors, mtp_tensors

QUANTISED = "layers.1.attn.wq_b"
EXPERT = "layers.2.ffn.experts.3.w2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised")
    write_checkpoint(path, SMALL, seed=3)
    return path


@pytest.fixture(scope="module")
def quantised(folder: Path) -> Checkpoint:
    return read(folder)


@pytest.fixture(scope="module")
def plain(quantised: Checkpoint) -> Checkpoint:
    """The checkpoint's values, dequantised."""
    return {name: dequantised(quantised, name) for name in quantised if not name.endswith(".scale")}


def dequantised(checkpoint: Checkpoint, name: str) -> Tensor:
    weight, scale = checkpoint[name], checkpoint.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return weight
    dequantise = dequantise_fp4_weight if weight.dtype == torch.int8 else dequantise_fp8_weight
    return dequantise(weight, scale, torch.float32)


@pytest.fixture(scope="module")
def harness(folder: Path) -> Harness:
    return Harness(folder, dtype="bfloat16", max_total_tokens=1024, max_requests=2)


@pytest.fixture(scope="module")
def main(harness: Harness) -> nn.Module:
    return harness.model


@pytest.fixture(scope="module")
def draft(harness: Harness) -> nn.Module:
    from sglang_dsv4.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    with harness._active():
        torch.set_default_dtype(torch.bfloat16)
        try:
            return DeepseekV4ForCausalLMNextN(harness.model.config)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_checkpoint_fills_every_parameter(main: nn.Module, draft: nn.Module, quantised: Checkpoint) -> None:
    for model in (main, draft):
        empty(model)
        model.load_weights(iter(quantised.items()))
    assert unfilled(main) == []
    assert unfilled(draft) == ["model.embed.weight", "lm_head.weight"]  # the target's, shared after loading


def test_the_tables_list_the_checkpoint_exactly(main: nn.Module, plain: Checkpoint) -> None:
    config = main.dsv4_config
    specs = main_model_tensors(config).specs | mtp_tensors(config).specs
    assert {name: spec.shape for name, spec in specs.items()} == {name: tuple(t.shape) for name, t in plain.items()}


def test_quantised_and_dequantised_checkpoints_load_the_same(
    main: nn.Module, draft: nn.Module, quantised: Checkpoint, plain: Checkpoint
) -> None:
    """Scales are powers of two, so bf16 holds the dequantised values exactly."""
    for model in (main, draft):
        expected = {n: p.nan_to_num() if p.is_floating_point() else p for n, p in loaded(model, plain).items()}
        actual = {n: p.nan_to_num() if p.is_floating_point() else p for n, p in loaded(model, quantised).items()}
        assert_same(actual, expected)


def test_values_are_loaded_into_their_parameters(main: nn.Module, quantised: Checkpoint, plain: Checkpoint) -> None:
    parameters = loaded(main, quantised)
    assert torch.equal(parameters["model.layers.1.attn.wq_b.weight"].float(), plain["layers.1.attn.wq_b.weight"])
    assert torch.equal(parameters["model.layers.2.attn.attn_sink"], plain["layers.2.attn.attn_sink"])
    experts = parameters["model.layers.2.ffn.experts.w13_weight"][3].float()
    gate_and_up = [plain[f"layers.2.ffn.experts.3.{matrix}.weight"] for matrix in ("w1", "w3")]
    assert torch.equal(experts, torch.cat(gate_and_up))
    shared = parameters["model.layers.2.ffn.shared_experts.w13.weight"].float()
    assert torch.equal(shared, torch.cat([plain[f"layers.2.ffn.shared_experts.{m}.weight"] for m in ("w1", "w3")]))
    groups = parameters["model.layers.0.attn.wo_a.weight"].float()
    assert groups.shape == (SMALL.o_groups, SMALL.o_lora_rank, SMALL.num_attention_heads * 512 // SMALL.o_groups)
    assert torch.equal(groups.flatten(0, 1), plain["layers.0.attn.wo_a.weight"])
    assert torch.equal(parameters["lm_head.weight"][: SMALL.vocab_size], plain["head.weight"].float())


@pytest.mark.parametrize("order", ["weights-first", "scales-first", "shuffled"])
def test_order_does_not_matter(main: nn.Module, quantised: Checkpoint, order: str) -> None:
    expected = loaded(main, quantised)
    names = sorted(quantised, key=lambda name: name.endswith(".scale"), reverse=order == "scales-first")
    if order == "shuffled":
        shuffle = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
        names = [names[i] for i in shuffle]
    assert_same(loaded(main, {name: quantised[name] for name in names}), expected)


def test_experts_may_be_fp8(main: nn.Module, quantised: Checkpoint) -> None:
    """The released Base models have FP8 experts. The dtype tells the format, since `expert_dtype` may be absent."""
    with_fp8 = dict(quantised)
    for name in quantised:
        if ".ffn.experts." in name and name.endswith(".weight"):
            scale_name = name.removesuffix("weight") + "scale"
            with_fp8[name], with_fp8[scale_name] = quantise_fp8_weight(dequantised(quantised, name))
    assert with_fp8[f"{EXPERT}.weight"].dtype == torch.float8_e4m3fn
    expected = {name: dequantised(with_fp8, name) for name in with_fp8 if not name.endswith(".scale")}
    assert_same(loaded(main, with_fp8), loaded(main, expected))


def test_loading_streams(main: nn.Module, quantised: Checkpoint) -> None:
    """In the order of SGLang's reader no weight is held after the iteration that reads it."""

    def items() -> Iterator[tuple[str, Tensor]]:
        weights: list[weakref.ref[Tensor]] = []
        for name in sorted(quantised):
            alive = sum(weight() is not None for weight in weights)
            assert alive <= 1, f"{alive} weights are held when {name} comes"
            tensor = quantised[name].clone()
            if name.endswith(".weight"):
                weights.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    main.load_weights(items())


def unquantised_beside_its_scale(checkpoint: Checkpoint) -> None:
    checkpoint[f"{QUANTISED}.weight"] = dequantised(checkpoint, f"{QUANTISED}.weight")


def renamed(checkpoint: Checkpoint) -> None:
    checkpoint["layers.1.attn.q_norm.weigth"] = checkpoint.pop("layers.1.attn.q_norm.weight")


def two_mistakes(checkpoint: Checkpoint) -> None:
    checkpoint.pop("norm.weight")
    checkpoint["head.weight"] = with_last(checkpoint["head.weight"], math.inf)


MISTAKES: dict[str, tuple[Callable[[Checkpoint], None], str]] = {
    "missing": (without("layers.1.attn.attn_sink"), r"1 missing tensors: 'layers\.1\.attn\.attn_sink' \(8,\)"),
    "missing-weight": (without(f"{QUANTISED}.weight"), r"missing.*'layers\.1\.attn\.wq_b\.weight' \(4096, 128\)"),
    "missing-scale": (
        without(f"{QUANTISED}.scale"),
        r"missing.*'layers\.1\.attn\.wq_b\.scale' \(32, 1\) of float8_e4m3fn 'layers\.1\.attn\.wq_b\.weight'",
    ),
    "missing-expert": (without(f"{EXPERT}.weight"), r"missing.*'layers\.2\.ffn\.experts\.3\.w2\.weight' \(256, 128\)"),
    "unknown": (
        with_tensor("layers.4.attn_norm.weight", lambda _: torch.ones(256)),
        r"1 unknown tensors: 'layers\.4\.attn_norm\.weight' \(did you mean",
    ),
    "renamed": (
        renamed,
        r"unknown.*'layers\.1\.attn\.q_norm\.weigth' \(did you mean 'layers\.1\.attn\.q_norm\.weight'.*missing.*q_norm",
    ),
    "shape": (
        with_tensor("layers.0.hc_attn_fn", lambda t: t[:-1]),
        r"'layers\.0\.hc_attn_fn' is float32 \(23, 1024\); expected .*float32.* \(24, 1024\)",
    ),
    "transposed": (
        with_tensor(f"{QUANTISED}.weight", lambda t: t.T),
        r"'layers\.1\.attn\.wq_b\.weight' is float8_e4m3fn \(128, 4096\); expected .*\(4096, 128\)",
    ),
    "fp4-shape": (
        with_tensor(f"{EXPERT}.weight", lambda t: t[:, :-1]),
        r"\.experts\.3\.w2\.weight' is int8 \(256, 63\); expected int8/uint8 \(256, 64\) or .*\(256, 128\)",
    ),
    "scale-shape": (
        with_tensor(f"{QUANTISED}.scale", lambda t: t[:-1]),
        r"'layers\.1\.attn\.wq_b\.scale' is float8_e8m0fnu \(31, 1\); expected float8_e8m0fnu/float32 \(32, 1\)",
    ),
    "scale-of-other-format": (
        with_tensor(f"{EXPERT}.scale", lambda t: torch.ones(2, 1).to(torch.float8_e8m0fnu)),
        r"'layers\.2\.ffn\.experts\.3\.w2\.scale' is float8_e8m0fnu \(2, 1\); expected .* \(256, 4\)",
    ),
    "dtype": (
        with_tensor(f"{QUANTISED}.weight", lambda t: t.view(torch.int8)),
        r"'layers\.1\.attn\.wq_b\.weight' is int8 .*; expected float8_e4m3fn/bfloat16/float32/float16",
    ),
    "quantised-norm": (
        with_tensor("norm.weight", lambda t: t.to(torch.float8_e4m3fn)),
        r"'norm\.weight' is float8_e4m3fn \(256,\); expected bfloat16/float32",
    ),
    "scale-dtype": (
        with_tensor(f"{QUANTISED}.scale", lambda t: t.to(torch.bfloat16)),
        r"'layers\.1\.attn\.wq_b\.scale' is bfloat16",
    ),
    "scale-without-use": (unquantised_beside_its_scale, r"'layers\.1\.attn\.wq_b\.scale' has no use"),
    "nan-scale": (
        with_tensor(f"{QUANTISED}.scale", e8m0(255)),
        r"1 tensors hold.*'layers\.1\.attn\.wq_b\.scale' \(NaN\)",
    ),
    "nan-scale-of-fp4": (
        with_tensor(f"{EXPERT}.scale", e8m0(255)),
        r"'layers\.2\.ffn\.experts\.3\.w2\.scale' \(NaN\)",
    ),
    "nan-fp32-scale": (
        with_tensor(f"{QUANTISED}.scale", lambda t: with_last(t.float(), math.nan)),
        r"'layers\.1\.attn\.wq_b\.scale' \(NaN\)",
    ),
    "scale-that-overflows": (
        with_tensor(f"{QUANTISED}.scale", e8m0(247)),
        r"'layers\.1\.attn\.wq_b\.scale' \(a scale of 1\.33e\+36, with which weights can be infinite\)",
    ),
    "nan-code": (
        with_tensor(f"{QUANTISED}.weight", lambda t: with_last(t.view(torch.uint8), 0x7F).view(t.dtype)),
        r"'layers\.1\.attn\.wq_b\.weight' \(NaN\)",
    ),
    "minus-nan-code": (
        with_tensor(f"{QUANTISED}.weight", lambda t: with_last(t.view(torch.uint8), 0xFF).view(t.dtype)),
        r"'layers\.1\.attn\.wq_b\.weight' \(NaN\)",
    ),
    "nan": (with_tensor("norm.weight", lambda t: with_last(t, math.nan)), r"'norm\.weight' \(NaN\)"),
    "infinity": (with_tensor("embed.weight", lambda t: with_last(t, math.inf)), r"'embed\.weight' \(infinite\)"),
    "minus-infinity": (
        with_tensor("layers.0.hc_attn_base", lambda t: with_last(t, -math.inf)),
        r"'layers\.0\.hc_attn_base' \(infinite\)",
    ),
    "values-and-a-missing-tensor": (
        two_mistakes,
        r"1 missing tensors: 'norm\.weight'.*1 tensors hold.*'head\.weight' \(infinite\)",
    ),
    "expert-ids": (
        with_tensor("layers.0.ffn.gate.tid2eid", lambda t: t + 1),
        r"'layers\.0\.ffn\.gate\.tid2eid' holds ids from \d+ to 8; expected expert ids in \[0, 8\)",
    ),
}


@pytest.mark.parametrize("order", ["sorted", "reversed"])
@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(
    main: nn.Module, quantised: Checkpoint, mistake: Callable[[Checkpoint], None], message: str, order: str
) -> None:
    checkpoint = dict(quantised)
    mistake(checkpoint)
    names = sorted(checkpoint, reverse=order == "reversed")
    with pytest.raises(CheckpointError, match=message):
        main.load_weights((name, checkpoint[name]) for name in names)


def test_the_largest_numbers_of_every_format_are_no_mistake(main: nn.Module, quantised: Checkpoint) -> None:
    """448 and -448 times 2**119, 6 times 2**125, and the largest bf16 and fp32."""
    checkpoint = dict(quantised)
    codes = with_last(checkpoint[f"{QUANTISED}.weight"].view(torch.uint8), 0x7E)
    codes.view(-1)[0] = 0xFE
    checkpoint[f"{QUANTISED}.weight"] = codes.view(torch.float8_e4m3fn)
    checkpoint[f"{QUANTISED}.scale"] = e8m0(127 + 119)(checkpoint[f"{QUANTISED}.scale"])
    checkpoint[f"{EXPERT}.weight"] = with_last(checkpoint[f"{EXPERT}.weight"], 0x7F)
    checkpoint[f"{EXPERT}.scale"] = e8m0(127 + 125)(checkpoint[f"{EXPERT}.scale"])
    for name in ("norm.weight", "layers.0.hc_attn_base"):
        checkpoint[name] = with_last(checkpoint[name], -torch.finfo(checkpoint[name].dtype).max)
    parameters = loaded(main, checkpoint)
    assert unfilled(main) == []
    assert parameters["model.layers.1.attn.wq_b.weight"].view(-1)[-1] == 448 * 2.0**119
    assert parameters["model.layers.2.ffn.experts.w2_weight"][3].view(-1)[-1] == 6 * 2.0**125


def test_values_are_checked_without_waiting_at_each_tensor(
    main: nn.Module, quantised: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a number from a GPU waits for the GPU. Only the ids of hash layers, three tensors, are read at once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from sglang_dsv4.weights import values as weight_values

    waits: list[str] = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                waits.append("a scalar")
            return function(*args, **(kwargs or {}))

    fetched: list[int] = []
    fetch = weight_values._fetch
    monkeypatch.setattr(weight_values, "_fetch", lambda scalars: fetched.append(len(scalars)) or fetch(scalars))
    monkeypatch.setattr(weight_values, "_FETCH_AT_ONCE", 200)
    bad = {**quantised, "head.weight": with_last(quantised["head.weight"], math.nan)}
    plain = {name: tensor for name, tensor in bad.items() if "tid2eid" not in name}
    with Waits(), pytest.raises(CheckpointError, match=r"'head\.weight' \(NaN\)"):
        main.load_weights(iter(plain.items()))
    judged = sum(tensor.is_floating_point() for name, tensor in plain.items() if not name.startswith("mtp."))
    assert waits == []
    assert sum(fetched) == 2 * judged and len(fetched) == judged // 200 + 1


def test_quantised_weights_without_a_quantization_config_are_refused(main: nn.Module, quantised: Checkpoint) -> None:
    """The quantisers that the release was trained with would be off, and no message would say so."""
    config = replace(main.dsv4_config, quantised_checkpoint=False)
    with pytest.raises(
        CheckpointError, match=r"'.*weight' is \w+ with scales, but config.json has no quantization_config"
    ):
        load_checkpoint(main, config, main_model_tensors(config), iter(quantised.items()))


def test_a_repeated_tensor_is_named(main: nn.Module, quantised: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"'norm\.weight' comes twice"):
        main.load_weights(iter([*quantised.items(), ("norm.weight", quantised["norm.weight"])]))


def test_the_draft_checks_its_own_tensors_only(draft: nn.Module, quantised: Checkpoint) -> None:
    draft.load_weights((name, tensor) for name, tensor in quantised.items() if name.startswith("mtp."))
    with pytest.raises(CheckpointError, match=r"1 missing tensors: 'mtp\.0\.e_proj\.weight' \(256, 256\)"):
        draft.load_weights((n, t) for n, t in quantised.items() if not n.startswith("mtp.0.e_proj"))
    with pytest.raises(CheckpointError, match=r"1 unknown tensors: 'mtp\.1\.norm\.weight'"):
        draft.load_weights(iter({**quantised, "mtp.1.norm.weight": torch.ones(256)}.items()))


@pytest.mark.parametrize("reader", ["one-thread", "many-threads"])
@pytest.mark.parametrize("cut", ["last-byte", "half", "header", "first-bytes"])
def test_a_file_cut_short_is_named(
    main: nn.Module, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, reader: str
) -> None:
    source = sorted(folder.glob("*.safetensors"))[0]
    content = source.read_bytes()
    kept = {"last-byte": len(content) - 1, "half": len(content) // 2, "header": 1000, "first-bytes": 5}[cut]
    file = tmp_path / source.name
    file.write_bytes(content[:kept])
    monkeypatch.setattr(main.config, "_name_or_path", str(tmp_path))
    if reader == "one-thread":
        weights = safetensors_weights_iterator([str(file)])
    else:
        weights = buffered_multi_thread_safetensors_weights_iterator([str(file)], max_workers=2)
    what = r"'[\w.]+' \(.*\) ends at byte \d+ of" if cut in ("last-byte", "half") else "within its header"
    with pytest.raises(CheckpointError, match=rf"cut short.*{what}"):
        main.load_weights(weights)


@pytest.mark.parametrize(
    "header",
    [b"\x00" * 40, b"<!DOCTYPE html>" * 3, b"[1, 2]", b'{"a": {"dtype": "F32"}}', b'{"a": 1}', b"\xff\xfe"],
    ids=["zeros", "a-web-page", "a-list", "no-offsets", "no-table", "no-text"],
)
def test_a_file_with_a_damaged_header_is_named(
    main: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    """Before, it ended in a JSONDecodeError about "line 1 column 1"."""
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(main.config, "_name_or_path", str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"damaged.*bytes of {file.name} are no safetensors header"):
        main.load_weights(safetensors_weights_iterator([str(file)]))


def test_cut_tensors_lists_the_lost_tensors(folder: Path, tmp_path: Path) -> None:
    source = sorted(folder.glob("*.safetensors"))[0]
    assert cut_tensors(source) == []
    tensors = load_file(source)
    file = tmp_path / "cut.safetensors"
    file.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    lost = [line.split("'")[1] for line in cut_tensors(file)]
    assert 0 < len(lost) < len(tensors)
    assert set(lost) <= tensors.keys()


def test_another_failure_of_the_reader_is_not_renamed(main: nn.Module) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        raise OSError("disk on fire")
        yield

    with pytest.raises(OSError, match="disk on fire"):
        main.load_weights(broken())


DSPARK = PRESETS["flash-0731"]


@pytest.fixture(scope="module")
def dspark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dspark")
    write_checkpoint(path, DSPARK, seed=4)
    return path


def test_the_target_of_a_dspark_checkpoint_loads(dspark_folder: Path) -> None:
    """The draft's tensors are skipped by name: a name that no draft has is unknown, with or without a stage number."""
    tensors = read(dspark_folder)
    harness = Harness(dspark_folder)
    harness.model.load_weights(tensors.items())
    for name in ("mtp.1.markov_head.markov_w1.weight", "mtp.0.enorm.weight", "mtp.3.attn_norm.weight"):
        with pytest.raises(CheckpointError, match=f"1 unknown tensors: '{name}'"):
            harness.model.load_weights([*tensors.items(), (name, torch.zeros(4))])


def test_the_draft_of_the_releases_has_as_many_tensors_as_their_index_says() -> None:
    """4,705 tensors for DSpark in 0731, 1,575 for the MTP module in earlier releases."""
    from model.released_configs import FLASH, FLASH_0731, Fields

    from sglang_dsv4.model_config.config import Config
    from sglang_dsv4.weights.tensor_table import _draft_names

    names = _draft_names(Config.from_hf(Fields(**FLASH_0731)))
    of_stage = [sum(name.startswith(f"mtp.{stage}.") for name in names) for stage in range(3)]
    assert (len(names), of_stage) == (4705, [1568, 1565, 1572])
    assert len(_draft_names(Config.from_hf(Fields(**FLASH)))) == 1575


def test_products_with_fp8_weights_are_sglangs_layers(main: nn.Module, draft: nn.Module) -> None:
    """On a GPU SGLang compiles DeepGEMM's kernels of a shape, for all numbers of tokens, at a layer's first product.

    A product outside of these layers would be compiled while requests wait, at the first call with each token count.
    """
    from sglang.srt.layers.linear import LinearBase

    from sglang_dsv4.layers.linear import ReferenceLinearMethod

    found = set()
    for model in (main, draft):
        for name, module in model.named_modules():
            if isinstance(getattr(module, "quant_method", None), ReferenceLinearMethod):
                assert isinstance(module, LinearBase), f"{name} is {type(module).__name__}"
                found.add(name.rsplit(".", 1)[1])
    assert found == {"wqkv_a", "wq_b", "wo_b", "w13", "w2", "e_proj", "h_proj"}
    ours = Path(__file__).resolve().parents[3]
    for path in [*(ours / "sglang_dsv4").rglob("*.py"), *(ours / "kernels").rglob("*.py")]:
        assert "import deep_gemm" not in path.read_text(), path
