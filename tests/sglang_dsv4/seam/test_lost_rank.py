"""A rank that lost another one says so; other errors are left alone."""

from __future__ import annotations

import logging
import multiprocessing
import re
import socket
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_dsv4.seam import lost_rank


def end_after_a_meeting(port: int) -> None:
    """Meet rank 0, and end without a word."""
    meet(1, port)


def meet(rank: int, port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[pair.cc:544] Connection closed by peer [127.0.0.1]:20001", True),
        ("NCCL error: remote process exited or there was a network error", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("CUDA out of memory", False),
    ],
)
def test_errors_of_gloo_and_nccl_are_known(
    message: str, lost: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lost_rank, "live_parts", lambda: True)
    monkeypatch.setattr(lost_rank, "limit_waits", lambda: None)

    def loop(scheduler: object) -> None:
        raise RuntimeError(message)

    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=re.escape(message)):
        lost_rank.explain(loop, None)
    assert (f"another rank of this server has ended, or can't be reached any longer ({message})" in caplog.text) == lost


def wait_for_a_silent_rank(rank: int, port: int, results: multiprocessing.Queue) -> None:
    """Wait as SGLang's scheduler does: rank 1 waits for rank 0, which sends nothing and closes nothing."""
    meet(rank, port)
    group = torch.distributed.new_group([0, 1], backend="gloo", timeout=timedelta(hours=2))
    torch.distributed.barrier(group)
    if rank == 0:
        results.get(timeout=100)
        return
    of_cpus = SimpleNamespace(cpu_group=group)
    parallel = SimpleNamespace(dist_timeout=2, world_group=of_cpus, tp_group=of_cpus, attn_tp_group=of_cpus)
    with mock.patch("sglang.srt.runtime_context.get_parallel", lambda: parallel):
        lost_rank.limit_waits()
    try:
        torch.distributed.broadcast(torch.zeros(1), src=0, group=group)
    except RuntimeError as error:
        assert lost_rank.is_of_lost_rank(error), error
        results.put("lost")


@pytest.mark.slow
def test_a_rank_that_is_silent_is_waited_for_as_long_as_the_flag_says() -> None:
    """Through gloo itself; SGLang's groups of CPUs wait for two hours."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results, begin = context.Queue(), context.Queue()
    silent, waiting = (
        context.Process(target=wait_for_a_silent_rank, args=(rank, port, queue))
        for rank, queue in ((0, begin), (1, results))
    )
    for process in (silent, waiting):
        process.start()
    try:
        assert results.get(timeout=90) == "lost"
    finally:
        begin.put("end")
        for process in (silent, waiting):
            process.join(60)


@pytest.mark.slow
def test_the_error_of_a_rank_that_is_gone() -> None:
    """Through gloo itself: the peer's process has ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=end_after_a_meeting, args=(port,))
    other.start()
    meet(0, port)
    other.join(60)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.distributed.broadcast(torch.zeros(1), src=1)
        assert lost_rank.is_of_lost_rank(raised.value), raised.value
    finally:
        torch.distributed.destroy_process_group()
