"""Attention data parallelism (`--attn-dp-size`): a group of ranks computes the attention of its own requests.

The ranks of tensor parallelism form `attn_dp_size` groups of `attn_tp_size` ranks. A group has its own requests, pools
and prefix tree; it shards attention over its ranks. Experts are sharded over all ranks: before the experts every rank
gets the rows of all groups, afterwards the sums of its own group's rows.

Within a group all ranks have the same rows. Each sends its share of them, so that a row travels once to every rank, and
the experts' parts of a row travel to one rank of its group, which adds them in rank order; then the group gathers the
sums. So a row's sum does not depend on the rows of other groups, nor on its place in the message. With equal numbers of
rows (CUDA graphs) as with unequal ones these are all-to-alls: ranks send each other what they need, in one step.

A group without requests has no rows, but holds experts: it takes part in every layer's exchange.

`row_exchange` is the other way, in which a rank's rows are not gathered, and its bits are those of one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.utils import all_gather_single
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.reference.batch_invariant import sum_in_order
from sglang_dsv4.layers import row_exchange
from sglang_dsv4.layers.row_exchange import ExchangedRows

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def is_on() -> bool:
    """Whether the ranks form more than one group with requests of its own."""
    return get_parallel().attn_dp_size > 1


@dataclass(frozen=True)
class RowsOfAllGroups:
    """The rows of one forward of all groups, in the order of the groups.

    Attributes:
        shares: number of rows that each rank of tensor parallelism sends, in rank order.
        rank: this rank.
        group_size: ranks of a group, `attn_tp_size`.
    """

    shares: tuple[int, ...]
    rank: int
    group_size: int

    is_whole = False
    """Each group has its own rows only, see `RowShards.is_whole`."""

    @classmethod
    def of_groups(cls, rows: Sequence[int], rank: int, group_size: int) -> RowsOfAllGroups:
        """The rows of a forward in which the groups have `rows` rows, a multiple of `group_size` each.

        Raises:
            ValueError: a number of rows is not a multiple.
        """
        if any(count % group_size for count in rows):
            raise ValueError(f"expected numbers of rows in multiples of {group_size} (attn_tp_size), got {list(rows)}")
        return cls(tuple(count // group_size for count in rows for _ in range(group_size)), rank, group_size)

    @property
    def own(self) -> int:
        """Number of rows of this rank's share."""
        return self.shares[self.rank]

    @property
    def total(self) -> int:
        """Number of rows of all groups."""
        return sum(self.shares)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all groups [total, ...], from the rows [T, ...] of this rank's group."""
        if not self.total:
            return rows
        ranks, begin = len(self.shares), self.rank % self.group_size * self.own
        share = rows[begin : begin + self.own]
        gathered = rows.new_empty(self.total, *rows.shape[1:])
        torch.distributed.all_to_all_single(
            gathered,
            share.repeat(ranks, *[1] * (rows.dim() - 1)),
            list(self.shares),
            [self.own] * ranks,
            group=get_parallel().tp_group.device_group,
        )
        return gathered

    def sum(self, part: Tensor) -> Tensor:
        """The sums [T, d] over all ranks for the rows of this rank's group, from this rank's part [total, d]."""
        if not self.total:
            return part
        ranks, parallel = len(self.shares), get_parallel()
        parts = part.new_empty(ranks * self.own, *part.shape[1:])
        torch.distributed.all_to_all_single(
            parts,
            part.contiguous(),
            [self.own] * ranks,
            list(self.shares),
            group=parallel.tp_group.device_group,
        )
        share = sum_in_order(parts.unflatten(0, (ranks, self.own)))
        if self.group_size == 1 or not self.own:
            return share
        summed = share.new_empty(self.group_size * self.own, *share.shape[1:])
        all_gather_single(summed, share.contiguous(), group=parallel.attn_tp_group.device_group)
        return summed


RowsOfExperts = RowsOfAllGroups | ExchangedRows
"""The rows of a forward, gathered for the experts or exchanged."""


def of_forward(batch: ForwardBatch, tokens: int) -> RowsOfExperts | None:
    """The rows that a forward's experts get; None without attention data parallelism.

    Args:
        batch: SGLang's.
        tokens: T, padding included.

    Raises:
        RuntimeError: the groups' numbers of rows, which come from SGLang, do not fit.
    """
    if not is_on():
        return None
    parallel, rows = get_parallel(), batch.global_num_tokens_cpu
    if rows is None:  # while a draft's graph is captured
        rows = get_dp_global_num_tokens()
    if rows is None or len(rows) != parallel.attn_dp_size or rows[parallel.attn_dp_rank] != tokens:
        raise RuntimeError(
            f"expected numbers of rows of {parallel.attn_dp_size} groups (--attn-dp-size), {tokens} of them group "
            f"{parallel.attn_dp_rank}'s, for a forward in mode {batch.forward_mode.name}; got {rows}"
        )
    if row_exchange.is_chosen():
        return ExchangedRows.of_ranks(rows, parallel.tp_rank)
    return RowsOfAllGroups.of_groups(rows, parallel.tp_rank, parallel.attn_tp_size)
