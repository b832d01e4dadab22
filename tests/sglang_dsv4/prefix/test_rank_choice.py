"""The rank that gets a request: its prefix, its load, its namespace, and SGLang's controller around it."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct
from sglang.srt.managers.data_parallel_controller import DataParallelController, LoadBalanceMethod
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.sampling.sampling_params import SamplingParams

from dsv4_radix_cache.pages import PAGE_TOKENS
from sglang_dsv4 import env
from sglang_dsv4.prefix import rank_choice
from sglang_dsv4.prefix.rank_choice import COMPUTED_AGAIN, FULL_CACHE_TOKENS, REQUEST_TOKENS, RankChoice

BOTH = [0, 1]


def prompt(first: int, tokens: int) -> list[int]:
    return list(range(first, first + tokens))


def ask(choice: RankChoice, tokens: list[int], key: str | None = None, salt: str | None = None) -> int:
    digests = choice.digests(tokens, key, salt)
    rank = choice.choose(digests, BOTH)
    choice.note(digests, len(tokens), rank)
    return rank


def idle(choice: RankChoice, at: float, capacity: int = 1 << 16) -> None:
    choice.update([LoadSnapshot(timestamp=at, dp_rank=rank, max_total_num_tokens=capacity) for rank in BOTH])


@pytest.fixture
def choice() -> RankChoice:
    return RankChoice(2, now=lambda: 0.0)


def test_turns_of_a_conversation_stay_on_their_rank(choice: RankChoice) -> None:
    """Requests of others come between them, and go where less is cached."""
    conversations, ranks = [prompt(10_000 * i, 700) for i in range(8)], []
    for turn in range(4):
        idle(choice, 1.0 + turn)
        for i, tokens in enumerate(conversations):
            rank = ask(choice, tokens)
            idle(choice, 1.5 + turn + i / 100)
            ranks.append(rank)
            conversations[i] = tokens + prompt(500_000 + 10_000 * i + 300 * turn, 300)
    assert ranks[8:16] == ranks[16:24] == ranks[24:] == ranks[:8]
    assert ranks[:8].count(0) == 4


def test_a_prefix_of_all_requests_reaches_every_rank(choice: RankChoice) -> None:
    idle(choice, 1.0)
    shared, ranks = prompt(0, 16 * PAGE_TOKENS), []
    for i in range(1, 65):  # requests that are computed at once, and decode for ever
        ranks.append(ask(choice, shared + prompt(10_000 * i, 40)))
        running = [LoadSnapshot(timestamp=1.0 + i, dp_rank=r, num_running_reqs=ranks.count(r)) for r in BOTH]
        choice.update(running)
    assert ranks[:3] == [ranks[0]] * 3, "the prefix is found while the rank has little to do"
    assert ranks.index(1 - ranks[0]) <= COMPUTED_AGAIN * 16 * PAGE_TOKENS / REQUEST_TOKENS
    assert 24 <= ranks.count(0) <= 40


def test_a_shared_beginning_does_not_draw_all_conversations(choice: RankChoice) -> None:
    """The ranks are idle, and their caches fill up."""
    shared, ranks = prompt(0, 4 * PAGE_TOKENS), []
    for i in range(1, 41):
        idle(choice, float(i), capacity=100 * PAGE_TOKENS)
        ranks.append(ask(choice, shared + prompt(10_000 * i, 3 * PAGE_TOKENS)))
    assert 15 <= ranks.count(0) <= 25


def test_waiting_tokens_count(choice: RankChoice) -> None:
    idle(choice, 1.0)
    tokens = prompt(0, 4 * PAGE_TOKENS)
    rank = ask(choice, tokens)
    waiting = COMPUTED_AGAIN * 4 * PAGE_TOKENS + FULL_CACHE_TOKENS
    choice.update([LoadSnapshot(timestamp=2.0, dp_rank=rank, num_waiting_uncached_tokens=waiting)])
    assert ask(choice, tokens) == 1 - rank
    idle(choice, 3.0)
    assert {ask(choice, tokens), ask(choice, tokens)} == set(BOTH)


def test_a_snapshot_replaces_only_requests_that_it_has() -> None:
    clock = [10.0]
    choice = RankChoice(2, now=lambda: clock[0])
    ask(choice, prompt(0, 600))
    choice.update([LoadSnapshot(timestamp=10.05, dp_rank=0)])
    assert choice.loads[0].tokens == 600 + REQUEST_TOKENS, "the request may be on its way still"
    choice.update([LoadSnapshot(timestamp=10.2, dp_rank=0, num_running_reqs=1)])
    assert choice.loads[0].tokens == REQUEST_TOKENS
    choice.update([LoadSnapshot(timestamp=10.2, dp_rank=0, num_running_reqs=9)])
    assert choice.loads[0].tokens == REQUEST_TOKENS, "the same snapshot again"


def test_snapshots_are_read_at_most_so_often_even_if_the_clock_is_set_back() -> None:
    clock, read = [100.0], []
    choice = RankChoice(1, now=lambda: clock[0])
    for now, times in ((100.0, 1), (100.0 + 1.5 * rank_choice.REFRESH_S, 2), (50.0, 3), (50.0, 3)):
        clock[0] = now
        choice.refresh(lambda: read.append(1) or [])
        assert len(read) == times, now


def test_requests_are_forgotten_without_a_snapshot() -> None:
    clock = [10.0]
    choice = RankChoice(1, now=lambda: clock[0])
    for number in range(100):
        choice.note([], 50, 0)
        clock[0] += rank_choice.FORGOTTEN_AFTER_S / 10
        assert len(choice.loads[0].handed_out) == min(number + 1, 10)


@pytest.mark.parametrize("other", [("b", None), (None, "b"), ("b", "b")], ids=["extra_key", "cache_salt", "both"])
def test_namespaces_share_nothing(choice: RankChoice, other: tuple[str | None, str | None]) -> None:
    tokens = prompt(0, 700)
    first, second = choice.digests(tokens, None, None), choice.digests(tokens, *other)
    assert not set(first) & set(second)
    choice.note(first, 700, 0)
    assert choice.index.costs(second) == [2 * PAGE_TOKENS] * 2


@pytest.mark.parametrize("overlap", [0, 1], ids=["tokens", "bigrams"])
def test_digests_are_the_trees(overlap: int) -> None:
    """`prefix.tail_nodes` makes them of SGLang's key, bigrams with EAGLE included."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_dsv4.prefix.request_state import chain_of

    for tokens in (0, 1, 255, 256, 257, 512, 513, 700):
        key = RadixKey(array("q", prompt(5, tokens)), "key", is_bigram=bool(overlap), cache_salt="salt")
        chain = chain_of(None, (key.extra_key, key.cache_salt), int(key.is_bigram))
        expected = chain.digests(key.token_ids, len(key) // PAGE_TOKENS)
        assert RankChoice(2, overlap).digests(prompt(5, tokens), "key", "salt") == expected


class Reader:
    def read_all(self) -> list[LoadSnapshot]:
        later = time.time() + 1
        return [LoadSnapshot(timestamp=later, dp_rank=rank, max_total_num_tokens=1 << 16) for rank in range(3)]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's controller without its processes; what it sends is in `sent`."""
    made = DataParallelController.__new__(DataParallelController)
    made.workers, made.status, made.dp_active = ["w0", "w1", "w2"], [True] * 3, [True] * 3
    made._active_workers, made.round_robin_counter = [0, 1, 2], 0
    made.load_snapshot_reader, made.sent = Reader(), []
    memory = SimpleNamespace(
        radix_cache_backend="dsv4", disable_radix_cache=False, enable_hierarchical_cache=False, hicache_size=0
    )
    made.memory = memory
    monkeypatch.setattr(rank_choice, "REFRESH_S", 0.0)
    monkeypatch.setattr("sglang.srt.runtime_context.get_memory", lambda: memory)
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    send = lambda socket, request: made.sent.append(socket)  # noqa: E731
    monkeypatch.setattr(io_struct, "sock_send", send)
    monkeypatch.setattr("sglang.srt.managers.data_parallel_controller.sock_send", send)
    yield made


def send(controller: Any, tokens: list[int] | None, rank: int | None = None, session: str | None = None) -> str:
    turn = io_struct.SessionParams(id=session) if session is not None else None
    request = SimpleNamespace(
        input_ids=tokens, extra_key=None, cache_salt=None, routed_dp_rank=rank, session_params=turn
    )
    rank_choice.dispatch(sglangs_round_robin(), controller, request)
    return controller.sent[-1]


def sglangs_round_robin() -> Callable[..., None]:
    hooked = DataParallelController.round_robin_scheduler
    return getattr(hooked, "__wrapped__", hooked)


def test_the_controller_sends_to_the_chosen_rank(controller: Any) -> None:
    assert send(controller, prompt(0, 700)) == send(controller, prompt(0, 900))
    assert send(controller, prompt(50_000, 700)) != controller.sent[0]
    assert send(controller, None) and send(controller, [1])


def test_the_clients_rank_is_honoured_and_remembered(controller: Any) -> None:
    assert send(controller, prompt(0, 1300), 2) == "w2"
    assert send(controller, prompt(0, 1400)) == "w2"


def test_the_turns_of_a_session_go_to_the_rank_of_the_first(controller: Any) -> None:
    """Each sends its own tokens only, and a rank that has not seen the turn before refuses it: with three ranks, two of
    three turns failed. They are no beginning of another prompt."""
    first = [send(controller, prompt(50_000 * i, 600), session=f"s{i}") for i in range(3)]
    assert sorted(first) == ["w0", "w1", "w2"]
    for turn in range(1, 5):
        for i in (2, 0, 1):
            assert send(controller, prompt(10_000 * turn, 600), session=f"s{i}") == first[i]
    index = rank_choice._choices[controller].index
    assert sum(map(index.stored, range(3))) == 3 * 2, "the pages of the first turns"
    assert send(controller, prompt(0, 40), 2, session="s0") == "w2"
    assert send(controller, prompt(0, 40), session="s0") == "w2", "where the client has sent it"
    controller.status[2] = False
    assert send(controller, prompt(0, 40), session="s0") != "w2"


def test_sessions_are_bounded(choice: RankChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_choice, "MOST_SESSIONS", 2)
    for name in "abc":
        choice.note_session(name, 1)
    assert [choice.rank_of(name) for name in ("a", "b", "c", None)] == [None, 1, 1, None]


def test_a_dead_rank_gets_nothing(controller: Any) -> None:
    assert send(controller, prompt(0, 1300), 1) == "w1"
    controller.status[1] = False
    assert send(controller, prompt(0, 1300)) != "w1"
    controller.workers[0] = None
    controller._active_workers = [2]
    assert {send(controller, prompt(9000 * i, 600)) for i in range(4)} == {"w2"}
    controller.status[2] = False
    with pytest.raises(RuntimeError, match="unavailable"):
        send(controller, prompt(0, 600))


def test_health_checks_go_round_all_ranks_and_leave_the_choice_alone(controller: Any) -> None:
    """Through the function of SGLang that tells them from requests; a check counts neither as load nor as a prefix."""
    controller.dispatching = partial(rank_choice.dispatch, sglangs_round_robin(), controller)
    assert send(controller, prompt(0, 700), 1) == "w1"
    choice = rank_choice._choices[controller]

    def state() -> list[tuple[float, int, int]]:
        return [(load.tokens, len(load.handed_out), choice.index.stored(i)) for i, load in enumerate(choice.loads)]

    before = state()
    controller.refresh_load_budget_on_dispatch, controller.health_round_robin_counter = False, 0
    controller.load_balance_method = LoadBalanceMethod.ROUND_ROBIN
    for number in range(6):
        check = io_struct.TokenizedGenerateReqInput(
            rid=f"{HEALTH_CHECK_RID_PREFIX}_{number}",
            input_text="",
            input_ids=array("q", [0]),
            input_embeds=None,
            token_type_ids=None,
            mm_inputs=None,
            sampling_params=SamplingParams(max_new_tokens=1),
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        controller.dispatching_with_trace(check)
    assert controller.sent[1:] == ["w0", "w1", "w2"] * 2
    assert state() == before
    assert send(controller, prompt(0, 900)) == "w1"


@pytest.mark.parametrize("how", ["switch", "no prefix cache", "another model"])
def test_sglangs_round_robin_stays(controller: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "switch":
        monkeypatch.setenv(rank_choice.VARIABLE, "sglang")
    elif how == "no prefix cache":
        controller.memory.disable_radix_cache = True
    else:
        controller.memory.radix_cache_backend = None
    assert [send(controller, prompt(0, 700)) for _ in range(4)] == ["w0", "w1", "w2", "w0"]


def test_another_word_is_refused(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_choice.VARIABLE, "yes")
    with pytest.raises(ValueError, match=rank_choice.VARIABLE):
        env.choice(rank_choice.VARIABLE)


class Caches:
    """An LRU cache of pages for each rank, whose load is told to the choice after each request."""

    def __init__(self, ranks: int, pages: int) -> None:
        self.pages, self.of_rank, self.hit, self.asked = pages, [dict[bytes, None]() for _ in range(ranks)], 0, 0

    def serve(self, digests: list[bytes], rank: int) -> None:
        cache = self.of_rank[rank]
        self.hit += next((i for i, digest in enumerate(digests) if digest not in cache), len(digests))
        self.asked += len(digests)
        for digest in reversed(digests):
            cache.pop(digest, None)
            cache[digest] = None
        while len(cache) > self.pages:
            del cache[next(iter(cache))]


def hit_rate(ranks: int, pages: int, in_turn: bool = False) -> float:
    """The share of cached pages of conversations with a common beginning, in random order, on caches that are full."""
    rng, clock = random.Random(1), [0.0]
    choice, caches = RankChoice(ranks, now=lambda: clock[0]), Caches(ranks, pages)
    conversations = [prompt(0, 2 * PAGE_TOKENS) for _ in range(30)]
    for number in range(800):
        clock[0] += 1.0
        i = rng.randrange(len(conversations))
        if len(conversations[i]) > 10 * PAGE_TOKENS:  # another one begins
            conversations[i] = prompt(0, 2 * PAGE_TOKENS)
        conversations[i] = conversations[i] + prompt(10_000 + 1000 * number, 300)
        busy = [rng.randrange(3) for _ in range(ranks)]
        capacity = pages * PAGE_TOKENS
        choice.update(
            LoadSnapshot(timestamp=clock[0], dp_rank=r, num_running_reqs=busy[r], max_total_num_tokens=capacity)
            for r in range(ranks)
        )
        digests = choice.digests(conversations[i], None, None)
        rank = number % ranks if in_turn else choice.choose(digests, range(ranks))
        choice.note(digests, len(conversations[i]), rank)
        caches.serve(digests, rank)
    return caches.hit / caches.asked


@pytest.mark.parametrize("pages", [120, 60], ids=["nearly all fit", "half is evicted"])
def test_two_ranks_hit_nearly_as_one_of_twice_the_cache(pages: int) -> None:
    one = hit_rate(1, 2 * pages)
    assert hit_rate(2, pages) >= 0.95 * one
    assert hit_rate(2, pages, in_turn=True) < 0.9 * one


def burst_rate(ranks: int, pages: int, seed: int) -> float:
    """The share of cached pages of conversations whose turns come four at once, to ranks that were idle before."""
    rng, clock = random.Random(seed), [0.0]
    choice, caches = RankChoice(ranks, now=lambda: clock[0]), Caches(ranks, pages)
    histories, turns = [prompt(0, PAGE_TOKENS) for _ in range(12)], [i for i in range(12) for _ in range(4)]
    rng.shuffle(turns)
    for begin in range(0, len(turns), 4):
        clock[0] += 1.0
        capacity = pages * PAGE_TOKENS
        idle_ranks = (LoadSnapshot(timestamp=clock[0], dp_rank=r, max_total_num_tokens=capacity) for r in range(ranks))
        choice.update(idle_ranks)
        for i in sorted(set(turns[begin : begin + 4])):
            histories[i] = histories[i] + prompt(10_000 + 1000 * (begin + i), 600)
            digests = choice.digests(histories[i], None, None)
            rank = choice.choose(digests, range(ranks))
            choice.note(digests, len(histories[i]), rank)
            caches.serve(digests, rank)
    return caches.hit / caches.asked


@pytest.mark.parametrize("weight", [COMPUTED_AGAIN, 1], ids=["as weighted", "too light"])
def test_bursts_do_not_scatter_conversations(weight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_choice, "COMPUTED_AGAIN", weight)
    seeds = range(4)
    share = sum(burst_rate(2, 58, seed) for seed in seeds) / sum(burst_rate(1, 116, seed) for seed in seeds)
    assert share >= 0.97 if weight == COMPUTED_AGAIN else share < 0.95
