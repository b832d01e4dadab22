"""The official checkpoint as a table (DeepSeek-V4 specification, section 6).

`main_model_tensors`, `mtp_tensors` and `dspark_tensors` list every tensor that a checkpoint must have: its shape, its
format, and the parameter that it is loaded into. `loader` reads a checkpoint by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from sglang_dsv4.model_config.config import FP4_WEIGHT_BLOCK, WEIGHT_BLOCK, Config
from sglang_dsv4.model_config.layer_kinds import LayerKind
from sglang_dsv4.model_config.stages import Stage
from sglang_dsv4.weights import nvfp4

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
"""The dtypes of a tensor that is not quantised."""

_NEXTN_DECODER = "model.decoder."


class Format(Enum):
    """How a tensor may be stored; each value lists the accepted dtypes."""

    FLOAT = FLOATS
    """Never quantised."""
    LINEAR = (torch.float8_e4m3fn, *FLOATS)
    """FP8 with a `.scale` per 128x128 block, or not quantised."""
    EXPERT = (torch.int8, nvfp4.WEIGHT_DTYPE, torch.float8_e4m3fn, *FLOATS)
    """FP4, two values a byte, with a `.scale` per 32 columns; or NVFP4 with its three scales; or as LINEAR."""
    INDEX = (torch.int64, torch.int32)
    """Expert ids."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint."""

    name: str
    """Official name."""
    shape: tuple[int, ...]
    """Shape of its values; in the file an FP4 tensor has half as many columns."""
    format: Format
    parameter: str | None
    """The model's parameter that it is loaded into; None: it is checked and dropped, no forward reads it."""
    shard: str | int | None = None
    """The part of a fused parameter, as the parameter's weight loader names it."""
    expert: int | None = None

    @property
    def may_have_scale(self) -> bool:
        """Whether the tensor may be quantised."""
        return self.format in (Format.LINEAR, Format.EXPERT)

    @property
    def scale_name(self) -> str:
        """Official name of the tensor's scales."""
        return self.name.removesuffix("weight") + "scale"

    def stored_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape in the file, if it is stored as `dtype`."""
        packed = dtype in (torch.int8, nvfp4.WEIGHT_DTYPE)
        return (self.shape[0], self.shape[1] // 2) if packed else self.shape

    def scale_shape(self, dtype: torch.dtype) -> tuple[int, int]:
        """Shape of the scales of a weight stored as `dtype`, FP8 or FP4."""
        rows, columns = self.shape
        if dtype == torch.int8:
            return rows, columns // FP4_WEIGHT_BLOCK
        return -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)


@dataclass(frozen=True)
class TensorTable:
    """The tensors that one model loads from a checkpoint."""

    specs: dict[str, TensorSpec]
    """Official name -> tensor."""
    is_ours: Callable[[str], bool]
    """False for names that belong to another model in the same checkpoint: they are skipped, not checked."""


def main_model_tensors(config: Config, stage: Stage | None = None) -> TensorTable:
    """The tensors of the main model, or of a stage of it.

    The tensors of the draft and of other stages are skipped by name; any other name that is not in the table is
    unknown.
    """
    stage = stage or Stage.whole(config.num_hidden_layers)
    own = {spec.name: spec for spec in (*_top_level(config, stage), *_layers(config, stage.layers))}
    skipped = _draft_names(config)
    if stage.count > 1:
        whole = Stage.whole(config.num_hidden_layers)
        others = (*_top_level(config, whole), *_layers(config, whole.layers))
        skipped |= _names_with_scales(config, (spec for spec in others if spec.name not in own))
    return TensorTable(own, lambda name: name not in skipped)


def _layers(config: Config, layers: range) -> Iterator[TensorSpec]:
    for i in layers:
        for spec in _block(config, config.schedule.kind(i), config.uses_hash_routing(i)):
            yield _moved(spec, f"layers.{i}.", f"model.layers.{i}.")


def _draft_names(config: Config) -> frozenset[str]:
    """Names of all tensors of the checkpoint's draft, MTP or DSpark, with their scales."""
    return _names_with_scales(config, draft_tensors(config).specs.values())


