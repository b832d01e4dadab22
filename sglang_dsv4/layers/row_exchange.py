"""Exchange of experts' rows between ranks with requests of their own: the bits of one GPU on any number of ranks.

With attention data parallelism and whole experts on a rank, a rank chooses the experts of its own tokens and sends each
token to the ranks that have one of them. An expert's rank sends one row for each pair of token and expert back, in the
model's dtype, as its second product makes it. The token's owner adds the rows in fp32 by rising expert, and its own
shared expert, which is not sharded. One GPU adds the same rows in the same order. (`data_parallel` gathers all rows on
all ranks and adds a part a rank, so its bits depend on the number of ranks.)

    SGLANG_DSV4_EXPERT_ROWS    gather (default): all ranks get all rows, and return one part of the sum a token.
                               exchange: as above; one rank a group (`--attn-dp-size` and `--ep-size` of `--tp-size`).

Ranks with unequal numbers of tokens, and with more than `FIXED_TOKENS`, first tell each other how many rows and pairs
follow, for which the host waits once a layer. Equal numbers of few tokens, and forwards that a CUDA graph captures,
have messages of a fixed size, and no rank waits: every rank gets all tokens, and returns a place for every pair. A
token's pairs may all lie on one rank, so no smaller size is safe. Places of pairs whose expert is elsewhere hold any
row, and no owner reads them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sglang.srt.distributed.utils import all_gather_single
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_dsv4 import env

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DSV4_EXPERT_ROWS"
FIXED_TOKENS = 64
"""Most tokens of a rank whose messages have a fixed size outside of CUDA graphs."""
WORDS = 4
"""int32 of which a message's rows are a multiple: the experts' kernels load 16 bytes at a time."""


@functools.cache
def is_chosen() -> bool:
    """Whether the environment asks for the exchange.

    Raises:
        ValueError: neither gather nor exchange.
    """
    return env.choice(VARIABLE) == "exchange"


def is_on() -> bool:
    """Whether experts' rows are exchanged in this process: with one rank there is nothing to exchange."""
    return is_chosen() and get_parallel().attn_dp_size > 1


def log_choice() -> None:
    """Log once a server that rows are exchanged; log nothing if they are gathered, or with one rank."""
    if is_on() and get_parallel().tp_rank == 0:
        logger.info(
            "experts' rows: exchanged between %d ranks (%s), with the bits of one", get_parallel().tp_size, VARIABLE
        )


class Arrived(NamedTuple):
    """Tokens that this rank's experts compute, and the way back.

    R: the tokens that arrived, in the order of the ranks that sent them.
    """

    x: Tensor  # [R, d] model dtype, rows of any stride
    weights: Tensor  # [R, k] fp32
    experts: Tensor  # [R, k] int32, among the experts of all ranks
    row_of_pair: Tensor  # [T, k] int32: the row of each of this rank's own pairs in the result of `back`
    to_owners: tuple[list[int], list[int]] | None
    """Pairs that each rank gets, and that come from each rank; None: messages of a fixed size."""

    def back(self, rows: Tensor, row_of_pair: Tensor) -> Tensor:
        """The rows [P, d] of this rank's own tokens' pairs, from the rows of the pairs that this rank has computed.

        Args:
            rows: [slots, d], contiguous.
            row_of_pair: [R, k] int32, rows of `rows`; negative where the expert is on another rank.
        """
        group = get_parallel().tp_group.device_group
        if self.to_owners is None:
            sent = rows.index_select(0, row_of_pair.flatten().clamp(min=0))
            returned = torch.empty_like(sent)
            torch.distributed.all_to_all_single(returned, sent, group=group)
            return returned
        given, taken = self.to_owners
        # The number of pairs is known, so that the host does not wait for it.
        pairs = torch.nonzero_static((row_of_pair >= 0).flatten(), size=sum(given)).flatten()
        sent = rows.index_select(0, row_of_pair.flatten()[pairs])
        returned = rows.new_empty(sum(taken), rows.shape[1])
        torch.distributed.all_to_all_single(returned, sent, taken, given, group=group)
        return returned


