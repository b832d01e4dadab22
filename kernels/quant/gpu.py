"""Rows of bf16 as e4m3 with a scale for 128 channels, on Hopper and Blackwell (sm_90a, sm_100a): bound by memory.

A thread has a chunk of 8 channels, 16 neighbouring lanes a block. The threads of a row are padded to whole blocks;
those behind its end bring zeros, which raise no maximum. `dsv4_kernels.moe.gpu` and `dsv4_kernels.norm.gpu` store their
results by `store_codes` too.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, e4m3, ptx
from dsv4_kernels.device.bf16_rows import CHUNK, CHUNK_BYTES
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.compile_cache import load_or_compile
from dsv4_kernels.host.launch import current_stream
from dsv4_kernels.host.launch_arguments import example
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes

THREADS = 256
BLOCK = 128
BLOCK_LANES = BLOCK // CHUNK


class Codes(NamedTuple):
    """Where codes and scales go; addresses are Int64."""

    codes: Int64  # e4m3, contiguous
    scales: Int64  # fp32
    scale_row_bytes: Int64
    scale_block_bytes: Int64
    chunks: Int32  # of a row
    blocks: Int32  # of a row; the last one may be shorter
    num_rows: Int32


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    x: Int64
    x_row_bytes: Int64
    to: Codes


@cute.jit
def launch(arguments: Arguments, num_ctas: Int32, stream: cuda.CUstream) -> None:
    """One thread for a chunk of a row, padded to whole blocks."""
    kernel(arguments).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments) -> None:
    """Quantises one chunk."""
    dependent_launch.begin()
    row, chunk, exists = place_of_thread(args.to)
    words = bf16_rows.load_words_if(exists, args.x + Int64(row) * args.x_row_bytes + chunk * CHUNK_BYTES)
    store_codes(args.to, row, chunk, exists, bf16_rows.channels(words))


def place_of_thread(to: Codes) -> tuple:
    """Row and chunk of a thread, and whether there is one."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    unit = cta * THREADS + thread
    row = unit // (to.blocks * BLOCK_LANES)
    chunk = unit - row * (to.blocks * BLOCK_LANES)
    return row, chunk, (row < to.num_rows) & (chunk < to.chunks)


@cute.jit
def store_codes(to: Codes, row: Int32, chunk: Int32, exists: Boolean, values: list) -> None:
    """Stores the codes of 8 channels, and the scale of their block once. All lanes come here."""
    exponent = e4m3.scale_exponent(bf16_rows.max_over_lanes(e4m3.largest(values), BLOCK_LANES))
    codes = e4m3.codes(values, exponent)
    if exists:
        bf16_rows.store_8_bytes(to.codes + (Int64(row) * to.chunks + chunk) * CHUNK, codes)
        if chunk % BLOCK_LANES == 0:
            scale = to.scales + Int64(row) * to.scale_row_bytes + Int64(chunk // BLOCK_LANES) * to.scale_block_bytes
            ptx.store_f32(scale, e4m3.scale_of(exponent))


# Host side


def new_codes(rows: int, dim: int, column_major: bool, device: torch.device) -> tuple[Tensor, Tensor, Codes]:
    """Codes and scales of a result, and where the kernel writes them."""
    codes = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=device)
    blocks = -(-dim // BLOCK)
    if column_major:
        scales = torch.empty(blocks, -(-rows // 4) * 4, dtype=torch.float32, device=device).T[:rows]
    else:
        scales = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    to = Codes(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        scale_row_bytes=stride_bytes(scales, 0),
        scale_block_bytes=stride_bytes(scales, 1),
        chunks=dim // CHUNK,
        blocks=blocks,
        num_rows=rows,
    )
    return codes, scales, to


def plain_result(out: Tensor, rows: int, dim: int) -> Codes:
    """Where a kernel writes that may give codes, if its result is bf16: no scales."""
    return Codes(
        codes=out.data_ptr(),
        scales=0,
        scale_row_bytes=0,
        scale_block_bytes=0,
        chunks=dim // CHUNK,
        blocks=-(-dim // BLOCK),
        num_rows=rows,
    )


def num_ctas(rows: int, dim: int) -> int:
    """Of a launch over rows of `dim` channels of the result."""
    return -(-rows * -(-dim // BLOCK) * BLOCK_LANES // THREADS)


def compile(arch: str) -> Callable[..., None]:
    """The launcher, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    def from_compiler() -> Callable[..., None]:
        return cute.compile(launch, example(Arguments), Int32(1), cuda.CUstream(0))

    return load_or_compile("fp8_quantise", "the only one", arch, from_compiler)


def _run(name: str, x: Tensor, block: int, column_major: bool) -> tuple[Tensor, Tensor]:
    check_rows("fp8_quantise: x", x)
    if block != BLOCK:
        raise ValueError(f'fp8_quantise: the GPU kernel takes blocks of {BLOCK}; got {block}. "ref" takes any')
    rows, dim = x.shape
    codes, scales, to = new_codes(rows, dim, column_major, x.device)
    if codes.numel():
        arguments = Arguments(x=x.data_ptr(), x_row_bytes=stride_bytes(x, 0), to=to)
        launcher = compile(architecture(name, x.device))
        launcher(arguments, Int32(num_ctas(rows, dim)), current_stream(x.device))
    return codes, scales


def sm90(x: Tensor, block: int, column_major: bool) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.quant.fp8_quantise` on Hopper: x bf16, K a multiple of 8, block 128."""
    return _run("sm90", x, block, column_major)


def sm100(x: Tensor, block: int, column_major: bool) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.quant.fp8_quantise` on Blackwell (B200, GB200, B300); as `sm90`."""
    return _run("sm100", x, block, column_major)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `fp8_quantise`."""
    return [partial(compile, arch)]
