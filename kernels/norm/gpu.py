"""RMS norm on Hopper and Blackwell (sm_90a, sm_100a), in bf16 or as e4m3: one kernel, bound by memory.

A warp computes a row of up to WARP_DIM channels, a CTA a longer row; the CTA's warps exchange their sums in shared
memory once. Neighbouring lanes have neighbouring chunks of 8 channels; a lane loads all its chunks before it uses the
first. Their number depends on the row's length only, and so do the order of the sum and its bits. Sixteen neighbouring
lanes have a block of e4m3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64
from torch import Tensor

from dsv4_kernels.device import bf16_rows, dependent_launch, ptx
from dsv4_kernels.device.bf16_rows import CHUNK, CHUNK_BYTES, WARP, add, mul, sum_over_lanes
from dsv4_kernels.device.fp8_rows import store_codes
from dsv4_kernels.host.arch import architecture
from dsv4_kernels.host.fp8_rows import Codes, bf16_result, new_codes
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.model_shapes import ModelShapes

WARP_DIM = 2048
"""The longest row that one warp computes: 8 chunks, 64 channels a lane."""
WARPS_OF_SHORT = 4
WARPS_OF_LONG = 8
LARGEST_DIM = 8 * CHUNK * WARP * WARPS_OF_LONG


@dataclass(frozen=True)
class Configuration:
    """Compile-time parameters besides the architecture."""

    dim: int
    weight: str
    """"fp32", "bf16" or "none"."""
    is_fp8: bool = False
    """Whether the result is e4m3 with a scale for 128 channels; otherwise it is bf16."""

    def __post_init__(self) -> None:
        if self.dim % CHUNK or not 0 < self.dim <= LARGEST_DIM:
            raise ValueError(
                f"rms_norm: the GPU kernel takes rows of a multiple of {CHUNK} and at most {LARGEST_DIM} channels; got "
                f'{self.dim}. The implementation "ref" takes any'
            )

    @property
    def warps_a_row(self) -> int:
        """Warps that share a row: 1, or all of a CTA."""
        return 1 if self.dim <= WARP_DIM else WARPS_OF_LONG

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return WARPS_OF_SHORT if self.warps_a_row == 1 else WARPS_OF_LONG

    @property
    def chunks_a_lane(self) -> int:
        """The most chunks of a lane; the last ones may lie after the row's end."""
        return -(-self.dim // (CHUNK * WARP * self.warps_a_row))

    @property
    def is_even(self) -> bool:
        """Whether all lanes have the same number of chunks."""
        return self.dim % (CHUNK * WARP * self.warps_a_row) == 0


class Arguments(NamedTuple):
    """Dynamic arguments of the kernel; addresses are Int64."""

    x: Int64
    x_row_bytes: Int64
    weight: Int64
    eps: Float32
    to: Codes  # for a result in bf16 its address is in `codes`, and there are no scales


@cute.jit
def launch(
    arguments: Arguments, configuration: cutlass.Constexpr[Configuration], num_ctas: Int32, stream: cuda.CUstream
) -> None:
    """Launches one warp, or one CTA, for each row."""
    threads = configuration.warps * WARP
    kernel(arguments, configuration).launch(
        grid=[num_ctas, 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def kernel(args: Arguments, configuration: cutlass.Constexpr[Configuration]) -> None:
    """Normalises the rows of a CTA."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(configuration.warps_a_row == 1):
        row = cta * configuration.warps + thread // WARP
        if row < args.to.num_rows:
            normalise(args, configuration, row, thread % WARP, Int32(0))
    else:
        memory = cutlass.utils.SmemAllocator()
        partial = memory.allocate_array(Float32, num_elems=configuration.warps)
        normalise(args, configuration, cta, thread, Int32(partial.toint()))


@cute.jit
def normalise(
    args: Arguments, configuration: cutlass.Constexpr[Configuration], row: Int32, lane: Int32, shared: Int32
) -> None:
    """Normalises one row. lane: index among all lanes that share the row."""
    lanes = configuration.warps_a_row * WARP
    x = args.x + Int64(row) * args.x_row_bytes
    words, weights = [], []
    for i in cutlass.range_constexpr(configuration.chunks_a_lane):
        words.append(load_chunk(x, lane + i * lanes, configuration))
    for i in cutlass.range_constexpr(configuration.chunks_a_lane):
        weights.append(load_weights(args.weight, lane + i * lanes, configuration))
    values = [bf16_rows.channels(chunk) for chunk in words]
    total = bf16_rows.sum_of_squares(values[0])
    for i in cutlass.range_constexpr(1, configuration.chunks_a_lane):
        total = add(total, bf16_rows.sum_of_squares(values[i]))
    total = sum_over_lanes(total)
    if cutlass.const_expr(configuration.warps_a_row > 1):
        total = sum_over_warps(total, configuration.warps_a_row, lane, shared)
    factor = bf16_rows.reciprocal_root(ptx.fma(total, Float32(1 / configuration.dim), args.eps))
    for i in cutlass.range_constexpr(configuration.chunks_a_lane):
        chunk = lane + i * lanes
        made = bf16_rows.packed(scaled(values[i], factor, weights[i]))
        exists = Boolean(True)
        if cutlass.const_expr(not configuration.is_even):
            exists = chunk < configuration.dim // CHUNK
        if cutlass.const_expr(configuration.is_fp8):
            store_codes(args.to, row, chunk, exists, bf16_rows.channels(made))
        else:
            if exists:
                ptx.store_16_bytes(args.to.codes + Int64(row) * (configuration.dim * 2) + chunk * CHUNK_BYTES, made)


def scaled(values: list, factor: Float32, weights: list) -> list:
    """`x * factor * weight`, each product rounded."""
    values = [mul(value, factor) for value in values]
    return [mul(value, weight) for value, weight in zip(values, weights, strict=True)] if weights else values


def load_chunk(x: Int64, chunk: Int32, configuration: Configuration) -> tuple:
    """The words of a chunk; zeros after the row's end."""
    if configuration.is_even:
        return bf16_rows.load_words(x + chunk * CHUNK_BYTES)
    return bf16_rows.load_words_if(chunk < configuration.dim // CHUNK, x + chunk * CHUNK_BYTES)


def load_weights(weight: Int64, chunk: Int32, configuration: Configuration) -> list:
    """The weights of a chunk as fp32; an empty list without weight, arbitrary values after the row's end."""
    if configuration.weight == "none":
        return []
    if not configuration.is_even:
        chunk = ptx.imin(chunk, Int32(configuration.dim // CHUNK - 1))
    if configuration.weight == "bf16":
        return bf16_rows.channels(bf16_rows.load_words(weight + chunk * CHUNK_BYTES))
    address = weight + chunk * (2 * CHUNK_BYTES)
    return [*bf16_rows.load_f32x4(address), *bf16_rows.load_f32x4(address + 16)]


@cute.jit
def sum_over_warps(total: Float32, warps: cutlass.Constexpr[int], lane: Int32, shared: Int32) -> Float32:
    """The sum of the totals of a CTA's warps, added in the order of the warps."""
    if lane % WARP == 0:
        ptx.store_shared_f32(shared + lane // WARP * 4, total)
    cute.arch.sync_threads()
    total = ptx.load_shared_f32(shared)
    for i in cutlass.range_constexpr(1, warps):
        total = add(total, ptx.load_shared_f32(shared + i * 4))
    return total


# Host side


def compile(configuration: Configuration, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, CTAs, stream)."""

    return load_launcher("rms_norm", configuration, arch, launch, Arguments, configuration, Int32)


def _configuration(what: str, x: Tensor, weight: Tensor | None, is_fp8: bool) -> Configuration:
    weights = {None: "none", torch.float32: "fp32", torch.bfloat16: "bf16"}
    dtype = None if weight is None else weight.dtype
    if dtype not in weights or (weight is not None and (not weight.is_contiguous() or weight.data_ptr() % 16)):
        raise ValueError(
            f"{what}: the GPU kernel takes a contiguous weight in torch.float32 or torch.bfloat16 at a multiple of "
            f"16 bytes; got {dtype}"
        )
    return Configuration(x.shape[-1], weights[dtype], is_fp8)


def _run(name: str, rows: Tensor, weight: Tensor | None, eps: float, configuration: Configuration, to: Codes) -> None:
    arguments = Arguments(
        x=rows.data_ptr(),
        x_row_bytes=stride_bytes(rows, 0),
        weight=0 if weight is None else weight.data_ptr(),
        eps=eps,
        to=to,
    )
    num_ctas = -(-len(rows) * configuration.warps_a_row // configuration.warps)
    arch = architecture(name, rows.device)
    compile(configuration, arch)(arguments, Int32(num_ctas), current_stream(rows.device))


def _bf16(name: str, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    configuration = _configuration("rms_norm", x, weight, is_fp8=False)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.flatten(0, -2) if x.dim() != 2 else x
    check_rows("rms_norm: x", rows)
    if len(rows):
        _run(name, rows, weight, eps, configuration, bf16_result(out, len(rows), configuration.dim))
    return out


def _fp8(name: str, x: Tensor, weight: Tensor | None, eps: float, column_major: bool) -> tuple[Tensor, Tensor]:
    configuration = _configuration("rms_norm_fp8", x, weight, is_fp8=True)
    check_rows("rms_norm_fp8: x", x)
    codes, scales, to = new_codes(*x.shape, column_major, x.device)
    if len(x):
        _run(name, x, weight, eps, configuration, to)
    return codes, scales


def sm90(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`dsv4_kernels.norm.rms_norm` on Hopper: x [..., d] bf16, d a multiple of 8 and at most LARGEST_DIM."""
    return _bf16("sm90", x, weight, eps)


def sm100(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`dsv4_kernels.norm.rms_norm` on Blackwell (B200, GB200, B300); arguments as for `sm90`."""
    return _bf16("sm100", x, weight, eps)


def sm90_fp8(x: Tensor, weight: Tensor | None, eps: float, column_major: bool) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.norm.rms_norm_fp8` on Hopper; x as for `sm90`."""
    return _fp8("sm90", x, weight, eps, column_major)


def sm100_fp8(x: Tensor, weight: Tensor | None, eps: float, column_major: bool) -> tuple[Tensor, Tensor]:
    """`dsv4_kernels.norm.rms_norm_fp8` on Blackwell (B200, GB200, B300); x as for `sm90`."""
    return _fp8("sm100", x, weight, eps, column_major)


def _jobs(model: ModelShapes, arch: str, is_fp8: bool) -> list[Callable[[], object]]:
    if is_fp8 != model.quantises_inputs:
        return []
    return [partial(compile, Configuration(dim, "fp32", is_fp8), arch) for dim in model.norm_dims]


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of `rms_norm`; none where the norms of a forward also quantise."""
    return _jobs(model, arch, False)


def fp8_compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of `rms_norm_fp8`; none where the norms of a forward do not quantise."""
    return _jobs(model, arch, True)
