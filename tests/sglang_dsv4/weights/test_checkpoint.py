"""Checkpoints as they are released: official names, FP8 128x128 and MXFP4 experts, bf16 and fp32 for the rest.

Logits and streams that equal an independent model's over independently dequantised weights show that every tensor was
used, and used right.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from model.compare import TOLERANCE, assert_equal_logits
from model.harness import Draft, Harness
from model.oracle import OracleRun, TransformersOracle, read_dequantised
from model.recording import recording
from model.reference import FULL, Reference
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config, write_checkpoint

SPECULATION = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return read_dequantised(self.folder)


def write(folder: Path, preset: str, quantised: bool = True, **changes: Any) -> Checkpoint:
    shape = replace(PRESETS[preset], **changes)
    write_checkpoint(folder, shape, seed=0, quantised=quantised)
    return Checkpoint(folder, hf_config(shape, quantised))


def random_tokens(checkpoint: Checkpoint, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, checkpoint.config["vocab_size"], (count,), generator=generator)


def assert_main_model_equals_transformers(checkpoint: Checkpoint, tokens: Tensor, **harness: Any) -> OracleRun:
    # One model at a time: at real dimensions each takes 2 GB.
    logits = Harness(checkpoint.folder, qat="off", **harness).run(tokens, 256, decode_from=len(tokens) - 6)
    expected = TransformersOracle(checkpoint.config, read_dequantised(checkpoint.folder)).run(tokens, 128)
    assert_equal_logits(logits, expected, checkpoint.folder.name)
    return expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    # With 32 indexer heads no score is exactly 0, so there are no ties.
    return write(tmp_path_factory.mktemp("tiny"), "tiny", index_n_heads=32, moe_intermediate_size=128)


def test_another_user_may_read_the_files(tiny: Checkpoint) -> None:
    """Weight files had mode 600, whatever the umask: a server of another user could not load them."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in tiny.folder.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes


@pytest.mark.slow
def test_quantised_checkpoint_in_fp32(tiny: Checkpoint) -> None:
    """The released format with dequantised weights and no fake quantisers, for a tight tolerance."""
    expected = assert_main_model_equals_transformers(tiny, random_tokens(tiny, 400))
    assert (expected.margins <= 1e-5).sum() <= 2


@pytest.mark.slow
def test_mtp_of_a_quantised_checkpoint(tiny: Checkpoint) -> None:
    harness = Harness(tiny.folder, qat="off", **SPECULATION)
    draft = Draft(harness)
    tokens = random_tokens(tiny, 150)
    request = harness.open()
    ((_, streams),) = harness.step_with_streams([(request, tokens[:-1].tolist())])
    ((logits, _),) = draft.step([(request, 0, tokens[1:].tolist(), streams)])
    reference = Reference(tiny.config, tiny.weights)
    expected = reference.mtp_logits(reference.mtp_streams(streams.unflatten(-1, (4, -1)), tokens[1:]))
    assert (logits - expected).abs().max() < TOLERANCE


