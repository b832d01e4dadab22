"""Conversations over two replicas with a prefix cache each: they hit as on one server with twice the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest
import requests
from serving.groups import some
from serving.server import SLEEP_ON_IDLE, Server, running_server

from sglang_dsv4.prefix import rank_choice

pytestmark = pytest.mark.slow
CONVERSATIONS, TURNS, AT_ONCE, TURN_TOKENS = 8, 4, 4, 600
PAGES = 36
"""Pages of one replica's pool: half of what all conversations have in the end."""


def flags(replicas: int, pages: int) -> tuple[str, ...]:
    return (
        *("--dp-size", str(replicas), "--max-total-tokens", str(256 * (pages + 2)), "--max-running-requests", "8"),
        *("--chunked-prefill-size", "512", SLEEP_ON_IDLE),
    )


@pytest.fixture(scope="module")
def replicas(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("replicas") / "log"
    env = {"SGLANG_DSV4_TAIL_INTERVAL": "256"}
    with running_server(checkpoint, log, *flags(2, PAGES), env=env) as server:
        yield server


def hit_rate(server: Server) -> tuple[float, list[set[int]]]:
    """Hold the conversations, a few turns at once in random order; return the share of cached tokens of all prompts,
    and the ranks of each conversation."""
    rng, lock = random.Random(3), Lock()
    shared, cached, prompted = some(99, 256), 0, 0
    histories, ranks = [list(shared) for _ in range(CONVERSATIONS)], [set() for _ in range(CONVERSATIONS)]
    order = [i for i in range(CONVERSATIONS) for _ in range(TURNS)]
    rng.shuffle(order)

    def turn(job: tuple[int, int]) -> None:
        nonlocal cached, prompted
        number, i = job
        tokens = histories[i] + some(1000 + number, TURN_TOKENS)
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        response = requests.post(
            f"{server.url}/generate", json={"input_ids": tokens, "sampling_params": sampling}, timeout=300
        )
        response.raise_for_status()
        result = response.json()
        with lock:
            histories[i] = tokens + result["output_ids"]
            cached += result["meta_info"]["cached_tokens"]
            prompted += len(tokens)
            ranks[i].add(result["meta_info"].get("dp_rank") or 0)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for begin in range(0, len(order), AT_ONCE):
            batch = list(enumerate(order))[begin : begin + AT_ONCE]
            list(pool.map(turn, {i: (number, i) for number, i in batch}.values()))  # one turn of a conversation at once
    return cached / prompted, ranks


def test_conversations_hit_as_with_one_cache_of_twice_the_size(
    replicas: Server, checkpoint: Path, tmp_path: Path
) -> None:
    over_two, ranks = hit_rate(replicas)
    with running_server(
        checkpoint, tmp_path / "log", *flags(1, 2 * PAGES), env={"SGLANG_DSV4_TAIL_INTERVAL": "256"}
    ) as one:
        on_one, _ = hit_rate(one)
    assert on_one > 0.4
    assert over_two >= 0.95 * on_one, (over_two, on_one, ranks)
    share = sum(ranks_of == {0} for ranks_of in ranks) / CONVERSATIONS
    assert 0.2 <= share <= 0.8, f"conversations of rank 0: {share}"


def test_the_log_names_the_choice_and_its_switch(replicas: Server) -> None:
    assert f"most of their prompt is cached ({rank_choice.VARIABLE}=sglang" in replicas.log


@pytest.mark.parametrize("rank", [2, -1, "zero", 1.5])
def test_a_rank_that_does_not_exist_gets_a_400(replicas: Server, rank: object) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": rank}
    assert requests.post(f"{replicas.url}/generate", json=body, timeout=60).status_code == 400
    for rank in (0, 1):
        body["routed_dp_rank"] = rank
        answer = requests.post(f"{replicas.url}/generate", json=body, timeout=60)
        assert answer.json()["meta_info"]["dp_rank"] == rank


@pytest.mark.parametrize("header", ["2", "-1", "zero"])
def test_a_header_with_a_rank_that_does_not_exist_gets_a_400(replicas: Server, header: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    response = requests.post(
        f"{replicas.url}/v1/chat/completions", json=body, headers={"X-Data-Parallel-Rank": header}, timeout=60
    )
    assert response.status_code == 400, response.text
    assert replicas.is_alive()
