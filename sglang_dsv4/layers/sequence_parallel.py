"""Sequence parallelism in addition to tensor parallelism: a rank does token-wise work for its share of the rows only.

Tensor parallelism shards heads and experts; the boundary between two sublayers (mHC and the norm) and the indexer's
selection are not sharded, and every rank repeats them for all tokens. With sequence parallelism, in a large prefill, a
rank has the streams of its own tokens only: the sublayers' parts are summed for these tokens (`rank_sum`, a
reduce-scatter instead of the all-reduce), the boundary is computed for them, and the normed rows are gathered before
the next sublayer (Korthikanti et al., 2022, arXiv 2205.05198, section 4.2.2). Reduce-scatter plus gather move as many
bytes as the all-reduce. The indexer selects for a rank's own tokens, and the selected rows are gathered. Stored data
(window rows, entries, keys, raw rows of compressors) is computed for all tokens on every rank, whose pools are not
sharded.

Each row is computed by itself, so bits do not change, except for sums over more than two ranks without
--enable-deterministic-inference.

    SGLANG_DSV4_SEQUENCE_PARALLEL    off (default): every rank computes all rows.
                                     on: as above.
                                     attention: as above; and a rank attends for its own tokens only, with all heads
                                     (`all_heads`), whose weights every rank then has. No sum follows the attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.nn.functional as F
from sglang.srt.distributed import get_tp_group
from sglang.srt.distributed.utils import all_gather_single
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_dsv4 import env

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

VARIABLE = "SGLANG_DSV4_SEQUENCE_PARALLEL"

FEWEST_TOKENS = 512
"""Fewest tokens of a forward whose rows are sharded. The boundary of 512 tokens takes some 30 us on an H200; sharding
saves half of that or more, and costs about as much: a reduce-scatter and a gather are one collective more than an
all-reduce."""


@functools.cache
def is_on() -> bool:
    """Whether the environment switches sequence parallelism on.

    Raises:
        ValueError: the variable holds another word.
    """
    return env.choice(VARIABLE) in ("on", "attention")


def shards_attention() -> bool:
    """Whether a rank of this process attends for its own rows only, in forwards whose rows are sharded."""
    return may_be() and env.choice(VARIABLE) == "attention"


def may_be() -> bool:
    """Whether forwards of this process may have their rows sharded."""
    return get_parallel().tp_size > 1 and is_on()


@dataclass(frozen=True)
class RowShards:
    """A forward's rows in `count` shards of equal size, one of them this rank's; by default one shard with all rows.

    Shards are runs of consecutive tokens, in the order of the ranks. The last shards are padded with rows of zeros,
    which are computed like any row and dropped when rows are gathered.
    """

    tokens: int = 0
    count: int = 1
    index: int = 0
    padding: int = 0
    """Rows after the tokens that the shards were made for, too."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all rows."""
        return self.count == 1

    @property
    def size(self) -> int:
        """Rows of a shard."""
        return -(-(self.tokens + self.padding) // self.count)

    def of_first(self, tokens: int) -> RowShards:
        """The same shards of the first `tokens` tokens; the other tokens become padding."""
        return self if self.is_whole else replace(self, tokens=tokens, padding=self.padding + self.tokens - tokens)

    @property
    def own(self) -> slice:
        """This rank's tokens without padding; the slice may be empty."""
        if self.is_whole:
            return slice(None)
        begin = min(self.index * self.size, self.tokens)
        return slice(begin, min(begin + self.size, self.tokens))

    def take(self, rows: Tensor) -> Tensor:
        """This rank's rows [size, ...] of all rows [T, ...], with zeros after the last token."""
        return self.pad_own(rows[self.own])

    def pad_own(self, rows: Tensor) -> Tensor:
        """This rank's rows [size, ...], with zeros after the last token, from its tokens' [up to size, ...]."""
        return rows if self.is_whole else _padded(rows, self.size)

    def pad(self, rows: Tensor) -> Tensor:
        """The rows [T, ...] padded to [count * size, ...] with zeros after the last token, in contiguous memory."""
        return _padded(rows, self.count * self.size).contiguous()

    def gather(self, rows: Tensor) -> Tensor:
        """All rows [T, ...] on every rank, from each rank's [size, ...] rows, or [up to size, ...] without padding."""
        if self.is_whole:
            return rows
        rows = _padded(rows, self.size).contiguous()
        gathered = rows.new_empty(self.count * self.size, *rows.shape[1:])
        # With the process group itself: SGLang's own calls may choose another library than NCCL, or multicast memory.
        all_gather_single(gathered, rows, group=get_tp_group().device_group)
        return gathered[: self.tokens]


ALL_ROWS = RowShards()
"""Every rank has all rows."""


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = size - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def of_forward(mode: ForwardMode, tokens: int) -> RowShards:
    """This rank's share of a forward's rows; every rank decides alike, by the mode and the number of tokens.

    Rows are sharded in prefills only. Forwards that a CUDA graph may capture (decode, verify and draft steps) never
    are, so they compute the same in capture, in replay and without graphs.

    Args:
        mode: of the forward.
        tokens: T, padding included.
    """
    if tokens < FEWEST_TOKENS or not mode.is_extend_without_speculative() or not may_be():
        return ALL_ROWS
    parallel = get_parallel()
    return RowShards(tokens, parallel.tp_size, parallel.tp_rank)
