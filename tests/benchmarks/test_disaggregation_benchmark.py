"""The benchmark of two servers, and the random trace: what they do when a server fails."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from bench_disaggregation import PairClient, engine
from lib import transfer_rate
from lib.transfer_engines import visible_gpus
from serving.answered_cases import Answer, Case
from serving.pair import needs_nixl
from serving.pd_trace import Trace


class Refusing:
    """A client session in which the prefill server refuses, and the decode server never answers."""

    def __init__(self, url: str) -> None:
        self.url, self.status = url, 400

    async def __aenter__(self) -> Refusing:
        if "decode" in self.url:
            await asyncio.sleep(60)
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def text(self) -> str:
        return "prompt too long"


def test_a_refusal_by_the_prefill_server_is_raised_at_once() -> None:
    session = SimpleNamespace(post=lambda url, json: Refusing(url))
    client, begin = PairClient(session, ("http://prefill", "http://decode"), 9000), time.monotonic()
    with pytest.raises(RuntimeError, match="the prefill server answered 400: prompt too long"):
        asyncio.run(client.generate([1, 2], 4))
    assert time.monotonic() - begin < 10


def test_the_gpus_of_two_servers_are_those_that_the_benchmark_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert [visible_gpus(number) for number in (0, 1)] == ["5,3", "3,5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(1) == "1,0"


def test_an_engine_of_a_test_is_not_called_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(origin="tests/lib/gpu_sockets/mooncake/__init__.py")
    monkeypatch.setattr(sys.modules["bench_disaggregation"], "find_spec", lambda name: spec)
    assert engine("mooncake_tcp") == "tests/lib/gpu_sockets/mooncake/__init__.py, not installed"
    assert importlib.util.find_spec("mooncake") is None, "the installed package is named with its version"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mooncake_tcp", pytest.param("nixl", marks=needs_nixl)])
def test_a_prompt_arrives_as_it_was_sent(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement compares sums of all bytes, so that no rate is of a transfer that did not happen."""
    monkeypatch.setattr(transfer_rate, "ROUNDS", 2)
    rates = transfer_rate.measure([256], ("cpu", "cpu"), backend)
    assert [(rate.pages, rate.gb_s > 0) for rate in rates] == [("anywhere", True), ("in one run", True)]
    monkeypatch.setattr(transfer_rate, "send", lambda *about: None)
    with pytest.raises(RuntimeError, match="256 tokens have not arrived as they were sent"):
        transfer_rate.measure([256], ("cpu", "cpu"), backend)


@pytest.mark.parametrize("is_dead", [False, True], ids=["no server has died", "a server has died"])
def test_an_error_in_a_stream_is_an_outcome_of_the_trace(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error ended the trace where its client would have left; it is right only if a server has died."""
    case = Case((5, 6), (("max_new_tokens", 4),))
    trace = Trace(SimpleNamespace(router="http://router"), {case: Answer([1], [0.0], "length")}, 1)
    trace._one_is_dead = is_dead

    class Stream(SimpleNamespace):
        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    def post(url: str, **how: Any) -> Stream:
        return Stream(status_code=200, iter_lines=lambda: [b'data: {"error": "worker gone"}'])

    monkeypatch.setattr(requests, "post", post)
    trace._client_leaves(case, "r", 30.0)
    assert dict(trace.report.outcomes) == ({"lost with a server": 1} if is_dead else {"client left: failed": 1})
    assert len(trace.report.wrong) == (0 if is_dead else 1)