def _names_with_scales(config: Config, specs: Iterable[TensorSpec]) -> frozenset[str]:
    """The names of tensors, and of all scales that they may have in this checkpoint."""
    specs = list(specs)
    names = {spec.name for spec in specs} | {spec.scale_name for spec in specs if spec.may_have_scale}
    if config.nvfp4_experts:  # some exports store the draft's experts in NVFP4, too
        names.update(name for spec in specs if spec.format is Format.EXPERT for name in nvfp4.scale_names(spec.name))
    return frozenset(names)


def draft_tensors(config: Config) -> TensorTable:
    """The tensors of the checkpoint's draft, MTP or DSpark."""
    return mtp_tensors(config) if config.dspark is None else dspark_tensors(config)


def dspark_tensors(config: Config) -> TensorTable:
    """The tensors of a DSpark draft: a window-only block per stage, and the extra tensors of the first and last stage.

    The draft uses the main model's embedding and head.
    """
    d, v, rank, stages = config.hidden_size, config.vocab_size, config.dspark.markov_rank, config.dspark.num_stages
    first, last = "mtp.0.", f"mtp.{stages - 1}."
    rows = [
        *(
            _moved(spec, f"mtp.{stage}.", f"model.stages.{stage}.")
            for stage in range(stages)
            for spec in _block(config, LayerKind.SWA, hashed=False)
        ),
        TensorSpec(f"{first}main_proj.weight", (d, d * stages), Format.LINEAR, "model.main_proj.weight"),
        TensorSpec(f"{first}main_norm.weight", (d,), Format.FLOAT, "model.main_norm.weight"),
        TensorSpec(f"{last}norm.weight", (d,), Format.FLOAT, "model.norm.weight"),
        TensorSpec(f"{last}markov_head.markov_w1.weight", (v, rank), Format.FLOAT, "markov_head.markov_w1"),
        TensorSpec(f"{last}markov_head.markov_w2.weight", (v, rank), Format.FLOAT, "markov_head.markov_w2"),
        TensorSpec(f"{last}confidence_head.proj.weight", (1, d + rank), Format.FLOAT, None),
        *(_moved(spec, last, "model.") for spec in _hyper_connection_head(config)),
    ]
    return TensorTable({spec.name: spec for spec in rows}, lambda name: name.startswith("mtp."))


def mtp_tensors(config: Config) -> TensorTable:
    """The tensors of the MTP module, which uses the main model's embedding and head."""
    d = config.hidden_size
    rows = [
        *(_moved(spec, "mtp.0.", _NEXTN_DECODER) for spec in _block(config, LayerKind.SWA, hashed=False)),
        TensorSpec("mtp.0.e_proj.weight", (d, d), Format.LINEAR, "model.e_proj.weight"),
        TensorSpec("mtp.0.h_proj.weight", (d, d), Format.LINEAR, "model.h_proj.weight"),
        TensorSpec("mtp.0.enorm.weight", (d,), Format.FLOAT, "model.enorm.weight"),
        TensorSpec("mtp.0.hnorm.weight", (d,), Format.FLOAT, "model.hnorm.weight"),
        TensorSpec("mtp.0.norm.weight", (d,), Format.FLOAT, "model.norm.weight"),
        *(_moved(spec, "mtp.0.", "model.") for spec in _hyper_connection_head(config)),
    ]
    return TensorTable({spec.name: spec for spec in rows}, lambda name: name.startswith("mtp."))


def _moved(spec: TensorSpec, name_prefix: str, parameter_prefix: str) -> TensorSpec:
    return replace(spec, name=name_prefix + spec.name, parameter=parameter_prefix + spec.parameter)


def _top_level(c: Config, stage: Stage) -> list[TensorSpec]:
    v, d = c.vocab_size, c.hidden_size
    rows = [TensorSpec("embed.weight", (v, d), Format.FLOAT, "model.embed.weight")] if stage.is_first else []
    if stage.is_last:
        rows += [
            TensorSpec("head.weight", (v, d), Format.FLOAT, "lm_head.weight"),
            TensorSpec("norm.weight", (d,), Format.FLOAT, "model.norm.weight"),
            *(_moved(spec, "", "model.") for spec in _hyper_connection_head(c)),
        ]
    return rows


def _hyper_connection_head(c: Config) -> list[TensorSpec]:
    n, d = c.hc_mult, c.hidden_size
    return [
        TensorSpec("hc_head_fn", (n, n * d), Format.FLOAT, "hc_head.fn"),
        TensorSpec("hc_head_base", (n,), Format.FLOAT, "hc_head.base"),
        TensorSpec("hc_head_scale", (1,), Format.FLOAT, "hc_head.scale"),
    ]


