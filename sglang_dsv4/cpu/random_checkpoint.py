"""Write a DeepSeek-V4 checkpoint of random weights in the released format: names, dtypes, scales, config, tokenizer.

    python -m sglang_dsv4.cpu.random_checkpoint OUT [--preset NAME] [--seed 0] [--unquantised]

``make serve`` serves `tiny`: every kind of layer, both routers, the MTP module, 20 MB. `flash-april`, `flash-0731` and
`pro-0813` are as small and have the layouts of these releases: the first has an MTP module, the others have a DSpark
draft of three stages. `nvfp4` is `tiny` as NVIDIA's modelopt exports it: the main model's experts in NVFP4, the MTP
module's as released. `flash` and `pro` have the released models' attention, indexer and hyper-connection dimensions and
6 and 5 of their layers; hidden size, experts and vocabulary are small enough for a CPU (0.6 and 1.1 GB).
``--unquantised`` writes every weight in fp32 and no quantization_config, for tight comparisons with another
implementation.

Names, shapes and dtypes: DeepSeek-V4 specification, sections 1, 4.2 and 6. Every parameter is random and large enough
to change the logits, so that a test notices an ignored parameter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dsv4_kernels.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    quantise_fp4_weight,
    quantise_fp8_weight,
    quantise_nvfp4_weight,
)
from sglang_dsv4.cpu.random_tokenizer import write_tokenizer
from sglang_dsv4.weights import nvfp4

SHARD_BYTES = 256 << 20  # small enough that flash and pro have several shards, as the release has


class StoredAs(Enum):
    """The format of a tensor in the released files."""

    FP8 = "fp8"  # e4m3 [n, k] and .scale e8m0 [ceil(n/128), ceil(k/128)]
    FP4 = "fp4"  # packed e2m1 int8 [n, k/2] and .scale e8m0 [n, k/32]
    BF16 = "bf16"
    FP32 = "fp32"
    INT64 = "int64"


@dataclasses.dataclass(frozen=True)
class Nvfp4:
    """The format of an NVFP4 matrix: packed e2m1 uint8 [n, k/2], and the scales of `sglang_dsv4.weights.nvfp4`."""

    amax: float  # largest absolute value of the matrices that share a global scale
    input_amax: float  # largest absolute value of the product's input


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions of a random model. Field names follow ``config.json`` (specification, section 1)."""

    compress_ratios: tuple[int, ...]  # one a layer, draft layers left out: 0 SWA, 4 CSA, 128 HCA
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    vocab_size: int
    max_position_embeddings: int
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    sliding_window: int = 128
    hc_mult: int = 4
    num_nextn_predict_layers: int = 1
    dspark_markov_rank: int | None = None  # None: the draft is an MTP module, not DSpark's
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 999
    nvfp4_experts: bool = False  # the main model's experts are NVFP4; no field of config.json

    @property
    def draft_layers(self) -> int:
        """Number of window-only blocks in the draft, each with one 0 in `compress_ratios`."""
        return self.num_nextn_predict_layers if self.dspark_markov_rank is None else len(self.dspark_target_layer_ids)


_TINY = Shape(
    compress_ratios=(0, 4, 128, 4),
    hidden_size=256,
    num_attention_heads=8,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    index_n_heads=8,
    index_topk=64,
    moe_intermediate_size=256,  # 128 a rank under --tp 2: SGLang's quantised experts need multiples of 128
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_hash_layers=1,
    routed_scaling_factor=1.5,
    vocab_size=1024,
    max_position_embeddings=16384,
)
# The first and the last layers of each release.
_TINY_FLASH = dataclasses.replace(_TINY, compress_ratios=(0, 0, 4, 128, 4), num_hash_layers=3)
_TINY_PRO = dataclasses.replace(
    _TINY, compress_ratios=(128, 128, 4, 128, 4), num_hash_layers=3, routed_scaling_factor=2.5
)
_LAST_THREE = (2, 3, 4)

PRESETS: dict[str, Shape] = {
    "tiny": _TINY,
    "nvfp4": dataclasses.replace(_TINY, nvfp4_experts=True),
    "flash-april": _TINY_FLASH,
    "flash-0731": dataclasses.replace(_TINY_FLASH, dspark_markov_rank=32, dspark_target_layer_ids=_LAST_THREE),
    "pro-0813": dataclasses.replace(_TINY_PRO, dspark_markov_rank=64, dspark_target_layer_ids=_LAST_THREE),
    "flash": Shape(
        compress_ratios=(0, 0, 4, 128, 4, 128),
        hidden_size=512,
        num_attention_heads=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        index_n_heads=64,
        index_topk=512,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=1.5,
        vocab_size=2048,
        max_position_embeddings=1048576,
    ),
    "pro": Shape(
        compress_ratios=(128, 128, 4, 128, 4),
        hidden_size=512,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        o_lora_rank=1024,
        index_n_heads=64,
        index_topk=1024,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=2.5,
        vocab_size=2048,
        max_position_embeddings=1048576,
    ),
}