@dataclass(frozen=True)
class ExchangedRows:
    """The rows of one forward of all ranks, each of which keeps its own.

    Attributes:
        shares: number of rows of each rank, in rank order.
        rank: this rank.
    """

    shares: tuple[int, ...]
    rank: int

    is_whole = True
    """A rank has all rows that a sublayer's input is made of, see `RowShards.is_whole`."""

    @classmethod
    def of_ranks(cls, rows: Sequence[int], rank: int) -> ExchangedRows:
        """The rows of a forward in which the ranks have `rows` rows."""
        return cls(tuple(rows), rank)

    @property
    def total(self) -> int:
        """Number of rows of all ranks."""
        return sum(self.shares)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of a sublayer's input, or its token ids: this rank's own."""
        return rows

    def send(self, x: Tensor, weights: Tensor, experts: Tensor, experts_of_a_rank: int) -> Arrived:
        """The tokens of all ranks of which this rank has an expert; all ranks call it at the same time.

        Args:
            x: [T, d] in the model's dtype, this rank's.
            weights: [T, k] fp32.
            experts: [T, k] int32, among the experts of all ranks.
            experts_of_a_rank: rank r has the experts from r times this number on.
        """
        message = _packed(x, weights, experts)
        ranks_of_pairs = experts // experts_of_a_rank
        if self._has_fixed_size(x):
            return self._send_all(message, ranks_of_pairs, x)
        return self._send_needed(message, ranks_of_pairs, x)

    def _has_fixed_size(self, x: Tensor) -> bool:
        """Whether messages have a size that follows from `shares`; all ranks decide alike."""
        tokens = self.shares[0]
        if any(count != tokens for count in self.shares):
            return False
        return tokens <= FIXED_TOKENS or (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def _send_all(self, message: Tensor, ranks_of_pairs: Tensor, like: Tensor) -> Arrived:
        ranks, (tokens, chosen) = len(self.shares), ranks_of_pairs.shape
        arrived = message.new_empty(ranks * tokens, message.shape[1])
        all_gather_single(arrived, message, group=get_parallel().tp_group.device_group)
        pairs = torch.arange(tokens * chosen, dtype=torch.int32, device=like.device).view(tokens, chosen)
        return Arrived(*_unpacked(arrived, like, chosen), ranks_of_pairs * (tokens * chosen) + pairs, None)

    def _send_needed(self, message: Tensor, ranks_of_pairs: Tensor, like: Tensor) -> Arrived:
        group, ranks = get_parallel().tp_group.device_group, torch.arange(len(self.shares), device=like.device)
        on_rank = ranks_of_pairs == ranks[:, None, None]  # [ranks, T, k]
        goes_to = on_rank.any(2)
        given = torch.stack((goes_to.sum(1), on_rank.sum((1, 2))), 1)  # [ranks, 2]: tokens, pairs
        taken = torch.empty_like(given)
        torch.distributed.all_to_all_single(taken, given, group=group)
        # The host waits for the device here, and nowhere else.
        (tokens_given, pairs_given), (tokens_taken, pairs_taken) = torch.stack((given, taken)).mT.tolist()
        assert sum(pairs_given) == ranks_of_pairs.numel(), f"{pairs_given}: not all {ranks_of_pairs.shape} pairs"
        tokens = torch.nonzero_static(goes_to, size=sum(tokens_given))[:, 1]
        arrived = message.new_empty(sum(tokens_taken), message.shape[1])
        torch.distributed.all_to_all_single(arrived, message[tokens], tokens_taken, tokens_given, group=group)
        # Pairs come back from one rank after the other, in the order of the tokens.
        order = ranks_of_pairs.flatten().argsort(stable=True)
        places = torch.arange(len(order), dtype=torch.int32, device=like.device)
        row_of_pair = torch.empty_like(places).scatter_(0, order, places).view_as(ranks_of_pairs)
        unpacked = _unpacked(arrived, like, ranks_of_pairs.shape[1])
        return Arrived(*unpacked, row_of_pair, (pairs_taken, pairs_given))


def _packed(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """One row of words a token, int32 [T, multiple of WORDS]: x, then weights, then experts."""
    parts = [part.contiguous().view(torch.int32) for part in (x, weights, experts)]
    used = sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(len(x), -used % WORDS)], 1)


def _unpacked(message: Tensor, like: Tensor, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x [R, d] in the dtype of `like`, weights [R, chosen] fp32, experts [R, chosen] int32): views of a message."""
    of_x = like.shape[1] * like.element_size() // message.element_size()
    x, weights, experts, _ = message.split((of_x, chosen, chosen, message.shape[1] - of_x - 2 * chosen), 1)
    return x.view(like.dtype), weights.view(torch.float32), experts
