"""Which implementation of an op runs: a static table, one choice by device and dtype, or by name.

Every public function of this package (`dsv4_kernels.<op>.<function>`) asks `select` for the function to call. The
table below names implementations as `"module:attribute"`, so importing this module imports none of them. The
definition of every op is called "ref"; a kernel is tested against it.

Nothing falls back silently: an implementation that was asked for by name and does not support the device and dtype is
an error, and the first use of each choice writes one log line.

A process may ask for batch-invariant implementations only (`require_batch_invariance`): then no other one is chosen,
by priority or by name, and an op that has none is an error that names it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

Supports = Callable[[torch.device, torch.dtype], bool]
"""Whether an implementation serves tensors of this device and dtype."""

MODEL_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that a model may compute in."""


def any_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Any device that PyTorch computes on, in one of MODEL_DTYPES."""
    return device.type != "meta" and dtype in MODEL_DTYPES


def cpu_only(device: torch.device, dtype: torch.dtype) -> bool:
    """A CPU, in one of MODEL_DTYPES."""
    return device.type == "cpu" and dtype in MODEL_DTYPES


def gpu_in_bf16(device: torch.device, dtype: torch.dtype) -> bool:
    """Any NVIDIA GPU, in bf16."""
    return device.type == "cuda" and dtype == torch.bfloat16


def gpu_of_generation(major: int, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Supports:
    """The NVIDIA GPUs of one compute capability (9: Hopper, 10: Blackwell of data centres), in these dtypes."""

    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cuda" or dtype not in dtypes or not torch.cuda.is_available():
            return False
        return torch.cuda.get_device_capability(device)[0] == major

    return supports


@dataclass(frozen=True)
class Implementation:
    """One row of the table."""

    op: str
    name: str
    loader: str
    """`"package.module:attribute"`, imported on first use."""
    supports: Supports
    priority: int
    """Among the implementations that support a device and dtype the highest priority is taken."""
    graph_safe: bool
    """Whether a CUDA graph can capture it: it never waits for the device."""
    batch_invariant: bool
    """Whether a row of the result has the same bits in every batch, on every device that it supports: they depend on
    the row's own inputs, not on how many other rows a call has, nor on which."""
    batch_invariant_on_cpu: bool = False
    """Whether that holds on a CPU at least, where every implementation is given."""

    def is_batch_invariant(self, device: torch.device) -> bool:
        """Whether a row has the same bits in every batch on this device."""
        return self.batch_invariant or (self.batch_invariant_on_cpu and device.type == "cpu")


_table: dict[str, dict[str, Implementation]] = {}
_resolved: dict[tuple[str, str, torch.dtype, str | None], Callable[..., Any]] = {}
_requires_batch_invariance = False


def require_batch_invariance(required: bool = True) -> None:
    """From now on only batch-invariant implementations are chosen in this process; False takes that back."""
    global _requires_batch_invariance
    _requires_batch_invariance = required
    _resolved.clear()


def requires_batch_invariance() -> bool:
    """Whether only batch-invariant implementations are chosen: an op with several ways of its own asks."""
    return _requires_batch_invariance


def register(
    op: str,
    name: str,
    loader: str,
    supports: Supports,
    priority: int,
    graph_safe: bool = False,
    batch_invariant: bool = False,
    batch_invariant_on_cpu: bool = False,
) -> None:
    """Adds an implementation of `op` to the table; the arguments are the fields of `Implementation`.

    Raises:
        ValueError: `loader` is not "module:attribute", or `op` already has an implementation called `name`.
    """
    module, _, attribute = loader.partition(":")
    if not module or not attribute:
        raise ValueError(f"loader of {op}/{name} is {loader!r}; expected 'package.module:attribute'")
    implementations = _table.setdefault(op, {})
    if name in implementations:
        raise ValueError(f"op {op!r} already has an implementation called {name!r} ({implementations[name].loader})")
    implementations[name] = Implementation(
        op, name, loader, supports, priority, graph_safe, batch_invariant, batch_invariant_on_cpu
    )
    _resolved.clear()


def ops() -> tuple[str, ...]:
    """The names of all ops, sorted."""
    return tuple(sorted(_table))


def available(op: str) -> tuple[str, ...]:
    """The names of the implementations of `op`, the one with the highest priority first.

    Raises:
        KeyError: there is no such op; the message lists those that exist.
    """
    if op not in _table:
        raise KeyError(f"no op {op!r}; the ops are: {', '.join(ops())}")
    return tuple(i.name for i in sorted(_table[op].values(), key=lambda i: -i.priority))