def _block(c: Config, kind: LayerKind, hashed: bool) -> list[TensorSpec]:
    """The tensors of one decoder layer; names and parameters without the layer's prefix."""
    d, n, heads, dim = c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim
    rq, group_outputs = c.q_lora_rank, c.o_groups * c.o_lora_rank
    mixes = (2 + n) * n

    def row(
        name: str, *shape: int, format: Format = Format.FLOAT, parameter: str | None = None, shard: int | None = None
    ) -> TensorSpec:
        return TensorSpec(name, shape, format, parameter or name, shard)

    rows = [row("attn_norm.weight", d), row("ffn_norm.weight", d)]
    for sublayer in ("attn", "ffn"):
        rows += [
            row(f"hc_{sublayer}_fn", mixes, n * d, parameter=f"hc_{sublayer}.fn"),
            row(f"hc_{sublayer}_base", mixes, parameter=f"hc_{sublayer}.base"),
            row(f"hc_{sublayer}_scale", 3, parameter=f"hc_{sublayer}.scale"),
        ]
    rows += [
        row("attn.attn_sink", heads),
        row("attn.wq_a.weight", rq, d, format=Format.LINEAR, parameter="attn.wqkv_a.weight", shard=0),
        row("attn.q_norm.weight", rq),
        row("attn.wq_b.weight", heads * dim, rq, format=Format.LINEAR),
        row("attn.wkv.weight", dim, d, format=Format.LINEAR, parameter="attn.wqkv_a.weight", shard=1),
        row("attn.kv_norm.weight", dim),
        row("attn.wo_a.weight", group_outputs, heads * dim // c.o_groups, format=Format.LINEAR),
        row("attn.wo_b.weight", d, group_outputs, format=Format.LINEAR),
    ]
    if kind is not LayerKind.SWA:
        rows += _compressor("attn.compressor.", c, kind, dim)
    if kind is LayerKind.CSA:
        rows += [
            row("attn.indexer.wq_b.weight", c.index_n_heads * c.index_head_dim, rq, format=Format.LINEAR),
            row("attn.indexer.weights_proj.weight", c.index_n_heads, d, parameter="attn.indexer.weights_proj"),
            *_compressor("attn.indexer.compressor.", c, kind, c.index_head_dim),
        ]
    return rows + _moe(c, hashed)


def _compressor(prefix: str, c: Config, kind: LayerKind, dim: int) -> list[TensorSpec]:
    width = dim * kind.groups
    return [
        TensorSpec(f"{prefix}ape", (kind.ratio, width), Format.FLOAT, f"{prefix}ape"),
        TensorSpec(f"{prefix}wkv.weight", (width, c.hidden_size), Format.FLOAT, f"{prefix}wkv"),
        TensorSpec(f"{prefix}wgate.weight", (width, c.hidden_size), Format.FLOAT, f"{prefix}wgate"),
        TensorSpec(f"{prefix}norm.weight", (dim,), Format.FLOAT, f"{prefix}norm.weight"),
    ]


def _moe(c: Config, hashed: bool) -> list[TensorSpec]:
    d, channels, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    rows = [TensorSpec("ffn.gate.weight", (experts, d), Format.FLOAT, "ffn.gate.weight")]
    if hashed:
        shape = (c.vocab_size, c.num_experts_per_tok)
        rows.append(TensorSpec("ffn.gate.tid2eid", shape, Format.INDEX, "ffn.gate.tid2eid"))
    else:
        rows.append(TensorSpec("ffn.gate.bias", (experts,), Format.FLOAT, "ffn.gate.bias"))
    for matrix, shape, fused, half in (
        ("w1", (channels, d), "w13", 0),
        ("w3", (channels, d), "w13", 1),
        ("w2", (d, channels), "w2", None),
    ):
        rows.append(
            TensorSpec(
                f"ffn.shared_experts.{matrix}.weight",
                shape,
                Format.LINEAR,
                f"ffn.shared_experts.{fused}.weight",
                shard=half,
            )
        )
        rows += [
            TensorSpec(
                f"ffn.experts.{expert}.{matrix}.weight",
                shape,
                Format.EXPERT,
                f"ffn.experts.{fused}_weight",
                shard=matrix,
                expert=expert,
            )
            for expert in range(experts)
        ]
    return rows
