"""The speculation benchmark without a GPU: the times it reads in a trace, and its results."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_speculation
import pytest
from bench_speculation import Results, Steps, compared, replays, rows_of, steps
from lib import serve_load
from lib.model_shapes import FULL_SIZE, MODELS, write_config
from lib.serve_load import Reply
from lib.serve_profile import gpu_work
from model.released_configs import FLASH, FLASH_0731

from sglang_dsv4.cpu.random_checkpoint import hf_config
from sglang_dsv4.model_config.config import Config


def trace(verify_us: float, draft_us: float, extend_us: float, gap_us: float, count: int = 4) -> list[dict]:
    """Return a trace of steps with a chain of drafts, a verify step, an eager launch and an extend step, in no order,
    as a GPU's trace is. The host is a step ahead."""
    events, now, launch = [], 1000.0, 7

    def call(name: str) -> dict[str, int]:
        nonlocal launch
        launch += 1
        about = {"correlation": launch}
        events.append({"cat": "cuda_runtime", "name": name, "ts": now - 900.0, "dur": 60.0, "args": about})
        return about

    def graph(kernels: int, total: float) -> None:
        nonlocal now
        about = call("cudaGraphLaunch")
        for _ in range(kernels):
            busy = total / kernels
            events.append({"cat": "kernel", "ts": now, "dur": busy * 0.75, "args": about})
            now += busy

    for _ in range(count):
        graph(30, draft_us)
        graph(200, verify_us)
        events.append({"cat": "kernel", "ts": now, "dur": 8.0, "args": call("cudaLaunchKernel")})
        now += 8
        graph(30, extend_us)
        events.append({"cat": "gpu_memcpy", "ts": now, "dur": 2.0})  # a copy without a launch
        now += gap_us
    return events[::-1]


def test_steps_of_a_trace() -> None:
    events = trace(verify_us=1000, draft_us=200, extend_us=120, gap_us=50)
    assert [replay.kernels for replay in replays(gpu_work(events))] == [30, 200, 30] * 4
    found = steps(events)
    assert found.largest == pytest.approx(1000 - 5 * 0.25)  # the gap after the last kernel comes after the graph's end
    assert found.others == pytest.approx(0.75 * 320 + 10)
    assert set(rows_of("eagle", found, 1400.0)) == {"eagle_verify", "eagle_draft", "eagle_step"}
    assert rows_of("decode", found, 1400.0) == {"decode": found.largest, "decode_step": 1400.0}


@pytest.mark.parametrize(("verify_steps", "step_us"), [(0, 1e4), (10, 2e4)], ids=["decode", "two tokens a step"])
def test_a_step_lasts_as_clients_see_it(verify_steps: int, step_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests that get a token every 10 ms, the first from their prefill; with drafting, two tokens a step. In all
    runs except the second the machine has other load."""
    runs = 0

    class Client:
        async def generate(self, prompt: list[int], new_tokens: int) -> Reply:
            nonlocal runs
            runs += 1
            gap = 0.01 if runs in (3, 4) else 0.013
            times = tuple(1.0 + gap * i for i in range(21))
            return Reply(0.0, times, len(prompt), 0, tuple(range(21)), verify_steps)

    monkeypatch.setattr(serve_load, "run", lambda url, load: asyncio.run(load(Client())))
    assert bench_speculation.step_us("", requests=2) == pytest.approx(step_us)


def test_servers_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are measured once, and steps in every turn; the shortest time of a step is kept."""
    asked, steps_us = [], iter([5.0, 6.0, 4.0, 7.0])

    @contextlib.contextmanager
    def running(contender: str, *arguments: object, **options: object) -> Iterator[SimpleNamespace]:
        asked.append(contender)
        yield SimpleNamespace(url="")

    monkeypatch.setattr(bench_speculation, "running", running)
    monkeypatch.setattr(bench_speculation, "write_models", lambda folder, tiny, full_size: None)
    monkeypatch.setattr(bench_speculation, "step_us", lambda url, requests: next(steps_us))
    monkeypatch.setattr(
        bench_speculation,
        "measure",
        lambda server, work, requests: rows_of(work, Steps(3.0, 1.0), bench_speculation.step_us("", requests)),
    )
    arguments = argparse.Namespace(
        **{"models": tmp_path, "tiny": True, "full_size": False, "deterministic": False, "works": ["dspark"]},
        **{"algorithms": ["dspark"]},
        **{"requests": [1], "turns": 2, "contenders": ["ours", "builtin"], "builtin_flags": "", "flags": []},
        **{"port": 1, "logs": tmp_path, "out": tmp_path / "out.json"},
    )
    results = Results({})
    bench_speculation.run(arguments, results)
    assert asked == ["ours", "builtin", "ours", "builtin"]
    assert results.times["dspark_verify", 1] == {"ours": 3.0, "builtin": 3.0}
    assert results.times["dspark_step", 1] == {"ours": 4.0, "builtin": 6.0}


def test_a_trace_without_graphs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="0 replays of a CUDA graph"):
        steps([{"cat": "kernel", "ts": i, "dur": 1.0, "args": {"correlation": i}} for i in range(100)])
    with pytest.raises(RuntimeError, match="2 of the largest"):
        steps(trace(1000, 200, 120, 50, count=2))


def test_where_speculation_pays(tmp_path: Path) -> None:
    results = Results({})
    results.note("ours", 16, rows_of("decode", Steps(2000.0, 10.0), 2500.0))
    results.note("ours", 16, rows_of("dspark", Steps(2400.0, 900.0), 5000.0))
    results.note("builtin", 16, rows_of("dspark", Steps(2500.0, 900.0), 6000.0))
    results.note("ours", 1, rows_of("dspark", Steps(1.0, 2.0), 3.0))  # no decode step to divide by
    written = results.as_json()
    assert written["pays"] == [{"algorithm": "dspark", "requests": 16, "ours": 2.0, "builtin": None}]
    assert {"work": "decode", "requests": 16, "ours_us": 2000.0, "builtin_us": None} in written["rows"]
    again = Results(written)
    again.note("builtin", 16, rows_of("decode", Steps(2000.0, 10.0), 3000.0))
    assert again.as_json()["pays"][0] == {"algorithm": "dspark", "requests": 16, "ours": 2.0, "builtin": 2.0}
    for us in (2800.0, 3200.0):  # measured again, in turns
        again.note("builtin", 16, {"decode_step": us}, again=True)
    assert again.times["decode_step", 16] == {"ours": 2500.0, "builtin": 2800.0}


def test_answers_that_differ_are_counted() -> None:
    plain = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert compared(plain, plain)["mismatches"] == 0
    found = compared(plain, [[1, 2, 3], [4, 0, 6], [0, 8, 9]])
    assert (found["mismatches"], found["after"]) == (2, [0, 1])


@pytest.mark.parametrize(("name", "release"), [("april", FLASH), ("dspark", FLASH_0731)])
def test_the_full_size_is_the_releases(name: str, release: dict[str, Any]) -> None:
    written = hf_config(FULL_SIZE[name])
    assert {field: list(v) if isinstance(v := written[field], tuple) else v for field in release} == release


@pytest.mark.parametrize("name", MODELS)
def test_its_models_are_legal(name: str, tmp_path: Path) -> None:
    """Dimensions of V4-Flash, six of its layers."""
    from transformers import AutoConfig

    write_config(tmp_path, MODELS[name])
    config = Config.from_hf(AutoConfig.from_pretrained(tmp_path))
    assert (config.hidden_size, config.num_hidden_layers, config.n_routed_experts) == (4096, 6, 256)
    assert (config.dspark is not None) == (name == "dspark")
