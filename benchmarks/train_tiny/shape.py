"""Dimensions of the small model, and its parameters: shape, stored format, initial value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TinyShape:
    """Dimensions under the names of ``config.json``. The defaults are the model that is shipped."""

    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4)  # draft layers left out
    hidden_size: int = 256
    num_attention_heads: int = 4
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    sliding_window: int = 128
    index_n_heads: int = 8
    index_head_dim: int = 128
    index_topk: int = 512
    moe_intermediate_size: int = 256
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    num_hash_layers: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 16.0
    yarn_original_positions: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    vocab_size: int = 3840
    max_position_embeddings: int = 40960

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TinyShape:
        """The shape of parsed JSON; a field that it lacks has its default."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON holds them, with lists in place of tuples."""
        return dataclasses.asdict(self) | {"compress_ratios": list(self.compress_ratios)}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor of the model; experts of a layer are stacked."""

    shape: tuple[int, ...]
    stored: str
    """"fp8" (128 x 128 blocks), "fp4" (rows of 32), "bf16" or "fp32"."""
    std: float = 0.0
    mean: float = 0.0
    update: str = "adam"
    """"muon" (matrices between activations), "adam", or "none" (set by other rules)."""
    rate: float = 1.0
    """Factor of the learning rate."""


def matrix(stored: str, *shape: int, gain: float = 1.0, update: str = "muon") -> Parameter:
    """A matrix [..., out, in] whose output has the standard deviation ``gain`` for inputs of variance 1."""
    return Parameter(shape, stored, std=gain / math.sqrt(shape[-1]), update=update)


def parameters(s: TinyShape) -> dict[str, Parameter]:
    """All parameters in a fixed order, under the release's names; routed experts as ``experts.w1`` [E, I, d]."""
    found: dict[str, Parameter] = {
        "embed.weight": Parameter((s.vocab_size, s.hidden_size), "bf16", std=0.5, rate=3.0),
        "head.weight": Parameter((s.vocab_size, s.hidden_size), "bf16", std=0.01, rate=1.0),
        "norm.weight": ones(s.hidden_size),
        **mixing_parameters("hc_head_", s, s.hc_mult, 1),
    }
    for layer, ratio in enumerate(s.compress_ratios):
        found |= block_parameters(f"layers.{layer}.", s, ratio, layer < s.num_hash_layers)
    found |= block_parameters("mtp.0.", s, 0, False) | mixing_parameters("mtp.0.hc_head_", s, s.hc_mult, 1)
    found |= {f"mtp.0.{name}.weight": ones(s.hidden_size) for name in ("enorm", "hnorm", "norm")}
    found |= {f"mtp.0.{name}.weight": matrix("fp8", s.hidden_size, s.hidden_size) for name in ("e_proj", "h_proj")}
    return found


def stored_names(name: str, parameter: Parameter) -> list[str]:
    """The names of a parameter's tensors in a checkpoint: its own, or a name for each expert of a stack."""
    if ".experts.w" not in name:
        return [name]
    prefix, of_expert = name.rsplit(".", 1)
    return [f"{prefix}.{expert}.{of_expert}.weight" for expert in range(parameter.shape[0])]


def ones(dim: int) -> Parameter:
    """A norm's weight."""
    return Parameter((dim,), "bf16", mean=1.0)


def mixing_parameters(prefix: str, s: TinyShape, outputs: int, scales: int) -> dict[str, Parameter]:
    """The fn, base and scale of a hyper-connection."""
    return {
        prefix + "fn": Parameter((outputs, s.hc_mult * s.hidden_size), "fp32", std=0.02, rate=0.5),
        prefix + "base": Parameter((outputs,), "fp32"),
        prefix + "scale": Parameter((scales,), "fp32", mean=0.1),
    }


