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
from ops.hyper_connection_cases import expert_rows
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.all_reduce import peer_memory
from dsv4_kernels.all_reduce.peer_memory import CannotConnectError
from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.host.mailboxes import Mailboxes, Plan
from dsv4_kernels.hyper_connection import hc_boundary
from sglang_dsv4.layers import hyper_connection, peer_sums, rank_sum
from sglang_dsv4.layers.hyper_connection import HyperConnection, HyperConnectionHead, Pending
from sglang_dsv4.layers.peer_sums import Part
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, RowShards
from sglang_dsv4.model_config.config import ConfigError

CONFIG = SimpleNamespace(hc_mult=4, hidden_size=1024, hc_eps=1e-6, hc_sinkhorn_iters=3)
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def mailboxes(most_bytes: int = 4096) -> Mailboxes:
    zeros = torch.zeros(2, dtype=torch.int32)
    return Mailboxes(None, 0, Plan.of(2, most_bytes), (0, 0), zeros, zeros, zeros.clone(), 3 * 10**9, 16)


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


def test_sglang_sums_if_it_is_asked_to(set_up: Callable[..., list[str]]) -> None:
    assert set_up("sglang") == [] and peer_sums.ranks() == 0


@pytest.mark.parametrize("word", [None, "auto", "ours", " OURS "])
def test_ours_is_made_once(
    word: str | None, set_up: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
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
    with pytest.raises(ValueError, match="SGLANG_DSV4_ALL_REDUCE must be 'auto' or 'ours' or 'sglang', got 'nccl'"):
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


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Mailboxes:
    """Return mailboxes for boundaries of up to 64 tokens; the kernels of the boundary and of the sum are stand-ins that
    take a part for the half of a sum."""
    made = mailboxes(1 << 20)
    monkeypatch.setattr(peer_sums, "_mailboxes", made)
    monkeypatch.setattr(rank_sum, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    monkeypatch.setattr(rank_sum.data_parallel, "is_on", lambda: False)
    monkeypatch.setattr(peer_sums, "all_reduce", lambda part, boxes: 2 * part)

    def boundary_of_parts(part: Tensor | ExpertRows, boxes: Mailboxes, *arguments: object, **options: object) -> tuple:
        assert boxes == replace(made, time_limit=boxes.time_limit)
        assert isinstance(part, ExpertRows) or part.is_contiguous()
        return hc_boundary((2 * summed(part)).to(torch.bfloat16), *arguments, **options)

    monkeypatch.setattr(hyper_connection, "hc_boundary_of_parts", boundary_of_parts)
    return made


def written_back(output: Tensor | ExpertRows | Part, streams: Tensor, sublayer: HyperConnection) -> list[Tensor]:
    pending = Pending(streams, None, torch.ones(len(streams), 4), torch.eye(4).repeat(len(streams), 1, 1) / 2)
    made, after = sublayer(pending.with_output(output), SimpleNamespace(weight=torch.ones(1024), eps=1e-6), ALL_ROWS)
    return [made.rows, after.streams, after.post, after.comb]


@pytest.mark.parametrize("parts", [torch.bfloat16, torch.float32])
def test_few_tokens_are_left_to_the_boundary(two_ranks: Mailboxes, parts: torch.dtype) -> None:
    """Attention and experts return parts for up to `BOUNDARY_TOKENS` tokens; the boundary, or `total` for the head,
    makes the same of them as of the sum."""
    sublayer = HyperConnection(CONFIG)
    for parameter in sublayer.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    for tokens in (1, 5, peer_sums.BOUNDARY_TOKENS, peer_sums.BOUNDARY_TOKENS + 1):
        part, streams = torch.randn(tokens, 1024).to(parts), torch.randn(tokens, 4, 1024).bfloat16()
        outputs = [rank_sum.output_of_experts(part, ALL_ROWS, torch.bfloat16)]
        if parts == torch.bfloat16:
            outputs.append(rank_sum.output_of_attention(part, ALL_ROWS))
        summed = (2 * part).bfloat16()
        for output in outputs:
            assert isinstance(output, Part) == (tokens <= peer_sums.BOUNDARY_TOKENS)
            whole = output.total() if isinstance(output, Part) else output
            assert torch.equal(whole, summed) and whole.dtype == torch.bfloat16
            found, wanted = written_back(output, streams, sublayer), written_back(summed, streams, sublayer)
            assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_experts_are_left_to_the_boundary(two_ranks: Mailboxes, dtype: torch.dtype) -> None:
    """On one rank and on two; with more tokens than a boundary takes, their sum is made first."""
    sublayer, head = HyperConnection(CONFIG), HyperConnectionHead(CONFIG)
    for parameter in (*sublayer.parameters(), *head.parameters()):
        torch.nn.init.normal_(parameter, std=0.01)
    norm = SimpleNamespace(weight=torch.ones(1024), eps=1e-6)
    for tokens in (1, 5, peer_sums.BOUNDARY_TOKENS + 1):
        rows, streams = expert_rows(tokens, 1024, dtype, seed=tokens), torch.randn(tokens, 4, 1024).bfloat16()
        state = (torch.ones(tokens, 4), torch.eye(4).repeat(tokens, 1, 1))
        output = rank_sum.output_of_experts(rows, ALL_ROWS, torch.bfloat16)
        assert isinstance(output, Part) == (tokens <= peer_sums.BOUNDARY_TOKENS)
        pairs = [(output, (2 * rows.total()).bfloat16())]
        pairs += [(rows, rows.total())] if dtype == torch.bfloat16 else []
        for left, whole in pairs:
            found, wanted = written_back(left, streams, sublayer), written_back(whole, streams, sublayer)
            assert all(map(torch.equal, found, wanted))
            assert all(map(torch.equal, *(head(Pending(streams, y, *state), norm) for y in (left, whole))))


def test_the_head_sums_what_the_last_sublayer_left(two_ranks: Mailboxes) -> None:
    head = HyperConnectionHead(CONFIG)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    part, streams = torch.randn(3, 1024).bfloat16(), torch.randn(3, 4, 1024).bfloat16()
    norm = SimpleNamespace(weight=torch.ones(1024), eps=1e-6)
    state = (torch.ones(3, 4), torch.eye(4).repeat(3, 1, 1))
    made = [head(Pending(streams, output, *state), norm) for output in (Part(part, torch.bfloat16), 2 * part)]
    assert all(map(torch.equal, *made))


def test_who_sums_himself(two_ranks: Mailboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in fp32, rows that are sharded, no rows at all, widths without a kernel, and a process without
    mailboxes leave nothing to the boundary."""
    part = torch.ones(3, 1024)
    assert peer_sums.left_to_boundary(part, torch.float32) is None
    assert peer_sums.left_to_boundary(part[:0], torch.bfloat16) is None
    assert peer_sums.left_to_boundary(part[:, :1000], torch.bfloat16) is None
    monkeypatch.setattr(rank_sum, "_sum_of_own_rows", lambda part, rows: part[: rows.size])
    assert torch.equal(rank_sum.output_of_experts(part, RowShards(3, 2, 0), torch.bfloat16), part[:2].bfloat16())
    monkeypatch.setattr(peer_sums, "_mailboxes", None)
    assert peer_sums.boundary_tokens(1024, torch.bfloat16, torch.bfloat16) == 0
    assert peer_sums.left_to_boundary(part, torch.bfloat16) is None


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
