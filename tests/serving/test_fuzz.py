"""Thousands of generated requests over all public routes: the server goes on, and known answers keep their bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import requests
from serving.fuzz import LEFT_OUT, Fuzzer, send
from serving.server import MAX_RUNNING, POOL_TOKENS, SLEEP_ON_IDLE, TAILS, Server, output_logprobs, running_server

KNOWN = {"short": [0, 7, 8, 9], "two-pages": [0, *(3 + i % 800 for i in range(520))]}
BETWEEN = 25
"""Generated requests between two known answers."""


def answers(server: Server) -> dict[str, tuple[list[int], list[float]]]:
    """Return greedy and sampled answers, of a prefix that is stored and of one that is not."""
    found = {}
    for name, ids in KNOWN.items():
        for how, parameters in (("greedy", {}), ("drawn", {"temperature": 1.0, "sampling_seed": 5})):
            result = server.generate(ids, max_new_tokens=6, **parameters)
            found[f"{name}, {how}"] = (result["output_ids"], output_logprobs(result))
    return found


def fuzz(server: Server, seed: int, count: int) -> Counter[int]:
    """Send `count` requests; return their status codes. If the server ends or does not answer, `requests` raises."""
    fuzzer = Fuzzer(requests.get(f"{server.url}/openapi.json", timeout=300).json(), seed)
    known, statuses = answers(server), Counter()
    for number in range(count):
        method, path, options = fuzzer.request()
        try:
            statuses[send(server.url, method, path, options).status_code] += 1
        except requests.RequestException as error:
            pytest.fail(f"request {number} of seed {seed}, {method} {path} {str(options)[:2000]}: {error!r}")
        if number % BETWEEN == BETWEEN - 1:
            assert answers(server) == known, f"after request {number} of seed {seed}: {method} {path}"
    assert server.is_alive() and answers(server) == known
    return statuses


def test_some_hundred_requests(server: Server) -> None:
    statuses = fuzz(server, seed=1, count=300)
    assert statuses[200] > 20 and statuses[400] > 100, statuses


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_thousands_of_requests(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING), "--enable-metrics")
    flags += ("--chunked-prefill-size", "512", "--constrained-json-disable-any-whitespace", SLEEP_ON_IDLE)
    with running_server(checkpoint, tmp_path / "log", *flags, env=TAILS) as server:
        statuses = fuzz(server, seed, 800)
        assert statuses[200] > 60 and statuses[400] > 300, statuses


def test_routes_left_out_exist(server: Server) -> None:
    """Otherwise the list would keep a reason whose route has been renamed."""
    paths = requests.get(f"{server.url}/openapi.json", timeout=300).json()["paths"]
    assert set(LEFT_OUT) <= set(paths)
