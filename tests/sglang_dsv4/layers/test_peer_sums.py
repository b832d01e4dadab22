"""The choice between our sum over ranks and SGLang's, by the switch and by what the GPUs can do; absent ranks."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.all_reduce import peer_memory
from dsv4_kernels.all_reduce.mailboxes import Mailboxes
from dsv4_kernels.all_reduce.peer_memory import CannotConnectError
from dsv4_kernels.all_reduce.plan import Plan
from sglang_dsv4.layers import peer_sums, rank_sum
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS
from sglang_dsv4.model_config.config import ConfigError

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def mailboxes(most_bytes: int = 4096) -> Mailboxes:
    zeros = torch.zeros(2, dtype=torch.int32)
    return Mailboxes(None, 0, Plan.of(2, most_bytes), (0, 0), zeros, zeros, zeros.clone(), 3 * 10**9)


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Return a function that sets a process up: (switch, device, ranks, error of `connect`) -> what was called."""

    def run(
        word: str | None,
        device: torch.device = CUDA,
        ranks: int = 2,
        error: str = "",
        trial: str = "",
        groups: bool = False,
    ) -> list[str]:
        called = []

        def connect(*_: object) -> Mailboxes:
            called.append("connect")
            if error:
                raise CannotConnectError(error)
            return mailboxes()

        def try_out(*_: object) -> None:
            called.append("try_out")
            if trial:
                raise CannotConnectError(trial)

        monkeypatch.delenv(peer_sums.VARIABLE, raising=False)
        if word is not None:
            monkeypatch.setenv(peer_sums.VARIABLE, word)
        peer_sums.choice.cache_clear()
        group = SimpleNamespace(world_size=ranks, rank_in_group=0, device_group=None, cpu_group=None)
        monkeypatch.setattr(peer_sums, "get_tp_group", lambda: group)
        monkeypatch.setattr(peer_sums.data_parallel, "is_on", lambda: groups)
        monkeypatch.setattr(peer_memory, "connect", connect)
        monkeypatch.setattr(peer_memory, "try_out", try_out)
        monkeypatch.setattr(peer_sums, "_watch", lambda _: called.append("watch"))
        monkeypatch.setattr(peer_sums.threading, "Thread", thread)
        peer_sums.set_up(device)
        return called

    def thread(target: Callable[..., None], args: tuple, name: str, daemon: bool) -> SimpleNamespace:
        assert daemon and name
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(peer_sums, "_mailboxes", None)
    yield run
    peer_sums.choice.cache_clear()


def test_sglang_sums_by_default(set_up: Callable[..., list[str]]) -> None:
    for word in (None, "sglang"):
        assert set_up(word) == [] and peer_sums.ranks() == 0


@pytest.mark.parametrize("word", ["auto", "ours", " OURS "])
def test_ours_is_made_once(word: str, set_up: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", peer_sums.__name__)
    assert set_up(word) == ["connect", "try_out", "watch"] and peer_sums.ranks() == 2
    assert set_up(word) == []
    assert [record.getMessage()[:35] for record in caplog.records] == ["sums over 2 ranks of up to 0.0 MB: "]


def test_one_rank_sums_nothing(set_up: Callable[..., list[str]]) -> None:
    assert set_up("ours", ranks=1) == [] and peer_sums.ranks() == 0


OBSTACLES = {
    "cpu": (dict(device=CPU), [], "the model is on a CPU, not on GPUs"),
    "ranks": (dict(ranks=3), [], "there are 3 ranks, not 2, 4, 8"),
    "groups": (dict(groups=True), [], "attention data parallelism exchanges rows"),
    "mapping": (dict(error="rank 1 cannot map the memory of rank 0: x"), ["connect"], "rank 1 cannot map the memory"),
    "trial": (dict(trial="rank 0 got a wrong sum"), ["connect", "try_out"], "rank 0 got a wrong sum"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_ours_cannot_be(
    obstacle: str, set_up: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """`auto`: one line names SGLang's and says why. `ours`: the server stops with the same reason."""
    caplog.set_level("INFO", peer_sums.__name__)
    case, called, reason = OBSTACLES[obstacle]
    assert set_up("auto", **case) == called and peer_sums.ranks() == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "SGLang's all-reduce, since" in line and reason in line
    with pytest.raises(ConfigError, match=reason):
        set_up("ours", **case)
    assert peer_sums.ranks() == 0


def test_another_word_is_refused(set_up: Callable[..., list[str]]) -> None:
    with pytest.raises(ValueError, match="SGLANG_DSV4_ALL_REDUCE must be 'sglang' or 'auto' or 'ours', got 'nccl'"):
        set_up("nccl")


@pytest.mark.parametrize("under_flag", [False, True])
def test_small_parts_go_through_the_mailboxes(under_flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts use the mailboxes with the flag and without it; larger parts are summed as without mailboxes."""

    limits: list[int] = []

    def summed(part: Tensor, boxes: Mailboxes) -> Tensor:
        assert part.is_contiguous() and boxes == replace(peer_sums._mailboxes, time_limit=boxes.time_limit)
        limits.append(boxes.time_limit // 10**9)
        return part * 10

    monkeypatch.setattr(peer_sums, "all_reduce", summed)
    monkeypatch.setattr(rank_sum, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    monkeypatch.setattr(rank_sum, "tensor_model_parallel_all_reduce", lambda x: x * 100)
    monkeypatch.setattr(rank_sum, "tensor_model_parallel_all_gather", lambda x, dim: torch.cat([x, 2 * x], dim))
    by_sglang = 3 if under_flag else 100
    registry.require_batch_invariance(under_flag)
    try:
        made = mailboxes()
        most = made.most_bytes // 256
        for boxes, rows, factor in (
            (None, 1, by_sglang),
            (made, 1, 10),
            (made, most, 10),
            (made, most + 1, by_sglang),
            (made, -1, by_sglang),
        ):
            monkeypatch.setattr(peer_sums, "_mailboxes", boxes)
            part = torch.ones(64 if rows > 0 else 63, abs(rows)).T  # 256 bytes a row, or no multiple of 16
            assert torch.equal(rank_sum.sum_over_ranks(part, ALL_ROWS), part * factor), rows
        assert limits == [3, 3]
        monkeypatch.setattr(peer_sums, "_mailboxes", made)
        monkeypatch.setattr(peer_sums, "_is_captured", lambda _: True)
        rank_sum.sum_over_ranks(torch.ones(1, 64), ALL_ROWS)
        assert limits[2:] == [240]  # a captured sum gives up before SGLang's watchdog
    finally:
        registry.require_batch_invariance(False)


def test_a_late_rank_ends_the_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the ranks; the launcher gets the signal that SGLang's own watchdog sends."""
    boxes, sent, looks = mailboxes(), [], []

    def sleep(_: float) -> None:
        looks.append(1)
        if len(looks) == 3:
            boxes.late[1] = 1

    monkeypatch.setattr(peer_sums.time, "sleep", sleep)
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    peer_sums._watch(boxes)
    (record,) = [record for record in caplog.records if record.name == peer_sums.__name__]
    assert record.levelno == logging.ERROR and "waited 240 s or more for a part of rank 1:" in record.getMessage()
    assert len(looks) == 3 and sent == [(os.getppid(), signal.SIGQUIT)]