def select(op: str, device: torch.device, dtype: torch.dtype, impl: str | None = None) -> Callable[..., Any]:
    """The function that computes `op` for tensors of `device` and `dtype`.

    `impl` names the implementation; without it the supported implementation with the highest priority is taken. The
    first use of each choice is logged at INFO.

    Raises:
        KeyError: no such op or implementation; the message lists those that exist.
        NotImplementedError: the named implementation, or all of them, do not support this device and dtype, or are
            not batch-invariant where that is required.
    """
    key = (op, device.type, dtype, impl)
    function = _resolved.get(key)
    if function is None:
        implementation = chosen(op, device, dtype, impl)
        module, _, attribute = implementation.loader.partition(":")
        function = _resolved[key] = getattr(importlib.import_module(module), attribute)
        how = " (named)" if impl else ""
        logger.info("op %s on %s, %s: %s%s", op, device.type, dtype, implementation.name, how)
    return function


def chosen(op: str, device: torch.device, dtype: torch.dtype, impl: str | None = None) -> Implementation:
    """The row of the table that `select` takes for these arguments, without importing it.

    Raises: as `select`.
    """
    candidates = available(op) if impl is None else (_implementation(op, impl).name,)
    supported = [_table[op][name] for name in candidates if _table[op][name].supports(device, dtype)]
    for implementation in supported:
        if not _requires_batch_invariance or implementation.is_batch_invariant(device):
            return implementation
    if supported:
        names = ", ".join(repr(implementation.name) for implementation in supported)
        raise NotImplementedError(
            f"op {op!r} has no batch-invariant implementation for device {device.type!r} with dtype {dtype}, and this "
            f"process asks for no other: a row's bits depend on the batch in {names}"
        )
    subject = f"implementation {impl!r} of op {op!r} does not support" if impl else f"no op {op!r} for"
    raise NotImplementedError(
        f"{subject} device {device.type!r} with dtype {dtype}; implementations of {op!r}: {', '.join(available(op))}"
    )


def _implementation(op: str, name: str) -> Implementation:
    names = available(op)
    if name not in names:
        raise KeyError(f"op {op!r} has no implementation {name!r}; it has: {', '.join(names)}")
    return _table[op][name]


_REFERENCES = {
    "compressor": ("compress", "compress_store"),
    "hyper_connection": ("hc_pre", "hc_post", "hc_head", "hc_boundary", "hc_enter", "hc_finish"),
    "indexer": ("index_query", "index_scores", "index_topk"),
    "linear": ("linear", "linear_fp32", "grouped_linear"),
    "moe": (
        *("swiglu", "fused_swiglu", "swiglu_fp8"),
        *("experts_forward", "mxfp4_experts_forward", "nvfp4_experts_forward"),
    ),
    "norm": ("rms_norm", "rms_norm_fp8"),
    "norm_rope_store": ("norm_rope_store",),
    "quant": ("fp8_qdq", "fp4_qdq", "fp8_quantise", "hadamard"),
    "rope": ("apply_rope", "apply_rope_in_place"),
    "router": ("route_topk", "route_hash", "route_topk_logits", "route_hash_logits"),
    "sparse_attention": ("sparse_attention",),
    "step_mapping": ("step_mapping",),
    "unpack": ("unpack_pages",),
}

_WAITING_REFERENCES = (
    "compress_store",
    "experts_forward",
    "mxfp4_experts_forward",
    "nvfp4_experts_forward",
    "index_scores",
    "index_topk",
    "norm_rope_store",
    "sparse_attention",
)
"""References that read a length or a list back from the device."""

_SHAPE_DEPENDENT_REFERENCES = (
    *("linear", "linear_fp32", "grouped_linear", "route_topk", "route_hash"),
    *("experts_forward", "mxfp4_experts_forward", "nvfp4_experts_forward"),
    *("hc_pre", "hc_head", "hc_boundary", "hc_enter", "hc_finish"),
    *("rms_norm", "rms_norm_fp8", "norm_rope_store", "compress_store"),
    *("sparse_attention", "index_scores", "index_topk"),
)
"""References with a product, or with a sum of PyTorch's: on a GPU both choose their order of summation by the shape.
(On a CPU these have the same bits in every batch too, but for `linear`'s, in whose place "tiled" is taken.)"""

