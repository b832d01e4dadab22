"""Rotation in place on Hopper and Blackwell (sm_90a, sm_100a): one kernel, bound by memory.

A thread rotates one chunk of 8 channels, four pairs, of HEADS_A_THREAD heads of a token. The heads share the angles,
and all their loads are issued before the first is used. Only the rotated channels are read and written.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import CHUNK, CHUNK_BYTES, load_words_if, mul
from dsv4_kernels.device.rotation import cosine_and_sine, inverted, position_of, turned
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes

THREADS = 128
HEADS_A_THREAD = 4


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel. Addresses are Int64; x: of the first rotated channel."""

    x: Int64
    x_token_bytes: Int64
    x_head_bytes: Int64
    positions: Int64  # int64
    frequencies: Int64  # fp32
    inverse: Int32
    num_tokens: Int32
    num_heads: Int32
    chunks: Int32  # rotated chunks of a row


@cute.jit
def launch(arguments: Arguments, heads_a_thread: cutlass.Constexpr[int], ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one thread for each chunk of `heads_a_thread` heads."""
    kernel(arguments, heads_a_thread).launch(
        grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, heads_a_thread: cutlass.Constexpr[int]) -> None:
    """Rotates one chunk of some heads of a token."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    units_a_token = (args.num_heads + heads_a_thread - 1) // heads_a_thread * args.chunks
    unit = cta * THREADS + thread
    token = unit // units_a_token
    within = unit - token * units_a_token
    first_head, chunk = within // args.chunks * heads_a_thread, within % args.chunks
    if token < args.num_tokens:
        x = args.x + Int64(token) * args.x_token_bytes + Int64(first_head) * args.x_head_bytes + chunk * CHUNK_BYTES
        loaded = []
        for i in cutlass.range_constexpr(heads_a_thread):
            loaded.append(load_words_if(first_head + i < args.num_heads, x + i * args.x_head_bytes))
        pairs = turns(args, token, chunk)
        for i in cutlass.range_constexpr(heads_a_thread):
            if first_head + i < args.num_heads:
                ptx.store_16_bytes(x + i * args.x_head_bytes, rotated(loaded[i], pairs))


def turns(args: Arguments, token: Int32, chunk: Int32) -> list:
    """(cosine, sine) of the four pairs of a chunk."""
    position = position_of(args.positions + Int64(token) * 8)
    frequencies = bf16_rows.load_f32x4(args.frequencies + chunk * 16)
    both = [cosine_and_sine(mul(position, frequency)) for frequency in frequencies]
    return [(cosine, inverted(sine, args.inverse)) for cosine, sine in both]


def rotated(words: tuple, pairs: list) -> tuple:
    """The words of a chunk, rotated; a pair is a word."""
    return tuple(turned(word, *pair) for word, pair in zip(words, pairs, strict=True))


# Host side


def compile(heads_a_thread: int, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    return load_launcher(
        "apply_rope_in_place", f"{heads_a_thread} heads a thread", arch, launch, Arguments, heads_a_thread, Int32
    )


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """The compile job of `apply_rope_in_place`."""
    return [partial(compile, HEADS_A_THREAD, arch)]


def _run(name: str, x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> None:
    rotated_dim = 2 * len(frequencies)
    check_rows("apply_rope: x", x)
    if x.dim() not in (2, 3) or rotated_dim % CHUNK or not frequencies.is_contiguous():
        raise ValueError(
            f"apply_rope: the GPU kernel takes x [T, D] or [T, H, D] and a multiple of {CHUNK} rotated channels, with "
            f'contiguous frequencies; got {tuple(x.shape)} and {rotated_dim}. The implementation "ref" takes any'
        )
    if positions.dtype != torch.int64 or frequencies.dtype != torch.float32 or not positions.is_contiguous():
        raise ValueError(
            f"apply_rope: the GPU kernel takes contiguous torch.int64 positions and torch.float32 frequencies; got "
            f"{positions.dtype} and {frequencies.dtype}"
        )
    heads, chunks = x.shape[1] if x.dim() == 3 else 1, rotated_dim // CHUNK
    if not (len(x) and heads and chunks):
        return
    arguments = Arguments(
        x=x.data_ptr() + (x.shape[-1] - rotated_dim) * x.element_size(),
        x_token_bytes=stride_bytes(x, 0),
        x_head_bytes=stride_bytes(x, 1),
        positions=positions.data_ptr(),
        frequencies=frequencies.data_ptr(),
        inverse=inverse,
        num_tokens=len(x),
        num_heads=heads,
        chunks=chunks,
    )
    heads_a_thread = 1 if heads == 1 else HEADS_A_THREAD
    num_ctas = -(-len(x) * -(-heads // heads_a_thread) * chunks // THREADS)
    launch = compile(heads_a_thread, architecture(name, x.device))
    launch(arguments, Int32(num_ctas), current_stream(x.device))


def sm90_in_place(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> None:
    """`dsv4_kernels.rope.apply_rope_in_place` on Hopper: x [T, D] or [T, H, D] bf16, all dimensions multiples of 8."""
    _run("sm90", x, positions, frequencies, inverse)


def sm100_in_place(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> None:
    """`dsv4_kernels.rope.apply_rope_in_place` on Blackwell (B200, GB200, B300); x as for `sm90_in_place`."""
    _run("sm100", x, positions, frequencies, inverse)
