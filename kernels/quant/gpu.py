"""Rows of bf16 as e4m3 with a scale for 128 channels, on Hopper and Blackwell (sm_90a, sm_100a): bound by memory.

One thread loads a chunk of 8 channels; `dsv4_kernels.device.fp8_rows` says how blocks map to lanes and stores them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch
from dsv4_kernels.device.bf16_rows import CHUNK_BYTES
from dsv4_kernels.device.fp8_rows import chunk_of_thread, store_codes
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.fp8_rows import BLOCK, THREADS, Codes, new_codes, num_ctas
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    x: Int64
    x_row_bytes: Int64
    to: Codes


@cute.jit
def launch(arguments: Arguments, num_ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one thread for each chunk of a row, rows padded to whole blocks."""
    kernel(arguments).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments) -> None:
    """Quantises one chunk."""
    dependent_launch.begin()
    cta, _, _ = cute.arch.block_idx()
    row, chunk, exists = chunk_of_thread(args.to, cta)
    words = bf16_rows.load_words_if(exists, args.x + Int64(row) * args.x_row_bytes + chunk * CHUNK_BYTES)
    store_codes(args.to, row, chunk, exists, bf16_rows.channels(words))


# Host side


def compile(arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    return load_launcher("fp8_quantise", "the only one", arch, launch, Arguments, Int32)


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
    """`dsv4_kernels.quant.fp8_quantise` on Blackwell (B200, GB200, B300); arguments as for `sm90`."""
    return _run("sm100", x, block, column_major)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `fp8_quantise`."""
    return [partial(compile, arch)]
