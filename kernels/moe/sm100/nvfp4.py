"""Rows of activations in NVFP4, with the bits of `encode_nvfp4`: its arithmetic, and the quantiser of tokens.

A thread quantises a block of 16 channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import CHUNK_BYTES
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes

NVFP4_BLOCK = 16
"""Channels that share a scale."""
LEAST_E4M3 = 2.0**-9
LARGEST_E2M1 = 6.0
THREADS = 128


class Arguments(NamedTuple):
    """Dynamic arguments of the quantiser; addresses are Int64."""

    x: Int64  # bf16 [rows, d]
    x_row_bytes: Int64
    factor: Int64  # fp32 [1]: the scale of all rows
    blocks: Int32  # of a row
    num_blocks: Int32  # of all rows
    codes: Int64  # e2m1 [rows, d / 2], the even channel in the low nibble
    scales: Int64  # e4m3 [rows, d / 16]


@cute.jit
def launch(args: Arguments, ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one thread for each block."""
    kernel(args).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on())


@cute.kernel
def kernel(args: Arguments) -> None:
    """Quantises one block."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    block = cta * THREADS + thread
    if block < args.num_blocks:
        row = block // args.blocks
        place = args.x + Int64(row) * args.x_row_bytes + (block - row * args.blocks) * (NVFP4_BLOCK * 2)
        values = [x for i in range(2) for x in bf16_rows.channels(bf16_rows.load_words(place + i * CHUNK_BYTES))]
        largest = bf16_rows.magnitude(values[0])
        for value in values[1:]:
            largest = ptx.fmax(largest, bf16_rows.magnitude(value))
        factor = ptx.load_f32(args.factor)
        scale, value = block_scale(largest, bf16_rows.mul(factor, Float32(LARGEST_E2M1)))
        of_block = bf16_rows.mul(value, factor)
        quotients = [bf16_rows.divide(x, of_block) for x in values]
        words = tuple(to_e2m1_word(quotients[i : i + 8]) for i in (0, 8))
        bf16_rows.store_8_bytes(args.codes + Int64(block) * (NVFP4_BLOCK // 2), words)
        ptx.asm("st.global.b8 [{$r0}], {$r1};", [], args.scales + block, scale)


def block_scale(largest: Float32, largest_code: Float32) -> tuple:
    """(byte, value) of the e4m3 scale of a block with this largest magnitude; `largest_code` is 6 times the factor."""
    return to_e4m3(ptx.fmax(bf16_rows.divide(largest, largest_code), Float32(LEAST_E4M3)))


def to_e4m3(x: Float32) -> tuple:
    """(byte, value) of the nearest e4m3, at most 448. PTX text: the rounding and saturation define the bits."""
    return ptx.asm(
        "{\n.reg .b16 code, low, high;\n.reg .b32 pair;\ncvt.rn.satfinite.e4m3x2.f32 code, {$r0}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 pair, code;\nmov.b32 {low, high}, pair;\ncvt.f32.f16 {$w1}, low;\n"
        "cvt.u32.u16 {$w0}, code;\n}",
        [Uint32, Float32],
        x,
    )


def to_e2m1(low: Float32, high: Float32) -> Uint32:
    """A byte of the two nearest e2m1, at most 6, in all bytes of the word. PTX text, for the rounding."""
    return ptx.asm(
        "{\n.reg .b8 code;\ncvt.rn.satfinite.e2m1x2.f32 code, {$r1}, {$r0};\n"
        "mov.b32 {$w0}, {code, code, code, code};\n}",
        [Uint32],
        low,
        high,
    )


def to_e2m1_word(values: list) -> Uint32:
    """A word of the eight nearest e2m1, at most 6, the first in the lowest nibble. PTX text, for the rounding."""
    return ptx.asm(
        "{\n.reg .b8 a, b, c, d;\n"
        "cvt.rn.satfinite.e2m1x2.f32 a, {$r1}, {$r0};\ncvt.rn.satfinite.e2m1x2.f32 b, {$r3}, {$r2};\n"
        "cvt.rn.satfinite.e2m1x2.f32 c, {$r5}, {$r4};\ncvt.rn.satfinite.e2m1x2.f32 d, {$r7}, {$r6};\n"
        "mov.b32 {$w0}, {a, b, c, d};\n}",
        [Uint32],
        *values,
    )


# Host side


def compile(arch: str) -> Callable[..., None]:
    """The launcher: (arguments, CTAs, stream)."""
    return load_launcher("experts_nvfp4", "the only one", arch, launch, Arguments, Int32)


def quantise(x: Tensor, factor: Tensor, arch: str) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.number_formats.encode_nvfp4(x, factor)`: uint8 [T, d / 2] and e4m3 [T, d / 16].

    Args:
        x: bf16 [T, d], rows of any stride, d a multiple of 16.
        factor: fp32 [], above 0.
        arch: to compile for.

    Raises:
        ValueError: rows of x cannot be read 16 bytes at a time.
    """
    check_rows("nvfp4_experts_forward: x", x)
    rows, d = x.shape
    codes = torch.empty(rows, d // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, d // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=x.device)
    arguments = Arguments(
        x=x.data_ptr(),
        x_row_bytes=stride_bytes(x, 0),
        factor=factor.data_ptr(),
        blocks=d // NVFP4_BLOCK,
        num_blocks=scales.numel(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
    )
    compile(arch)(arguments, Int32(-(-scales.numel() // THREADS)), current_stream(x.device))
    return codes, scales
