"""A rank that lost another one says so; other errors are left alone."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import re
import signal
import socket
import time
from datetime import timedelta
from queue import Empty, Queue
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator

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

    def loop(scheduler: object) -> None:
        raise RuntimeError(message)

    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=re.escape(message)):
        lost_rank.explain(loop, None)
    assert (f"another rank of this server has ended, or can't be reached any longer ({message})" in caplog.text) == lost


class Made(Exception):
    """The first group of CPUs is made, with this time limit."""


@pytest.mark.parametrize(
    ("flag", "architecture", "seconds"),
    [
        (None, "DeepseekV4ForCausalLM", 7200),
        (20, "DeepseekV4ForCausalLM", 20),
        (20, "Qwen3ForCausalLM", 7200),
    ],
)
def test_groups_of_cpus_wait_as_long_as_the_flag_says(
    flag: int | None, architecture: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through SGLang's own constructor, which gives them two hours."""

    def new_group(ranks: list[int], backend: str, timeout: timedelta | None, **others: object) -> None:
        if others["group_desc"] == "tp:cpu":
            raise Made(timeout)

    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(dist_timeout=flag))
    monkeypatch.setattr("sglang.srt.runtime_context.process_model_config", lambda: config)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(parallel_state, "_register_group", lambda group: None)
    others = inspect.signature(inspect.unwrap(GroupCoordinator.__init__)).parameters
    given = {name: False for name in others if name.startswith("use_")}
    given |= {"group_ranks": [[0]], "local_rank": 0, "torch_distributed_backend": "gloo", "group_name": "tp"}
    with pytest.raises(Made) as made:
        original = inspect.unwrap(GroupCoordinator.__init__)
        lost_rank.limit_waits(original, object.__new__(GroupCoordinator), **given)
    assert made.value.args == (timedelta(seconds=seconds),)


@pytest.mark.parametrize("ours", [True, False])
def test_a_replica_that_ends_ends_the_server(
    ours: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One process of two, of which SGLang's controller, in its loop, sees nothing; another model's is left alone."""
    architecture = "DeepseekV4ForCausalLM" if ours else "Qwen3ForCausalLM"
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    launcher = SimpleNamespace(signals=Queue())
    launcher.send_signal = launcher.signals.put
    monkeypatch.setattr("sglang.srt.runtime_context.process_model_config", lambda: config)
    monkeypatch.setattr(lost_rank, "LAUNCHER_ENDS_S", 0.0)
    monkeypatch.setattr(lost_rank.psutil, "Process", lambda: SimpleNamespace(parent=lambda: launcher))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=time.sleep, args=(100,)) for _ in range(2)]
    try:
        for process in processes:
            process.start()
        with caplog.at_level(logging.ERROR):
            lost_rank.watch_replicas(SimpleNamespace(scheduler_procs=[None, *processes]))
            lost_rank.watch_replicas(SimpleNamespace(scheduler_procs=[]))  # the ranks of groups are the launcher's
            with pytest.raises(Empty):
                launcher.signals.get(timeout=0.3)
            processes[1].kill()
            if not ours:
                processes[1].join()
                with pytest.raises(Empty):
                    launcher.signals.get(timeout=0.3)
                return
            assert launcher.signals.get(timeout=30) == signal.SIGQUIT
        assert f"a replica (process {processes[1].pid}) has ended with exit code -9" in caplog.text
    finally:
        for process in processes:
            process.kill()
            process.join()


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
