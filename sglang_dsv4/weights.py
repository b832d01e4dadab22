"""The official checkpoint as a table (DeepSeek-V4 specification, section 6), and its loading.

`main_model_tensors` and `mtp_tensors` list every tensor there must be: its shape, its format, and the parameter it
goes to. `load_checkpoint` streams a checkpoint through that table. A quantised weight goes as it is into a parameter
that has a scale beside it (SGLang's quantised layers, on a GPU); for any other parameter it is dequantised on the way.
Nothing is held back but one half of a weight and scale pair, and in files sorted by name that is the small half.
"""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor, nn

from dsv4_kernels.quant import dequantise_fp4_weight, dequantise_fp8_weight
from sglang_dsv4.config import FP4_WEIGHT_BLOCK, WEIGHT_BLOCK, Config
from sglang_dsv4.layer_kinds import LayerKind
from sglang_dsv4.weight_values import WeightValues

_FLOATS = (torch.bfloat16, torch.float32, torch.float16)
_SCALES = (torch.float8_e8m0fnu, torch.float32)
_LISTED_AT_MOST = 8
_NEXTN_DECODER = "model.decoder."


class CheckpointError(ValueError):
    """A checkpoint that is not this model's: names the tensors and what was expected."""


class Format(Enum):
    """How a tensor may be stored; each value lists the accepted dtypes."""

    FLOAT = _FLOATS
    """Never quantised."""
    LINEAR = (torch.float8_e4m3fn, *_FLOATS)
    """FP8 with a `.scale` for 128x128 blocks, or not quantised."""
    EXPERT = (torch.int8, torch.float8_e4m3fn, *_FLOATS)
    """FP4, two to a byte, with a `.scale` for 32 columns; or as LINEAR."""
    INDEX = (torch.int64, torch.int32)
    """Expert ids."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint."""

    name: str
    """Official name."""
    shape: tuple[int, ...]
    """Of its values; an FP4 tensor has half as many columns in the file."""
    format: Format
    parameter: str
    """Where it goes: a parameter of the model."""
    shard: str | int | None = None
    """Which part of a fused parameter, as its weight loader calls it."""
    expert: int | None = None

    @property
    def scale_name(self) -> str:
        """Official name of its scales."""
        return self.name.removesuffix("weight") + "scale"

    def stored_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape in the file if stored as `dtype`."""
        return (self.shape[0], self.shape[1] // 2) if dtype == torch.int8 else self.shape

    def scale_shape(self, dtype: torch.dtype) -> tuple[int, int]:
        """Shape of the scales of a weight stored as `dtype`, FP8 or FP4."""
        rows, columns = self.shape
        if dtype == torch.int8:
            return rows, columns // FP4_WEIGHT_BLOCK
        return -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)


@dataclass(frozen=True)
class TensorTable:
    """What one model loads from a checkpoint."""

    specs: dict[str, TensorSpec]
    """By official name."""
    is_ours: Callable[[str], bool]
    """False for the names of another model in the same checkpoint: they are skipped, not checked."""


def main_model_tensors(config: Config) -> TensorTable:
    """All tensors but those of the draft, which are left out by name: another name of a draft's kind is unknown."""
    rows = [
        *_top_level(config),
        *(
            _moved(spec, f"layers.{i}.", f"model.layers.{i}.")
            for i in range(config.num_hidden_layers)
            for spec in _block(config, config.schedule.kind(i), config.uses_hash_routing(i))
        ),
    ]
    of_draft = _draft_names(config)
    return TensorTable({spec.name: spec for spec in rows}, lambda name: name not in of_draft)


def _draft_names(config: Config) -> frozenset[str]:
    """Names of all tensors of the checkpoint's draft, scales too: the MTP module's or DSpark's."""
    specs = (mtp_tensors if config.dspark is None else dspark_tensors)(config).specs.values()
    names = {spec.name for spec in specs} | {spec.scale_name for spec in specs if _may_have_scale(spec)}
    return frozenset(names)


def dspark_tensors(config: Config) -> TensorTable:
    """The tensors of a DSpark draft: a window-only block for each stage, and what the first and the last one have.

    Embedding and head are the main model's.
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
        TensorSpec(f"{last}confidence_head.proj.weight", (1, d + rank), Format.FLOAT, "confidence"),
        *(_moved(spec, last, "model.") for spec in _hyper_connection_head(config)),
    ]
    return TensorTable({spec.name: spec for spec in rows}, lambda name: name.startswith("mtp."))


def mtp_tensors(config: Config) -> TensorTable:
    """The tensors of the MTP module. Embedding and head are the main model's."""
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


def _top_level(c: Config) -> list[TensorSpec]:
    v, d = c.vocab_size, c.hidden_size
    return [
        TensorSpec("embed.weight", (v, d), Format.FLOAT, "model.embed.weight"),
        TensorSpec("head.weight", (v, d), Format.FLOAT, "lm_head.weight"),
        TensorSpec("norm.weight", (d,), Format.FLOAT, "model.norm.weight"),
        *(_moved(spec, "", "model.") for spec in _hyper_connection_head(c)),
    ]


