"""Sequence parallelism beside tensor parallelism: a rank's share of a forward's rows, for what is computed by token.

Heads and experts are sharded; the boundary between two sublayers (mHC and the norm) and the choice of the indexer are
not, and every rank repeats them for all tokens. Switched on, a rank has, in a large prefill, the streams of its own
tokens only: a sublayer's parts are summed for these (`rank_sum`, a reduce-scatter in place of the all-reduce), its
boundary is computed of these, and the normed rows are gathered in front of the next sublayer (Korthikanti et al., 2022,
arXiv 2205.05198, section 4.2.2). Together that moves the bytes of the all-reduce. Indexers choose for a rank's own
tokens, and what they chose is gathered. Whatever is stored (rows, entries, keys, raw rows of compressors) is computed
for all tokens on every rank, whose pools are whole.

A row is computed by itself, so that bits don't change, but for sums of more than two ranks, unless under the flag.

    SGLANG_DSV4_SEQUENCE_PARALLEL    on: as said; off (default): every rank computes all rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
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
"""Of a forward that is sharded. A boundary of that many takes some 30 us on an H200, of which sharding saves half or
more, and costs about that: a reduce-scatter and a gather are one collective more than an all-reduce."""


@functools.cache
def is_on() -> bool:
    """Whether the environment asks for it.

    Raises:
        ValueError: neither on nor off.
    """
    return env.choice(VARIABLE) == "on"


def may_be() -> bool:
    """Whether this process will meet forwards whose rows are sharded."""
    return get_parallel().tp_size > 1 and is_on()


@dataclass(frozen=True)
class RowShards:
    """The rows of a forward in `count` shards of one size, of which this rank has one; by default all rows.

    Shards are runs of neighbouring tokens, in the order of the ranks. What is left of the last ones is padding: zeros
    that are computed with, and dropped when rows are gathered.
    """

    tokens: int = 0
    count: int = 1
    index: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all rows."""
        return self.count == 1

    @property
    def size(self) -> int:
        """Rows of a shard."""
        return -(-self.tokens // self.count)

    @property
    def own(self) -> slice:
        """This rank's tokens, without padding; there may be none."""
        if self.is_whole:
            return slice(None)
        begin = min(self.index * self.size, self.tokens)
        return slice(begin, min(begin + self.size, self.tokens))

    def take(self, rows: Tensor) -> Tensor:
        """This rank's rows: [T, ...] -> [size, ...], zeros behind the last token."""
        return rows if self.is_whole else _padded(rows[self.own], self.size)

    def pad(self, rows: Tensor) -> Tensor:
        """[T, ...] -> [count * size, ...] in contiguous memory, zeros behind the last token."""
        return _padded(rows, self.count * self.size).contiguous()

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows: those of `take` [size, ...], or of `own` [up to size, ...] -> [T, ...] on every rank."""
        if self.is_whole:
            return rows
        rows = _padded(rows, self.size).contiguous()
        gathered = rows.new_empty(self.count * self.size, *rows.shape[1:])
        # By the group itself: SGLang's own calls may choose another library than NCCL, or memory with multicast.
        all_gather_single(gathered, rows, group=get_tp_group().device_group)
        return gathered[: self.tokens]


ALL_ROWS = RowShards()
"""Every rank has all rows."""


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = size - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def of_forward(mode: ForwardMode, tokens: int) -> RowShards:
    """This rank's rows of a forward: decided by what all ranks know alike.

    Prefills only, however many tokens others have: what a CUDA graph may hold (decode, verify and draft steps) is the
    same in capture, in replay and without graphs.

    Args:
        mode: of the forward.
        tokens: T, padding included.
    """
    if tokens < FEWEST_TOKENS or not mode.is_extend_without_speculative() or not may_be():
        return ALL_ROWS
    parallel = get_parallel()
    return RowShards(tokens, parallel.tp_size, parallel.tp_rank)
