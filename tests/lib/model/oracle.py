"""Independent references of the model tests: random checkpoints in official names, and transformers' DeepSeek-V4 in
fp32.

Nothing here imports sglang_dsv4 or dsv4_kernels. `configuration()` is a config.json of the released format with small
dimensions, `random_weights()` its tensors with every parameter non-trivial (norms, biases, sinks, ape, mHC), and
`TransformersOracle` returns logits at every position, with the margin by which each position's discrete choices (CSA
top-k, router top-k) were decided: a position whose margin is within rounding cannot be compared.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLASH_LIKE = (0, 0, 4, 128, 4, 128)
PRO_LIKE = (128, 128, 4, 128, 4)
# The release's quantisers need multiples of 128 (activations), 64 (KV) and 32 (indexer) channels.
QUANTISABLE = dict(
    hidden_size=128, q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=128, head_dim=128, qk_rope_head_dim=64,
    num_attention_heads=4, index_n_heads=8, index_head_dim=64, num_hash_layers=2,
)  # fmt: skip
# Rows and indexer keys of the released dimensions, which the byte formats need.
REAL_ROWS = dict(
    hidden_size=128, q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=128, head_dim=512, qk_rope_head_dim=64,
    num_attention_heads=4, index_n_heads=8, index_head_dim=128,
)  # fmt: skip


# (official fragment, transformers fragment), applied in order; DeepSeek-V4 specification, section 6.
_RENAMES = (
    (".attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    (".attn.compressor.", ".self_attn.compressor."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    ("compressor.wkv.", "compressor.kv_proj."),
    ("compressor.wgate.", "compressor.gate_proj."),
    ("compressor.ape", "compressor.position_bias"),
    ("compressor.norm.", "compressor.kv_norm."),
    ("indexer.wkv.", "indexer.kv_proj."),
    ("indexer.wgate.", "indexer.gate_proj."),
    ("indexer.ape", "indexer.position_bias"),
    ("indexer.norm.", "indexer.kv_norm."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    ("self_attn.attn_sink", "self_attn.sinks"),
    ("self_attn.wq_a.", "self_attn.q_a_proj."),
    ("self_attn.q_norm.", "self_attn.q_a_norm."),
    ("self_attn.wq_b.", "self_attn.q_b_proj."),
    ("self_attn.wkv.", "self_attn.kv_proj."),
    ("self_attn.wo_a.", "self_attn.o_a_proj."),
    ("self_attn.wo_b.", "self_attn.o_b_proj."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    ("shared_experts.w1.", "shared_experts.gate_proj."),
    ("shared_experts.w3.", "shared_experts.up_proj."),
    ("shared_experts.w2.", "shared_experts.down_proj."),
)


def configuration(ratios: Iterable[int] = FLASH_LIKE, **overrides: Any) -> dict[str, Any]:
    """Return a config.json in the released format (specification, section 1) with small dimensions and the real window,
    ratios, rope and mHC constants. `ratios` are those of the main layers; the MTP layer's 0 is appended."""
    ratios = list(ratios)
    config = dict(
        architectures=["DeepseekV4ForCausalLM"],
        model_type="deepseek_v4",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=1,
        hidden_act="silu",
        hidden_size=64,
        num_hidden_layers=len(ratios),
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=24,
        sliding_window=128,
        compress_ratios=[*ratios, 0],
        index_n_heads=16,
        index_head_dim=32,
        index_topk=24,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        num_hash_layers=2,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        compress_rope_theta=160000,
        rope_scaling=dict(beta_fast=32, beta_slow=1, factor=16, original_max_position_embeddings=65536, type="yarn"),
        max_position_embeddings=1048576,
        num_nextn_predict_layers=1,
        initializer_range=0.02,
        tie_word_embeddings=False,
        torch_dtype="float32",
        use_cache=True,
        vocab_size=160,
    )
    config.update(overrides)
    return config


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return official names -> fp32 tensors (int64 for tid2eid), MTP included; logits have a standard deviation near
    1.4."""
    generator = torch.Generator().manual_seed(seed)
    d, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, groups, o_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    experts, active, inner = config["n_routed_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]
    vocab, streams = config["vocab_size"], config["hc_mult"]
    weights: dict[str, Tensor] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(rows: int, columns: int, gain: float = 1.4) -> Tensor:
        return normal(rows, columns) * (gain / math.sqrt(columns))

    def norm(name: str, size: int) -> None:
        weights[name + ".weight"] = 1 + 0.2 * normal(size)

    def compressor(prefix: str, ratio: int, dim: int) -> None:
        width = 2 * dim if ratio == 4 else dim
        weights[prefix + "ape"] = normal(ratio, width)
        weights[prefix + "wkv.weight"] = matrix(width, d)
        weights[prefix + "wgate.weight"] = matrix(width, d)
        norm(prefix + "norm", dim)

    def head_mix(prefix: str) -> None:
        weights[prefix + "hc_head_fn"] = matrix(streams, streams * d, 1.5)
        weights[prefix + "hc_head_base"] = 0.7 * normal(streams)
        weights[prefix + "hc_head_scale"] = 1 + 0.3 * normal(1)

    def block(prefix: str, ratio: int, hashed: bool) -> None:
        norm(prefix + "attn_norm", d)
        norm(prefix + "ffn_norm", d)
        mixes = (2 + streams) * streams
        for sublayer in ("attn", "ffn"):
            weights[f"{prefix}hc_{sublayer}_fn"] = matrix(mixes, streams * d, 1.5)
            weights[f"{prefix}hc_{sublayer}_base"] = 0.7 * normal(mixes)
            weights[f"{prefix}hc_{sublayer}_scale"] = 1 + 0.3 * normal(3)
        attn = prefix + "attn."
        weights[attn + "attn_sink"] = normal(heads)
        norm(attn + "q_norm", q_rank)
        norm(attn + "kv_norm", head_dim)
        weights[attn + "wq_a.weight"] = matrix(q_rank, d)
        weights[attn + "wq_b.weight"] = matrix(heads * head_dim, q_rank)
        weights[attn + "wkv.weight"] = matrix(head_dim, d)
        weights[attn + "wo_a.weight"] = matrix(groups * o_rank, heads * head_dim // groups)
        weights[attn + "wo_b.weight"] = matrix(d, groups * o_rank)
        if ratio:
            compressor(attn + "compressor.", ratio, head_dim)
        if ratio == 4:
            weights[attn + "indexer.wq_b.weight"] = matrix(index_heads * index_dim, q_rank)
            weights[attn + "indexer.weights_proj.weight"] = matrix(index_heads, d)
            compressor(attn + "indexer.compressor.", 4, index_dim)
        ffn = prefix + "ffn."
        weights[ffn + "gate.weight"] = matrix(experts, d)
        if hashed:
            table = [torch.randperm(experts, generator=generator)[:active] for _ in range(vocab)]
            weights[ffn + "gate.tid2eid"] = torch.stack(table)
        else:
            weights[ffn + "gate.bias"] = 0.3 * normal(experts)
        # Gain 6 makes about one pre-activation in ten exceed the SwiGLU limit, so that both clamps show in the logits.
        for expert in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
            weights[f"{ffn}{expert}.w1.weight"] = matrix(inner, d, 6.0)
            weights[f"{ffn}{expert}.w3.weight"] = matrix(inner, d, 6.0)
            weights[f"{ffn}{expert}.w2.weight"] = matrix(d, inner, 0.5)

    weights["embed.weight"] = normal(vocab, d)
    weights["head.weight"] = matrix(vocab, d)
    norm("norm", d)
    head_mix("")
    for layer in range(config["num_hidden_layers"]):
        block(f"layers.{layer}.", config["compress_ratios"][layer], layer < config["num_hash_layers"])
    if config["num_nextn_predict_layers"]:
        block("mtp.0.", 0, False)
        head_mix("mtp.0.")
        for name in ("enorm", "hnorm", "norm"):
            norm("mtp.0." + name, d)
        weights["mtp.0.e_proj.weight"] = matrix(d, d)
        weights["mtp.0.h_proj.weight"] = matrix(d, d)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def as_stored(name: str, value: Tensor) -> Tensor:
    """Return the value rounded as the released files store it, in bf16 or fewer bits; they keep mHC, ape, sinks and
    biases in fp32."""
    if value.dtype != torch.float32 or ".hc_" in name or name.startswith("hc_"):
        return value
    return value if name.endswith(("ape", "attn_sink", "gate.bias")) else value.bfloat16().float()


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write config.json and one safetensors shard with its index, as the released checkpoints have them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shard = "model-00001-of-00001.safetensors"
    save_file(weights, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def read_dequantised(folder: Path) -> dict[str, Tensor]:
    """Return every weight of a checkpoint in the released format as fp32 (tid2eid int64), dequantised (section 4.2)."""
    stored: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(shard))
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith((".scale", ".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        if tensor.dtype == torch.uint8:
            weights[name] = _nvfp4(tensor, stored[f"{name}_scale"], stored[f"{name}_scale_2"])
            continue
        if tensor.dtype == torch.int8:  # two e2m1 codes a byte, the even column in the low nibble; a scale for 32
            low, high = tensor.view(torch.uint8).long() & 15, tensor.view(torch.uint8).long() >> 4
            codes = torch.stack((low, high), -1).flatten(1)
            values = _E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
            weights[name] = (values.unflatten(1, (-1, 32)) * scale.float()[..., None]).flatten(1)
        elif scale is not None:  # e4m3, a scale for 128 rows and 128 columns
            rows, columns = tensor.shape
            row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
            weights[name] = tensor.float() * scale.float()[row[:, None], column[None, :]]
        else:
            weights[name] = tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.float()
    return weights


def _nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return modelopt's NVFP4 values as fp32: computed in fp64 without error, rounded once.

    Two e2m1 codes a byte, the even column in the low nibble, and an e4m3 scale for 16 columns, read from its bits.
    """
    rows, half = packed.shape
    codes = torch.empty(rows, 2 * half, dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = packed.long() % 16, packed.long() // 16
    value = _E2M1.double()[codes % 8] * (1 - 2 * (codes // 8))
    bits = scale.view(torch.uint8).long()
    exponent, mantissa = bits // 8 % 16, (bits % 8).double()
    normal = (8 + mantissa) * torch.exp2(exponent.double() - 10)
    of_block = torch.where(exponent > 0, normal, mantissa * 2.0**-9) * (1 - 2 * (bits // 128))
    spread = of_block[:, torch.arange(2 * half) // 16]
    return (value * spread * float(global_scale)).float()


def transformers_state(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return official tensors under transformers' names (specification, section 6); routed experts stacked, MTP left
    out."""
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith("mtp.") or ".ffn.experts." in name:
            continue
        if name.startswith("layers."):
            for official, other in _RENAMES:
                name = name.replace(official, other)
            state["model." + name] = tensor
        elif name.startswith("hc_head_"):
            state["model.hc_head." + name.removeprefix("hc_head_").join(("hc_", ""))] = tensor
        else:
            top = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
            state[top.get(name, "model." + name)] = tensor
    for layer in range(config["num_hidden_layers"]):
        source = f"layers.{layer}.ffn.experts."
        target = f"model.layers.{layer}.mlp.experts."
        ids = range(config["n_routed_experts"])
        state[target + "gate_up_proj"] = torch.stack(
            [torch.cat([weights[f"{source}{e}.w1.weight"], weights[f"{source}{e}.w3.weight"]]) for e in ids]
        )
        state[target + "down_proj"] = torch.stack([weights[f"{source}{e}.w2.weight"] for e in ids])
    return state


@dataclass(frozen=True)
class OracleRun:
    """Logits and decision margins of one sequence."""

    logits: Tensor  # [num_tokens, vocab] fp32
    margins: Tensor  # [num_tokens] fp32: the smallest top-k or router margin of any layer, in units of the score's std


class TransformersOracle:
    """transformers' DeepseekV4ForCausalLM in fp32 with eager attention, run unpadded, one sequence at a time."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

        official = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype", "model_type")}
        official.pop("quantization_config", None)
        hf_config = DeepseekV4Config(**official)
        hf_config._attn_implementation = "eager"
        hf_config._experts_implementation = "eager"
        with torch.device("meta"):
            self.model = DeepseekV4ForCausalLM(hf_config)
        # The rotary buffers are not in the state dict, so only parameters and persistent buffers stay on `meta`.
        self.model = self.model.to_empty(device="cpu").eval()
        for module in self.model.modules():
            if type(module).__name__ == "DeepseekV4RotaryEmbedding":
                module.__init__(hf_config)
        # The model shares the tensors of `weights`; a copy of a checkpoint of real dimensions would be 2 GB.
        missing, unexpected = self.model.load_state_dict(transformers_state(config, weights), strict=False, assign=True)
        if missing or unexpected:
            raise ValueError(f"transformers: missing {missing}, unexpected {unexpected}")
        self.config = config

    @contextmanager
    def _record_margins(self, margins: list[Tensor]) -> Iterator[None]:
        """Append one [num_tokens] tensor to `margins` for every discrete choice inside the context."""
        handles = []
        top_k, ratio = self.config["index_topk"], 4
        start = 0

        def set_start(module: Any, args: Any, kwargs: Any) -> None:
            nonlocal start
            start = int(kwargs["position_ids"][0, 0])

        def indexer(module: Any, args: Any, output: Tensor) -> None:
            scores = output[0]  # [num_tokens, num_entries]
            rows = torch.full((scores.shape[0],), math.inf)
            for i in range(scores.shape[0]):
                visible = (start + i + 1) // ratio
                if visible > top_k:
                    row = scores[i, :visible].sort(descending=True).values
                    rows[i] = (row[top_k - 1] - row[top_k]) / row.std()
            margins.append(rows)

        def router(module: Any, args: Any, output: Any) -> None:
            biased = module.score_fn(output[0]) + module.e_score_correction_bias
            ordered = biased.sort(dim=-1, descending=True).values
            margins.append((ordered[:, module.top_k - 1] - ordered[:, module.top_k]) / biased.std(dim=-1))

        for module in self.model.modules():
            name = type(module).__name__
            if name == "DeepseekV4DecoderLayer":
                handles.append(module.register_forward_pre_hook(set_start, with_kwargs=True))
            elif name == "DeepseekV4IndexerScorer":
                handles.append(module.register_forward_hook(indexer))
            elif name == "DeepseekV4TopKRouter":
                handles.append(module.register_forward_hook(router))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def run(self, tokens: Tensor, chunk_tokens: int | None = None) -> OracleRun:
        """Return the logits of `tokens` [num_tokens] int64, in chunks of `chunk_tokens` (None: all at once)."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        logits, margins = [], []
        for chunk in tokens.split(chunk_tokens or len(tokens)):
            rows: list[Tensor] = []
            with self._record_margins(rows):
                logits.append(self.model(input_ids=chunk[None], past_key_values=cache).logits[0])
            margins.append(torch.stack(rows).amin(0) if rows else torch.full((len(chunk),), math.inf))
        return OracleRun(torch.cat(logits), torch.cat(margins))
