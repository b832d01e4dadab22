"""The table of ops: one row an op, with its implementations, the forwards that run it, and its compile jobs.

An op is a public function of this package, `dsv4_kernels.<folder>.<op>`, which asks `dsv4_kernels.registry` for an
implementation. Implementations and compile jobs are loader strings, so importing this module imports no kernel. Derived
from this table are:

    registry.select           the implementation that a device and dtype get
    registry.compile_jobs     kernels to compile before a server is ready
    forward_ops               ops that must be batch-invariant under --enable-deterministic-inference
    step_ops                  ops that a CUDA graph must be able to capture

The implementation "ref" is an op's definition in PyTorch; every other implementation is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum

import torch

from dsv4_kernels.model_shapes import Option

PACKAGE = "dsv4_kernels"
JOINT_LAUNCHES = f"{PACKAGE}.joint_launches:compile_jobs"
"""Compile jobs of the launches in which forwards of few tokens run several ops at once."""
MODEL_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that a model may compute in."""

Supports = Callable[[torch.device, torch.dtype], bool]
"""Whether an implementation serves tensors of this device and dtype."""


def any_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch computes on the device, and the dtype is one of MODEL_DTYPES."""
    return device.type != "meta" and dtype in MODEL_DTYPES


def cpu_only(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device is a CPU, and the dtype is one of MODEL_DTYPES."""
    return device.type == "cpu" and dtype in MODEL_DTYPES


