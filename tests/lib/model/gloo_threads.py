"""Ranks that are threads of this process, with collectives of gloo between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo

Result = TypeVar("Result")


@dataclass
class GlooThreads:
    """Ranks that are threads, each in a group of its own for attention data parallelism.

    Attributes:
        size: number of ranks.
        timeout_s: seconds after which a rank gives up that waits for others, one of which has failed.
        words_sent: 32-bit words that each rank has sent by `all_to_all_single` or given to `all_gather_single`.
    """

    size: int
    timeout_s: float = 60
    words_sent: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._store, self._thread = HashStore(), threading.local()
        self.words_sent = [0] * self.size

    def parallel(self) -> Any:
        """Return what SGLang's `get_parallel` returns on this thread's rank."""
        rank = self._thread.rank
        return SimpleNamespace(
            tp_rank=rank,
            tp_size=self.size,
            attn_tp_size=1,
            attn_dp_size=self.size,
            attn_dp_rank=rank,
            moe_ep_size=self.size,
            moe_ep_rank=rank,
            moe_tp_size=1,
            moe_tp_rank=0,
            tp_group=SimpleNamespace(device_group=self._thread.group),
        )

    def all_to_all_single(
        self,
        out: Tensor,
        given: Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
        group: ProcessGroupGloo | None = None,
    ) -> None:
        """Stand for `torch.distributed.all_to_all_single`, whose process groups belong to processes."""
        self.words_sent[self._thread.rank] += given.nbytes // 4
        assert group is self._thread.group
        group.alltoall_base(out, given, out_splits or [], in_splits or []).wait()

    def all_gather_single(self, out: Tensor, given: Tensor, group: ProcessGroupGloo) -> None:
        """Stand for `torch.distributed.all_gather_single`."""
        self.words_sent[self._thread.rank] += given.nbytes // 4
        group._allgather_base(out, given).wait()

    def run(self, do: Callable[[int], Result]) -> list[Result]:
        """Return what `do(rank)` returns on each rank."""

        def as_rank(rank: int) -> Result:
            self._thread.rank = rank
            self._thread.group = ProcessGroupGloo(self._store, rank, self.size, timedelta(seconds=self.timeout_s))
            return do(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(as_rank, range(self.size)))
