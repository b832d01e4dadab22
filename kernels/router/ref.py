"""Definition of the routers, in plain PyTorch (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.linear import linear_fp32
from dsv4_kernels.reference.batch_invariant import softplus, tree_sum

LEAST_SUM = 1e-20
"""Added to the sum of a token's chosen scores: where all their logits are at or below -104, the scores are 0, and 0 / 0
is NaN. SGLang and transformers add it, too; the release's own code does not. Sums from 2**-41 on, that is, logits from
about -57 on, keep their bits."""


def route_topk(x: Tensor, gate_weight: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.router.route_topk`."""
    return route_topk_logits(linear_fp32(x, gate_weight), bias, top_k, scale)


def route_hash(
    x: Tensor, gate_weight: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.router.route_hash`."""
    return route_hash_logits(linear_fp32(x, gate_weight), expert_table, token_ids, scale)


def route_topk_logits(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.router.route_topk_logits`."""
    scores = _scores(logits)
    # A stable sort keeps equals in the order of their ids; torch.topk promises no order among equals.
    experts = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :top_k]
    return _weights(scores, experts, scale), experts.int()


def route_hash_logits(logits: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.router.route_hash_logits`."""
    experts = expert_table[token_ids.long()].long()
    return _weights(_scores(logits), experts, scale), experts.int()


def _scores(logits: Tensor) -> Tensor:
    return torch.sqrt(softplus(logits))


def _weights(scores: Tensor, experts: Tensor, scale: float) -> Tensor:
    chosen = scores.gather(1, experts)
    return chosen / (tree_sum(chosen, 1).unsqueeze(1) + LEAST_SUM) * scale
