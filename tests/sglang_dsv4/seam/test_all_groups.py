"""Control requests with attention data parallelism: all ranks answer alike, also if one group has requests only."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper

from sglang_dsv4.seam import all_groups


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """`do(idle)` on a rank for each entry of `idle`, in threads whose minimum is taken as a group's all-reduce does."""
    barrier, local, values = [threading.Barrier(1)], threading.local(), {}

    def all_reduce(x: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN and group == "all ranks"
        values[threading.get_ident()] = x.item()
        barrier[0].wait()
        x.fill_(min(values.values()))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: local.parallel)

    def run(idle: list[bool], do: Callable[[bool], Any], groups: int | None = None, stages: int = 1) -> list[Any]:
        values.clear()
        barrier[0] = threading.Barrier(len(idle), timeout=10)

        def as_rank(is_idle: bool) -> Any:
            group = SimpleNamespace(cpu_group="all ranks")
            local.parallel = SimpleNamespace(attn_dp_size=groups or len(idle), pp_size=stages, tp_group=group)
            try:
                return do(is_idle)
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor(len(idle)) as pool:
            return list(pool.map(as_rank, idle))

    yield run


def scheduler(idle: bool, architecture: str = "DeepseekV4ForCausalLM") -> SimpleNamespace:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    return SimpleNamespace(
        model_config=config, _engine_paused=False, is_fully_idle=lambda ignore_waiting: idle and not ignore_waiting
    )


def flush(idle: bool) -> tuple[bool, list[str]]:
    done: list[str] = []

    def original(of: Any, empty_cache: bool) -> bool:
        done.append("flushed")
        return True

    return all_groups.flush(original, scheduler(idle), empty_cache=False), done


@pytest.mark.parametrize("idle", [[True, True], [True, False], [False, True, True], [False, False]])
def test_all_ranks_flush_or_none(idle: list[bool], on_ranks: Callable[..., list[Any]]) -> None:
    expected = (True, ["flushed"]) if all(idle) else (False, [])
    assert on_ranks(idle, flush) == [expected] * len(idle)


def test_without_groups_a_rank_asks_nobody(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks([True], flush, groups=1) == [(True, ["flushed"])]
    assert on_ranks([True], lambda idle: all_groups.true_in_all_groups(False), groups=1) == [False]


@pytest.mark.parametrize("idle", [[True, True], [True, False]])
def test_memory_is_released_on_all_ranks_or_none(idle: list[bool], on_ranks: Callable[..., list[Any]]) -> None:
    def release(is_idle: bool) -> None:
        of = scheduler(is_idle)
        all_groups.require_idle(SimpleNamespace(scheduler=of, is_fully_idle=of.is_fully_idle), None)

    found = on_ranks(idle, release)
    if all(idle):
        assert found == [None, None]
    else:
        assert all("the server is not idle" in text for text in found)


@pytest.mark.parametrize(("groups", "stages"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("timeout", [None, 0.0, 5.0])
def test_a_flush_that_waits_is_refused_with_groups_or_stages(
    groups: int, stages: int, timeout: float | None, on_ranks: Callable[..., list[Any]]
) -> None:
    """SGLang's wrapper waits for each rank's own requests."""
    wrapper = SchedulerFlushWrapper(flush_cache=lambda: True, is_fully_idle=lambda: False, send_output=print)
    request = FlushCacheReqInput(timeout_s=timeout)
    handle = inspect.unwrap(SchedulerFlushWrapper.handle)
    (answer,) = on_ranks([True], lambda _: all_groups.flush_at_once(handle, wrapper, request), groups, stages)
    if not timeout:
        assert answer.success
    elif groups == stages == 1:
        assert answer is None, "SGLang answers later"
    else:
        assert not answer.success and "leave it out" in answer.message