def block_parameters(prefix: str, s: TinyShape, ratio: int, hashed: bool) -> dict[str, Parameter]:
    """The parameters of a block."""
    d, heads_dim = s.hidden_size, s.num_attention_heads * s.head_dim
    attn, ffn = prefix + "attn.", prefix + "ffn."
    found = {f"{prefix}{name}.weight": ones(d) for name in ("attn_norm", "ffn_norm")}
    for sublayer in ("attn", "ffn"):
        found |= mixing_parameters(f"{prefix}hc_{sublayer}_", s, (2 + s.hc_mult) * s.hc_mult, 3)
    found |= {
        attn + "attn_sink": Parameter((s.num_attention_heads,), "fp32"),
        attn + "q_norm.weight": ones(s.q_lora_rank),
        attn + "kv_norm.weight": ones(s.head_dim),
        attn + "wq_a.weight": matrix("fp8", s.q_lora_rank, d),
        attn + "wq_b.weight": matrix("fp8", heads_dim, s.q_lora_rank),
        attn + "wkv.weight": matrix("fp8", s.head_dim, d),
        attn + "wo_a.weight": matrix("fp8", s.o_groups * s.o_lora_rank, heads_dim // s.o_groups),
        attn + "wo_b.weight": matrix("fp8", d, s.o_groups * s.o_lora_rank, gain=0.3),
    }
    if ratio:
        found |= _compressor(attn + "compressor.", s, ratio, s.head_dim)
    if ratio == 4:
        index = attn + "indexer."
        found[index + "wq_b.weight"] = matrix("fp8", s.index_n_heads * s.index_head_dim, s.q_lora_rank)
        found[index + "weights_proj.weight"] = matrix("bf16", s.index_n_heads, d, update="adam")
        found |= _compressor(index + "compressor.", s, ratio, s.index_head_dim)
    found[ffn + "gate.weight"] = matrix("bf16", s.n_routed_experts, d, update="adam")
    if not hashed:
        found[ffn + "gate.bias"] = Parameter((s.n_routed_experts,), "fp32", update="none")
    experts, inner = s.n_routed_experts, s.moe_intermediate_size
    found |= {
        ffn + "experts.w1": matrix("fp4", experts, inner, d),
        ffn + "experts.w3": matrix("fp4", experts, inner, d),
        ffn + "experts.w2": matrix("fp4", experts, d, inner, gain=0.3),
        ffn + "shared_experts.w1.weight": matrix("fp8", inner, d),
        ffn + "shared_experts.w3.weight": matrix("fp8", inner, d),
        ffn + "shared_experts.w2.weight": matrix("fp8", d, inner, gain=0.3),
    }
    return found


def _compressor(prefix: str, s: TinyShape, ratio: int, dim: int) -> dict[str, Parameter]:
    channels = dim * (2 if ratio == 4 else 1)
    return {
        prefix + "ape": Parameter((ratio, channels), "fp32", std=0.02),
        prefix + "wkv.weight": matrix("bf16", channels, s.hidden_size),
        prefix + "wgate.weight": matrix("bf16", channels, s.hidden_size, gain=0.5),
        prefix + "norm.weight": ones(dim),
    }


def initial(s: TinyShape, seed: int = 0, table: dict[str, Parameter] | None = None) -> dict[str, Tensor]:
    """Initial parameters in fp32 on the host: of the model, or those of `table`.

    Streams pass a sublayer nearly unchanged (`comb` is close to the identity), and each sublayer reads mostly one
    stream, in turn, as hyper-connections begin.
    """
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    sublayer = 0
    for name, p in (table or parameters(s)).items():
        value = torch.randn(p.shape, generator=generator) * p.std + p.mean
        if name.endswith(("hc_attn_base", "hc_ffn_base")):
            n = s.hc_mult
            value[:n] = -1.0
            value[sublayer % n] = 1.0
            value[2 * n :].view(n, n).fill_diagonal_(3.0)
            sublayer += 1
        values[name] = value
    return values


def hash_tables(s: TinyShape) -> dict[str, Tensor]:
    """The experts of each token id in the layers that route by token id: int64 [vocab, k], equally often."""
    generator = torch.Generator().manual_seed(12345)
    tables = {}
    for layer in range(s.num_hash_layers):
        rows = [torch.randperm(s.n_routed_experts, generator=generator) for _ in range(s.vocab_size)]
        tables[f"layers.{layer}.ffn.gate.tid2eid"] = torch.stack(rows)[:, : s.num_experts_per_tok].contiguous()
    return tables
