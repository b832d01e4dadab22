"""Experts that are dealt to tokens in place of the router's choice, for benchmarks with dummy weights.

A router of dummy weights may send tokens whose vectors are alike to the same few experts, so that a forward reads fewer
weights than with a trained router. Two variables of SGLang replace the router's choice. They are for measurements of
speed: answers mean nothing.

    SGLANG_SIMULATE_UNIFORM_EXPERTS        each token has k different experts, drawn uniformly
    SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS    pairs of token and expert are dealt to the ranks in turn, and on a rank
                                           to its experts in turn

A token's experts depend on the layer and on its row in the forward, by the kernel that hash layers use for a token's
id, so that a layer has as many launches as a hash layer. As in SGLang, hash layers keep their experts. Unlike in
SGLang, where a token's weights are equal, they are computed from the logits.
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


class Deal:
    """Experts of the rows of a layer's forwards.

    Args:
        num_experts: E.
        top_k: k, different experts a token.
        layer_id: number of the decoder layer.
    """

    def __init__(self, num_experts: int, top_k: int, layer_id: int) -> None:
        parallel = get_parallel()
        # With an exchange of rows each group routes its own tokens, which should not have the other groups' experts.
        shard, shards = (parallel.attn_dp_rank, parallel.attn_dp_size) if row_exchange.is_on() else (0, 1)
        if envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get():
            table = _uniform(num_experts, top_k, seed=layer_id * shards + shard)
        else:
            ranks = parallel.moe_ep_size
            first = layer_id + shard * max(ranks, shards) // shards + shard * ranks
            table = _in_turn(num_experts, top_k, ranks, first)
        self.table = table.to(torch.get_default_device())
        """[ROWS, k] int32."""
        self._rows = _row_numbers(torch.get_default_device())

    def rows(self, tokens: int) -> Tensor:
        """The rows of `table` of a forward's tokens, [T] int64."""
        return self._rows[:tokens]


def deal(num_experts: int, top_k: int, layer_id: int) -> Deal | None:
    """The deal of a layer; None if the router chooses.

    Args:
        num_experts, top_k, layer_id: as for `Deal`.

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
    if not uniform and not in_turn:
        return None
    _warn()
    return Deal(num_experts, top_k, layer_id)


@functools.cache
def _warn() -> None:
    """Warn once that experts are dealt."""
    logger.warning("SGLANG_SIMULATE_*_EXPERTS: experts are dealt to tokens, not chosen; answers mean nothing")


def _uniform(num_experts: int, top_k: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(ROWS, num_experts, generator=generator, device="cpu").topk(top_k, 1).indices.int()


def _in_turn(num_experts: int, top_k: int, ranks: int, first: int) -> Tensor:
    order = torch.arange(num_experts, device="cpu").view(ranks, -1).t().flatten()
    slots = torch.arange(first, first + ROWS * top_k, device="cpu")
    return order[slots % num_experts].view(ROWS, top_k).int()


@functools.cache
def _row_numbers(device: torch.device) -> Tensor:
    return torch.arange(MOST_TOKENS, device=device) % ROWS
