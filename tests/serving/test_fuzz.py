"""Thousands of generated requests over all public routes: the server goes on, and known answers keep their bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import requests
from serving.fuzz import LEFT_OUT, Fuzzer, send
from serving.server import MAX_RUNNING, POOL_TOKENS, SLEEP_ON_IDLE, TAILS, Server, output_logprobs, running_server

KNOWN = {"short": [0, 7, 8, 9], "two-pages": [0, *(3 + i % 800 for i in range(520))]}
BETWEEN, BETWEEN_WRONG = 25, 100
"""Invalid requests do not change a known answer: requests drawn at random, and valid ones with one wrong field."""


def answers(server: Server) -> dict[str, tuple[list[int], list[float]]]:
    """Return greedy and sampled answers, of a prefix that is stored and of one that is not."""
    found = {}
    for name, ids in KNOWN.items():
        for how, parameters in (("greedy", {}), ("drawn", {"temperature": 1.0, "sampling_seed": 5})):
            result = server.generate(ids, max_new_tokens=6, **parameters)
            found[f"{name}, {how}"] = (result["output_ids"], output_logprobs(result))
    return found


def fuzz(server: Server, seed: int, drawn: int, wrong: int | None) -> Counter[int]:
    """Send requests; return their status codes. If the server ends or does not answer, `requests` raises.

    Args:
        server: the server.
        seed: of the requests.
        drawn: number of requests of `Fuzzer.request`.
        wrong: number of requests of `Fuzzer.wrong_fields`; None for all of them.
    """
    fuzzer = Fuzzer(requests.get(f"{server.url}/openapi.json", timeout=300).json(), seed)
    known, statuses, faults = answers(server), Counter(), []
    sent = [fuzzer.request() for _ in range(drawn)] + fuzzer.wrong_fields()[:wrong]
    for number, (method, path, options) in enumerate(sent):
        said = f"request {number} of seed {seed}, {method} {path} {str(options)[:2000]}"
        try:
            response = send(server.url, method, path, options)
        except requests.RequestException as error:
            pytest.fail(f"{said}: {error!r}")
        statuses[response.status_code] += 1
        if response.status_code >= 500:
            faults.append(f"{said}: {response.status_code} {response.text[:500]}")
        if (number + 1) % (BETWEEN if number < drawn else BETWEEN_WRONG) == 0:
            assert answers(server) == known, f"after {said}"
    assert server.is_alive() and answers(server) == known
    assert not faults, "\n".join(faults)
    return statuses


def test_some_hundred_requests(server: Server) -> None:
    statuses = fuzz(server, seed=1, drawn=90, wrong=90)
    assert statuses[200] > 20 and statuses[400] > 100, statuses


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "drawn", "wrong"), [(2, 800, 0), (3, 800, 0), (4, 0, None)])
def test_thousands_of_requests(checkpoint: Path, tmp_path: Path, seed: int, drawn: int, wrong: int | None) -> None:
    """Every field of every route gets a value of every kind: more than 5,000 requests."""
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING), "--enable-metrics")
    flags += ("--chunked-prefill-size", "512", "--constrained-json-disable-any-whitespace", SLEEP_ON_IDLE)
    with running_server(checkpoint, tmp_path / "log", *flags, env=TAILS) as server:
        statuses = fuzz(server, seed, drawn, wrong)
        assert statuses[200] > 60 and statuses[400] > 300, statuses
        assert drawn or statuses.total() > 5000, statuses


def test_routes_left_out_exist(server: Server) -> None:
    """A renamed route would leave its reason in the list unused."""
    paths = requests.get(f"{server.url}/openapi.json", timeout=300).json()["paths"]
    assert set(LEFT_OUT) <= set(paths)
