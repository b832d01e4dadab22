"""Limits of a grammar's compilation, through SGLang's manager of grammars with a backend whose compilations wait.

Some tests have two ranks, in two threads: they exchange what they know as SGLang's ranks do, and must end alike.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject, InvalidGrammarObject
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dsv4.requests.refused import grammars

LIMIT_S = 1.0
AT_ONCE = 1  # rounds of the scheduler


class Grammar(BaseGrammarObject):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def copy(self) -> Grammar:
        return Grammar(self.text)


class Backend(BaseGrammarBackend):
    """Regular expressions are compiled once they are released, all others at once; "(" is none."""

    def __init__(self, threads: int, *slow: str) -> None:
        super().__init__()
        self.executor = ThreadPoolExecutor(threads)
        self.slow = {text: threading.Event() for text in slow}
        self.compiled: Counter[str] = Counter()
        self.niceness = 0

    def dispatch_regex(self, key_string: str) -> BaseGrammarObject:
        self.compiled[key_string] += 1
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if key_string in self.slow:
            assert self.slow[key_string].wait(60)
        return InvalidGrammarObject("not a regex") if key_string == "(" else Grammar(key_string)


class Request:
    """The part of SGLang's request that its manager of grammars uses."""

    def __init__(self, regex: str, rid: str = "a") -> None:
        self.sampling_params = SimpleNamespace(
            json_schema=None, regex=regex, ebnf=None, structural_tag=None, custom_params=None
        )
        self.rid, self.origin_input_ids, self.require_reasoning = rid, [0], False
        self.grammar: Any = None
        self.grammar_key: Any = None
        self.grammar_wait_ct, self.to_finish = 0, None

    def finished(self) -> bool:
        return False  # SGLang ends an aborted request at its next forward

    def set_finish_with_abort(self, message: str) -> None:
        self.grammar, self.to_finish = None, FINISH_ABORT(message, 400)

    @property
    def reason(self) -> str:
        return self.to_finish.message if self.to_finish else ""


class Rank:
    """A scheduler's manager of grammars; `others`: how many ranks there are beside it."""

    def __init__(self, backend: Backend, others: int = 0) -> None:
        self.backend = backend
        self.manager = manager = GrammarManager.__new__(GrammarManager)
        manager.scheduler = SimpleNamespace(model_config=None)
        manager.grammar_backend, manager.grammar_queue = backend, []
        manager._enable_strict_thinking = False
        manager.grammar_sync_size, manager.grammar_sync_group = 1 + others, None
        manager.pp_rank, manager.pp_size, manager.pp_group = 0, 1, None
        manager.SGLANG_GRAMMAR_POLL_INTERVAL, manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = 0.002, 10_000

    def take(self, *requests: Request) -> None:
        for request in requests:
            self.manager.process_req_with_grammar(request)

    def begin(self, *requests: Request) -> None:
        """Take requests, and wait until threads compile their grammars: a compilation without a thread is dropped with
        its request."""
        before = self.backend.compiled.total()
        self.take(*requests)
        wait_until(lambda: self.backend.compiled.total() == before + len(requests))

    def run(self, *requests: Request) -> int:
        """Do rounds until the requests have left the queue; returns the number of rounds."""
        begin, rounds = time.monotonic(), 0
        while any(request in self.manager.grammar_queue for request in requests):
            assert time.monotonic() - begin < 30
            self.manager.get_ready_grammar_requests()
            rounds += 1
        return rounds

    def ask(self, regex: str) -> tuple[Request, int]:
        request = Request(regex)
        self.take(request)
        return request, self.run(request)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """The hooks as the table installs them, also where no test before has loaded the plugin; SGLang's own functions."""
    functions = {}
    monkeypatch.setattr(grammars, "live_parts", lambda: object())
    monkeypatch.setattr(grammars, "limit_s", lambda: LIMIT_S)
    for owner, name, ours in (
        (BaseGrammarBackend, "get_cached_or_future_value", grammars.compile_within_limit),
        (GrammarManager, "get_ready_grammar_requests", grammars.refuse_slow_grammars),
    ):
        theirs = functions[name] = inspect.unwrap(getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *args, ours=ours, theirs=theirs: ours(theirs, *args))
    return functions


