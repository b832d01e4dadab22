"""Clamped SwiGLU on Hopper and Blackwell (sm_90a, sm_100a): one kernel, bound by memory.

A thread computes 8 channels from 8 channels of the gate and of up, in bf16, or as a sixteenth of a block of e4m3.
Rows are padded to whole blocks by `dsv4_kernels.device.fp8_rows`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import CHUNK_BYTES, load_words_if
from dsv4_kernels.device.fp8_rows import chunk_of_thread, store_codes
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.fp8_rows import THREADS, Codes, bf16_result, new_codes, num_ctas
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.moe.activation import swiglu


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    gate: Int64
    up: Int64
    row_bytes: Int64  # of gate and up
    limit: Float32
    to: Codes  # for bf16 the codes are the result, without scales


@cute.jit
def launch(arguments: Arguments, is_fp8: cutlass.Constexpr[bool], ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one thread for each chunk of a row, padded to whole blocks."""
    kernel(arguments, is_fp8).launch(
        grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, is_fp8: cutlass.Constexpr[bool]) -> None:
    """The kernel of a launch of its own."""
    body(args, is_fp8, (), cta_of_launch())


@cute.jit
def body(args: Arguments, is_fp8: cutlass.Constexpr[bool], prepared: tuple, cta: cutlass.Constexpr[Cta]) -> None:
    """Computes one chunk."""
    dependent_launch.begin()
    row, chunk, exists = chunk_of_thread(args.to, cta.number)
    offset = Int64(row) * args.row_bytes + chunk * CHUNK_BYTES
    gate, up = load_words_if(exists, args.gate + offset), load_words_if(exists, args.up + offset)
    words = product(gate, up, args.limit)
    if cutlass.const_expr(is_fp8):
        store_codes(args.to, row, chunk, exists, bf16_rows.channels(words))
    else:
        if exists:
            ptx.store_16_bytes(args.to.codes + (Int64(row) * args.to.chunks + chunk) * CHUNK_BYTES, words)


def product(gate: tuple, up: tuple, limit: Float32) -> tuple:
    """`swiglu` of eight channels, rounded to bf16."""
    channels = zip(bf16_rows.channels(gate), bf16_rows.channels(up), strict=True)
    return bf16_rows.packed([swiglu(a, b, limit) for a, b in channels])


# Host side


def compile(is_fp8: bool, arch: str) -> Callable[..., None]:
    """The launcher: (arguments, CTAs, stream)."""
    return load_launcher("swiglu", "fp8" if is_fp8 else "bf16", arch, launch, Arguments, is_fp8, Int32)


@cache
def part(is_fp8: bool) -> Part:
    """The kernel as a part of a joint launch."""
    return Part("swiglu", is_fp8, Arguments, body, threads=THREADS)


def _run(name: str, gate_up: Tensor, limit: float, to: Codes, is_fp8: bool) -> None:
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    arguments = Arguments(
        gate=gate_up.data_ptr(),
        up=gate_up.data_ptr() + dim * gate_up.element_size(),
        row_bytes=stride_bytes(gate_up, 0),
        limit=limit,
        to=to,
    )
    arch, ctas, stream = architecture(name, gate_up.device), num_ctas(rows, dim), current_stream(gate_up.device)
    joint_launch.run(
        part(is_fp8),
        arch,
        arguments,
        ctas,
        stream,
        (gate_up,),
        alone=lambda: compile(is_fp8, arch)(arguments, Int32(ctas), stream),
    )


def _check(what: str, gate_up: Tensor) -> tuple[int, int]:
    """(rows, channels) of the result.

    Raises:
        ValueError: the kernel cannot read rows of gate or up 16 bytes at a time.
    """
    check_rows(f"{what}: gate_up", gate_up)
    check_rows(f"{what}: the half of up in gate_up", gate_up[:, gate_up.shape[1] // 2 :])
    return gate_up.shape[0], gate_up.shape[1] // 2


def _bf16(name: str, gate_up: Tensor, limit: float) -> Tensor:
    rows, dim = _check("fused_swiglu", gate_up)
    out = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _run(name, gate_up, limit, bf16_result(out, rows, dim), False)
    return out


def _fp8(name: str, gate_up: Tensor, limit: float, column_major: bool) -> tuple[Tensor, Tensor]:
    rows, dim = _check("swiglu_fp8", gate_up)
    codes, scales, to = new_codes(rows, dim, column_major, gate_up.device)
    if codes.numel():
        _run(name, gate_up, limit, to, True)
    return codes, scales


def sm90(gate_up: Tensor, limit: float) -> Tensor:
    """`dsv4_kernels.moe.fused_swiglu` on Hopper: bf16, I a multiple of 8."""
    return _bf16("sm90", gate_up, limit)


def sm100(gate_up: Tensor, limit: float) -> Tensor:
    """`dsv4_kernels.moe.fused_swiglu` on Blackwell (B200, GB200, B300); as `sm90`."""
    return _bf16("sm100", gate_up, limit)


def sm90_fp8(gate_up: Tensor, limit: float, column_major: bool) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.moe.swiglu_fp8` on Hopper: bf16, I a multiple of 8."""
    return _fp8("sm90", gate_up, limit, column_major)


def sm100_fp8(gate_up: Tensor, limit: float, column_major: bool) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.moe.swiglu_fp8` on Blackwell (B200, GB200, B300); as `sm90_fp8`."""
    return _fp8("sm100", gate_up, limit, column_major)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `fused_swiglu`."""
    return [partial(compile, False, arch)]


def fp8_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `swiglu_fp8`."""
    return [partial(compile, True, arch)]
