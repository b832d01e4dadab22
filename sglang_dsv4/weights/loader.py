"""Load a checkpoint into a model: every tensor of a `tensor_table`, one at a time.

A weight update (`weights.updates.staging`) uses the same `Loader`, which then stores the tensors in host memory.

A quantised weight is copied unchanged into a parameter that has a scale parameter (SGLang's quantised layers, on a
GPU); for any other parameter it is dequantised first. A weight is held in memory only until all of its scales have been
read, and in files sorted by name these are the next tensors.
"""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from dsv4_kernels.number_formats import dequantise_fp4_weight, dequantise_fp8_weight, dequantise_nvfp4_weight
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.weights import nvfp4
from sglang_dsv4.weights.tensor_table import FLOATS, Format, TensorSpec, TensorTable
from sglang_dsv4.weights.values import WeightValues

_SCALES = (torch.float8_e8m0fnu, torch.float32)
_LISTED_AT_MOST = 8


class CheckpointError(ValueError):
    """A checkpoint does not fit the model; the message names the tensors and what was expected."""


def load_checkpoint(
    model: nn.Module, config: Config, table: TensorTable, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy `weights` into `model`, so that every tensor is used and every parameter is filled.

    Args:
        model: has the parameters that `table` names.
        config: the model's.
        table: the tensors to expect.
        weights: (official name, tensor) in any order.

    Raises:
        CheckpointError: a tensor is missing, unknown, repeated, cut short, or of the wrong shape or dtype, or holds NaN
            or infinity. Unknown tensors, missing tensors and such values are reported together, at the end.
    """
    loader = Loader(model, config, table)
    for name, tensor in read(weights, getattr(model.config, "_name_or_path", "")):
        if table.is_ours(name):
            loader.add(name, tensor)
    loader.finish()


def copy_into(spec: TensorSpec, parameter: nn.Parameter, tensor: Tensor, name: str) -> None:
    """Copy a tensor into its part of a parameter; SGLang's experts tell the kind of scale by the tensor's `name`."""
    load = getattr(parameter, "weight_loader", None)
    if load is None:
        parameter.data.copy_(tensor)
    elif spec.expert is not None:
        load(parameter, tensor, name, shard_id=spec.shard, expert_id=spec.expert)
    elif spec.shard is not None:
        load(parameter, tensor, spec.shard)
    else:
        load(parameter, tensor)


class Loader:
    """The state of one pass over a checkpoint, or over the tensors of a weight update.

    Args:
        model: has the parameters that `table` names.
        config: the model's.
        table: the tensors to expect.
        store: puts a checked tensor where it belongs: (its spec, the parameter, the tensor as the parameter holds it,
            its name).
        source: a noun for errors.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        table: TensorTable,
        store: Callable[[TensorSpec, nn.Parameter, Tensor, str], None] = copy_into,
        source: str = "checkpoint",
    ) -> None:
        self.store, self.source = store, source
        self.num_experts = config.n_routed_experts
        self.quantised = config.quantised_checkpoint
        self.nvfp4_experts = config.nvfp4_experts
        self.values = WeightValues()
        self.parameters = dict(model.named_parameters())
        self.specs = table.specs
        self.specs_by_scale = {spec.scale_name: spec for spec in table.specs.values() if spec.may_have_scale}
        self.held: dict[str, Tensor] = {}
        """Quantised weights and scales whose counterparts have not been read yet, by tensor name."""
        self.loaded: set[str] = set()
        self.unknown: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Check one tensor, and load it or hold it until its counterparts have been read."""
        if name in self.loaded or name in self.held:
            raise CheckpointError(f"tensor {name!r} comes twice in the {self.source}")
        if name in self.specs_by_scale:
            self._add_scale(self.specs_by_scale[name], tensor)
        elif name in self.specs:
            self._add_weight(self.specs[name], tensor)
        elif (spec := self.specs.get(nvfp4.weight_name(name))) is not None and spec.format is Format.EXPERT:
            self._add_nvfp4_scale(spec, name, tensor)
        else:
            self.unknown.append(name)

    def _add_weight(self, spec: TensorSpec, weight: Tensor) -> None:
        _check(spec.name, weight, [(dtype, spec.stored_shape(dtype)) for dtype in spec.format.value])
        if spec.format is Format.INDEX and not 0 <= int(weight.min()) <= int(weight.max()) < self.num_experts:
            raise CheckpointError(
                f"tensor {spec.name!r} holds ids from {int(weight.min())} to {int(weight.max())}; "
                f"expected expert ids in [0, {self.num_experts})"
            )
        if not spec.may_have_scale or weight.dtype in FLOATS:
            if spec.scale_name in self.held:
                self._no_use(spec.scale_name, spec, weight)
            self._load(spec, weight, None)
        elif weight.dtype == nvfp4.WEIGHT_DTYPE:
            if spec.scale_name in self.held:
                self._no_use(spec.scale_name, spec, weight)
            self.held[spec.name] = weight
            self._load_nvfp4_if_complete(spec)
        elif spec.scale_name in self.held:
            self._load(spec, weight, self.held.pop(spec.scale_name))
        else:
            self.held[spec.name] = weight

    def _add_scale(self, spec: TensorSpec, scale: Tensor) -> None:
        quantised = [dtype for dtype in spec.format.value if dtype not in (*FLOATS, nvfp4.WEIGHT_DTYPE)]
        _check(spec.scale_name, scale, [(dtype, spec.scale_shape(stored)) for stored in quantised for dtype in _SCALES])
        weight = self.held.get(spec.name)
        if spec.name in self.loaded or (weight is not None and weight.dtype == nvfp4.WEIGHT_DTYPE):
            self._no_use(spec.scale_name, spec, weight)
        if spec.name in self.held:
            self._load(spec, self.held.pop(spec.name), scale)
        else:
            self.held[spec.scale_name] = scale

    def _add_nvfp4_scale(self, spec: TensorSpec, name: str, scale: Tensor) -> None:
        _check(name, scale, nvfp4.accepted(name, *spec.shape))
        weight = self.held.get(spec.name)
        if spec.name in self.loaded or (weight is not None and weight.dtype != nvfp4.WEIGHT_DTYPE):
            self._no_use(name, spec, weight)
        self.held[name] = scale
        self._load_nvfp4_if_complete(spec)

    def _no_use(self, name: str, spec: TensorSpec, weight: Tensor | None) -> NoReturn:
        stored = "is loaded without it" if weight is None else f"is {_word(weight.dtype)}"
        raise CheckpointError(
            f"tensor {name!r} has no use: {spec.name!r} {stored}; FP8 and MXFP4 (int8) have a scale, NVFP4 (uint8) has "
            f"{' and '.join(nvfp4.SCALES)}, floats have none"
        )

    def _load_nvfp4_if_complete(self, spec: TensorSpec) -> None:
        names = (spec.name, *nvfp4.scale_names(spec.name))
        if not all(name in self.held for name in names):
            return
        weight, scale, global_scale, input_scale = (self.held.pop(name) for name in names)
        if not self.nvfp4_experts:
            raise CheckpointError(
                f"tensor {spec.name!r} is NVFP4, but the quantization_config of config.json does not say so: "
                "moe_quant_algo 'NVFP4', quant_algo 'MIXED_PRECISION' and group_size 16, as in hf_quant_config.json"
            )
        for note, name, tensor in (
            (self.values.note_nvfp4_scale, names[1], scale),
            (self.values.note_nvfp4_global_scale, names[2], global_scale),
            (self.values.note_input_scale, names[3], input_scale),
        ):
            note(name, tensor)
        parameter = self.parameters[spec.parameter]
        if f"{spec.parameter}_scale_inv" in self.parameters:
            self._other_layer(spec, weight, parameter)
        if self._is_nvfp4(spec):
            stem = spec.parameter.removesuffix("weight")
            self._copy(spec, parameter, weight)
            for name, last, tensor in zip(names[1:], nvfp4.SCALES, (scale, global_scale, input_scale), strict=True):
                tensor = tensor if tensor.dim() == 2 else tensor.reshape(())
                self._copy(spec, self.parameters[stem + last], tensor, name)
        else:
            on_device = (tensor.to(parameter.device) for tensor in (weight, scale, global_scale))
            self._copy(spec, parameter, dequantise_nvfp4_weight(*on_device, parameter.dtype))
        self.loaded.update(names)

    def _is_nvfp4(self, spec: TensorSpec) -> bool:
        """Whether the tensor's layer was built for NVFP4, as SGLang's are on a GPU."""
        return f"{spec.parameter}_scale_2" in self.parameters

    def _other_layer(self, spec: TensorSpec, weight: Tensor, parameter: nn.Parameter) -> NoReturn:
        raise CheckpointError(
            f"tensor {spec.name!r} is {_word(weight.dtype)}; its layer was built for quantised weights in "
            f"{_word(parameter.dtype)}, as the config's quantization_config and expert_dtype say"
        )

    def _load(self, spec: TensorSpec, weight: Tensor, scale: Tensor | None) -> None:
        if scale is not None:
            if not self.quantised:  # SGLANG_DSV4_QAT would default to off
                raise CheckpointError(
                    f"tensor {spec.name!r} is {_word(weight.dtype)} with scales, but config.json has no "
                    "quantization_config: the release has one, copy it from there"
                )
            _check(spec.scale_name, scale, [(dtype, spec.scale_shape(weight.dtype)) for dtype in _SCALES])
            self.values.note_scale(spec.scale_name, scale, weight)
        self.values.note_weight(spec.name, weight)
        if spec.parameter is None:
            self.loaded.add(spec.name)
            return
        parameter = self.parameters[spec.parameter]
        scale_parameter = self.parameters.get(f"{spec.parameter}_scale_inv")
        if self._is_nvfp4(spec):
            self._other_layer(spec, weight, parameter)
        if scale_parameter is None:
            self._copy(spec, parameter, weight if scale is None else _dequantise(weight, scale, parameter))
        elif scale is None or weight.dtype.itemsize != parameter.dtype.itemsize:
            self._other_layer(spec, weight, parameter)
        else:
            self._copy(spec, parameter, weight)
            self._copy(spec, scale_parameter, scale)
        self.loaded.update((spec.name,) if scale is None else (spec.name, spec.scale_name))

    def _copy(self, spec: TensorSpec, parameter: nn.Parameter, tensor: Tensor, name: str | None = None) -> None:
        self.store(spec, parameter, tensor, name or spec.name)

    def finish(self, whole: bool = True) -> None:
        """Check the tensors that came.

        Args:
            whole: whether every tensor of the table must have come; else a tensor may be absent, but a weight may not
                come without its scales, nor a scale without its weight.

        Raises:
            CheckpointError: tensors are unknown, missing or unused, or hold values that are not finite.
        """
        problems = self._unknown_names()
        missing = self._missing(whole)
        if missing:
            problems.append(f"{len(missing)} missing tensors: {_first(missing, len(missing))}")
        unused = [repr(name) for name in self.held if nvfp4.weight_name(name) in self.loaded]
        if unused:
            problems.append(f"{len(unused)} scales of NVFP4 whose weight is not NVFP4: {_first(unused, len(unused))}")
        if problems:
            problems.insert(0, f"the {self.source} does not hold the tensors of this config in official names")
        self._raise(problems + self._wrong_values())

    def check_so_far(self) -> None:
        """Check names and values of the tensors that came until now.

        Raises:
            CheckpointError: tensors are unknown, or hold values that are not finite.
        """
        self._raise(self._unknown_names() + self._wrong_values())

    def _raise(self, problems: list[str]) -> None:
        if problems:
            raise CheckpointError("; ".join(problems))

    def _unknown_names(self) -> list[str]:
        if not self.unknown:
            return []
        listed = []
        for name in self.unknown[:_LISTED_AT_MOST]:
            near = difflib.get_close_matches(name, (*self.specs, *self.specs_by_scale), n=1)
            listed.append(repr(name) + (f" (did you mean {near[0]!r}?)" if near else ""))
        return [f"{len(self.unknown)} unknown tensors: {_first(listed, len(self.unknown))}"]

    def _wrong_values(self) -> list[str]:
        wrong = self.values.problems()
        if not wrong:
            return []
        why = ", as a damaged file does; fetch their files again" if self.source == "checkpoint" else ""
        return [f"{len(wrong)} tensors hold values that are no finite numbers{why}: {_first(wrong, len(wrong))}"]

    def _missing(self, whole: bool) -> list[str]:
        """Names and shapes of the tensors that have not come; unless `whole`, only counterparts of tensors that did."""
        missing = []
        for spec in self.specs.values():
            if spec.name in self.held:
                weight = self.held[spec.name]
                of_weight = f"of {_word(weight.dtype)} {spec.name!r}"
                if weight.dtype == nvfp4.WEIGHT_DTYPE:
                    absent = [name for name in nvfp4.scale_names(spec.name) if name not in self.held]
                    shapes = [nvfp4.accepted(name, *spec.shape)[0][1] for name in absent]
                    missing += [f"{name!r} {shape} {of_weight}" for name, shape in zip(absent, shapes, strict=True)]
                else:
                    missing.append(f"{spec.scale_name!r} {spec.scale_shape(weight.dtype)} {of_weight}")
            elif spec.name not in self.loaded and (whole or self._has_scale(spec)):
                missing.append(f"{spec.name!r} {spec.shape}")
        return missing

    def _has_scale(self, spec: TensorSpec) -> bool:
        names = (spec.scale_name, *nvfp4.scale_names(spec.name)) if spec.may_have_scale else ()
        return any(name in self.held for name in names)


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


def read(weights: Iterable[tuple[str, Tensor]], checkpoint: str) -> Iterator[tuple[str, Tensor]]:
    """`weights`; an error of the reader becomes one that names the tensors missing from the files in `checkpoint`.

    Raises:
        CheckpointError: files in the folder are cut short or damaged.
    """
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
    """One line for each tensor that a safetensors file lost by being cut short or damaged, or one for its header.

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
    except (ValueError, TypeError, LookupError, AttributeError):  # no JSON, or JSON of another form
        return [f"the first {begin} bytes of {path.name} are no safetensors header"]
    return [
        f"{name!r} {shape} ends at byte {end} of {path.name}, which has {file_bytes}"
        for end, name, shape in ends
        if end > file_bytes
    ]
