"""The launches of the experts on Blackwell (sm_100a): weights, work list, both products, and the sum (kernel.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from cutlass import Int32
from torch import Tensor

from dsv4_kernels.host.arch import architecture, hardware_multiprocessors
from dsv4_kernels.host.launch import current_stream, load_launcher
from dsv4_kernels.moe.sm100.kernel import launch
from dsv4_kernels.moe.sm100.plan import TILE_ROWS, Arguments, Numbers, Plan, Product
from dsv4_kernels.moe.weights import Mxfp4Experts, Nvfp4Experts
from dsv4_kernels.number_formats import encode_nvfp4
from dsv4_kernels.registry import select

STEP = 128
"""Channels that share a scale of the activations."""


class WorkList(NamedTuple):
    """Slots in the order of their experts, divided into tiles. Sizes follow from shapes: the host does not wait."""

    source: Tensor  # int32 [T * k]: the token of each slot
    routing: Tensor  # fp32 [T * k]: its weight
    slots: Tensor  # int64 [T, k]: the slots of a token, by rising expert; T * k where the expert is of another rank
    tile_expert: Tensor  # int32 [tiles]
    tile_first: Tensor  # int32 [tiles]
    tile_count: Tensor  # int32 [tiles]
    num_tiles: Tensor  # int32 [1]: number of tiles


def work_list(weights: Tensor, experts: Tensor, num_experts: int, offset: int, tokens: int) -> WorkList:
    """The work list of the pairs of token and expert.

    Args:
        weights: [T, k] fp32.
        experts: [T, k] integer, among all experts.
        num_experts: experts of this rank; the first has id `offset`.
        offset: id of this rank's first expert.
        tokens: slots of a tile.
    """
    pairs, chosen = experts.numel(), experts.shape[1]
    local = experts.long() - offset
    key = torch.where((local >= 0) & (local < num_experts), local, num_experts).flatten()
    ordered, order = key.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=key.device))
    counts = bounds.diff()
    ends = ((counts + tokens - 1) // tokens).cumsum(0)
    tile = torch.arange(min(pairs, num_experts + pairs // tokens), device=key.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp(max=num_experts - 1)
    within = (tile - (ends[expert] - (counts[expert] + tokens - 1) // tokens)) * tokens
    slot_of_pair = torch.empty_like(order).scatter_(0, order, torch.arange(pairs, device=key.device))
    slot_of_pair = torch.where(key < num_experts, slot_of_pair, pairs)
    return WorkList(
        source=(order // chosen).int(),
        routing=weights.flatten()[order],
        slots=slot_of_pair.view(-1, chosen).sort(1).values,
        tile_expert=expert.int(),
        tile_first=(bounds[expert] + within).int(),
        tile_count=(counts[expert] - within).clamp(min=0, max=tokens).int(),
        num_tiles=ends[-1:].int(),
    )


def compile(plan: Plan, arch: str) -> Callable[..., None]:
    """The launcher of a plan: (arguments, CTAs, stream)."""
    return load_launcher("experts_sm100", plan, arch, launch, Arguments, Int32, plan)


def run(
    plan: Plan,
    listed: WorkList,
    limit: float,
    weight: Tensor,
    weight_scale: Tensor,
    x: Tensor,
    x_scales: Tensor,
    out: Tensor,
    out_scales: Tensor,
    factors: Tensor | None = None,
    hidden_factor: Tensor | None = None,
) -> None:
    """Launches one product, which writes a row of `out`, and of GATE_UP also of `out_scales`, for each slot.

    Args:
        plan: the product, and the slots of a tile with which `listed` was made.
        listed: the slots.
        limit: swiglu_limit.
        weight: int8 or uint8 [E, rows, k / 2].
        weight_scale: uint8 [E, rows / 128, k / 128 (NVFP4: k / 64), 512].
        x: e4m3 [rows of x, k], or e2m1 uint8 [rows of x, k / 2]: tokens for GATE_UP, slots for DOWN.
        x_scales: int32 [rows of x, k / 128], see `scale_words`; NVFP4: e4m3 [rows of x, k / 16].
        out: as x but [slots, I], or bf16 [slots, d].
        out_scales: as x_scales; not written by DOWN.
        factors: NVFP4: fp32 [E, 2], see `Arguments`.
        hidden_factor: NVFP4, GATE_UP: fp32 [], the scale of h.
    """
    experts, rows, half = weight.shape
    row_tiles = rows // plan.matrices // TILE_ROWS
    arguments = Arguments(
        weights=weight.data_ptr(),
        weight_scales=weight_scale.data_ptr(),
        weight_rows=experts * rows,
        rows=rows,
        k=2 * half,
        x=x.data_ptr(),
        x_scales=x_scales.data_ptr(),
        source=listed.source.data_ptr(),
        routing=listed.routing.data_ptr(),
        limit=limit,
        tile_expert=listed.tile_expert.data_ptr(),
        tile_first=listed.tile_first.data_ptr(),
        tile_count=listed.tile_count.data_ptr(),
        num_tiles=listed.num_tiles.data_ptr(),
        row_tiles=row_tiles,
        out=out.data_ptr(),
        out_scales=out_scales.data_ptr(),
        factors=0 if factors is None else factors.data_ptr(),
        hidden_factor=0 if hidden_factor is None else hidden_factor.data_ptr(),
    )
    num_ctas = min(hardware_multiprocessors(x.device), len(listed.tile_expert) * row_tiles)
    compile(plan, architecture("sm100", x.device))(arguments, Int32(num_ctas), current_stream(x.device))


def tokens_of_a_tile(pairs: int, num_experts: int) -> int:
    """N of the products: the smallest of 16, 32 and 64 that holds an expert's mean number of slots, otherwise 96."""
    mean = -(-pairs // num_experts)
    return next((tokens for tokens in (16, 32, 64) if mean <= tokens), 96)


def scale_words(scales: Tensor) -> Tensor:
    """int32 words with the ue8m0 of each fp32 power of two four times: an instruction has a scale for 32 channels."""
    return (scales.contiguous().view(torch.int32) >> 23) * 0x01010101


def hidden_rows(x: Tensor, packed: Mxfp4Experts, listed: WorkList, limit: float, tokens: int) -> tuple[Tensor, Tensor]:
    """h of every slot: e4m3 [slots, I], and its scales as `scale_words`; slots of other ranks are not written."""
    pairs, channels = len(listed.source), packed.channels
    codes, scales = select("fp8_quantise", x.device, x.dtype)(x, STEP, False)
    hidden = torch.empty(pairs, channels, dtype=torch.float8_e4m3fn, device=x.device)
    hidden_scales = torch.empty(pairs, channels // STEP, dtype=torch.int32, device=x.device)
    plan = Plan(Product.GATE_UP, tokens)
    words = scale_words(scales)
    run(plan, listed, limit, packed.w13, packed.w13_scale, codes, words, hidden, hidden_scales)
    return hidden, hidden_scales


def output_rows(hidden: Tensor, scales: Tensor, packed: Mxfp4Experts, listed: WorkList, tokens: int) -> Tensor:
    """w2 h of every slot: bf16 [slots + 1, d]; the last row is zeros, slots of other ranks are not written."""
    rows = torch.empty(len(hidden) + 1, packed.hidden_size, dtype=torch.bfloat16, device=hidden.device)
    rows[len(hidden)].zero_()
    run(Plan(Product.DOWN, tokens), listed, 0.0, packed.w2, packed.w2_scale, hidden, scales, rows, scales)
    return rows


def mxfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: Mxfp4Experts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """`dsv4_kernels.moe.mxfp4_experts_forward` on Blackwell: x bf16, d and I multiples of 128, scales in tiles.

    Raises:
        ValueError: the scales have not been arranged by `Mxfp4Experts.tiled`, or d or I is no multiple of 128.
    """
    num_experts, d, channels = packed.num_experts, packed.hidden_size, packed.channels
    if not packed.in_tiles:
        raise ValueError("mxfp4_experts_forward on sm100 needs scales in tiles; call Mxfp4Experts.tiled() once at load")
    if d % STEP or channels % STEP:
        raise ValueError(f"mxfp4_experts_forward on sm100: d is {d}, I {channels}; expected multiples of {STEP}")
    pairs = experts.numel()
    if not pairs:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    tokens = tokens_of_a_tile(pairs, num_experts)
    listed = work_list(weights, experts, num_experts, expert_offset, tokens)
    hidden, scales = hidden_rows(x, packed, listed, swiglu_limit, tokens)
    return summed(output_rows(hidden, scales, packed, listed, tokens), listed)


def nvfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: Nvfp4Experts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """`dsv4_kernels.moe.nvfp4_experts_forward` on Blackwell: x bf16, d and I multiples of 256, scales in tiles.

    Raises:
        ValueError: the scales have not been arranged by `Nvfp4Experts.tiled`, or d or I is no multiple of 256.
    """
    num_experts, d, channels = packed.num_experts, packed.hidden_size, packed.channels
    if not packed.in_tiles:
        raise ValueError("nvfp4_experts_forward on sm100 needs scales in tiles; call Nvfp4Experts.tiled() once at load")
    if d % 256 or channels % 256:
        raise ValueError(f"nvfp4_experts_forward on sm100: d is {d}, I {channels}; expected multiples of 256")
    pairs = experts.numel()
    if not pairs:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    tokens = tokens_of_a_tile(pairs, num_experts)
    listed = work_list(weights, experts, num_experts, expert_offset, tokens)
    hidden, scales = nvfp4_hidden_rows(x, packed, listed, swiglu_limit, tokens)
    return summed(nvfp4_output_rows(hidden, scales, packed, listed, tokens), listed)


def nvfp4_hidden_rows(
    x: Tensor, packed: Nvfp4Experts, listed: WorkList, limit: float, tokens: int
) -> tuple[Tensor, Tensor]:
    """h of every slot: e2m1 uint8 [slots, I / 2] and e4m3 [slots, I / 16]."""
    pairs, channels = len(listed.source), packed.channels
    codes, scales = encode_nvfp4(x, packed.w13_input)
    hidden = torch.empty(pairs, channels // 2, dtype=torch.uint8, device=x.device)
    hidden_scales = torch.empty(pairs, channels // 16, dtype=torch.float8_e4m3fn, device=x.device)
    plan = Plan(Product.GATE_UP, tokens, Numbers.NVFP4)
    factors = (packed.w13_global * packed.w13_input).contiguous()
    scaled = (packed.w13_scale, codes, scales, hidden, hidden_scales, factors, packed.w2_input)
    run(plan, listed, limit, packed.w13, *scaled)
    return hidden, hidden_scales


def nvfp4_output_rows(hidden: Tensor, scales: Tensor, packed: Nvfp4Experts, listed: WorkList, tokens: int) -> Tensor:
    """w2 h of every slot, as `output_rows`."""
    rows = torch.empty(len(hidden) + 1, packed.hidden_size, dtype=torch.bfloat16, device=hidden.device)
    rows[len(hidden)].zero_()
    plan = Plan(Product.DOWN, tokens, Numbers.NVFP4)
    factors = (packed.w2_global * packed.w2_input)[:, None].repeat(1, 2)
    run(plan, listed, 0.0, packed.w2, packed.w2_scale, hidden, scales, rows, scales, factors)
    return rows


def summed(rows: Tensor, listed: WorkList) -> Tensor:
    """fp32 [T, d]: the sums of each token's rows by rising expert, in an order that does not depend on the batch."""
    out = torch.zeros(len(listed.slots), rows.shape[1], dtype=torch.float32, device=rows.device)
    for choice in range(listed.slots.shape[1]):
        out += rows[listed.slots[:, choice]]
    return out
