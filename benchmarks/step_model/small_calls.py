"""Modelled times of the small calls that `sglang_dsv4.kernel_check` times (tests/lib/ops/emulated_results.py).

A CUDA graph repeats a call with the same inputs, so that it reads from L2. Kernels without counts have no modelled time
(a norm in bf16, the router by token id, experts of two choices, attention over lists of any length, rows of a step,
unpacking), nor have calls of other sizes than the counts are for (scores of a prefill, the compressor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from step_model import index, products, rows
from step_model.hardware import B200, B300, H200, Gpu
from step_model.launch import Launch, time_us

TOKENS, DIM = 3, 4096
PRODUCTS = {"linear_fp32": (1, 256), "grouped_linear": (2, 1024), "linear_fp8": (1, 512), "wo_a_fp8": (2, 256)}
"""Case -> groups of a product's weight, and rows of a group, of DIM channels."""
TOKENS_OF_CHOICE, ENTRIES, ROOM = 14, 500, 576
"""Tokens of a call of the indexer, entries that most of them see, and entries that the page table has room for."""
GPU_OF = {(9, 0): H200, (10, 0): B200, (10, 3): B300}
"""Compute capability -> the GPU of the model."""


def _row(name: str) -> Callable[[Gpu], Launch]:
    return lambda gpu: rows.row_kernel(name, TOKENS, gpu)


def _fp8_product(gpu: Gpu) -> Launch:
    counted = products.fp8_hopper if gpu.is_hopper else products.fp8_by_tcgen05
    return counted("linear_fp8", TOKENS, PRODUCTS["linear_fp8"][1], DIM, gpu)


def _fp32_product(name: str) -> Callable[[Gpu], Launch]:
    groups, of_group = PRODUCTS[name]
    return lambda gpu: products.in_fp32(name, TOKENS, of_group, gpu, groups)


def _wo_a(gpu: Gpu) -> Launch:
    groups, of_group = PRODUCTS["wo_a_fp8"]
    return products.wo_a_from_fp8("wo_a", TOKENS, groups, gpu, of_group)


def _choice(gpu: Gpu) -> Iterator[Launch]:
    yield index.scores("scores", TOKENS_OF_CHOICE, ENTRIES, ROOM, gpu)
    yield index.choice("choice", TOKENS_OF_CHOICE, ENTRIES, gpu)


CALLS: dict[str, Callable[[Gpu], Launch | Iterator[Launch]]] = {
    "fp8_quantise": _row("fp8_quantise"),
    "inverse_rope": _row("apply_rope_in_place"),
    "rms_norm_fp8": _row("rms_norm_fp8"),
    "swiglu": _row("fused_swiglu"),
    "swiglu_fp8": _row("swiglu_fp8"),
    "route_topk": _row("route_topk_logits"),
    "norm_rope_store": _row("norm_rope_store"),
    "hc_boundary": lambda gpu: rows.boundary("hc_boundary", TOKENS, DIM, gpu),
    "linear_fp32": _fp32_product("linear_fp32"),
    "grouped_linear": _fp32_product("grouped_linear"),
    "linear_fp8": _fp8_product,
    "wo_a_fp8": _wo_a,
    "index_topk": _choice,
}
"""Case -> the launches of a call."""


def modelled_us(case: str, capability: tuple[int, int]) -> float | None:
    """Return the microseconds of a call by the model of time; None if its kernel or the GPU has no counts."""
    gpu, counted = GPU_OF.get(capability), CALLS.get(case)
    if gpu is None or counted is None:
        return None
    found = counted(gpu)
    return sum(time_us(_in_l2(one), gpu) for one in ([found] if isinstance(found, Launch) else found))


def _in_l2(launch: Launch) -> Launch:
    """Return the launch if all that it reads is in L2."""
    return replace(launch, memory=0.0, from_memory=0, from_l2=launch.from_l2 + launch.from_memory)
