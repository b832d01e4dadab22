"""The model's shapes, constants and switches, read once from the HF config: one frozen, validated `Config`.

SGLang parses `config.json` with an alias of `DeepseekV3Config`, which fills every field that the file lacks with
DeepSeek-V3's default (`n_group`, `topk_group`, `v_head_dim`, ...). Only this module reads the HF config, so no other
module can read such a default. `checkpoint_files` finds fields that are read here and missing from the file, in the
launcher. Fields keep the names of `config.json`; section numbers are those of the DeepSeek-V4 specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.rope import YarnScaling, rope_frequencies
from sglang_dsv4 import env
from sglang_dsv4.model_config.dspark import DSpark, dspark_of
from sglang_dsv4.model_config.layer_kinds import WINDOW_TOKENS, LayerKind

ACTIVATION_BLOCK = 128
"""Channels that share one scale when an FP8 linear quantises its input (section 4.2)."""

KV_BLOCK = 64
"""Channels of a KV row's nope part that share one scale (section 4.2)."""

INDEX_BLOCK = 32
"""Channels of an indexer row that share one FP4 scale (section 4.2)."""

WEIGHT_BLOCK = 128
"""Rows and columns of an FP8 weight that share one scale (section 4.2)."""

FP4_WEIGHT_BLOCK = 32
"""Columns of an FP4 expert weight that share one scale (section 4.2)."""

NVFP4_WEIGHT_BLOCK = 16
"""Columns of an NVFP4 expert weight that share one e4m3 scale; a matrix has one fp32 scale in addition."""

QAT_VARIABLE = "SGLANG_DSV4_QAT"
_FP32 = torch.finfo(torch.float32)  # kernels take constants as fp32
_A_NUMBER = "a number > 0, finite in fp32"
_MISSING = "the field is missing from config.json"
_TRANSFORMERS_RATIOS = {
    "sliding_attention": LayerKind.SWA.ratio,
    "compressed_sparse_attention": LayerKind.CSA.ratio,
    "heavily_compressed_attention": LayerKind.HCA.ratio,
}


class ConfigError(ValueError):
    """A config or a server option that this model can't serve: names it, its value and what is accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        super().__init__(f"DeepSeek-V4 can't be served: {field!r} is {value!r}; accepted: {accepted}")


@dataclass(frozen=True)
class LayerSchedule:
    """Compression ratio of each decoder layer, draft layers left out (section 1)."""

    ratios: tuple[int, ...]

    def __post_init__(self) -> None:
        known = {kind.ratio: f"{kind.ratio} ({kind.name})" for kind in LayerKind}
        for layer_id, ratio in enumerate(self.ratios):
            if type(ratio) is not int or ratio not in known:
                raise ConfigError(f"compress_ratios[{layer_id}]", ratio, " or ".join(known.values()))
        if not self.ratios:
            raise ConfigError("compress_ratios", self.ratios, "one ratio for each decoder layer, at least one")

    def kind(self, layer_id: int) -> LayerKind:
        """The kind of decoder layer `layer_id`."""
        return LayerKind(self.ratios[layer_id])


@dataclass(frozen=True)
class QuantSwitches:
    """The fake quantisers of the release that run (section 4.3). The input of wo_a is never quantised."""

    kv_fp8: bool
    """Quantise the nope channels of window rows and entries to FP8."""
    indexer_fp4: bool
    """Rotate indexer queries and keys by a Hadamard matrix and quantise them to FP4."""
    activations_fp8: bool
    """Quantise the input of every quantised linear layer and expert to FP8."""

    @classmethod
    def off(cls) -> QuantSwitches:
        """No fake quantiser, as an unquantised checkpoint and a comparison in fp32 need."""
        return cls(kv_fp8=False, indexer_fp4=False, activations_fp8=False)

    @classmethod
    def kv(cls) -> QuantSwitches:
        """The fake quantisers of the caches: KV rows and indexer keys."""
        return cls(kv_fp8=True, indexer_fp4=True, activations_fp8=False)

    @classmethod
    def full(cls) -> QuantSwitches:
        """All fake quantisers, as in the release."""
        return cls(kv_fp8=True, indexer_fp4=True, activations_fp8=True)

    @classmethod
    def resolve(cls, quantised_checkpoint: bool) -> QuantSwitches:
        """The switches that `SGLANG_DSV4_QAT` names; if unset, `full` for a quantised checkpoint, else `off`.

        Raises:
            ValueError: the variable holds another word.
        """
        presets = {None: cls.full if quantised_checkpoint else cls.off, "off": cls.off, "kv": cls.kv, "full": cls.full}
        return presets[env.choice(QAT_VARIABLE)]()


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one kind of layer (section 3.2)."""

    dim: int
    """Number of rotated channels: the last channels of a row."""
    theta: float
    yarn: YarnScaling | None

    def frequencies(self) -> torch.Tensor:
        """Angle per position of each channel pair, fp32 [dim / 2]."""
        return rope_frequencies(self.dim, self.theta, self.yarn)


