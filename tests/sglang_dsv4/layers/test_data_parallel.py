"""Exchange of rows between groups of attention data parallelism, with ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_kernels.reference.batch_invariant import sum_in_order
from sglang_dsv4.layers import data_parallel, logits, rank_sum
from sglang_dsv4.layers.data_parallel import RowsOfAllGroups
from sglang_dsv4.layers.logits import Fp32LogitsProcessor
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS

WIDTH = 6
# Ranks of a group, and each group's rows: equal, unequal, none in the first, in the last, in all but one, in all.
CASES = [
    (1, (3, 3)),
    (1, (5, 1, 2)),
    (1, (0, 4)),
    (1, (7, 0, 0, 1)),
    (2, (4, 4)),
    (2, (6, 2)),
    (2, (0, 8)),
    (4, (4, 12)),
    (1, (0, 0)),
]


class Ranks:
    """Collectives among threads."""

    def __init__(self, size: int, group_size: int) -> None:
        self.size, self.group_size, self.local = size, group_size, threading.local()
        self._given, self.rows_sent = [None] * size, [0] * size
        self._all = threading.Barrier(size, timeout=10)
        self._in_group = [threading.Barrier(group_size, timeout=10) for _ in range(size // group_size)]

    def parallel(self) -> Any:
        group = self.local.rank // self.group_size
        return SimpleNamespace(
            tp_rank=self.local.rank,
            tp_size=self.size,
            attn_tp_size=self.group_size,
            attn_dp_size=self.size // self.group_size,
            tp_group=SimpleNamespace(device_group=None),
            attn_tp_group=SimpleNamespace(device_group=group),
        )

    def _exchange(self, given: Any, barrier: threading.Barrier) -> list[Any]:
        self._given[self.local.rank] = given
        barrier.wait()
        taken = list(self._given)
        barrier.wait()
        return taken

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], group: Any
    ) -> None:
        assert x.is_contiguous() and out.is_contiguous()
        assert len(x) == sum(in_splits) and len(out) == sum(out_splits)
        self.rows_sent[self.local.rank] += len(x)
        parts = [given.split(splits)[self.local.rank] for given, splits in self._exchange((x, in_splits), self._all)]
        assert [len(part) for part in parts] == out_splits
        out.copy_(torch.cat(parts))

    def all_gather_single(self, out: Tensor, x: Tensor, group: int) -> None:
        first = group * self.group_size
        out.copy_(torch.cat(self._exchange(x, self._in_group[group])[first : first + self.group_size]))

    def run(self, do: Callable[[int], Any]) -> list[Any]:
        """Return what `do(rank)` returns on each rank."""

        def as_rank(rank: int) -> Any:
            self.local.rank = rank
            return do(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(as_rank, range(self.size)))


@pytest.fixture
def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Ranks]]:
    def make(size: int, group_size: int) -> Ranks:
        ranks = Ranks(size, group_size)
        for module in (data_parallel, rank_sum, logits):
            monkeypatch.setattr(module, "get_parallel", ranks.parallel)
            monkeypatch.setattr(module, "all_gather_single", ranks.all_gather_single)
        monkeypatch.setattr(torch.distributed, "all_to_all_single", ranks.all_to_all_single)
        return ranks

    yield make


def rows_of(group_size: int, counts: tuple[int, ...], rank: int) -> RowsOfAllGroups:
    return RowsOfAllGroups.of_groups(counts, rank, group_size)


@pytest.mark.parametrize(("group_size", "counts"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_every_rank_gets_all_rows_once(
    group_size: int, counts: tuple[int, ...], dtype: torch.dtype, ranks_of: Callable[[int, int], Ranks]
) -> None:
    size = group_size * len(counts)
    ranks, shape = ranks_of(size, group_size), (WIDTH,) if dtype is torch.bfloat16 else ()
    of_groups = [(100 * torch.randn(count, *shape)).to(dtype) for count in counts]
    gathered = ranks.run(lambda rank: rows_of(group_size, counts, rank).gather(of_groups[rank // group_size]))
    assert all(torch.equal(rows, torch.cat(of_groups)) for rows in gathered)
    assert sum(ranks.rows_sent) == size * sum(counts), "a row travels once to each rank"


@pytest.mark.parametrize(("group_size", "counts"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_rank_order_and_go_to_their_group(
    group_size: int, counts: tuple[int, ...], dtype: torch.dtype, ranks_of: Callable[[int, int], Ranks]
) -> None:
    size = group_size * len(counts)
    ranks = ranks_of(size, group_size)
    parts = torch.randn(size, sum(counts), WIDTH)
    parts[:, :, ::2] *= 2.0 ** (9 * torch.arange(size)[:, None, None])  # another order has other bits
    parts = parts.to(dtype)
    summed = ranks.run(lambda rank: rank_sum.sum_over_ranks(parts[rank], rows_of(group_size, counts, rank)))
    expected = sum_in_order(parts).split(counts)
    for rank, rows in enumerate(summed):
        assert rows.dtype == dtype and torch.equal(rows, expected[rank // group_size])


@pytest.mark.parametrize("group_size", [1, 2])
def test_the_attention_is_summed_within_a_group(group_size: int, ranks_of: Callable[[int, int], Ranks]) -> None:
    parts = torch.randn(4, 3, WIDTH)
    ranks = ranks_of(4, group_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sum.flag, "is_on", lambda: True)
        summed = ranks.run(lambda rank: rank_sum.sum_attention(parts[rank], ALL_ROWS))
    for rank, rows in enumerate(summed):
        first = rank // group_size * group_size
        assert torch.equal(rows, sum_in_order(parts[first : first + group_size]))


@pytest.mark.parametrize("vocabulary", [64, 60], ids=["whole shards", "a padded last shard"])
def test_logits_are_gathered_within_a_group(vocabulary: int, ranks_of: Callable[[int, int], Ranks]) -> None:
    """Two groups of two ranks with 3 and 0 rows; each rank has 32 rows of the head, padding included."""
    ranks, counts = ranks_of(4, 2), (3, 0)
    whole = [torch.randn(count, 64) for count in counts]
    processor = Fp32LogitsProcessor.__new__(Fp32LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.vocab_size = vocabulary

    def gathered(rank: int) -> Tensor:
        return processor.gather_logits(whole[rank // 2][:, 32 * (rank % 2) : 32 * (rank % 2 + 1)])

    for rank, found in enumerate(ranks.run(gathered)):
        assert torch.equal(found, whole[rank // 2][:, :vocabulary]) and found.is_contiguous()


def test_rows_that_a_group_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiples of 2 \(attn_tp_size\), got \[4, 3\]"):
        RowsOfAllGroups.of_groups([4, 3], 0, 2)


@pytest.mark.parametrize(
    "counts", [None, [4], [4, 0, 2], [3, 5]], ids=["none", "one group's", "three groups'", "another number"]
)
def test_a_forward_without_the_groups_numbers_is_an_error(counts: list[int] | None, monkeypatch: Any) -> None:
    parallel = SimpleNamespace(attn_dp_size=2, attn_tp_size=1, tp_rank=0, attn_dp_rank=0)
    monkeypatch.setattr(data_parallel, "get_parallel", lambda: parallel)
    monkeypatch.setattr(data_parallel, "get_dp_global_num_tokens", lambda: None)
    batch = SimpleNamespace(global_num_tokens_cpu=counts, forward_mode=SimpleNamespace(name="DECODE"))
    with pytest.raises(RuntimeError, match=r"rows of 2 groups .*, 4 of them group 0's"):
        data_parallel.of_forward(batch, 4)
    batch.global_num_tokens_cpu = [4, 0]
    assert data_parallel.of_forward(batch, 4).shares == (4, 0)
    batch.global_num_tokens_cpu = None
    monkeypatch.setattr(data_parallel, "get_dp_global_num_tokens", lambda: [4, 4])
    assert data_parallel.of_forward(batch, 4).shares == (4, 4), "the numbers of a capture"
    parallel.attn_dp_size = 1
    assert data_parallel.of_forward(batch, 4) is None