def _hyper_connection_head(c: Config) -> list[TensorSpec]:
    n, d = c.hc_mult, c.hidden_size
    return [
        TensorSpec("hc_head_fn", (n, n * d), Format.FLOAT, "hc_head.fn"),
        TensorSpec("hc_head_base", (n,), Format.FLOAT, "hc_head.base"),
        TensorSpec("hc_head_scale", (1,), Format.FLOAT, "hc_head.scale"),
    ]


def _block(c: Config, kind: LayerKind, hashed: bool) -> list[TensorSpec]:
    """One decoder layer; names and parameters without its prefix."""
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
        row("attn.wo_a.weight", group_outputs, heads * dim // c.o_groups, format=Format.LINEAR, parameter="attn.wo_a"),
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


def load_checkpoint(
    model: nn.Module, config: Config, table: TensorTable, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Stream `weights` into `model`; every tensor is used, and every parameter is filled.

    Args:
        model: its parameters are named as `table` says.
        config: of the model.
        table: what to expect.
        weights: (official name, tensor) in any order.

    Raises:
        CheckpointError: a tensor is missing, unknown, repeated, cut short, or of the wrong shape or dtype, or holds NaN
            or infinity. Unknown and missing tensors and values are reported together, after all have been read.
    """
    loader = _Loader(model, config, table)
    for name, tensor in _read(weights, getattr(model.config, "_name_or_path", "")):
        if table.is_ours(name):
            loader.take(name, tensor)
    loader.finish()


class _Loader:
    """State of one pass over a checkpoint."""

    def __init__(self, model: nn.Module, config: Config, table: TensorTable) -> None:
        self.num_experts = config.n_routed_experts
        self.quantised = config.quantised_checkpoint
        self.values = WeightValues()
        self.parameters = dict(model.named_parameters())
        self.specs = table.specs
        self.specs_by_scale = {spec.scale_name: spec for spec in table.specs.values() if _may_have_scale(spec)}
        self.held: dict[str, Tensor] = {}
        """Halves of weight and scale pairs whose other half has not come yet, by their own names."""
        self.loaded: set[str] = set()
        self.unknown: list[str] = []

    def take(self, name: str, tensor: Tensor) -> None:
        """Check one tensor and load it, or hold it until its other half comes."""
        if name in self.loaded or name in self.held:
            raise CheckpointError(f"tensor {name!r} comes twice in the checkpoint")
        if name in self.specs_by_scale:
            self._take_scale(self.specs_by_scale[name], tensor)
        elif name in self.specs:
            self._take_weight(self.specs[name], tensor)
        else:
            self.unknown.append(name)

    def _take_weight(self, spec: TensorSpec, weight: Tensor) -> None:
        _check(spec.name, weight, [(dtype, spec.stored_shape(dtype)) for dtype in spec.format.value])
        if spec.format is Format.INDEX and not 0 <= int(weight.min()) <= int(weight.max()) < self.num_experts:
            raise CheckpointError(
                f"tensor {spec.name!r} holds ids from {int(weight.min())} to {int(weight.max())}; "
                f"expected expert ids in [0, {self.num_experts})"
            )
        if not _may_have_scale(spec) or weight.dtype in _FLOATS:
            if spec.scale_name in self.held:
                raise CheckpointError(
                    f"tensor {spec.scale_name!r} has no use: {spec.name!r} is {_word(weight.dtype)}, not quantised"
                )
            self._load(spec, weight, None)
        elif spec.scale_name in self.held:
            self._load(spec, weight, self.held.pop(spec.scale_name))
        else:
            self.held[spec.name] = weight

    def _take_scale(self, spec: TensorSpec, scale: Tensor) -> None:
        quantised = [dtype for dtype in spec.format.value if dtype not in _FLOATS]
        _check(spec.scale_name, scale, [(dtype, spec.scale_shape(stored)) for stored in quantised for dtype in _SCALES])
        if spec.name in self.loaded:
            raise CheckpointError(f"tensor {spec.scale_name!r} has no use: {spec.name!r} is not quantised")
        if spec.name in self.held:
            self._load(spec, self.held.pop(spec.name), scale)
        else:
            self.held[spec.scale_name] = scale

    def _load(self, spec: TensorSpec, weight: Tensor, scale: Tensor | None) -> None:
        if scale is not None:
            if not self.quantised:  # and so SGLANG_DSV4_QAT would be off by default
                raise CheckpointError(
                    f"tensor {spec.name!r} is {_word(weight.dtype)} with scales, but config.json has no "
                    "quantization_config: the release has one, copy it from there"
                )
            _check(spec.scale_name, scale, [(dtype, spec.scale_shape(weight.dtype)) for dtype in _SCALES])
            self.values.take_scale(spec.scale_name, scale, weight)
        self.values.take_weight(spec.name, weight)
        parameter = self.parameters[spec.parameter]
        scale_parameter = self.parameters.get(f"{spec.parameter}_scale_inv")
        if scale_parameter is None:
            self._copy(spec, parameter, weight if scale is None else _dequantise(weight, scale, parameter))
        elif scale is None or weight.dtype.itemsize != parameter.dtype.itemsize:
            raise CheckpointError(
                f"tensor {spec.name!r} is {_word(weight.dtype)}; its layer was built for quantised weights in "
                f"{_word(parameter.dtype)}, as the config's quantization_config and expert_dtype say"
            )
        else:
            self._copy(spec, parameter, weight)
            self._copy(spec, scale_parameter, scale)
        self.loaded.update((spec.name,) if scale is None else (spec.name, spec.scale_name))

    def _copy(self, spec: TensorSpec, parameter: nn.Parameter, tensor: Tensor) -> None:
        load = getattr(parameter, "weight_loader", None)
        if load is None:
            parameter.data.copy_(tensor)
        elif spec.expert is not None:
            load(parameter, tensor, spec.name, shard_id=spec.shard, expert_id=spec.expert)
        elif spec.shard is not None:
            load(parameter, tensor, spec.shard)
        else:
            load(parameter, tensor)

    def finish(self) -> None:
        """Report what is unknown, what is missing and what holds no numbers."""
        problems = []
        if self.unknown:
            listed = []
            for name in self.unknown[:_LISTED_AT_MOST]:
                near = difflib.get_close_matches(name, (*self.specs, *self.specs_by_scale), n=1)
                listed.append(repr(name) + (f" (did you mean {near[0]!r}?)" if near else ""))
            problems.append(f"{len(self.unknown)} unknown tensors: {_first(listed, len(self.unknown))}")
        missing = []
        for spec in self.specs.values():
            if spec.name in self.held:
                weight = self.held[spec.name]
                shape = spec.scale_shape(weight.dtype)
                missing.append(f"{spec.scale_name!r} {shape} of {_word(weight.dtype)} {spec.name!r}")
            elif spec.name not in self.loaded:
                missing.append(f"{spec.name!r} {spec.shape}")
        if missing:
            problems.append(f"{len(missing)} missing tensors: {_first(missing, len(missing))}")
        if problems:
            problems.insert(0, "the checkpoint does not hold the tensors of this config in official names")
        wrong = self.values.problems()
        if wrong:
            problems.append(
                f"{len(wrong)} tensors hold values that are no finite numbers, as a damaged file does; fetch their "
                f"files again: {_first(wrong, len(wrong))}"
            )
        if problems:
            raise CheckpointError("; ".join(problems))


def _may_have_scale(spec: TensorSpec) -> bool:
    return spec.format in (Format.LINEAR, Format.EXPERT)


def _dequantise(weight: Tensor, scale: Tensor, parameter: nn.Parameter) -> Tensor:
    dequantise = dequantise_fp4_weight if weight.dtype == torch.int8 else dequantise_fp8_weight
    return dequantise(weight.to(parameter.device), scale.to(parameter.device), parameter.dtype)


def _check(name: str, tensor: Tensor, accepted: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise unless (dtype, shape) of `tensor` is one of `accepted`."""
    if (tensor.dtype, tuple(tensor.shape)) in accepted:
        return
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for dtype, shape in accepted:
        words = by_shape.setdefault(shape, [])
        if _word(dtype) not in words:
            words.append(_word(dtype))
    expected = " or ".join(f"{'/'.join(words)} {shape}" for shape, words in by_shape.items())
    raise CheckpointError(f"tensor {name!r} is {_word(tensor.dtype)} {tuple(tensor.shape)}; expected {expected}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first(items: list[str], total: int) -> str:
    rest = f" and {total - _LISTED_AT_MOST} more" if total > _LISTED_AT_MOST else ""
    return ", ".join(items[:_LISTED_AT_MOST]) + rest


def _read(weights: Iterable[tuple[str, Tensor]], checkpoint: str) -> Iterator[tuple[str, Tensor]]:
    """`weights`, but a reader's failure names the tensors that a file in `checkpoint` has lost."""
    try:
        yield from weights
    except CheckpointError:
        raise
    except Exception as error:
        files = sorted(Path(checkpoint).glob("*.safetensors")) if checkpoint else []
        cut = [line for path in files for line in cut_tensors(path)]
        if not cut:
            raise
        lost = _first(cut, len(cut))
        raise CheckpointError(f"the checkpoint is cut short or damaged; fetch it again: {lost}") from error


def cut_tensors(path: Path) -> list[str]:
    """What a safetensors file has lost by being cut short or damaged: one line a tensor, or one for its header.

    Args:
        path: the file. Only its header is read.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 8
        begin = 8 + header_bytes
        if file_bytes < begin:
            return [f"{path.name} ends at byte {file_bytes}, within its header of {begin} bytes"]
        content = file.read(header_bytes)
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        ends = sorted((begin + entry["data_offsets"][1], name, tuple(entry["shape"])) for name, entry in header.items())
    except (ValueError, TypeError, LookupError, AttributeError):  # no JSON, or JSON that is no table of tensors
        return [f"the first {begin} bytes of {path.name} are no safetensors header"]
    return [
        f"{name!r} {shape} ends at byte {end} of {path.name}, which has {file_bytes}"
        for end, name, shape in ends
        if end > file_bytes
    ]
