"""Prefixes beyond the device through SGLang's own server: deterministic under concurrency, aborts and flushes, found
again by the next server, and ignored by a server with other weights.

Ten pages on the device, some thirty in host memory, and files.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import requests
from serving.server import (
    SLEEP_ON_IDLE,
    TAILS,
    VOCAB_SIZE,
    Server,
    account,
    flush,
    output_logprobs,
    running_server,
    stop,
    wait_for_files,
)

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE

FLAGS = ("--max-total-tokens", "3072", "--max-running-requests", "6", "--chunked-prefill-size", "512", SLEEP_ON_IDLE)
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
FILES = (*TIERS, "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(count)]


def answer(result: dict[str, Any]) -> list[Any]:
    return [result["output_ids"], output_logprobs(result)]


def starter(checkpoint: Path, folder: Path, tmp: Path) -> Callable[..., AbstractContextManager[Server]]:
    env = TAILS | {FOLDER_VARIABLE: str(folder)}
    return lambda *flags: running_server(checkpoint, tmp / "log", *FLAGS, *flags, env=env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with starter(checkpoint, folder, tmp_path_factory.mktemp("server"))(*FILES, "--enable-metrics") as running:
        yield running


PROMPT = some(1, 1100)


@pytest.mark.slow
def test_from_host_memory_from_files_and_after_a_restart(
    server: Server, checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    """One prompt, four times: cold; from host memory after other requests filled the pool; from files after a flush;
    from files by another server, while the first one is killed in the middle of writing."""
    cold = server.generate(PROMPT, max_new_tokens=6)
    assert account(cold)["position"] == 0
    for seed in range(10, 14):
        server.generate(some(seed, 900), max_new_tokens=2)
    again = server.generate(PROMPT, max_new_tokens=6)
    assert answer(again) == answer(cold)
    assert account(again)["position"] == 1024 and account(again)["pages_from"] == {"host": 1024}
    assert again["meta_info"]["cached_tokens_details"]["host"] == 1024

    assert wait_for_files(folder) > 20
    flush(server)
    again = server.generate(PROMPT, max_new_tokens=6)
    assert answer(again) == answer(cold)
    assert account(again)["position"] == 1024 and account(again)["pages_from"] == {"storage": 1024}
    again = server.generate(PROMPT, max_new_tokens=6)
    assert account(again)["pages_from"] == {"device": 1024}

    text = requests.get(f"{server.url}/metrics", timeout=60).text
    counted = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    for name in ("prefix_page_tokens_total", "prefix_tier_hits_total", "prefix_tier_bytes_total", "host_pages"):
        assert f"sglang_dsv4:{name}" in counted, name
    assert server.is_alive() and "Traceback" not in server.log

    with ThreadPoolExecutor(3) as pool:
        for seed in range(90, 93):
            pool.submit(
                lambda prompt: requests.post(f"{server.url}/generate", json={"input_ids": prompt}), some(seed, 1500)
            )
        time.sleep(1)
        os.kill(server.process.pid, signal.SIGKILL)
        stop(server.process)
    with starter(checkpoint, folder, tmp_path)(*FILES) as second:
        again = second.generate(PROMPT, max_new_tokens=6)
        assert answer(again) == answer(cold)
        assert account(again)["position"] == 1024 and account(again)["pages_from"] == {"storage": 1024}
        assert "is of another server" not in second.log and "Traceback" not in second.log


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_many_at_once(checkpoint: Path, tmp_path: Path, policy: str) -> None:
    """Four rounds of twelve requests over six prefixes, six at a time in a pool that holds two; some are aborted, and
    between the rounds the cache is flushed or not: loads, saves, evictions, fetches and aborts at once."""
    prefixes = [some(20 + i, 600 + 140 * i) for i in range(6)]
    prompts = [prefixes[i % 6] + some(40 + i, 20 + 9 * i) for i in range(12)]
    start = starter(checkpoint, tmp_path / "prefixes", tmp_path)
    with start("--disable-radix-cache") as server:
        expected = [answer(server.generate(prompt, max_new_tokens=8)) for prompt in prompts]
    with start(*FILES, "--hicache-write-policy", policy) as server:
        tiers: dict[str, int] = {}

        def one(i: int) -> None:
            result = server.generate(prompts[i], max_new_tokens=8)
            assert answer(result) == expected[i], f"prompt {i}, {account(result)}"
            for tier, tokens in account(result)["pages_from"].items():
                tiers[tier] = tiers.get(tier, 0) + tokens

        def aborted(i: int) -> None:
            try:
                body = {"input_ids": prompts[i], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
                requests.post(f"{server.url}/generate", json=body, timeout=0.3)
            except requests.RequestException:
                pass

        with ThreadPoolExecutor(15) as pool:
            for _round in range(4):
                jobs = [pool.submit(one, i) for i in range(12)] + [pool.submit(aborted, i) for i in range(3)]
                for job in jobs:
                    job.result()
                if _round == 1:
                    flush(server)
        assert tiers.get("host", 0) + tiers.get("storage", 0) > 2000, tiers
        flush(server)
        assert server.is_alive() and "Traceback" not in server.log


@pytest.mark.slow
def test_other_weights_find_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """The same config and folder: the log says what differs."""
    from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

    other = tmp_path / "other"
    write_checkpoint(other, PRESETS["tiny"], seed=5)
    folder = tmp_path / "prefixes"
    with starter(checkpoint, folder, tmp_path)(*FILES) as server:
        server.generate(PROMPT, max_new_tokens=2)
        assert wait_for_files(folder) >= 5
    with starter(other, folder, tmp_path)(*FILES) as server:
        assert account(server.generate(PROMPT, max_new_tokens=2))["position"] == 0
        assert "is of another server and not read: other weights" in server.log


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Rank 0 writes, both ranks read, and both trees stay equal (SGLang compares them)."""
    from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

    write_checkpoint(tmp_path / "model", PRESETS["tiny"], quantised=False)
    folder = tmp_path / "prefixes"
    start = starter(tmp_path / "model", folder, tmp_path)
    flags = (*FILES, "--tp", "2")
    with start(*flags) as server:
        cold = server.generate(PROMPT, max_new_tokens=6)
        for seed in range(10, 14):
            server.generate(some(seed, 900), max_new_tokens=2)
        again = server.generate(PROMPT, max_new_tokens=6)
        assert answer(again) == answer(cold) and account(again)["pages_from"] == {"host": 1024}
        assert wait_for_files(folder) > 20 and server.is_alive() and "Traceback" not in server.log
    with start(*flags) as server:
        again = server.generate(PROMPT, max_new_tokens=6)
        assert answer(again) == answer(cold) and account(again)["pages_from"] == {"storage": 1024}
        flush(server)
        assert server.is_alive() and "Traceback" not in server.log
