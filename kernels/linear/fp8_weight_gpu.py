"""Products of few tokens with an FP8 weight on Hopper and Blackwell: choice of tile, and launch. The kernel is in
`fp8_weight`; on both architectures it has the bits of `linear.kernel`, whose instructions it uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.host.addresses import address
from dsv4_kernels.host.arch import architecture, hardware_multiprocessors
from dsv4_kernels.host.fp8_rows import new_codes
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.linear import fp8_weight_resident
from dsv4_kernels.linear.fp8_weight import HEAD, ROTATED, ROWS, STEP, Arguments, Configuration, Tile, launch
from dsv4_kernels.linear.fp8_weight_resident import CLUSTER
from dsv4_kernels.linear.kernel import SEGMENTS
from dsv4_kernels.linear.ref import HeadRotation
from dsv4_kernels.model_shapes import ModelShapes

TILES = (
    Tile(tokens=8, warps=8, stages=3),
    Tile(tokens=16, warps=8, stages=4),
    Tile(tokens=32, warps=4, stages=4),
    Tile(tokens=64, warps=4, stages=3),
)
"""All tiles that a call may get; the bits are the same. Two CTAs share a multiprocessor with each of them."""
RESIDENT = (Tile(tokens=8, warps=4, stages=8, rows=64), Tile(tokens=16, warps=4, stages=8, rows=64))
"""Tiles of `fp8_weight_resident`, whose stages hold a whole segment."""
_OP = "grouped_linear_fp8_weight"


def chosen(num_tokens: int, clusters: int = 0, steps: int = 0, multiprocessors: int = 0) -> Tile:
    """The tile for a product: the smallest that holds all tokens, so that the weight is read once; otherwise the
    largest. A tile that holds a segment is chosen if no multiprocessor gets more than one of its CTAs.

    Args:
        num_tokens: T.
        clusters: tiles of 128 rows, of all groups.
        steps: of a segment, K / 512.
        multiprocessors: of the GPU.
    """
    for tile in RESIDENT:
        if num_tokens <= tile.tokens and steps == tile.stages and clusters * CLUSTER <= multiprocessors:
            return tile
    return next((tile for tile in TILES if num_tokens <= tile.tokens), TILES[-1])


def serves(rows: int, channels: int) -> bool:
    """Whether the kernel supports output groups of `rows` rows (N) and `channels` channels (K)."""
    return rows % ROWS == 0 and channels % (SEGMENTS * STEP) == 0


def compile(configuration: Configuration, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, tiles, output groups,
    stream)."""

    resident = configuration.tile.rows < ROWS
    name, function = (f"{_OP}_resident", fp8_weight_resident.launch) if resident else (_OP, launch)
    return load_launcher(name, configuration, arch, function, Arguments, configuration, Int32, Int32)


