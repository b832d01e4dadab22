"""The batch-invariant products on Hopper and Blackwell: which tile, and launching it. The kernel is in `kernel`.

bf16 operands, whose products are exact in fp32. `linear_fp32` takes them into fp32 (gate, compressors, indexer,
logits), `grouped_linear` into bf16 (the first half of the output projection). cuBLAS is faster where it may split K and
choose its instruction by the number of rows, so these serve where batch invariance is required.
"""

import functools
from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels import bf16_rows
from dsv4_kernels.bf16_rows import stride_bytes
from dsv4_kernels.compile_cache import load_or_compile
from dsv4_kernels.linear.kernel import SEGMENTS, Arguments, Configuration, Tile, launch

TILES = (
    Tile(rows=16, tokens=16, at_once=SEGMENTS, row_warps=1, token_warps=1, stages=4),
    Tile(rows=64, tokens=16, at_once=SEGMENTS, row_warps=2, token_warps=1, stages=4),
    Tile(rows=64, tokens=64, at_once=SEGMENTS, row_warps=2, token_warps=1, stages=3),
    Tile(rows=128, tokens=128, at_once=1, row_warps=2, token_warps=4, stages=4),
)
"""All that a call may get; the bits are the same."""
MANY_TOKENS = 256
"""From here on a product is bound by arithmetic, and gets the largest tile whatever its waves."""


def chosen(num_tokens: int, num_rows: int, groups: int, multiprocessors: int) -> Tile:
    """The tile for a product: the one whose CTAs together wait for the fewest bytes, waves of CTAs counted as whole.

    A CTA moves its rows and its tokens, as long as either; a token's bits do not depend on the choice.
    """
    if num_tokens >= MANY_TOKENS:
        return TILES[-1]

    def moved(tile: Tile) -> int:
        ctas = -(-num_rows // tile.rows) * -(-num_tokens // tile.tokens) * groups
        return -(-ctas // multiprocessors) * (tile.rows + min(tile.tokens, num_tokens))

    return min(TILES[:-1], key=moved)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; in the emulator those of an H200."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 132


def compile(configuration: Configuration, arch: str) -> Callable[..., None]:
    """The launcher, from memory, from disk or from the compiler: (arguments, tiles, groups, stream)."""

    def from_compiler() -> Callable[..., None]:
        example = Arguments(*(kind(1) for kind in Arguments.__annotations__.values()))
        return cute.compile(launch, example, configuration, Int32(1), Int32(1), cuda.CUstream(0))

    return load_or_compile("linear", configuration, arch, from_compiler)


def run(name: str, op: str, x: Tensor, weight: Tensor, out: Tensor, tile: Tile | None = None) -> Tensor:
    """One launch: `out[t, g] = weight[g] @ x[t, g]`.

    Args:
        name: "sm90" or "sm100".
        op: the function's name, for errors.
        x: [T, G, K] bf16.
        weight: [G, N, K] bf16.
        out: [T, G, N] fp32 or bf16, written.
        tile: None chooses.

    Raises:
        ValueError: dtypes, strides or a K that the kernel is not made for.
    """
    for what, operand in (("x", x), ("weight", weight)):
        bf16_rows.check_rows(f"{op}: {what}", operand)
    (num_tokens, groups, channels), num_rows = x.shape, weight.shape[1]
    if not out.numel():
        return out
    if tile is None:
        tile = chosen(num_tokens, num_rows, groups, multiprocessors(x.device))
    row_tiles, token_tiles = -(-num_rows // tile.rows), -(-num_tokens // tile.tokens)
    arguments = Arguments(
        x=x.data_ptr(),
        x_token_bytes=stride_bytes(x, 0),
        x_group_bytes=stride_bytes(x, 1),
        weight=weight.data_ptr(),
        weight_row_bytes=stride_bytes(weight, 1),
        weight_group_bytes=stride_bytes(weight, 0),
        out=out.data_ptr(),
        out_token_bytes=stride_bytes(out, 0),
        out_group_bytes=stride_bytes(out, 1),
        num_tokens=num_tokens,
        num_rows=num_rows,
        channels=channels,
        num_row_tiles=row_tiles,
    )
    launcher = compile(Configuration(tile, out.dtype == torch.float32), bf16_rows.architecture(name, x.device))
    launcher(arguments, Int32(row_tiles * token_tiles), Int32(groups), bf16_rows.current_stream(x.device))
    return out


def _linear_fp32(name: str, x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    run(name, "linear_fp32", x.unsqueeze(1), weight.unsqueeze(0), out.unsqueeze(1), tile)
    return out


def _grouped_linear(name: str, x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    out = torch.empty(x.shape[0], *weight.shape[:2], dtype=torch.bfloat16, device=x.device)
    return run(name, "grouped_linear", x, weight, out, tile)


sm90_linear_fp32 = functools.partial(_linear_fp32, "sm90")
sm100_linear_fp32 = functools.partial(_linear_fp32, "sm100")
sm90_grouped_linear = functools.partial(_grouped_linear, "sm90")
sm100_grouped_linear = functools.partial(_grouped_linear, "sm100")