for _folder, _functions in _REFERENCES.items():
    for _function in _functions:
        register(
            _function,
            "ref",
            f"dsv4_kernels.{_folder}.ref:{_function}",
            any_device,
            0,
            graph_safe=_function not in _WAITING_REFERENCES,
            batch_invariant=_function not in _SHAPE_DEPENDENT_REFERENCES,
            batch_invariant_on_cpu=_folder != "linear",
        )
for _function in _REFERENCES["linear"]:
    register(_function, "tiled", f"dsv4_kernels.linear.tiled:{_function}", cpu_only, 10, batch_invariant=True)
register(
    *("grouped_linear_fp8_weight", "ref", "dsv4_kernels.linear.ref:grouped_linear_fp8_weight", any_device, 0),
    graph_safe=True,
)
register(
    *("grouped_linear_fp8_weight", "sm90", "dsv4_kernels.linear.fp8_weight_gpu:sm90", gpu_of_generation(9), 20),
    graph_safe=True,
    batch_invariant=True,
)
for _function in ("linear_fp32", "grouped_linear"):
    register(_function, "cublas", f"dsv4_kernels.linear.cublas:{_function}", gpu_in_bf16, 10, graph_safe=True)

_BF16_KERNELS = {
    "apply_rope_in_place": "rope.gpu:{}_in_place",
    "compress_store": "compressor.gpu:{}",
    "fp8_quantise": "quant.gpu:{}",
    "fused_swiglu": "moe.gpu:{}",
    "index_query": "indexer.query:{}",
    "index_topk": "indexer.gpu:{}",
    "norm_rope_store": "norm_rope_store.gpu:{}",
    "rms_norm": "norm.gpu:{}",
    "rms_norm_fp8": "norm.gpu:{}_fp8",
    "sparse_attention": "sparse_attention.launch:{}",
    "step_mapping": "step_mapping.gpu:{}",
    "swiglu_fp8": "moe.gpu:{}_fp8",
    "unpack_pages": "unpack.gpu:{}",
    **{
        function: f"hyper_connection.gpu:{{}}_{function}"
        for function in ("hc_boundary", "hc_enter", "hc_finish", "hc_head")
    },
}
# Of fp32 logits, whatever dtype the model computes in.
_ROUTER_KERNELS = {"route_hash_logits": "router.gpu:{}_hash", "route_topk_logits": "router.gpu:{}_topk"}

# On Hopper as fast as cuBLAS (benchmarks/results/invariant_linear_h200.json). On Blackwell chosen where batch
# invariance is required: the kernel of both generations is slower where cuBLAS splits K and tiles by number of rows.
_PRODUCTS = {function: f"linear.gpu:{{}}_{function}" for function in ("linear_fp32", "grouped_linear")}

for _name, _generation, _priority in (("sm90", 9, 20), ("sm100", 10, 5)):
    for _function, _attribute in _PRODUCTS.items():
        _loader = f"dsv4_kernels.{_attribute.format(_name)}"
        _supports = gpu_of_generation(_generation)
        register(_function, _name, _loader, _supports, _priority, graph_safe=True, batch_invariant=True)
    for _kernels, _dtypes in ((_BF16_KERNELS, (torch.bfloat16,)), (_ROUTER_KERNELS, MODEL_DTYPES)):
        for _function, _attribute in _kernels.items():
            _loader = f"dsv4_kernels.{_attribute.format(_name)}"
            _supports = gpu_of_generation(_generation, _dtypes)
            register(_function, _name, _loader, _supports, 20, graph_safe=True, batch_invariant=True)

register("linear_fp8", "ref", "dsv4_kernels.linear.ref:linear_fp8", any_device, 0, graph_safe=True)
register(
    *("linear_fp8", "sm90", "dsv4_kernels.linear.fp8:sm90", gpu_of_generation(9), 20),
    graph_safe=True,
    batch_invariant=True,
)

# By name only: these have run in the emulator, on no GPU.
for _function in ("mxfp4_experts_forward", "nvfp4_experts_forward"):
    _loader = f"dsv4_kernels.moe.sm100.launch:{_function}"
    register(_function, "sm100", _loader, gpu_of_generation(10), -1, graph_safe=True, batch_invariant=True)
register(
    *("mxfp4_experts_forward", "sm90", "dsv4_kernels.moe.sm90.launch:mxfp4_experts_forward"),
    *(gpu_of_generation(9), -1),
    graph_safe=True,
    batch_invariant=True,
)
