"""The batch-invariant products on Hopper and Blackwell: choice of kernel and tile, and the launch.

`kernel` has the kernel for both generations, `cluster` the same for a tile that four CTAs share, `wgmma` a kernel for
Hopper, faster from some 32 tokens on. All have the same bits.

Operands are bf16; their products are exact in fp32. `linear_fp32` returns fp32 (gate, compressors, indexer, logits),
`grouped_linear` bf16 (the first half of the output projection). On Hopper they are the default; on Blackwell they run
where batch invariance is required, since cuBLAS is faster where it may split K and choose its tile by the number of
rows.
"""

import functools
import math
from collections.abc import Callable

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.arch import ARCHITECTURES, architecture, multiprocessors
from dsv4_kernels.host.joint_launch import Part
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.linear import cluster, wgmma
from dsv4_kernels.linear.kernel import CHUNK, ROW_BYTES, SEGMENTS, Arguments, Configuration, Tile, body, launch
from dsv4_kernels.model_shapes import ModelShapes

TILES = (
    Tile(rows=16, tokens=16, at_once=SEGMENTS, row_warps=1, token_warps=1, stages=4),
    Tile(rows=64, tokens=16, at_once=SEGMENTS, row_warps=2, token_warps=1, stages=4),
    Tile(rows=64, tokens=64, at_once=SEGMENTS, row_warps=2, token_warps=1, stages=3),
    Tile(rows=128, tokens=128, at_once=1, row_warps=2, token_warps=4, stages=4),
)
"""Tiles of `kernel`, for any architecture."""
CLUSTER_TILES = (
    Tile(rows=32, tokens=16, at_once=1, row_warps=2, token_warps=2, stages=16, ctas=SEGMENTS),
    Tile(rows=32, tokens=32, at_once=1, row_warps=2, token_warps=2, stages=12, ctas=SEGMENTS),
    Tile(rows=64, tokens=32, at_once=1, row_warps=2, token_warps=2, stages=8, ctas=SEGMENTS),
    Tile(rows=64, tokens=64, at_once=1, row_warps=2, token_warps=2, stages=5, ctas=SEGMENTS),
    Tile(rows=96, tokens=16, at_once=1, row_warps=2, token_warps=2, stages=7, ctas=SEGMENTS),
    Tile(rows=96, tokens=32, at_once=1, row_warps=2, token_warps=2, stages=6, ctas=SEGMENTS),
    Tile(rows=96, tokens=64, at_once=1, row_warps=2, token_warps=2, stages=4, ctas=SEGMENTS),
)
"""Tiles of `cluster`, for any architecture; two CTAs fit a multiprocessor. A call gets a cluster on Blackwell only:
on an H200 some are faster than HOPPER_TILES in a sweep, by at most 0.5 % of a step (docs/log/linear_hopper.md)."""
BLACKWELL_TILES = (*CLUSTER_TILES, *TILES[1:])
PART_TILE = TILES[0]
"""The tile of a product in a joint launch, of few tokens."""
HOPPER_TILES: dict[Tile | wgmma.Tile, tuple[int, int]] = {
    TILES[0]: (105, 51),
    wgmma.Tile(rows=64, tokens=32, stages=10): (160, 240),
    wgmma.Tile(rows=64, tokens=64, stages=8): (172, 188),
    wgmma.Tile(rows=64, tokens=128, stages=8): (208, 253),
    wgmma.Tile(rows=128, tokens=64, stages=8): (228, 340),
    wgmma.Tile(rows=128, tokens=128, stages=6): (355, 410),
    wgmma.Tile(rows=128, tokens=192, stages=5): (508, 586),
}
"""Tiles for Hopper -> nanoseconds for 64 channels on an H200: of one wave of CTAs, and of each further wave
(`bench_invariant_linear.py --sweep`). Of all tiles that were tried, these are the ones that cannot be removed without
costing 2 %.
"""
HOPPER_BYTES_A_NANOSECOND = 4200
COPY_CLOCK_BYTES, READ_CLOCK_BYTES = 64, 128
"""Bytes a clock through a multiprocessor's port of shared memory: those that `cp.async` writes, zeros included, and
those that warps read. Found from the times of TILES on an H200, which they explain to 10 %
(`benchmarks/step_model/products.py`)."""
L2_CLOCK_BYTES = 40
"""Bytes a clock from L2 into a multiprocessor."""
CLUSTER_CLOCKS = 600
"""The exchange of a cluster's sums."""
TYPICAL_CHUNKS = 64
"""Chunks of 4,096 channels, for which tiles are compared."""
MEMORY_CLOCK_BYTES = 3800
"""Bytes a clock of a B200's memory: 88 % of 8 TB/s, the share that a copy reaches on an H200, at 1.85 GHz."""
SHARED_BYTES, SYSTEM_BYTES, MOST_THREADS = 227 << 10, 1 << 10, 2048
"""Shared memory of a multiprocessor, what the system takes of it for each CTA, and the threads that fit."""


