"""The FP8 product of any number of tokens on Blackwell: checks, plan, and launch. The kernel is in fp8_tcgen05.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.host.arch import architecture, hardware_multiprocessors
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import stride_bytes
from dsv4_kernels.linear.fp8_tcgen05 import launch
from dsv4_kernels.linear.fp8_tcgen05_plan import BLOCK, Arguments, Plan, num_tiles, plan_for, plans
from dsv4_kernels.model_shapes import ModelShapes


def compile(plan: Plan, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""
    return load_launcher("linear_fp8_sm100", plan, arch, launch, Arguments, Int32, plan)


def sm100(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, plan: Plan | None = None) -> Tensor:
    """`dsv4_kernels.linear.linear_fp8` on Blackwell: K a multiple of 128, both operands' scales powers of two.

    Args:
        codes, scales, weight, weight_scale: as in `linear_fp8`; rows of codes and weight at multiples of 16 bytes. The
            scales' mantissas are not read. No kernel may write weights while a model runs: they are read before the
            previous kernel has ended.
        plan: None chooses. The bits are the same.

    Raises:
        ValueError: sizes or strides that the kernel does not support.
    """
    (num_tokens, channels), num_rows = codes.shape, weight.shape[0]
    _check(codes, weight, weight_scale)
    out = torch.empty(num_tokens, num_rows, dtype=torch.bfloat16, device=codes.device)
    if not out.numel():
        return out
    multiprocessors = hardware_multiprocessors(codes.device)
    plan = plan or plan_for(num_tokens, num_rows, multiprocessors)
    tiles = num_tiles(plan, num_tokens, num_rows)
    arguments = Arguments(
        codes=codes.data_ptr(),
        codes_row_bytes=_row_bytes(codes),
        scales=scales.data_ptr(),
        scales_row_bytes=stride_bytes(scales, 0),
        scales_block_bytes=stride_bytes(scales, 1),
        weight=weight.data_ptr(),
        weight_row_bytes=_row_bytes(weight),
        weight_scale=weight_scale.data_ptr(),
        weight_scale_row_bytes=stride_bytes(weight_scale, 0),
        out=out.data_ptr(),
        out_row_bytes=stride_bytes(out, 0),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_blocks=channels // BLOCK,
        row_tiles=-(-num_rows // plan.rows),
        num_tiles=tiles,
    )
    num_ctas = min(multiprocessors, tiles)
    compile(plan, architecture("sm100", codes.device))(arguments, Int32(num_ctas), current_stream(codes.device))
    return out


def _row_bytes(codes: Tensor) -> int:
    """Bytes from one row of e4m3 to the next; any multiple of 16 serves a single row."""
    return codes.stride(0) if len(codes) > 1 else codes.shape[1]


def _check(codes: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    if codes.shape[1] % BLOCK or not codes.shape[1]:
        raise ValueError(f"linear_fp8 on sm100 takes K in multiples of {BLOCK}; got {codes.shape[1]}")
    for what, operand in (("codes", codes), ("weight", weight)):
        if operand.stride(1) != 1 or _row_bytes(operand) % 16 or operand.data_ptr() % 16:
            raise ValueError(
                f"linear_fp8 on sm100: {what} must have contiguous channels and rows at multiples of 16 bytes; got "
                f"strides {operand.stride()} at address {operand.data_ptr():#x}"
            )
    if codes.shape[1] > BLOCK and weight_scale.stride(1) != 1:
        raise ValueError(
            f"linear_fp8 on sm100: weight_scale must have contiguous rows; got strides {weight_scale.stride()}"
        )


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of every plan."""
    return [functools.partial(compile, plan, arch) for plan in plans()]