def gpu_in_bf16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device is an NVIDIA GPU, and the dtype bf16."""
    return device.type == "cuda" and dtype == torch.bfloat16


def gpu_of_generation(major: int, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Supports:
    """A test for GPUs of one compute capability (9: Hopper, 10: data-centre Blackwell) and these dtypes."""

    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cuda" or dtype not in dtypes or not torch.cuda.is_available():
            return False
        return torch.cuda.get_device_capability(device)[0] == major

    return supports


class Runs(Enum):
    """The forwards of a model that run an op."""

    STEP = "decode, verify and draft steps, and prefills"
    PREFILL = "prefills only"
    NOWHERE = "no forward: part of the definitions of other ops"


@dataclass(frozen=True)
class Implementation:
    """One implementation of an op."""

    name: str
    loader: str
    """`"package.module:attribute"` of the function, imported on first use."""
    supports: Supports
    priority: int
    """The registry chooses the highest priority among the implementations that support a device and dtype."""
    graph_safe: bool = False
    """Whether a CUDA graph can capture it: it never waits for the device."""
    batch_invariant: bool = False
    """Whether a row of the result has the same bits in every batch, on every supported device: they depend on the row's
    own inputs, not on the number or the contents of the other rows of a call."""
    batch_invariant_on_cpu: bool = False
    """Whether a row of the result has the same bits in every batch at least on a CPU."""
    jobs: str | None = None
    """`"package.module:function"`: (ModelShapes, architecture "sm_90a") -> compile jobs of all kernels that forwards of
    the model run. A job is a callable without arguments that can be pickled."""

    def is_batch_invariant(self, device: torch.device) -> bool:
        """Whether a row has the same bits in every batch on this device."""
        return self.batch_invariant or (self.batch_invariant_on_cpu and device.type == "cpu")


@dataclass(frozen=True)
class Op:
    """One row of the table."""

    name: str
    """Name of the public function."""
    folder: str
    """Sub-package with that function: `dsv4_kernels.<folder>`."""
    runs: Runs
    implementations: tuple[Implementation, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Devices on which forwards run it."""
    option: Option | None = None
    """Forwards run it only with this option; None: with any options."""
    by_name: bool = False
    """Whether the layer calls the kernel of the GPU's generation by name, whatever the priorities."""

    def named(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """The implementation that the layer calls by name; None if the registry chooses.

        Raises:
            NotImplementedError: no kernel serves this device and dtype.
        """
        if not self.by_name:
            return None
        kernels = [row.name for row in self.implementations if row.name != "ref" and row.supports(device, dtype)]
        if not kernels:
            raise NotImplementedError(f"op {self.name!r} has no kernel for device {device.type!r} with dtype {dtype}")
        return kernels[0]


# ---- constructors of rows


@dataclass(frozen=True)
class _Reference:
    graph_safe: bool = True
    batch_invariant: bool = False
    batch_invariant_on_cpu: bool = True


ELEMENTWISE = _Reference(batch_invariant=True)
"""Reference without a product or a sum whose order PyTorch chooses."""
SHAPED = _Reference()
"""Reference with a product or a sum: on a GPU PyTorch chooses the order of summation by the shape."""
WAITING = _Reference(graph_safe=False)
"""Reference like SHAPED that also reads a length or a list back from the device."""
PRODUCT = _Reference(batch_invariant_on_cpu=False)
"""Reference that is a matrix product of PyTorch, whose order of summation depends on the shape on a CPU, too."""


def _op(
    name: str,
    folder: str,
    runs: Runs,
    reference: _Reference,
    *implementations: Implementation,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    option: Option | None = None,
    by_name: bool = False,
) -> Op:
    ref = Implementation(
        "ref",
        f"{PACKAGE}.{folder}.ref:{name}",
        any_device,
        0,
        reference.graph_safe,
        reference.batch_invariant,
        reference.batch_invariant_on_cpu,
    )
    return Op(name, folder, runs, (*implementations, ref), devices, option, by_name)


_GENERATIONS = {"sm90": 9, "sm100": 10}


def _kernel(
    name: str,
    loader: str,
    jobs: str | None = None,
    *,
    priority: int = 20,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
) -> Implementation:
    """The implementation `name` ("sm90", "sm100") by a kernel of this package.

    Args:
        name: says the GPU's generation.
        loader: "module:attribute" in this package.
        jobs: function of compile jobs in the loader's module, or "module:function" in this package.
        priority: see `Implementation`.
        dtypes: that the kernel serves.
    """
    if jobs is not None:
        jobs = f"{PACKAGE}.{jobs}" if ":" in jobs else f"{PACKAGE}.{loader.partition(':')[0]}:{jobs}"
    supports = gpu_of_generation(_GENERATIONS[name], dtypes)
    return Implementation(
        name, f"{PACKAGE}.{loader}", supports, priority, graph_safe=True, batch_invariant=True, jobs=jobs
    )


def _kernels(
    loader: str, jobs: str | None = None, *, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
) -> tuple[Implementation, ...]:
    """The implementations "sm90" and "sm100"; `{}` in the loader stands for that name."""
    return tuple(_kernel(name, loader.format(name), jobs, dtypes=dtypes) for name in _GENERATIONS)


def _products(function: str) -> tuple[Implementation, ...]:
    """Implementations of a product of bf16 operands.

    On Hopper this package's kernel is as fast as cuBLAS (benchmarks/results/invariant_linear_h200.json). On Blackwell
    it is chosen where batch invariance is required: the kernel of both generations is slower there than cuBLAS, which
    splits K and chooses tiles by the number of rows.
    """
    loader, jobs = f"linear.gpu:{{}}_{function}", f"{function}_jobs"
    return (
        Implementation("tiled", f"{PACKAGE}.linear.tiled:{function}", cpu_only, 10, batch_invariant=True),
        Implementation("cublas", f"{PACKAGE}.linear.cublas:{function}", gpu_in_bf16, 10, graph_safe=True),
        _kernel("sm90", loader.format("sm90"), jobs),
        _kernel("sm100", loader.format("sm100"), jobs, priority=5),
    )


# ---- the table

STEP, PREFILL, NOWHERE = Runs
CPU, GPU = ("cpu",), ("cuda",)

_ROWS = (
    _op(
        "all_reduce",
        "all_reduce",
        STEP,
        SHAPED,
        *_kernels("all_reduce.gpu:{}", "compile_jobs", dtypes=MODEL_DTYPES),
        devices=GPU,
        option=Option.PEER_SUMS,
    ),
    _op("compress", "compressor", NOWHERE, ELEMENTWISE),
    _op("compress_store", "compressor", STEP, WAITING, *_kernels("compressor.gpu:{}", "compile_jobs")),
    _op("hc_pre", "hyper_connection", NOWHERE, SHAPED),
    _op("hc_post", "hyper_connection", NOWHERE, ELEMENTWISE),
    _op("hc_head", "hyper_connection", NOWHERE, SHAPED),
    *(
        _op(name, "hyper_connection", STEP, SHAPED, *_kernels(f"hyper_connection.gpu:{{}}_{name}", "compile_jobs"))
        for name in ("hc_boundary", "hc_enter", "hc_finish")
    ),
    _op(
        "hc_boundary_of_parts",
        "hyper_connection",
        STEP,
        SHAPED,
        *_kernels("hyper_connection.gpu:{}_hc_boundary_of_parts", "parts_compile_jobs"),
        devices=GPU,
        option=Option.PEER_SUMS,
    ),
    _op("index_query", "indexer", STEP, ELEMENTWISE, *_kernels("indexer.query:{}", "compile_jobs")),
    _op("index_scores", "indexer", NOWHERE, WAITING),
    _op("index_topk", "indexer", STEP, WAITING, *_kernels("indexer.gpu:{}", "compile_jobs")),
    _op(
        "linear",
        "linear",
        STEP,
        PRODUCT,
        Implementation("tiled", f"{PACKAGE}.linear.tiled:linear", cpu_only, 10, batch_invariant=True),
        devices=CPU,
    ),
    _op("linear_fp32", "linear", STEP, PRODUCT, *_products("linear_fp32")),
    _op("grouped_linear", "linear", STEP, PRODUCT, *_products("grouped_linear")),
    _op(
        "grouped_linear_fp8_weight",
        "linear",
        STEP,
        PRODUCT,
        *_kernels("linear.fp8_weight_gpu:{}", "compile_jobs"),
        devices=GPU,
        option=Option.FP8_WO_A,
    ),
    _op(
        "linear_fp8",
        "linear",
        STEP,
        PRODUCT,
        _kernel("sm90", "linear.fp8:sm90", "compile_jobs"),
        _kernel("sm100", "linear.fp8_blackwell:sm100", "compile_jobs"),
        devices=GPU,
        option=Option.FP8_LINEAR,
    ),
    _op("swiglu", "moe", NOWHERE, ELEMENTWISE),
    _op("fused_swiglu", "moe", STEP, ELEMENTWISE, *_kernels("moe.gpu:{}", "compile_jobs")),
    _op("swiglu_fp8", "moe", STEP, ELEMENTWISE, *_kernels("moe.gpu:{}_fp8", "fp8_compile_jobs"), devices=GPU),
    _op("experts_forward", "moe", STEP, WAITING, devices=CPU),
    # On a GPU the kernels of packed experts give these rows, and add them, in launches of their own.
    _op("expert_rows", "moe", STEP, WAITING, devices=CPU),
    _op("sum_expert_rows", "moe", STEP, SHAPED, devices=CPU),
    # Priority -1: chosen by name only, because a kernel takes weights that are arranged for it.
    _op(
        "mxfp4_experts_forward",
        "moe",
        STEP,
        WAITING,
        _kernel("sm100", "moe.sm100.launch:mxfp4_experts_forward", "compile_jobs", priority=-1),
        _kernel("sm90", "moe.sm90.launch:mxfp4_experts_forward", "compile_jobs", priority=-1),
        devices=GPU,
        option=Option.PACKED_EXPERTS,
        by_name=True,
    ),
    _op(
        "nvfp4_experts_forward",
        "moe",
        STEP,
        WAITING,
        _kernel("sm100", "moe.sm100.launch:nvfp4_experts_forward", "nvfp4_compile_jobs", priority=-1),
        devices=GPU,
        option=Option.NVFP4_EXPERTS,
        by_name=True,
    ),
    _op("rms_norm", "norm", STEP, SHAPED, *_kernels("norm.gpu:{}", "compile_jobs")),
    _op("rms_norm_fp8", "norm", STEP, SHAPED, *_kernels("norm.gpu:{}_fp8", "fp8_compile_jobs"), devices=GPU),
    _op("norm_rope_store", "norm_rope_store", STEP, WAITING, *_kernels("norm_rope_store.gpu:{}", "compile_jobs")),
    _op("fp8_qdq", "quant", NOWHERE, ELEMENTWISE),
    _op("fp4_qdq", "quant", NOWHERE, ELEMENTWISE),
    _op("hadamard", "quant", NOWHERE, ELEMENTWISE),
    _op("fp8_quantise", "quant", STEP, ELEMENTWISE, *_kernels("quant.gpu:{}", "compile_jobs"), devices=GPU),
    _op("apply_rope", "rope", NOWHERE, ELEMENTWISE),
    _op("apply_rope_in_place", "rope", STEP, ELEMENTWISE, *_kernels("rope.gpu:{}_in_place", "compile_jobs")),
    _op("route_topk", "router", NOWHERE, SHAPED),
    _op("route_hash", "router", NOWHERE, SHAPED),
    # The logits are fp32 whatever dtype the model computes in.
    _op(
        "route_topk_logits",
        "router",
        STEP,
        ELEMENTWISE,
        *_kernels("router.gpu:{}_topk", "topk_compile_jobs", dtypes=MODEL_DTYPES),
    ),
    _op(
        "route_hash_logits",
        "router",
        STEP,
        ELEMENTWISE,
        *_kernels("router.gpu:{}_hash", "hash_compile_jobs", dtypes=MODEL_DTYPES),
    ),
    _op(
        "sparse_attention",
        "sparse_attention",
        STEP,
        WAITING,
        *_kernels("sparse_attention.launch:{}", "attention_calls:compile_jobs"),
    ),
    _op("step_mapping", "step_mapping", STEP, ELEMENTWISE, *_kernels("step_mapping.gpu:{}", "compile_jobs")),
    _op(
        "unpack_pages",
        "unpack",
        PREFILL,
        ELEMENTWISE,
        *_kernels("unpack.gpu:{}", "attention_calls:unpack_compile_jobs"),
    ),
)

OPS: dict[str, Op] = {row.name: row for row in sorted(_ROWS, key=lambda row: row.name)}


def forward_ops(device: str, options: Container[Option] = ()) -> tuple[str, ...]:
    """Ops that a model's forwards run on a device type ("cpu", "cuda"), sorted.

    Args:
        device: type of the model's device.
        options: the server's options; an op that needs another option is left out.
    """
    return tuple(
        op.name
        for op in OPS.values()
        if op.runs in (Runs.STEP, Runs.PREFILL) and device in op.devices and (op.option is None or op.option in options)
    )


def step_ops(device: str, options: Container[Option] = ()) -> tuple[str, ...]:
    """The part of `forward_ops` that decode, verify and draft steps run, which CUDA graphs capture."""
    return tuple(name for name in forward_ops(device, options) if OPS[name].runs is Runs.STEP)