def tiles(arch: str) -> tuple[Tile | wgmma.Tile, ...]:
    """All tiles that a call may get; the bits are the same."""
    return tuple(HOPPER_TILES) if arch == ARCHITECTURES["sm90"] else BLACKWELL_TILES


def port_clocks(tile: Tile) -> float:
    """Clocks of the port of shared memory for 64 channels of a tile: its copies, and what its warps read."""
    read = tile.row_warps * tile.token_warps * (tile.warp_rows + tile.warp_tokens)
    return ROW_BYTES * ((tile.rows + tile.tokens) / COPY_CLOCK_BYTES + read / READ_CLOCK_BYTES)


def resident(tile: Tile) -> int:
    """CTAs that share a multiprocessor."""
    return min(SHARED_BYTES // (tile.shared_bytes + SYSTEM_BYTES), MOST_THREADS // tile.threads)


@functools.lru_cache(1024)
def chosen(
    arch: str, num_tokens: int, num_rows: int, groups: int, multiprocessors: int, pairs: bool = True
) -> Tile | wgmma.Tile:
    """The tile for a product; a token's bits do not depend on the choice.

    On Hopper it is the fastest tile by the times of `HOPPER_TILES` and of memory. Elsewhere it is the tile with the
    fewest clocks: of the busiest multiprocessor, by its port of shared memory or its bytes from L2, or of memory, which
    the last round of CTAs leaves idle in part. By the model of time (docs/step_model.md) this is near the fastest tile
    on a B200.

    Args:
        arch: compiled for.
        num_tokens, num_rows, groups: of the product.
        multiprocessors: of the GPU.
        pairs: whether the result can be written two rows at a time (`stores_pairs`).
    """

    def ctas(tile: Tile | wgmma.Tile) -> int:
        of_tile = tile.ctas if isinstance(tile, Tile) else 1
        return -(-num_rows // tile.rows) * -(-num_tokens // tile.tokens) * groups * of_tile

    def waves(tile: Tile | wgmma.Tile) -> int:
        return -(-ctas(tile) // multiprocessors)

    if arch == ARCHITECTURES["sm90"]:
        # Bytes for 64 channels: operands in bf16, and a share of the result.
        moved = groups * (num_rows + num_tokens) * 2 * CHUNK + groups * num_rows * num_tokens // 16
        memory = moved / HOPPER_BYTES_A_NANOSECOND

        def nanoseconds(tile: Tile | wgmma.Tile) -> float:
            first, further = HOPPER_TILES[tile]
            alone = first + (waves(tile) - 1) * further
            return max(alone, memory) + alone / 10  # if memory bounds all tiles, less work is still better

        def fits(tile: Tile | wgmma.Tile) -> bool:
            # TMA is slower for tokens that do not exist: in tiles of 64 tokens, logits of 16 tokens took 446 us, logits
            # of 64 tokens 273 us.
            return isinstance(tile, Tile) or (pairs and tile.tokens <= max(32, 2 * num_tokens))

        return min(filter(fits, HOPPER_TILES), key=nanoseconds)

    def clocks(tile: Tile) -> float:
        from_l2 = (tile.rows + min(tile.tokens, num_tokens)) * ROW_BYTES / L2_CLOCK_BYTES
        busiest = waves(tile) * TYPICAL_CHUNKS / tile.ctas * max(port_clocks(tile), from_l2)
        rounds = ctas(tile) / (multiprocessors * resident(tile))
        idle = math.ceil(rounds) / rounds if rounds > 1 else 1.0
        memory = groups * num_rows * TYPICAL_CHUNKS * ROW_BYTES / MEMORY_CLOCK_BYTES * idle
        exchange = CLUSTER_CLOCKS if tile.ctas > 1 else 0
        return max(busiest, memory) + busiest / 10 + exchange  # if memory bounds all tiles, less work is still better

    return min(BLACKWELL_TILES, key=clocks)


def stores_pairs(out: Tensor) -> bool:
    """Whether a result [T, G, N] can be written two neighbouring rows at a time: N and all strides are even, and the
    address is a multiple of two elements."""
    steps = [stride for size, stride in zip(out.shape[:2], out.stride()[:2], strict=True) if size > 1]
    return not any(step % 2 for step in (out.shape[2], *steps)) and out.data_ptr() % (2 * out.element_size()) == 0


def configuration(tile: Tile | wgmma.Tile, fp32: bool) -> Configuration | wgmma.Configuration:
    """The configuration of the kernel that has the tile."""
    return (wgmma.Configuration if isinstance(tile, wgmma.Tile) else Configuration)(tile, fp32)


def compile(configuration: Configuration | wgmma.Configuration, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, tiles, groups, stream) for
    `kernel` and `cluster`, (arguments, tiles of all groups, groups, CTAs, stream) for `wgmma`."""
    name, of_kernel, counts = "linear", launch, 2
    if isinstance(configuration, wgmma.Configuration):
        name, of_kernel, counts = "linear_wgmma", wgmma.launch, 3
    elif configuration.tile.ctas > 1:
        name, of_kernel = "linear_cluster", cluster.launch

    return load_launcher(name, configuration, arch, of_kernel, Arguments, configuration, *[Int32] * counts)


@functools.cache
def part(fp32: bool) -> Part:
    """A product of one group as a part of a joint launch."""
    return Part("linear", Configuration(PART_TILE, fp32), Arguments, body, threads=PART_TILE.threads)


def run(name: str, op: str, x: Tensor, weight: Tensor, out: Tensor, tile: Tile | wgmma.Tile | None = None) -> Tensor:
    """Launches `out[t, g] = weight[g] @ x[t, g]`; returns out.

    Args:
        name: "sm90" or "sm100".
        op: the function's name, for errors.
        x: [T, G, K] bf16.
        weight: [G, N, K] bf16.
        out: [T, G, N] fp32 or bf16, written.
        tile: None chooses.

    Raises:
        ValueError: dtypes, strides or a K that the kernel does not support, or a result that the tile cannot write.
    """
    for what, operand in (("x", x), ("weight", weight)):
        check_rows(f"{op}: {what}", operand)
    groups = x.shape[1]
    if not out.numel():
        return out
    arch, alone = architecture(name, x.device), functools.partial(_run_alone, name, op, x, weight, out, tile)
    if groups == 1:
        arguments, ctas = _arguments(x, weight, out, PART_TILE)
        as_part = part(out.dtype == torch.float32)
        joint_launch.run(as_part, arch, arguments, ctas, current_stream(x.device), (x,), alone)
    else:
        alone()
    return out


def _run_alone(name: str, op: str, x: Tensor, weight: Tensor, out: Tensor, tile: Tile | wgmma.Tile | None) -> None:
    num_tokens, groups, _ = x.shape
    num_rows = weight.shape[1]
    arch, pairs = architecture(name, x.device), stores_pairs(out)
    if tile is None:
        tile = chosen(arch, num_tokens, num_rows, groups, multiprocessors(x.device), pairs)
    elif isinstance(tile, wgmma.Tile) and not pairs:
        raise ValueError(
            f"{op}: {tile} writes two rows at a time; the result has shape {tuple(out.shape)}, "
            f"strides {out.stride()} and begins at {out.data_ptr():#x}"
        )
    arguments, count = _arguments(x, weight, out, tile)
    launcher = compile(configuration(tile, out.dtype == torch.float32), arch)
    stream = current_stream(x.device)
    if isinstance(tile, wgmma.Tile):
        ctas = min(count * groups, multiprocessors(x.device))
        launcher(arguments, Int32(count * groups), Int32(groups), Int32(ctas), stream)
    else:
        launcher(arguments, Int32(count), Int32(groups), stream)


def _arguments(x: Tensor, weight: Tensor, out: Tensor, tile: Tile | wgmma.Tile) -> tuple[Arguments, int]:
    """Dynamic arguments, and the number of tiles of a group."""
    (num_tokens, _, channels), num_rows = x.shape, weight.shape[1]
    row_tiles = -(-num_rows // tile.rows)
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
    return arguments, row_tiles * -(-num_tokens // tile.tokens)


def _linear_fp32(name: str, x: Tensor, weight: Tensor, tile: Tile | wgmma.Tile | None = None) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    run(name, "linear_fp32", x.unsqueeze(1), weight.unsqueeze(0), out.unsqueeze(1), tile)
    return out


def _grouped_linear(name: str, x: Tensor, weight: Tensor, tile: Tile | wgmma.Tile | None = None) -> Tensor:
    out = torch.empty(x.shape[0], *weight.shape[:2], dtype=torch.bfloat16, device=x.device)
    return run(name, "grouped_linear", x, weight, out, tile)


sm90_linear_fp32 = functools.partial(_linear_fp32, "sm90")
sm100_linear_fp32 = functools.partial(_linear_fp32, "sm100")
sm90_grouped_linear = functools.partial(_grouped_linear, "sm90")
sm100_grouped_linear = functools.partial(_grouped_linear, "sm100")


def _jobs(fp32: bool, arch: str) -> list[Callable[[], object]]:
    return [functools.partial(compile, configuration(tile, fp32), arch) for tile in tiles(arch)]


def linear_fp32_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of `linear_fp32`: of every tile, since any may be chosen."""
    return _jobs(True, arch)


def grouped_linear_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of `grouped_linear`: of every tile, since any may be chosen."""
    return _jobs(False, arch)
