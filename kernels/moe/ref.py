"""Definition of the experts, in plain PyTorch (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.invariant import silu
from dsv4_kernels.linear import linear


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See `dsv4_kernels.moe.swiglu`."""
    return silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


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
    local = experts.long() - expert_offset
    for expert in local.unique().tolist():  # rising ids: the order of a token's sum is its experts', not the batch's
        if not 0 <= expert < w13.shape[0]:
            continue
        tokens, choice = (local == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], w13[expert], act_qdq_block).chunk(2, -1)
        h = weights[tokens, choice].unsqueeze(1) * swiglu(gate, up, swiglu_limit)
        out.index_add_(0, tokens, linear(h.to(x.dtype), w2[expert], act_qdq_block).float())
    return out
