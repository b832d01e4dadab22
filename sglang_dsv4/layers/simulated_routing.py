"""Experts that are dealt to tokens in place of the router's choice, for benchmarks with dummy weights.

A router of dummy weights sends tokens whose vectors are alike to the same experts, so that a forward reads fewer
weights than with a trained router, which spreads tokens over all experts. Two variables of SGLang replace the choice in
all its models, and so here. They are for speed alone: answers mean nothing.

    SGLANG_SIMULATE_UNIFORM_EXPERTS        each token has k different experts, drawn uniformly
    SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS    tokens are dealt to the ranks' experts in turn

A token's experts depend on its row in the forward, by the kernel that hash layers use for a token's id. So a layer has
as many launches as a hash layer. The weights are those of the logits, as in hash layers.
"""

from __future__ import annotations

import functools
import logging

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_dsv4.layers import row_exchange

logger = logging.getLogger(__name__)

ROWS = 8192
"""Rows of a table, after which the deal begins again."""
MOST_TOKENS = 1 << 20
"""The most tokens of a forward."""


def is_on() -> bool:
    """Whether experts are dealt.

    Raises:
        ValueError: both variables are set.
    """
    uniform, in_turn = (
        variable.get() for variable in (envs.SGLANG_SIMULATE_UNIFORM_EXPERTS, envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS)
    )
    if uniform and in_turn:
        raise ValueError(
            "SGLANG_SIMULATE_UNIFORM_EXPERTS and SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS are both set; expected one. "
            "Unset one of them"
        )
    return uniform or in_turn


class Deal:
    """The experts that a row of a forward gets.

    Args:
        num_experts: E.
        top_k: k, different experts a token.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        parallel = get_parallel()
        uniform = envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get()
        # With an exchange of rows each group routes its own tokens, which should not have the others' experts.
        shard, shards = (parallel.attn_dp_rank, parallel.attn_dp_size) if row_exchange.is_on() else (0, 1)
        device = torch.get_default_device()
        made = _uniform(num_experts, top_k) if uniform else _in_turn(num_experts, top_k, parallel.moe_ep_size)
        self.table = made.roll(-(shard * ROWS // shards), 0).to(device)
        """[ROWS, k] int32."""
        self._rows = _numbers(device)

    def rows(self, tokens: int) -> Tensor:
        """The rows of `table` of a forward's tokens, [T] int64."""
        return self._rows[:tokens]


@functools.cache
def _uniform(num_experts: int, top_k: int) -> Tensor:
    logger.warning("SGLANG_SIMULATE_UNIFORM_EXPERTS: experts are drawn, not chosen; answers mean nothing")
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.rand(ROWS, num_experts, generator=generator, device="cpu").topk(top_k, 1).indices.int()


@functools.cache
def _in_turn(num_experts: int, top_k: int, ranks: int) -> Tensor:
    logger.warning("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS: experts are dealt in turn, not chosen; answers mean nothing")
    slots = torch.arange(ROWS * top_k, device="cpu")
    experts = slots % ranks * (num_experts // ranks) + slots // ranks % (num_experts // ranks)
    return experts.view(ROWS, top_k).int()


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    return torch.arange(MOST_TOKENS, device=device) % ROWS
