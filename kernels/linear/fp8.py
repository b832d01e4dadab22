"""The FP8 product of few tokens on Hopper: checks, choice of plan, and launch. The kernel is in fp8_kernel.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.arch import multiprocessors
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import stride_bytes
from dsv4_kernels.linear.fp8_kernel import body, launch, tma_tensors
from dsv4_kernels.linear.fp8_plan import (
    BLOCK,
    MOST_TOKENS,
    ROWS,
    TOKENS,
    Arguments,
    Plan,
    chosen,
    planned,
    sharing,
)
from dsv4_kernels.model_shapes import ModelShapes

ARCH = "sm_90a"


def compile(plan: Plan, arch: str = ARCH) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, clusters, stream)."""

    return load_launcher("linear_fp8", plan, arch, launch, Arguments, Int32, plan)


@functools.cache
def part(plan: Plan) -> Part:
    """The product as a part of a joint launch."""
    return Part(
        "linear_fp8",
        plan,
        Arguments,
        body,
        threads=plan.threads,
        cluster=plan.cluster,
        ctas_per_sm=plan.ctas_per_sm,
        prepare=tma_tensors,
    )


def plans(most_tokens: int) -> list[Plan]:
    """All plans that calls of at most `most_tokens` tokens may get, with any weight."""
    widths = [width for before, width in zip((0, *TOKENS), TOKENS, strict=False) if before < most_tokens]
    return [planned(rows, width) for rows in ROWS for width in widths]


def sm90(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, plan: Plan | None = None) -> Tensor:
    """`dsv4_kernels.linear.linear_fp8` on Hopper: at most 128 tokens, K a multiple of 128, N of 8.

    Args:
        codes, scales, weight, weight_scale: as in `linear_fp8`. Rows of codes lie at multiples of 16 bytes. No kernel
            may write weights and their scales while a model runs: they are read before the previous kernel has ended.
        plan: None chooses. The bits are the same.

    Raises:
        ValueError: sizes or strides that the kernel does not support.
    """
    (num_tokens, channels), num_rows = codes.shape, weight.shape[0]
    _check(codes, scales, weight, weight_scale)
    out = torch.empty(num_tokens, num_rows, dtype=torch.bfloat16, device=codes.device)
    if not out.numel():
        return out
    resident = multiprocessors(codes.device)
    plan = plan or chosen(num_tokens, num_rows, resident)
    if num_tokens > plan.tokens:
        raise ValueError(f"linear_fp8 on sm90: {num_tokens} tokens; {plan} has room for {plan.tokens}")
    arguments = Arguments(
        codes=codes.data_ptr(),
        codes_row_bytes=stride_bytes(codes, 0),
        scales=scales.data_ptr(),
        scales_row_bytes=stride_bytes(scales, 0),
        scales_block_bytes=stride_bytes(scales, 1),
        weight=weight.data_ptr(),
        weight_row_bytes=stride_bytes(weight, 0),
        weight_scale=weight_scale.data_ptr(),
        weight_scale_row_bytes=stride_bytes(weight_scale, 0),
        out=out.data_ptr(),
        out_row_bytes=stride_bytes(out, 0),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_blocks=channels // BLOCK,
        num_tiles=-(-num_rows // (plan.rows * plan.cluster)),
    )
    stream = current_stream(codes.device)

    joint_launch.run(
        part(sharing(plan)),
        ARCH,
        arguments,
        clusters_of(sharing(plan), arguments, resident) * plan.cluster,
        stream,
        (codes, scales),
        alone=lambda: compile(plan)(arguments, Int32(clusters_of(plan, arguments, resident)), stream),
    )
    return out


def clusters_of(plan: Plan, arguments: Arguments, resident: int) -> int:
    """Clusters of a launch on `resident` multiprocessors."""
    return min(arguments.num_tiles, resident * plan.ctas_per_sm // plan.cluster)


def _check(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    (num_tokens, channels), num_rows = codes.shape, weight.shape[0]
    if num_tokens > MOST_TOKENS or channels % BLOCK or num_rows % 8:
        raise ValueError(
            f"linear_fp8 on sm90 takes at most {MOST_TOKENS} tokens, K a multiple of {BLOCK} and N of 8; got "
            f"{num_tokens} tokens, K = {channels} and N = {num_rows}"
        )
    for what, operand in (("codes", codes), ("weight", weight)):
        apart = operand.stride(0) if len(operand) > 1 else 0
        if operand.stride(1) != 1 or apart % 16 or operand.data_ptr() % 16:
            raise ValueError(
                f"linear_fp8 on sm90: {what} must have contiguous channels and rows at multiples of 16 bytes; got "
                f"strides {operand.stride()} at address {operand.data_ptr():#x}"
            )
    if channels > BLOCK and weight_scale.stride(1) != 1:
        raise ValueError(
            f"linear_fp8 on sm90: weight_scale must have contiguous rows; got strides {weight_scale.stride()}"
        )


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of every plan that the layers of `model` may get."""
    return [functools.partial(compile, plan, arch) for plan in plans(model.fp8_linear_tokens)]