def test_a_slow_grammar_is_refused_and_used_once_it_is_compiled() -> None:
    """SGLang would refuse it for good."""
    rank = Rank(Backend(4, "slow" * 50))
    begin = time.monotonic()
    first, _ = rank.ask("slow" * 50)
    assert LIMIT_S <= time.monotonic() - begin < LIMIT_S + 10
    assert "This regex grammar of 200 characters takes longer than 1.0 s (SGLANG_DSV4_GRAMMAR_SECONDS)" in first.reason
    for _ in range(3):
        again, rounds = rank.ask("slow" * 50)
        assert again.reason == first.reason and rounds == AT_ONCE
    other, _ = rank.ask("a")
    assert not other.reason and other.grammar.text == "a"
    rank.backend.slow["slow" * 50].set()
    wait_until(lambda: not beyond(rank))
    last, _ = rank.ask("slow" * 50)
    assert not last.reason and last.grammar.text == "slow" * 50
    assert rank.backend.compiled["slow" * 50] == 1
    assert set(rank.backend.cache) == {("regex", "a"), ("regex", "slow" * 50)}


def test_a_grammar_that_is_compiled_while_its_request_is_refused(own: dict[str, Callable[..., Any]]) -> None:
    """SGLang's cache would have it under the text that is shown in the log, on one rank."""
    rank = Rank(Backend(2, "slow" * 50))
    request = Request("slow" * 50)
    rank.take(request)
    time.sleep(LIMIT_S)

    def late(manager: GrammarManager) -> list[Any]:
        rank.backend.slow["slow" * 50].set()
        wait_until(lambda: not beyond(rank) and all(one.result.done() for one in compilations(rank)))
        return own["get_ready_grammar_requests"](manager)

    assert grammars.refuse_slow_grammars(late, rank.manager) == [request]
    assert "takes longer" in request.reason and rank.backend.cache == {}
    again, _ = rank.ask("slow" * 50)
    assert again.grammar.text == "slow" * 50 and rank.backend.compiled["slow" * 50] == 1
    assert list(rank.backend.cache) == [("regex", "slow" * 50)]


def test_requests_with_the_same_grammar_share_a_compilation() -> None:
    rank = Rank(Backend(2, "slow"))
    requests = [Request("slow", rid) for rid in "abcd"]
    rank.take(*requests)
    rank.manager.abort_requests(SimpleNamespace(abort_all=False, rid="b"))
    rank.backend.slow["slow"].set()
    rank.run(*requests)
    assert [request.reason for request in requests] == ["", "Aborted by AbortReq.", "", ""]
    objects = {id(request.grammar) for request in requests if not request.reason}
    assert len(objects) == 3 and rank.backend.compiled["slow"] == 1


def test_slow_grammars_leave_threads_to_others() -> None:
    """At most half of the threads, also for clients that don't wait for an answer."""
    slow = [f"slow{n}" for n in range(4)]
    rank = Rank(Backend(4, *slow))
    known, _ = rank.ask("known")
    assert not known.reason
    rank.begin(*[Request(text, text) for text in slow[:2]])
    rank.manager.abort_requests(SimpleNamespace(abort_all=False, rid="slow1"))
    rank.run(*rank.manager.grammar_queue)
    refused, rounds = rank.ask("new")
    assert "as many as may be at a time: send this regex grammar again later" in refused.reason and rounds == AT_ONCE
    assert not rank.ask("known")[0].reason and rank.backend.compiled["new"] == 0
    rank.backend.slow["slow0"].set()
    wait_until(lambda: beyond(rank) < 2)
    assert not rank.ask("new")[0].reason
    for event in rank.backend.slow.values():
        event.set()


def test_a_compilation_that_was_not_begun_is_dropped() -> None:
    rank = Rank(Backend(1, "slow"))
    requests = [Request("slow"), Request("behind")]
    rank.take(*requests)
    rank.run(*requests)
    assert all("takes longer" in request.reason for request in requests)
    rank.backend.slow["slow"].set()
    wait_until(lambda: not beyond(rank))
    assert rank.backend.compiled["behind"] == 0
    assert not rank.ask("behind")[0].reason


