"""Prefix reuse through SGLang's own server is deterministic under concurrency, chunked prefill, overlap, retraction,
abort and flush; and the server reports it.

Two servers: the session's, with overlap scheduling, and in slow tests one without it whose requests are retracted
every few steps. Both have few pages, fewer device slots for tails than there are prefixes, and prefill in chunks of two
pages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from selection.marks import with_slow_marks
from serving.server import SLEEP_ON_IDLE, TAILS, Server, running_server

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

FLAGS = ("--max-total-tokens", "10240", "--max-running-requests", "6", "--chunked-prefill-size", "512", SLEEP_ON_IDLE)
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}


WITH_OVERLAP_ONLY = pytest.mark.parametrize("schedule", ["overlap"], indirect=True, scope="module")
"""For tests of a server's reports, which do not depend on the schedule."""


@pytest.fixture(scope="module", params=["overlap", pytest.param("no-overlap-retracting", marks=pytest.mark.slow)])
def schedule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(
    schedule: str, request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if schedule == "overlap":
        yield request.getfixturevalue("server")
        return
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(checkpoint, log, *FLAGS, "--disable-overlap-schedule", env=TAILS | RETRACT) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def log_begin(server: Server) -> int:
    """Length of the log before this module: other modules have sent invalid requests to the session's server."""
    return len(server.log)


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(count)]


def flush(server: Server) -> None:
    for _ in range(100):
        if requests.post(f"{server.url}/flush_cache", timeout=300).status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the server does not become idle")


def answer(result: dict[str, Any]) -> list[tuple[float, int]]:
    """Return tokens and their log-probabilities, which must be bitwise equal."""
    return [(entry[0], entry[1]) for entry in result["meta_info"]["output_token_logprobs"]]