_NOT_NVFP4 = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
_PRODUCER = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}


def hf_config(shape: Shape, quantised: bool = True) -> dict[str, Any]:
    """The fields of ``config.json`` for a checkpoint of this shape, as in the released file."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_hidden_layers": len(shape.compress_ratios),
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16" if quantised else "float32",
        "use_cache": True,
        **dataclasses.asdict(shape),
    }
    del config["nvfp4_experts"]
    config["compress_ratios"] = [*shape.compress_ratios, *[0] * shape.draft_layers]
    if shape.dspark_markov_rank is None:
        config = {field: value for field, value in config.items() if not field.startswith("dspark_")}
    if quantised:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
        if shape.nvfp4_experts:
            config["quantization_config"] |= {
                "quant_algo": "MIXED_PRECISION",
                "moe_quant_algo": "NVFP4",
                "group_size": 16,
                "ignore": _NOT_NVFP4,
                "producer": _PRODUCER,
            }
    return config


def hf_quant_config(shape: Shape) -> dict[str, Any]:
    """The fields of ``hf_quant_config.json``, which modelopt writes in addition to the config."""
    layers = [f"layers.{layer}.ffn.experts" for layer in range(len(shape.compress_ratios))]
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "quantized_layers": {layer: {"quant_algo": "NVFP4", "group_size": 16} for layer in layers},
            "exclude_modules": _NOT_NVFP4,
        },
    }


class _Weights:
    """Draws the tensors of one model in a fixed order, so that a seed always gives the same weights."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def linear(self, out_dim: int, in_dim: int, gain: float = 1.4) -> Tensor:
        """A weight [out_dim, in_dim] that maps an input of variance 1 to an output of standard deviation ``gain``."""
        return self.normal(out_dim, in_dim) * (gain / math.sqrt(in_dim))

    def norm(self, dim: int) -> Tensor:
        return 1 + 0.2 * self.normal(dim)

    def model(self) -> Iterator[tuple[str, Tensor, StoredAs | Nvfp4]]:
        shape = self.shape
        yield "embed.weight", self.normal(shape.vocab_size, shape.hidden_size), StoredAs.BF16
        yield "head.weight", self.linear(shape.vocab_size, shape.hidden_size), StoredAs.BF16
        yield "norm.weight", self.norm(shape.hidden_size), StoredAs.BF16
        yield from self.stream_mixing("hc_head_", outputs=shape.hc_mult, scales=1)
        for layer, ratio in enumerate(shape.compress_ratios):
            yield from self.block(f"layers.{layer}.", ratio, hashed=layer < shape.num_hash_layers)
        yield from self.mtp() if shape.dspark_markov_rank is None else self.dspark(shape.dspark_markov_rank)

    def mtp(self) -> Iterator[tuple[str, Tensor, StoredAs]]:
        """The tensors of the MTP module (specification, section 7)."""
        shape = self.shape
        for module in range(shape.num_nextn_predict_layers):
            prefix = f"mtp.{module}."
            yield from self.block(prefix, 0, hashed=False)
            yield from self.stream_mixing(prefix + "hc_head_", outputs=shape.hc_mult, scales=1)
            for name in ("enorm", "hnorm", "norm"):
                yield f"{prefix}{name}.weight", self.norm(shape.hidden_size), StoredAs.BF16
            for name in ("e_proj", "h_proj"):
                yield f"{prefix}{name}.weight", self.linear(shape.hidden_size, shape.hidden_size), StoredAs.FP8

    def dspark(self, rank: int) -> Iterator[tuple[str, Tensor, StoredAs]]:
        """The tensors of the DSpark draft: a block per stage, and the extra tensors of the first and last stage."""
        shape, stages = self.shape, len(self.shape.dspark_target_layer_ids)
        for stage in range(stages):
            yield from self.block(f"mtp.{stage}.", 0, hashed=False)
        d, last = shape.hidden_size, f"mtp.{stages - 1}."
        yield "mtp.0.main_proj.weight", self.linear(d, stages * d), StoredAs.FP8
        yield "mtp.0.main_norm.weight", self.norm(d), StoredAs.BF16
        yield last + "norm.weight", self.norm(d), StoredAs.BF16
        yield from self.stream_mixing(last + "hc_head_", outputs=shape.hc_mult, scales=1)
        for name in ("markov_w1", "markov_w2"):
            yield f"{last}markov_head.{name}.weight", self.linear(shape.vocab_size, rank), StoredAs.BF16
        yield last + "confidence_head.proj.weight", self.linear(1, d + rank), StoredAs.BF16

    def stream_mixing(self, prefix: str, outputs: int, scales: int) -> Iterator[tuple[str, Tensor, StoredAs]]:
        """The fn, base and scale of a hyper-connection (specification, sections 2.2 and 2.4)."""
        yield prefix + "fn", self.linear(outputs, self.shape.hc_mult * self.shape.hidden_size), StoredAs.FP32
        yield prefix + "base", 0.7 * self.normal(outputs), StoredAs.FP32
        yield prefix + "scale", 1 + 0.3 * self.normal(scales), StoredAs.FP32

    def block(self, prefix: str, ratio: int, hashed: bool) -> Iterator[tuple[str, Tensor, StoredAs | Nvfp4]]:
        shape = self.shape
        for name in ("attn_norm", "ffn_norm"):
            yield f"{prefix}{name}.weight", self.norm(shape.hidden_size), StoredAs.BF16
        for sublayer in ("attn", "ffn"):
            outputs = (2 + shape.hc_mult) * shape.hc_mult
            yield from self.stream_mixing(f"{prefix}hc_{sublayer}_", outputs=outputs, scales=3)
        yield from self.attention(prefix + "attn.", ratio)
        yield from self.experts(prefix + "ffn.", hashed)

    def attention(self, prefix: str, ratio: int) -> Iterator[tuple[str, Tensor, StoredAs]]:
        shape = self.shape
        heads_dim = shape.num_attention_heads * shape.head_dim
        yield prefix + "attn_sink", self.normal(shape.num_attention_heads), StoredAs.FP32
        yield prefix + "q_norm.weight", self.norm(shape.q_lora_rank), StoredAs.BF16
        yield prefix + "kv_norm.weight", self.norm(shape.head_dim), StoredAs.BF16
        o_rank = shape.o_groups * shape.o_lora_rank
        for name, out_dim, in_dim in (
            ("wq_a", shape.q_lora_rank, shape.hidden_size),
            ("wq_b", heads_dim, shape.q_lora_rank),
            ("wkv", shape.head_dim, shape.hidden_size),
            ("wo_a", o_rank, heads_dim // shape.o_groups),
            ("wo_b", shape.hidden_size, o_rank),
        ):
            yield f"{prefix}{name}.weight", self.linear(out_dim, in_dim), StoredAs.FP8
        if ratio:
            yield from self.compressor(prefix + "compressor.", ratio, shape.head_dim)
        if ratio == 4:
            index_dim = shape.index_n_heads * shape.index_head_dim
            yield prefix + "indexer.wq_b.weight", self.linear(index_dim, shape.q_lora_rank), StoredAs.FP8
            weights_proj = self.linear(shape.index_n_heads, shape.hidden_size)
            yield prefix + "indexer.weights_proj.weight", weights_proj, StoredAs.BF16
            yield from self.compressor(prefix + "indexer.compressor.", ratio, shape.index_head_dim)

    def compressor(self, prefix: str, ratio: int, dim: int) -> Iterator[tuple[str, Tensor, StoredAs]]:
        channels = dim * (2 if ratio == 4 else 1)  # CSA: one half for the previous compression group, one for its own
        yield prefix + "ape", self.normal(ratio, channels), StoredAs.FP32
        yield prefix + "wkv.weight", self.linear(channels, self.shape.hidden_size), StoredAs.BF16
        yield prefix + "wgate.weight", self.linear(channels, self.shape.hidden_size), StoredAs.BF16
        yield prefix + "norm.weight", self.norm(dim), StoredAs.BF16

    def experts(self, prefix: str, hashed: bool) -> Iterator[tuple[str, Tensor, StoredAs | Nvfp4]]:
        shape = self.shape
        yield prefix + "gate.weight", self.linear(shape.n_routed_experts, shape.hidden_size), StoredAs.BF16
        if hashed:
            scores = torch.rand(shape.vocab_size, shape.n_routed_experts, generator=self.generator)
            yield prefix + "gate.tid2eid", scores.topk(shape.num_experts_per_tok).indices, StoredAs.INT64
        else:
            yield prefix + "gate.bias", 0.3 * self.normal(shape.n_routed_experts), StoredAs.FP32
        nvfp4_experts = shape.nvfp4_experts and not prefix.startswith("mtp.")
        names = [(f"experts.{expert}.", StoredAs.FP4) for expert in range(shape.n_routed_experts)]
        for name, stored_as in [*names, ("shared_experts.", StoredAs.FP8)]:
            # With a gain of 3 some gate and up values exceed the clamp at 10.
            w1 = self.linear(shape.moe_intermediate_size, shape.hidden_size, 3)
            w3 = self.linear(shape.moe_intermediate_size, shape.hidden_size, 3)
            w2 = self.linear(shape.hidden_size, shape.moe_intermediate_size)
            of_w13 = of_w2 = stored_as
            if nvfp4_experts and stored_as is StoredAs.FP4:
                of_w13 = Nvfp4(float(torch.maximum(w1.abs().max(), w3.abs().max())), input_amax=4.0)
                of_w2 = Nvfp4(float(w2.abs().max()), input_amax=100.0)  # the largest output of the clamped SwiGLU
            yield f"{prefix}{name}w1.weight", w1, of_w13
            yield f"{prefix}{name}w3.weight", w3, of_w13
            yield f"{prefix}{name}w2.weight", w2, of_w2


def tensors(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Released name -> tensor before quantisation: fp32, the hash tables int64."""
    return {name: value.contiguous() for name, value, _ in _Weights(shape, seed).model()}


def stored(name: str, value: Tensor, stored_as: StoredAs | Nvfp4) -> dict[str, Tensor]:
    """Name -> tensor as in the released files: the value in its dtype, or the quantised weight and its scales."""
    if isinstance(stored_as, Nvfp4):
        weight, scale, global_scale = quantise_nvfp4_weight(value, stored_as.amax)
        input_scale = torch.tensor(stored_as.input_amax / (E2M1_MAX * E4M3_MAX))
        return dict(zip((name, *nvfp4.scale_names(name)), (weight, scale, global_scale, input_scale), strict=True))
    if stored_as is StoredAs.FP8 or stored_as is StoredAs.FP4:
        quantise = quantise_fp8_weight if stored_as is StoredAs.FP8 else quantise_fp4_weight
        weight, scale = quantise(value)
        return {name: weight.contiguous(), name.removesuffix("weight") + "scale": scale.contiguous()}
    dtype = {StoredAs.BF16: torch.bfloat16, StoredAs.FP32: torch.float32, StoredAs.INT64: torch.int64}[stored_as]
    return {name: value.to(dtype).contiguous()}


def write_checkpoint(directory: Path | str, shape: Shape, seed: int = 0, quantised: bool = True) -> int:
    """Write config, tokenizer, safetensors shards and their index; returns the number of bytes of the weights.

    Args:
        directory: created if it is missing; files of the same names are replaced.
        shape: dimensions, for instance ``PRESETS["tiny"]``.
        seed: of the random weights.
        quantised: the released dtypes and scales; otherwise fp32 and no ``quantization_config``.

    Raises:
        ValueError: the vocabulary is too small for the tokenizer.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, shape.vocab_size, shape.max_position_embeddings)
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = total_bytes = 0
    for name, value, stored_as in _Weights(shape, seed).model():
        entry = stored(name, value, stored_as) if quantised else {name: value.contiguous()}
        entry_bytes = sum(tensor.nbytes for tensor in entry.values())
        if shards[-1] and shard_bytes + entry_bytes > SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1].update(entry)
        shard_bytes += entry_bytes
        total_bytes += entry_bytes
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        # Not `save_file`, whose files other users can't read.
        (directory / file_name).write_bytes(save(shard, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(shard, file_name))
    index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
    if quantised and shape.nvfp4_experts:
        (directory / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(shape), indent=2) + "\n")
    # Last: a folder with a config.json is a complete checkpoint.
    (directory / "config.json").write_text(json.dumps(hf_config(shape, quantised), indent=2) + "\n")
    return total_bytes


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write a random DeepSeek-V4 checkpoint in the released format.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unquantised", action="store_true", help="fp32 weights, no quantization_config")
    arguments = parser.parse_args()
    written = write_checkpoint(
        arguments.out, PRESETS[arguments.preset], arguments.seed, quantised=not arguments.unquantised
    )
    print(f"{arguments.out}: DeepSeek-V4 {arguments.preset}, random weights, {written / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