def test_what_is_compiled_too_late_is_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "limit_s", lambda: 0.01)
    monkeypatch.setattr(grammars, "MOST_KEPT", 2)
    rank = Rank(Backend(2, "0", "1", "2", "3"))
    for text, event in rank.backend.slow.items():
        request = Request(text)
        rank.begin(request)
        rank.run(request)
        assert request.reason
        event.set()
        wait_until(lambda: not beyond(rank))
    rank.begin(Request("0"))
    assert rank.backend.compiled == {"0": 2, "1": 1, "2": 1, "3": 1}


def test_errors_are_those_of_sglang() -> None:
    rank = Rank(Backend(1))
    for _ in range(2):
        assert rank.ask("(")[0].reason == "Failed to compile regex grammar: not a regex"


def test_rounds_of_the_scheduler_are_no_limit() -> None:
    rank = Rank(Backend(1, "slow"))
    rank.manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = 3
    request = Request("slow")
    rank.take(request)
    for _ in range(10):
        rank.manager.get_ready_grammar_requests()
    assert request in rank.manager.grammar_queue
    rank.backend.slow["slow"].set()
    rank.run(request)
    assert not request.reason


def test_without_a_limit_sglang_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "limit_s", lambda: None)
    rank = Rank(Backend(1, "slow"))
    rank.manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = 3
    request, _ = rank.ask("slow")
    assert request.reason.startswith(grammars.TIMED_OUT)
    rank.backend.slow["slow"].set()


def test_threads_that_compile_have_a_lower_priority() -> None:
    rank = Rank(Backend(1))
    rank.ask("a")
    assert rank.backend.niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + grammars.NICE)


@pytest.mark.parametrize(("text", "seconds"), [(None, 30), ("5", 5), ("0", None)])
def test_the_switch(text: str | None, seconds: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv(grammars.SECONDS, raising=False)
    if text is not None:
        monkeypatch.setenv(grammars.SECONDS, text)
    assert grammars.limit_s() == seconds


def test_a_wrong_value_of_the_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(grammars.SECONDS, "soon")
    with pytest.raises(ValueError, match=grammars.SECONDS):
        grammars.limit_s()


# ---- two ranks


class Ranks:
    """Two ranks whose rounds run in two threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
        self.ranks = [Rank(backend, others=1) for backend in backends]
        self.pool, self.barrier = ThreadPoolExecutor(2), threading.Barrier(2, timeout=30)
        self.here, self.shared = threading.local(), [None, None]
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)

    def gather(self, result: list, mine: object, group: object) -> None:
        self.shared[self.here.rank] = mine
        self.barrier.wait()
        result[:] = self.shared
        self.barrier.wait()

    def both(self, work: Callable[[Rank], Any]) -> list[Any]:
        def of_rank(number: int) -> Any:
            self.here.rank = number
            return work(self.ranks[number])

        return list(self.pool.map(of_rank, range(2)))

    def ask(self, regex: str) -> list[Request]:
        return [request for request, _ in self.both(lambda rank: rank.ask(regex))]


def test_ranks_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has compiled the grammar in time, the other one has not; nothing is compiled twice."""
    quick, slow = Backend(2), Backend(2, "slow")
    ranks = Ranks(monkeypatch, quick, slow)
    for _ in range(3):
        assert all("takes longer" in request.reason for request in ranks.ask("slow"))
        assert quick.cache == slow.cache == {}
    slow.slow["slow"].set()
    wait_until(lambda: not beyond(ranks.ranks[1]))
    assert [request.grammar.text for request in ranks.ask("slow")] == ["slow", "slow"]
    assert quick.compiled == slow.compiled == {"slow": 1}
    assert list(quick.cache) == list(slow.cache) == [("regex", "slow")]


def test_ranks_decide_alike_where_one_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = Backend(2), Backend(2, "slow")
    ranks = Ranks(monkeypatch, *backends)
    ranks.ask("slow")
    for _ in range(2):
        assert all("again later" in request.reason for request in ranks.ask("new"))
    backends[1].slow["slow"].set()
    wait_until(lambda: not beyond(ranks.ranks[1]))
    assert [request.grammar.text for request in ranks.ask("new")] == ["new", "new"]


def compilations(rank: Rank) -> list[grammars.Compilation]:
    return list(grammars._of_backend[rank.backend]._known.values())


def beyond(rank: Rank) -> int:
    return grammars._of_backend[rank.backend].beyond()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