def cold(server: Server, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    flush(server)
    result = server.generate(prompt, max_new_tokens=tokens)
    assert result["meta_info"]["prefix_cache"][0]["position"] == 0
    return answer(result)


@pytest.mark.parametrize("remainder", with_slow_marks([0, 1, 3, 127, 129, 255], quick=[0, 127, 255]))
def test_cached_equals_cold(server: Server, remainder: int) -> None:
    prefix = some(1, 1024 + remainder)
    prompt = prefix + some(2, 40)
    expected = cold(server, prompt, 6)
    flush(server)
    server.generate(prefix, max_new_tokens=2)
    result = server.generate(prompt, max_new_tokens=6)
    assert result["meta_info"]["prefix_cache"][0]["position"] == 1024
    assert answer(result) == expected


@pytest.fixture(scope="module")
def answers_alone() -> dict[tuple[int, ...], list[tuple[float, int]]]:
    """Answers of prompts alone, filled by the first server; the other server must give the same answers."""
    return {}


def test_concurrent_requests_with_shared_prefixes(
    server: Server, schedule: str, answers_alone: dict[tuple[int, ...], list[tuple[float, int]]]
) -> None:
    """Twelve requests at once over three prefixes: some hit, some race, some wait for a request slot (without
    overlap there are six) or for pages (with overlap, 24); all answer as they do alone."""
    prefixes = [some(10 + i, 520 + 130 * i) for i in range(3)]
    prompts = [prefixes[i % 3] + some(20 + i, 30 + 17 * i) for i in range(12)]
    for prompt in prompts:
        if tuple(prompt) not in answers_alone:
            answers_alone[tuple(prompt)] = cold(server, prompt, 12)
    expected = [answers_alone[tuple(prompt)] for prompt in prompts]
    flush(server)
    with ThreadPoolExecutor(12) as pool:
        for _round in range(2):
            results = list(pool.map(lambda prompt: server.generate(prompt, max_new_tokens=12), prompts))
            assert [answer(r) for r in results] == expected
    assert sum(r["meta_info"]["cached_tokens"] for r in results) > 5000
    assert schedule == "overlap" or sum(r["meta_info"]["num_retractions"] for r in results) > 0


def test_a_conversation(server: Server) -> None:
    """Every turn continues from the last full page of the turn before, which decoding may have filled."""
    history, hits = some(40, 480), []
    for turn in range(4):
        result = server.generate(history, max_new_tokens=40)
        hits.append((result["meta_info"]["prefix_cache"][0]["position"], len(history)))
        expected = answer(result)
        whole = history + [token for _, token in expected]
        history = whole + some(50 + turn, 30)
    for (position, _), (_, before) in zip(hits[1:], hits[:-1], strict=True):
        assert position >= (before + 39) // 256 * 256 - 256
    assert hits[-1][0] == (hits[-2][1] + 39) // 256 * 256
    assert cold(server, history, 8) == answer(server.generate(history, max_new_tokens=8))


def running_requests(server: Server) -> int:
    return requests.get(f"{server.url}/v1/loads", timeout=300).json()["loads"][0]["num_running_reqs"]


@pytest.mark.slow
def test_abort_gives_everything_back(server: Server) -> None:
    """Requests aborted while queued, prefilling and decoding; afterwards every page and every slot is usable again."""
    flush(server)
    prompt = some(60, 3000)

    with ThreadPoolExecutor(8) as pool:
        body = {"sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}}
        calls = [
            pool.submit(
                requests.post,
                f"{server.url}/generate",
                json={**body, "input_ids": prompt[i:]},
                timeout=300,
            )
            for i in range(8)
        ]
        # Abort when some run, and again for requests that a busy machine starts later.
        while not running_requests(server):
            time.sleep(0.05)
        while not all(call.done() for call in calls):
            requests.post(f"{server.url}/abort_request", json={"rid": "", "abort_all": True}, timeout=300)
            time.sleep(0.2)
        statuses = [call.result().status_code for call in calls]
    assert len(statuses) == 8
    expected = cold(server, prompt, 4)
    assert answer(server.generate(prompt, max_new_tokens=4)) == expected
    flush(server)
    assert server.is_alive()


@WITH_OVERLAP_ONLY
def test_salts_are_separate_and_said(server: Server) -> None:
    flush(server)
    prompt = some(70, 600)
    url, sampling = f"{server.url}/generate", {"max_new_tokens": 2, "temperature": 0}

    def ask(**how: str) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": sampling, **how}
        return requests.post(url, json=body, timeout=300).json()["meta_info"]["prefix_cache"][0]

    ask()
    assert ask()["position"] == 512
    salted = ask(extra_key="tenant")
    assert (salted["position"], salted["stopped_by"]) == (0, "salt")
    assert ask(extra_key="tenant")["position"] == 512


@WITH_OVERLAP_ONLY
def test_a_response_says_where_its_hit_ended(server: Server) -> None:
    flush(server)
    shared = some(80, 900)
    server.generate(shared + some(81, 2000), max_new_tokens=2)
    report = server.generate(shared + some(82, 400), max_new_tokens=2)["meta_info"]["prefix_cache"][0]
    assert report == {
        "position": 512,
        "stopped_by": "no tail",
        "tail_from": "device",
        "pages_from": {"device": 512},
        "stored_tokens": 900,
        "differs_at": 900,
        "why": "prompt differs from the stored one at token 900; reused up to token 512: no tail is kept after that",
        "recomputed": {"no tail": 256, "no block": 512, "page remainder": 20},
    }
    again = server.generate(shared + some(83, 400), max_new_tokens=2)["meta_info"]["prefix_cache"][0]
    assert (again["position"], again["stopped_by"]) == (768, "no block")


@WITH_OVERLAP_ONLY
def test_metrics(server: Server) -> None:
    """The figures in Prometheus' format at SGLang's /metrics add up, and the memory is not zero."""
    flush(server)

    def read() -> dict[str, float]:
        lines = requests.get(f"{server.url}/metrics", timeout=300).text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def total(values: dict[str, float], name: str, label: str = "") -> float:
        return sum(value for key, value in values.items() if key.startswith(name) and label in key)

    before = read()
    prompt = some(90, 1300)
    for _ in range(2):
        server.generate(prompt, max_new_tokens=2)
    after = read()

    def gained(name: str, label: str = "") -> float:
        return total(after, name, label) - total(before, name, label)

    assert gained("sglang_dsv4:prefix_hit_tokens_total", 'tail="device"') == 1280
    assert gained("sglang_dsv4:prefix_recomputed_tokens_total", 'reason="no block"') == 1280
    assert gained("sglang_dsv4:prefix_recomputed_tokens_total", 'reason="page remainder"') == 40
    for tier, slots in (("device", 9), ("host", 40)):
        assert total(after, "sglang_dsv4:tail_slots{", f'tier="{tier}"') == slots
        assert total(after, "sglang_dsv4:tail_bytes{", f'tier="{tier}"') > slots * 500_000
    assert total(after, "sglang:kv_cache_memory_usage_gb") > 0


def test_nothing_was_broken_on_the_way(server: Server, log_begin: int) -> None:
    """SGLang's idle check runs the invariants of our tree and store; a leak would have ended the server."""
    flush(server)
    assert server.is_alive()
    assert "is live on SGLang" in server.log and "Dsv4PrefixCache" in server.log
    since = server.log[log_begin:]
    assert "Traceback" not in since, since[since.index("Traceback") :][:3000]


def test_doctor_asks_the_server(server: Server) -> None:
    from sglang_dsv4 import doctor

    lines = doctor.server(server.url)
    assert "radix_cache_backend: dsv4" in lines
    counted = any(line.startswith("sglang_dsv4:tail_slots") for line in lines)
    assert counted != any(line.startswith("no metrics") for line in lines)


@pytest.mark.slow
def test_two_ranks_keep_the_same_prefixes(tmp_path: Path) -> None:
    """Each rank has its own tree and store, which must decide alike; SGLang compares them."""
    write_checkpoint(tmp_path / "model", PRESETS["tiny"], quantised=False)
    prompt = some(95, 860)
    env = TAILS | {"SGLANG_DSV4_TAIL_SLOTS": "4", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with running_server(tmp_path / "model", tmp_path / "log", *FLAGS, "--tp", "2", env=env) as server:
        expected = cold(server, prompt, 8)
        for seed in (1, 2, 3):
            server.generate(prompt[:600] + some(seed, 300), max_new_tokens=2)
            result = server.generate(prompt, max_new_tokens=8)
            assert answer(result) == expected and result["meta_info"]["prefix_cache"][0]["position"] == 768
        flush(server)
        assert server.is_alive() and "Traceback" not in server.log
