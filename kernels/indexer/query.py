"""The indexer's queries on a GPU (sm_90a, sm_100a): rotated, transformed and rounded to FP4 in one launch, together
with the head weights.

A warp has one head of a token, a lane four neighbouring channels: two pairs of the rotation, the inputs of the
transform's first two levels, and an eighth of a block. The first lane also has the head's weight. Nothing goes through
shared memory.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import dependent_launch, e2m1, e4m3, ptx
from dsv4_kernels.device.bf16_rows import channels, load_8_bytes, max_over_lanes, mul, packed, store_8_bytes
from dsv4_kernels.device.e2m1 import DIM
from dsv4_kernels.device.e2m1 import LANE_CHANNELS as CHANNELS
from dsv4_kernels.device.joint_kernel import Cta, cta_of_launch
from dsv4_kernels.device.rotation import cosine_and_sine, position_of, turned
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.kv_layout import FP4_SCALE_GROUP
from dsv4_kernels.model_shapes import ModelShapes

ROTATED = 64
LANES_A_BLOCK = FP4_SCALE_GROUP // CHANNELS
THREADS = 128


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    q: Int64
    token_bytes: Int64
    out: Int64  # [T, Hi, 128] bf16
    head_weights: Int64  # [T, Hi] fp32
    weights_token_bytes: Int64
    weight_scale: Float32
    out_weights: Int64  # [T, Hi] fp32
    positions: Int64  # int64
    frequencies: Int64  # fp32
    num_heads: Int32
    num_rows: Int32  # T * Hi


@cute.jit
def launch(args: Arguments, quantise: cutlass.Constexpr[bool], ctas: Int32, stream: cuda.CUstream) -> None:
    """Launches one warp for each head of a token."""
    kernel(args, quantise).launch(
        grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, quantise: cutlass.Constexpr[bool]) -> None:
    """The kernel of a launch of its own."""
    body(args, quantise, (), cta_of_launch())


@cute.jit
def body(args: Arguments, quantise: cutlass.Constexpr[bool], prepared: tuple, cta: cutlass.Constexpr[Cta]) -> None:
    """Makes the query of one head, and its weight."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    row = cta.number * (THREADS // 32) + thread // 32
    if row < args.num_rows:
        token = row // args.num_heads
        head = row - token * args.num_heads
        address = args.q + Int64(token) * args.token_bytes + Int64(head) * (2 * DIM) + lane * (2 * CHANNELS)
        words = load_8_bytes(address)
        first, second = words[0], words[1]
        if lane >= 32 - ROTATED // CHANNELS:
            position = position_of(args.positions + Int64(token) * 8)
            frequency = args.frequencies + (lane - (32 - ROTATED // CHANNELS)) * 8
            pair = cosine_and_sine(mul(position, ptx.load_f32(frequency)))
            first = turned(first, *pair)
            pair = cosine_and_sine(mul(position, ptx.load_f32(frequency + 4)))
            second = turned(second, *pair)
        if lane == 0:
            weight = ptx.load_f32(args.head_weights + Int64(token) * args.weights_token_bytes + Int64(head) * 4)
            weight = channels((ptx.pack_bf16(weight, weight),))[0]
            ptx.store_f32(args.out_weights + Int64(row) * 4, mul(weight, args.weight_scale))
        if cutlass.const_expr(quantise):
            first, second = rounded((first, second), lane)
        store_8_bytes(args.out + Int64(row) * (2 * DIM) + lane * (2 * CHANNELS), (first, second))


def rounded(words: Sequence[Uint32], lane: Int32) -> tuple:
    """The Hadamard transform rounded to bf16, then its FP4 round trip (`fp4_qdq`)."""
    values = channels(packed(e2m1.hadamard(channels(words), lane)))
    exponent = e2m1.scale_exponent(max_over_lanes(e4m3.largest(values), LANES_A_BLOCK))
    return packed([e2m1.value_of(code, exponent) for code in e2m1.codes(values, exponent)])


# Host side


def compile(arch: str, quantise: bool) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    return load_launcher("index_query", quantise, arch, launch, Arguments, quantise, Int32)


@cache
def part(quantise: bool) -> Part:
    """The kernel as a part of a joint launch."""
    return Part("index_query", quantise, Arguments, body, threads=THREADS)


def _run(
    name: str,
    q: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    weight_scale: float,
    quantise: bool,
) -> tuple[Tensor, Tensor]:
    check_rows("index_query: q", q, DIM)
    side_by_side = q.stride(1) == DIM and head_weights.stride(1) == 1
    if not side_by_side or 2 * frequencies.shape[0] != ROTATED or positions.dtype != torch.int64:
        raise ValueError(
            f"index_query on a GPU takes heads side by side, {ROTATED} rotated channels and int64 positions; got "
            f"strides {q.stride()} and {head_weights.stride()}, {2 * frequencies.shape[0]}, {positions.dtype}. 'ref' "
            "takes any"
        )
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out_weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if out.numel():
        arguments = Arguments(
            q=q.data_ptr(),
            token_bytes=stride_bytes(q, 0),
            out=out.data_ptr(),
            head_weights=head_weights.data_ptr(),
            weights_token_bytes=stride_bytes(head_weights, 0),
            weight_scale=weight_scale,
            out_weights=out_weights.data_ptr(),
            positions=positions.data_ptr(),
            frequencies=frequencies.data_ptr(),
            num_heads=heads,
            num_rows=tokens * heads,
        )
        arch, ctas, stream = architecture(name, q.device), -(-tokens * heads * 32 // THREADS), current_stream(q.device)
        joint_launch.run(
            part(quantise),
            arch,
            arguments,
            ctas,
            stream,
            (q, head_weights, positions),
            alone=lambda: compile(arch, quantise)(arguments, Int32(ctas), stream),
        )
    return out, out_weights


def sm90(*arguments: object) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.indexer.index_query` on Hopper."""
    return _run("sm90", *arguments)


def sm100(*arguments: object) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.indexer.index_query` on Blackwell (B200, GB200, B300)."""
    return _run("sm100", *arguments)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs; none for a model without an indexer."""
    return [partial(compile, arch, model.index_fp4)] if model.index_heads else []
