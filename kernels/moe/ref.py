"""Definition of the experts, in plain PyTorch (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_kernels.linear import linear
from dsv4_kernels.moe.weights import Mxfp4Experts, Nvfp4Experts
from dsv4_kernels.number_formats import dequantise_fp4_weight, dequantise_nvfp4_weight, encode_nvfp4
from dsv4_kernels.quant.ref import fp8_quantise
from dsv4_kernels.reference.batch_invariant import silu

ACTIVATION_BLOCK = 128
"""Channels of a product's input that share a scale (section 4.2)."""


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See `dsv4_kernels.moe.swiglu`."""
    return silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def fused_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """See `dsv4_kernels.moe.fused_swiglu`."""
    return swiglu(*gate_up.chunk(2, -1), limit).to(gate_up.dtype)


def swiglu_fp8(gate_up: Tensor, limit: float, column_major: bool) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.moe.swiglu_fp8`."""
    return fp8_quantise(fused_swiglu(gate_up, limit), ACTIVATION_BLOCK, column_major)


def experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w13: Tensor,
    w2: Tensor,
    swiglu_limit: float,
    act_qdq_block: int | None,
    expert_offset: int,
) -> Tensor:
    """See `dsv4_kernels.moe.experts_forward`."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tokens, _, rows in _outputs(x, weights, experts, w13, w2, swiglu_limit, act_qdq_block, expert_offset):
        out.index_add_(0, tokens, rows.float())
    return out


def expert_rows(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w13: Tensor,
    w2: Tensor,
    swiglu_limit: float,
    act_qdq_block: int | None,
    expert_offset: int,
) -> Tensor:
    """See `dsv4_kernels.moe.expert_rows`."""
    out = x.new_zeros(*experts.shape, x.shape[1])
    for tokens, choice, rows in _outputs(x, weights, experts, w13, w2, swiglu_limit, act_qdq_block, expert_offset):
        out[tokens, choice] = rows
    return out


def sum_expert_rows(rows: Tensor, row_of_pair: Tensor, experts: Tensor) -> Tensor:
    """See `dsv4_kernels.moe.sum_expert_rows`."""
    in_order = row_of_pair.gather(1, experts.argsort(dim=1, stable=True)).long()
    out = torch.zeros(len(experts), rows.shape[1], dtype=torch.float32, device=rows.device)
    for of_tokens in in_order.unbind(1):
        out += rows[of_tokens].float()
    return out


def _outputs(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w13: Tensor,
    w2: Tensor,
    swiglu_limit: float,
    act_qdq_block: int | None,
    expert_offset: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(tokens [n], their choices [n], weighted outputs [n, d] in x's dtype) of each expert of this rank."""
    local = experts.long() - expert_offset
    # Rising ids: the order of a token's sum depends on its experts, not on the batch.
    for expert in local.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        tokens, choice = (local == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], w13[expert], act_qdq_block).chunk(2, -1)
        h = weights[tokens, choice].unsqueeze(1) * swiglu(gate, up, swiglu_limit)
        yield tokens, choice, linear(h.to(x.dtype), w2[expert], act_qdq_block)


def mxfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: Mxfp4Experts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """See `dsv4_kernels.moe.mxfp4_experts_forward`."""
    plain = packed.in_rows()
    w13, w2 = (
        torch.stack([dequantise_fp4_weight(codes, scale, x.dtype) for codes, scale in zip(*matrix, strict=True)])
        for matrix in ((plain.w13, plain.w13_scale), (plain.w2, plain.w2_scale))
    )
    return experts_forward(x, weights, experts, w13, w2, swiglu_limit, ACTIVATION_BLOCK, expert_offset)


def nvfp4_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, packed: Nvfp4Experts, swiglu_limit: float, expert_offset: int
) -> Tensor:
    """See `dsv4_kernels.moe.nvfp4_experts_forward`.

    Raises:
        ValueError: the scales are in tiles.
    """
    if packed.in_tiles:
        raise ValueError("nvfp4_experts_forward: the definition needs the scales as stored, not in tiles")

    def product(y: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return linear(dequantise_nvfp4_weight(*encode_nvfp4(y, scale), scale, torch.float32), weight).to(x.dtype)

    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    local = experts.long() - expert_offset
    for expert in local.unique().tolist():
        if not 0 <= expert < packed.num_experts:
            continue
        codes, scales = packed.w13[expert].chunk(2), packed.w13_scale[expert].chunk(2)
        halves = zip(codes, scales, packed.w13_global[expert], strict=True)
        w13 = torch.cat([dequantise_nvfp4_weight(*half, torch.float32) for half in halves])
        of_w2 = (packed.w2[expert], packed.w2_scale[expert], packed.w2_global[expert])
        w2 = dequantise_nvfp4_weight(*of_w2, torch.float32)
        tokens, choice = (local == expert).nonzero(as_tuple=True)
        gate, up = product(x[tokens], packed.w13_input, w13).chunk(2, -1)
        h = weights[tokens, choice].unsqueeze(1) * swiglu(gate, up, swiglu_limit)
        out.index_add_(0, tokens, product(h.to(x.dtype), packed.w2_input, w2).float())
    return out