@dataclass(frozen=True)
class Config:
    """Shapes, constants and switches of one DeepSeek-V4 model. Build it with `Config.from_hf`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    schedule: LayerSchedule
    num_nextn_predict_layers: int
    dspark: DSpark | None
    """The checkpoint's DSpark draft, which replaces the MTP module; None if it has no DSpark draft."""
    rms_norm_eps: float

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None

    index_n_heads: int
    index_head_dim: int
    index_topk: int

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    quantised_checkpoint: bool
    """The HF config declares FP8 weights. The dtype of the experts' tensors tells whether these are FP4 or FP8."""
    nvfp4_experts: bool
    """The HF config declares NVFP4 experts (modelopt's export); some may still be in the release's format."""
    qat: QuantSwitches

    @property
    def num_draft_layers(self) -> int:
        """Number of window-only layers in the checkpoint's draft: DSpark's stages, or the MTP module."""
        return self.num_nextn_predict_layers if self.dspark is None else self.dspark.num_stages

    @property
    def nope_head_dim(self) -> int:
        """Number of channels that are not rotated: the first channels of a row."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of q.k; YaRN's mscale is not applied (section 3.2)."""
        return self.head_dim**-0.5

    @property
    def activation_block(self) -> int | None:
        """Channels per scale of the input quantiser of FP8 and FP4 products; None if it is off."""
        return ACTIVATION_BLOCK if self.qat.activations_fp8 else None

    def rope(self, kind: LayerKind) -> Rope:
        """The rotary embedding of a kind of layer: `rope_theta` for SWA, else `compress_rope_theta` with YaRN."""
        if kind is LayerKind.SWA:
            return Rope(self.qk_rope_head_dim, self.rope_theta, None)
        return Rope(self.qk_rope_head_dim, self.compress_rope_theta, self.yarn)

    def uses_hash_routing(self, layer_id: int) -> bool:
        """Whether decoder layer `layer_id` chooses its experts by token id (section 5)."""
        return layer_id < self.num_hash_layers

    @classmethod
    def from_hf(cls, hf_config: object, qat: QuantSwitches | None = None) -> Config:
        """The validated config of `DeepseekV4ForCausalLM`.

        Args:
            hf_config: as SGLang parses the official `config.json`, or transformers' `DeepseekV4Config`.
            qat: fake quantisers to run; None: `QuantSwitches.resolve` decides.

        Raises:
            ConfigError: a field is missing, or has a value that this model can't serve.
        """
        fields = _Fields(hf_config)
        fields.require("model_type", ("deepseek_v4",))
        num_layers = fields.positive_int("num_hidden_layers")
        fields.require("num_nextn_predict_layers", (0, 1))
        num_mtp = fields.integer("num_nextn_predict_layers", minimum=0)
        vocab_size = fields.positive_int("vocab_size")
        dspark = dspark_of(fields.get, fields.positive_int, ConfigError, num_layers, vocab_size)
        quantised, nvfp4 = _quantised_checkpoint(fields)
        theta, compress_theta, yarn = _rope_fields(fields)
        fields.require("num_key_value_heads", (1,))
        fields.positive_int("max_position_embeddings")  # SGLang's: the longest request
        fields.require("n_shared_experts", (1,))
        fields.require("hidden_act", ("silu",))
        fields.require("scoring_func", ("sqrtsoftplus",))
        fields.require("norm_topk_prob", (True,))
        fields.require("topk_method", ("noaux_tc",), default="noaux_tc")
        fields.require("attention_bias", (False,), default=False)
        fields.require("tie_word_embeddings", (False,), default=False)
        fields.require("expert_dtype", (None, "fp4", "fp8"), default=None)
        config = cls(
            vocab_size=vocab_size,
            hidden_size=fields.positive_int("hidden_size"),
            num_hidden_layers=num_layers,
            schedule=_schedule(fields, num_layers, num_mtp if dspark is None else dspark.num_stages),
            num_nextn_predict_layers=num_mtp,
            dspark=dspark,
            rms_norm_eps=fields.positive("rms_norm_eps"),
            num_attention_heads=fields.positive_int("num_attention_heads"),
            head_dim=fields.positive_int("head_dim"),
            qk_rope_head_dim=fields.positive_int("qk_rope_head_dim"),
            q_lora_rank=fields.positive_int("q_lora_rank"),
            o_groups=fields.positive_int("o_groups"),
            o_lora_rank=fields.positive_int("o_lora_rank"),
            sliding_window=fields.positive_int("sliding_window"),
            rope_theta=theta,
            compress_rope_theta=compress_theta,
            yarn=yarn,
            index_n_heads=fields.positive_int("index_n_heads"),
            index_head_dim=fields.positive_int("index_head_dim"),
            index_topk=fields.positive_int("index_topk"),
            n_routed_experts=fields.positive_int("n_routed_experts"),
            num_experts_per_tok=fields.positive_int("num_experts_per_tok"),
            moe_intermediate_size=fields.positive_int("moe_intermediate_size"),
            num_hash_layers=_num_hash_layers(fields, num_layers),
            routed_scaling_factor=fields.positive("routed_scaling_factor"),
            swiglu_limit=fields.positive("swiglu_limit"),
            hc_mult=fields.positive_int("hc_mult"),
            hc_sinkhorn_iters=fields.positive_int("hc_sinkhorn_iters"),
            hc_eps=fields.positive("hc_eps"),
            quantised_checkpoint=quantised,
            nvfp4_experts=nvfp4,
            qat=qat if qat is not None else QuantSwitches.resolve(quantised),
        )
        config.validate()
        return config

    def validate(self) -> None:
        """Check that the shapes are legal; only this function states which shapes are.

        Raises:
            ConfigError: names the first field whose value is not legal.
        """
        if self.sliding_window != WINDOW_TOKENS:
            raise ConfigError("sliding_window", self.sliding_window, f"{WINDOW_TOKENS} (the rings' size)")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim >= self.head_dim:
            raise ConfigError("qk_rope_head_dim", self.qk_rope_head_dim, f"even and below head_dim ({self.head_dim})")
        if self.num_attention_heads % self.o_groups:
            raise ConfigError("o_groups", self.o_groups, f"a divisor of {self.num_attention_heads}, all the heads")
        if self.index_head_dim & (self.index_head_dim - 1) or self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(
                "index_head_dim",
                self.index_head_dim,
                f"a power of two (Hadamard), at least qk_rope_head_dim ({self.qk_rope_head_dim})",
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                "num_experts_per_tok", self.num_experts_per_tok, f"at most n_routed_experts ({self.n_routed_experts})"
            )
        if self.qat.kv_fp8 and self.nope_head_dim % KV_BLOCK:
            raise ConfigError(
                "head_dim",
                self.head_dim,
                f"qk_rope_head_dim ({self.qk_rope_head_dim}) plus a multiple of {KV_BLOCK}, with FP8 KV rows on",
            )
        if self.qat.indexer_fp4 and self.index_head_dim % INDEX_BLOCK:
            raise ConfigError(
                "index_head_dim", self.index_head_dim, f"a multiple of {INDEX_BLOCK}, with FP4 indexer rows switched on"
            )
        if self.qat.activations_fp8:
            for field in ("hidden_size", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"):
                if getattr(self, field) % ACTIVATION_BLOCK:
                    raise ConfigError(
                        field,
                        getattr(self, field),
                        f"a multiple of {ACTIVATION_BLOCK}, with FP8 activations switched on",
                    )


class _Fields:
    """Typed, checked reads of an HF config; every error names the field."""

    def __init__(self, hf_config: object) -> None:
        self._hf_config = hf_config

    def has(self, field: str) -> bool:
        return hasattr(self._hf_config, field)

    def get(self, field: str) -> Any:  # noqa: ANN401 - a config field may be anything until it is checked
        return getattr(self._hf_config, field, None)

    def _present(self, field: str, accepted: str) -> Any:  # noqa: ANN401
        value = self.get(field)
        if value is None:
            raise ConfigError(field, None, f"{accepted}; {_MISSING}")
        return value

    def integer(self, field: str, minimum: int) -> int:
        accepted = f"an integer >= {minimum}"
        value = self._present(field, accepted)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(field, value, accepted)
        return value

    def positive_int(self, field: str) -> int:
        return self.integer(field, minimum=1)

    def positive(self, field: str) -> float:
        return _positive(field, self._present(field, _A_NUMBER))

    def require(self, field: str, accepted: Iterable[object], default: object = ...) -> None:
        """Raise unless the field's value is in `accepted`; `default` is the value of a field that may be missing."""
        words = " or ".join(repr(value) for value in accepted)
        value = self.get(field)
        if value is None:
            if default is ...:
                raise ConfigError(field, None, f"{words}; {_MISSING}")
            value = default
        if value not in accepted:
            raise ConfigError(field, value, words)


def _schedule(fields: _Fields, num_layers: int, num_draft: int) -> LayerSchedule:
    """The schedule in `compress_ratios` (official: plus one 0 for each draft layer) or transformers' `layer_types`."""
    ratios = fields.get("compress_ratios")
    if ratios is None:
        kinds = fields.get("layer_types")
        if kinds is None:
            raise ConfigError("compress_ratios", None, f"{num_layers + num_draft} ratios; {_MISSING}")
        unknown = [kind for kind in kinds if kind not in _TRANSFORMERS_RATIOS]
        if unknown:
            raise ConfigError("layer_types", unknown[0], " or ".join(_TRANSFORMERS_RATIOS))
        ratios = [_TRANSFORMERS_RATIOS[kind] for kind in kinds]
        _check_compress_rates(fields)
    if not isinstance(ratios, list | tuple):
        raise ConfigError("compress_ratios", ratios, f"a list of {num_layers + num_draft} ratios")
    ratios = tuple(ratios)
    if len(ratios) not in (num_layers, num_layers + num_draft):
        raise ConfigError(
            "compress_ratios",
            f"{len(ratios)} entries",
            f"{num_layers + num_draft} entries: num_hidden_layers ({num_layers}) and one for each layer of the draft, "
            f"of which num_nextn_predict_layers or the dspark fields announce {num_draft}",
        )
    if any(ratios[num_layers:]):
        raise ConfigError("compress_ratios", ratios[num_layers:], "0 (window only) for the layers of the draft")
    return LayerSchedule(ratios[:num_layers])


def _check_compress_rates(fields: _Fields) -> None:
    for kind, rate in (fields.get("compress_rates") or {}).items():
        if rate != _TRANSFORMERS_RATIOS.get(kind):
            raise ConfigError(f"compress_rates[{kind!r}]", rate, repr(_TRANSFORMERS_RATIOS.get(kind)))


def _num_hash_layers(fields: _Fields, num_layers: int) -> int:
    """The number of hash layers: `num_hash_layers`, or the 'hash_moe' entries at the start of `mlp_layer_types`."""
    kinds = fields.get("mlp_layer_types")
    if fields.get("num_hash_layers") is None and kinds is not None:
        num_hash = sum(kind == "hash_moe" for kind in kinds)
        if list(kinds) != ["hash_moe"] * num_hash + ["moe"] * (num_layers - num_hash):
            raise ConfigError("mlp_layer_types", kinds, f"{num_layers} entries, 'hash_moe' first, then 'moe'")
        return num_hash
    num_hash = fields.integer("num_hash_layers", minimum=0)
    if num_hash > num_layers:
        raise ConfigError("num_hash_layers", num_hash, f"at most num_hidden_layers ({num_layers})")
    return num_hash


def _rope_fields(fields: _Fields) -> tuple[float, float, YarnScaling | None]:
    """(theta of window-only layers, theta of compressed layers, YaRN of compressed layers).

    A config has them in one of three forms: official (`rope_theta`, `rope_scaling`), as transformers 5 rewrites it
    (`rope_parameters` holds both), or as in transformers' own DeepseekV4Config (`rope_parameters` keyed "main" and
    "compress").
    """
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise ConfigError("rope_scaling", None, f"YaRN's table, or null for a model without; {_MISSING}")
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError("rope_scaling", parameters, "YaRN's table, or null for a model without")
    main: Mapping[str, Any] = parameters
    scaled: Mapping[str, Any] = parameters
    if "main" in parameters and "compress" in parameters:
        main, scaled = parameters["main"], parameters["compress"]
        if main.get("rope_type", "default") != "default":
            raise ConfigError("rope_parameters['main']['rope_type']", main["rope_type"], "'default'")
    theta = main.get("rope_theta")
    theta = fields.positive("rope_theta") if theta is None else _positive("rope_theta", theta)
    return theta, fields.positive("compress_rope_theta"), _yarn(scaled)


def _positive(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FP32.tiny <= value <= _FP32.max:
        raise ConfigError(field, value, _A_NUMBER)
    return float(value)


def _yarn(scaling: Mapping[str, Any]) -> YarnScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "default" or (kind is None and "factor" not in scaling):
        return None
    if kind != "yarn":
        raise ConfigError("rope_scaling['type']", kind, "'yarn' (or rope_scaling: null)")
    for field, neutral in (("mscale", ()), ("mscale_all_dim", ()), ("attention_factor", (1, 1.0))):
        value = scaling.get(field)
        if value is not None and value not in neutral:
            raise ConfigError(f"rope_scaling[{field!r}]", value, "no amplitude scaling: leave the field out")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    factor, positions, fast, slow = (_positive(f"rope_scaling[{name!r}]", scaling.get(name)) for name in names)
    if not positions.is_integer():
        raise ConfigError(f"rope_scaling[{names[1]!r}]", positions, "an integer >= 1")
    return YarnScaling(factor=factor, original_max_positions=int(positions), beta_fast=fast, beta_slow=slow)


def _quantised_checkpoint(fields: _Fields) -> tuple[bool, bool]:
    """Whether `quantization_config` declares the official FP8 format, and whether it declares NVFP4 experts.

    Raises:
        ConfigError: it declares another format.
    """
    declared = fields.get("quantization_config")
    if declared is None:
        return False, False
    if not isinstance(declared, Mapping):
        declared = declared.to_dict()
    accepted: dict[str, tuple[object, ...]] = {
        "quant_method": ("fp8",),
        "fmt": (None, "e4m3"),
        "scale_fmt": (None, "ue8m0"),
        "activation_scheme": (None, "dynamic"),
        "moe_quant_algo": (None, "NVFP4"),
    }
    nvfp4 = declared.get("moe_quant_algo") == "NVFP4"
    if nvfp4:  # SGLang reads all three fields; with only some of them it would build experts of the release's format
        accepted |= {"quant_algo": ("MIXED_PRECISION",), "group_size": (NVFP4_WEIGHT_BLOCK,)}
    else:
        accepted |= {"quant_algo": (None,)}
    for field, values in accepted.items():
        if declared.get(field) not in values:
            words = " or ".join("left out" if value is None else repr(value) for value in values)
            if nvfp4 and None not in values:
                words += ", with moe_quant_algo 'NVFP4'"
            raise ConfigError(f"quantization_config[{field!r}]", declared.get(field), words)
    block = declared.get("weight_block_size")
    if block is None or list(block) != [WEIGHT_BLOCK, WEIGHT_BLOCK]:
        raise ConfigError("quantization_config['weight_block_size']", block, f"[{WEIGHT_BLOCK}, {WEIGHT_BLOCK}]")
    return True, nvfp4
