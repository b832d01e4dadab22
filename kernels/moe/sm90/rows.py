"""Rows before the products: quantised in the order of the stages.

A work tile's slots have the same layout in global memory as in a stage in shared memory: for each 128 channels its
groups of eight slots, in rows of 128 bytes whose 16-byte units are permuted by the 128-byte swizzle; the scales are in
an array of their own. So bulk copies can load both.
"""

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsv4_kernels.device import bf16_rows, dependent_launch, e4m3, ptx
from dsv4_kernels.device.bf16_rows import CHUNK, CHUNK_BYTES
from dsv4_kernels.host.launch import load_launcher
from dsv4_kernels.moe.sm90.plan import GROUP_BYTES
from dsv4_kernels.moe.sm90.weights import STEP
from dsv4_kernels.moe.workspace import GROUP, TILE_WORDS, TileField

THREADS = 128
STEP_LANES = STEP // CHUNK
"""Threads of a row in a step of K."""


class QuantiseArguments(NamedTuple):
    """Dynamic arguments; addresses are Int64."""

    x: Int64  # bf16 [rows, K]
    x_row_bytes: Int64
    source: Int64  # int32 [slots]: row of x, negative: zeros; read if x has rows of tokens
    group_tile: Int64  # int32 [groups]
    tiles: Int64  # int32 [tiles, TILE_WORDS]
    totals: Int64  # int32 [2]: work tiles, groups
    steps: Int32  # K / 128
    codes: Int64  # e4m3
    scales: Int64  # fp32


@cute.jit
def launch_quantise(
    args: QuantiseArguments,
    chooses: cutlass.Constexpr[bool],
    groups: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches one CTA for a step of K of a group."""
    quantise(args, chooses).launch(
        grid=[args.steps, groups, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=dependent_launch.is_on()
    )


@cute.kernel
def quantise(args: QuantiseArguments, chooses: cutlass.Constexpr[bool]) -> None:
    """Quantises a step of K of a group: each thread quantises eight channels of one of the eight slots."""
    dependent_launch.begin()
    thread, _, _ = cute.arch.thread_idx()
    step, group, _ = cute.arch.block_idx()
    if group < ptx.load_i32(args.totals + 4):
        slot, chunk = thread // STEP_LANES, thread % STEP_LANES
        row = group * GROUP + slot
        if cutlass.const_expr(chooses):
            row = ptx.load_i32(args.source + Int64(row) * 4)
        address = args.x + Int64(row) * args.x_row_bytes + (step * STEP_LANES + chunk) * CHUNK_BYTES
        values = bf16_rows.channels(ptx.load_or_zeros(cutlass.Uint32, 4, address, row, "ge.s32", cache=""))
        exponent = e4m3.scale_exponent(bf16_rows.max_over_lanes(e4m3.largest(values), STEP_LANES))
        tile = args.tiles + Int64(ptx.load_i32(args.group_tile + Int64(group) * 4)) * (4 * TILE_WORDS)
        first_group = ptx.load_i32(tile + 4 * TileField.FIRST_GROUP)
        groups = ptx.load_i32(tile + 4 * TileField.GROUPS)
        # Groups before this one in the order of the stages: of previous tiles, of previous steps, of this step.
        before = Int64(first_group) * args.steps + step * groups + (group - first_group)
        place = slot * STEP + ((chunk // 2) ^ slot) * 16 + chunk % 2 * 8
        bf16_rows.store_8_bytes(args.codes + before * GROUP_BYTES + place, e4m3.codes(values, exponent))
        if chunk == 0:
            ptx.store_f32(args.scales + (before * GROUP + slot) * 4, e4m3.scale_of(exponent))


def compile_quantise(chooses: bool, arch: str) -> Callable[..., None]:
    """The launcher: (arguments, groups, stream)."""
    config = "tokens" if chooses else "slots"
    return load_launcher("experts_quantise", config, arch, launch_quantise, QuantiseArguments, chooses, Int32)