def test_a_quantised_checkpoint_runs_the_release_s_quantisers(tiny: Checkpoint) -> None:
    """Without SGLANG_DSV4_QAT the checkpoint decides. Sublayers get equal inputs and the choices of our layers."""
    harness = Harness(tiny.folder)
    tokens = random_tokens(tiny, 200)
    with recording(harness) as record:
        harness.run(tokens, 64)
    reference = Reference(tiny.config, tiny.weights, FULL)
    for layer, ratio in enumerate(tiny.config["compress_ratios"][:-1]):
        prefix = f"layers.{layer}."
        selected = record("selected", layer)[:, : len(tokens) // 4] if ratio == 4 else None
        pairs = {
            "attn": reference.attention(record("attn.in", layer), prefix, ratio, selected=selected),
            "ffn": reference.moe(record("ffn.in", layer), prefix, tokens, record("experts", layer)),
        }
        for name, expected in pairs.items():
            error = (record(f"{name}.out", layer) - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.median() < 2e-6 and (error > 1e-5).float().mean() <= 0.03, f"layer {layer} {name}: {error}"


def test_experts_stored_as_fp8(tiny: Checkpoint, tmp_path: Path) -> None:
    """V4-*-Base have experts in FP8; the tensor's dtype tells the format."""
    from safetensors.torch import load_file, save_file

    for shard in tiny.folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [n for n in tensors if ".experts." in n and n.endswith(".weight") and "shared" not in n]:
            # Each 128 x 128 block has another scale. The oracle reads the rounded e4m3 values, too.
            value = 1.07 * tiny.weights[name]
            rows, columns = (-(-size // 128) for size in value.shape)
            exponents = torch.arange(rows * columns).view(rows, columns) % 3 - 9
            scale = torch.ldexp(torch.ones(rows, columns), exponents)
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
            tensors[name] = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
        save_file(tensors, tmp_path / shard.name, metadata={"format": "pt"})
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text(
            (tiny.folder / name).read_text().replace('"expert_dtype": "fp4"', '"expert_dtype": "fp8"')
        )
    base = Checkpoint(tmp_path, tiny.config | {"expert_dtype": "fp8"})
    assert_main_model_equals_transformers(base, random_tokens(base, 140))


def test_nvfp4_experts(tmp_path: Path) -> None:
    """modelopt's NVFP4 experts, with an MTP module whose experts are MXFP4."""
    checkpoint = write(tmp_path, "nvfp4", index_n_heads=32, moe_intermediate_size=128)
    assert_main_model_equals_transformers(checkpoint, random_tokens(checkpoint, 140))


def test_real_attention_dimensions(tmp_path: Path) -> None:
    """Rows of 512 with 64 rotated, 64 x 128 indexer heads, long enough for HCA entries; few heads and a small rest."""
    checkpoint = write(
        tmp_path, "flash", quantised=False, compress_ratios=(0, 4, 128), hidden_size=128, num_attention_heads=8,
        q_lora_rank=128, o_groups=2, o_lora_rank=128, moe_intermediate_size=64, vocab_size=1024, n_routed_experts=8,
        index_topk=64, num_hash_layers=1,
    )  # fmt: skip
    assert_main_model_equals_transformers(checkpoint, random_tokens(checkpoint, 420))


@pytest.mark.slow
@pytest.mark.parametrize("preset, ratios, count", [("flash", (0, 4, 128), 2200), ("pro", (128, 4), 400)])
def test_presets_with_real_attention(tmp_path: Path, preset: str, ratios: tuple[int, ...], count: int) -> None:
    """The shapes of section 11.1, top-k 512 in force at 2,200 tokens: fp32 against transformers, then the release's
    quantisers in bf16 against the reference in fp32, to the bounds of section 11.1's table."""
    checkpoint = write(tmp_path, preset, compress_ratios=ratios, num_hash_layers=1)  # 1 GB a layer of pro in fp32
    tokens = random_tokens(checkpoint, count)
    assert_main_model_equals_transformers(checkpoint, tokens)


@pytest.mark.slow
def test_bf16_with_quantisers_at_real_dimensions(tmp_path: Path) -> None:
    """The bounds of section 11.1 (rel-L2 per token, flash-like, 300 tokens): medians 4e-2 and 1.5e-2."""
    checkpoint = write(tmp_path, "flash")
    harness = Harness(checkpoint.folder, dtype="bfloat16")
    tokens = random_tokens(checkpoint, 300)
    with recording(harness) as record:
        harness.run(tokens, 128, decode_from=290)
    reference = Reference(checkpoint.config, checkpoint.weights, FULL)
    for layer, ratio in enumerate(checkpoint.config["compress_ratios"][:-1]):
        prefix = f"layers.{layer}."
        selected = record("selected", layer)[:, :75] if ratio == 4 else None
        x, y = record("attn.in", layer).float(), record("ffn.in", layer).float()
        pairs = {
            "attn": (reference.attention(x, prefix, ratio, selected=selected), 4.2e-2, 4.6e-2, 6e-2),
            "ffn": (reference.moe(y, prefix, tokens, record("experts", layer)), 1.6e-2, 2.8e-2, 6e-2),
        }
        for name, (expected, median, ninety, largest) in pairs.items():
            error = (record(f"{name}.out", layer).float() - expected).norm(dim=1) / expected.norm(dim=1)
            found = [error.median().item(), error.quantile(0.9).item(), error.max().item()]
            print(f"layer {layer} {name}: median, p90, max = " + ", ".join(f"{value:.1e}" for value in found))
            assert found[0] <= median and found[1] <= ninety and found[2] <= largest, f"layer {layer} {name}: {found}"