def run(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    rotation: HeadRotation | None,
    out: Tensor,
    out_scales: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Launches the product; writes `out` and `out_scales`.

    Args:
        kernel: "sm90" or "sm100".
        x: [T, G, K] bf16.
        weight: [G, N, K] float8_e4m3fn.
        scale: [G, N / 128, K / 128] fp32.
        rotation: of x.
        out: [T, G, N] bf16 or, with `out_scales`, float8_e4m3fn; written.
        out_scales: [T, G N / 128] fp32, written; None for a result in bf16.
        tile: None chooses.

    Raises:
        ValueError: dtypes, strides or dimensions that the kernel does not support.
    """
    (num_tokens, groups, channels), num_rows = x.shape, weight.shape[1]
    _check(x, weight, scale, rotation)
    if not out.numel():
        return
    row_tiles, steps = num_rows // ROWS, channels // (SEGMENTS * STEP)
    tile = tile or chosen(num_tokens, row_tiles * groups, steps, hardware_multiprocessors(x.device))
    if tile.rows < ROWS and steps != tile.stages:
        raise ValueError(f"{_OP}: {tile} holds segments of {tile.stages} steps; K {channels} has {steps}")
    token_tiles = -(-num_tokens // tile.tokens)
    arguments = Arguments(
        x=x.data_ptr(),
        x_token_bytes=stride_bytes(x, 0),
        x_group_bytes=stride_bytes(x, 1),
        codes=weight.data_ptr(),
        code_row_bytes=stride_bytes(weight, 1),
        code_group_bytes=stride_bytes(weight, 0),
        scales=scale.data_ptr(),
        scale_row_bytes=stride_bytes(scale, 1),
        scale_group_bytes=stride_bytes(scale, 0),
        positions=0 if rotation is None else rotation.positions.data_ptr(),
        frequencies=0 if rotation is None else rotation.frequencies.data_ptr(),
        out=out.data_ptr(),
        out_token_bytes=stride_bytes(out, 0),
        out_group_bytes=stride_bytes(out, 1),
        out_scales=address(out_scales),
        out_scale_token_bytes=stride_bytes(out_scales, 0),
        out_scale_block_bytes=stride_bytes(out_scales, 1),
        num_tokens=num_tokens,
        num_token_tiles=token_tiles,
        num_row_tiles=row_tiles,
        steps=steps,
    )
    configuration = Configuration(tile, rotation is not None, out_scales is not None)
    launcher = compile(configuration, architecture(kernel, x.device))
    launcher(arguments, Int32(row_tiles * token_tiles), Int32(groups), current_stream(x.device))


def _check(x: Tensor, weight: Tensor, scale: Tensor, rotation: HeadRotation | None) -> None:
    check_rows(f"{_OP}: x", x)
    if not serves(*weight.shape[1:]):
        raise ValueError(
            f"{_OP}: the GPU kernel takes N in multiples of {ROWS} and K in multiples of {SEGMENTS * STEP}; got "
            f'{weight.shape[1]} and {weight.shape[2]}. The implementation "ref" takes any'
        )
    strides = [stride for size, stride in zip(weight.shape[:-1], weight.stride()[:-1], strict=True) if size > 1]
    if weight.stride(-1) != 1 or any(stride % 16 for stride in strides) or weight.data_ptr() % 16:
        raise ValueError(
            f"{_OP}: weight must have contiguous channels and rows at multiples of 16 bytes; got strides "
            f"{weight.stride()} at address {weight.data_ptr():#x}"
        )
    if scale.shape[-1] > 1 and scale.stride(-1) != 1:
        raise ValueError(f"{_OP}: scale must be contiguous in its last dimension; got strides {scale.stride()}")
    if rotation is None:
        return
    positions, frequencies, head_dim = rotation
    if head_dim != HEAD or 2 * len(frequencies) != ROTATED:
        raise ValueError(
            f"{_OP}: the GPU kernel turns the last {ROTATED} channels of heads of {HEAD}; got "
            f'{2 * len(frequencies)} of {head_dim}. The implementation "ref" takes any'
        )
    if positions.dtype != torch.int64 or frequencies.dtype != torch.float32:
        raise ValueError(
            f"{_OP}: the GPU kernel takes torch.int64 positions and torch.float32 frequencies; got {positions.dtype} "
            f"and {frequencies.dtype}"
        )
    if not (positions.is_contiguous() and frequencies.is_contiguous()):
        raise ValueError(f"{_OP}: the GPU kernel takes contiguous positions and frequencies")


def sm90(*arguments: object, **named: object) -> Tensor | tuple[Tensor, Tensor]:
    """`dsv4_kernels.linear.grouped_linear_fp8_weight` on Hopper: x bf16, N a multiple of 128, K of 512, heads of 512
    channels."""
    return _product("sm90", *arguments, **named)


def sm100(*arguments: object, **named: object) -> Tensor | tuple[Tensor, Tensor]:
    """`dsv4_kernels.linear.grouped_linear_fp8_weight` on Blackwell (B200, GB200, B300); see `sm90`."""
    return _product("sm100", *arguments, **named)


def _product(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    rotation: HeadRotation | None,
    quantises: bool,
    tile: Tile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    tokens, (groups, rows, _) = x.shape[0], weight.shape
    if quantises:
        codes, scales, _ = new_codes(tokens, groups * rows, True, x.device)
        run(kernel, x, weight, scale, rotation, codes.view(tokens, groups, rows), scales, tile)
        return codes, scales
    out = torch.empty(tokens, groups, rows, dtype=torch.bfloat16, device=x.device)
    run(kernel, x, weight, scale, rotation, out, tile=tile)
    return out


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of every tile that a forward's number of tokens may choose, with rotation and quantised result."""
    tiles = dict.fromkeys(chosen(tokens) for tokens in range(1, model.fp8_wo_a_tokens + 1))
    tiles |= dict.fromkeys(RESIDENT[: 2 if model.fp8_wo_a_tokens > RESIDENT[0].tokens else 1] if tiles else ())
    return [partial(compile, Configuration(tile, True, True), arch) for tile in tiles]
