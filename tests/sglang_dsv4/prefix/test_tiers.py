"""Prefixes beyond the device, without a model: a hit returns the prefix's own pages, up to its deepest tail.

The tree is SGLang's, and its invariants and ours are checked after every step (`tiered.TieredEngine`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cache.host_waits import READS, NoWaiting, OnDevice
from lib.prefix_replay import PAGE, Running
from prefix.checked_engine import longest_stored, retract_all, retract_or_finish, some
from prefix.tiered import OTHERS, PROMPT, Backend, TieredEngine, push_out
from prefix.waiting import handle
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_dsv4.prefix.host_tier import WritePolicy


@pytest.fixture
def engine(policy: WritePolicy) -> Iterator[TieredEngine]:
    """An engine with sixteen pages on the device and three times as many in host memory."""
    made = TieredEngine.made(pages=16, host_pages=48, policy=policy, interval_tokens=2 * PAGE)
    yield made
    made.check_idle()


def test_a_prefix_comes_back_from_host_memory(engine: TieredEngine) -> None:
    for hits in (0, 5 * PAGE):
        assert engine.run(PROMPT, [7]).hit_tokens == hits
        engine.check()
    push_out(engine)
    again = engine.admit(PROMPT)
    assert again.hit_tokens == 5 * PAGE
    engine.prefill_chunk(again)
    engine.check()
    report = again.req.tail_match.report
    assert report.pages_from == {"host": 5 * PAGE}
    engine.finish(again)


def test_selective_writes_keep_what_was_hit() -> None:
    """A prefix that was used once is not saved; a prefix that was used twice is."""
    engine = TieredEngine.made(pages=16, host_pages=48, policy=WritePolicy.SELECTIVE)
    engine.run(PROMPT, [7])
    push_out(engine)
    assert engine.run(PROMPT, [7]).hit_tokens == 0
    assert len(engine.tiers.pages) == 0
    engine.run(PROMPT, [7])
    push_out(engine)
    assert engine.run(PROMPT, [7]).hit_tokens == 5 * PAGE


def test_write_back_saves_what_leaves(policy: WritePolicy) -> None:
    engine = TieredEngine.made(pages=16, host_pages=48, policy=WritePolicy.WRITE_BACK)
    engine.run(PROMPT, [7])
    assert len(engine.tiers.pages) == 0
    engine.cache.evict(EvictParams(num_tokens=PAGE))
    engine.tiers.copies.issue()
    engine.check()
    assert len(engine.tiers.pages) == 5, "the page that left, and those before it"


def test_the_end_is_loaded_after_the_pages_still_on_the_device(engine: TieredEngine) -> None:
    """The device keeps the first tail; host memory adds the rest, and no page is loaded twice."""
    engine.run(PROMPT, [7])
    engine.run(PROMPT, [7])
    engine.cache.evict(EvictParams(num_tokens=PAGE))
    engine.check()
    loaded = engine.tiers.copies.records.loaded.pages
    again = engine.start(PROMPT)
    assert again.hit_tokens == 5 * PAGE and 0 < again.req.tail_match.report.host_tokens < 5 * PAGE
    assert engine.tiers.copies.records.loaded.pages - loaded == again.req.tail_match.report.host_tokens // PAGE
    engine.finish(again)


def test_a_branch_off_a_prefix_in_host_memory(engine: TieredEngine) -> None:
    """The branch starts at the last tail before it leaves the prefix; afterwards the tree has both ends."""
    for _ in range(2):
        engine.run(PROMPT, [7])
    push_out(engine)
    branch = PROMPT[: 4 * PAGE + 9] + some(random.Random(2), PAGE)
    assert engine.run(branch, [7]).hit_tokens == 4 * PAGE
    engine.check()
    assert engine.run(PROMPT, [7]).hit_tokens == 5 * PAGE


def test_a_load_that_does_not_fit_is_not_begun(engine: TieredEngine) -> None:
    for _ in range(2):
        engine.run(PROMPT, [7])
    push_out(engine)
    holding = engine.start(some(random.Random(3), 12 * PAGE))
    again = engine.admit(PROMPT)
    assert again.hit_tokens == 0
    engine.check()
    engine.retract(again)
    engine.finish(holding)
    assert engine.run(PROMPT, [7]).hit_tokens == 5 * PAGE


def test_full_host_memory_frees_the_oldest_prefix_with_its_tails() -> None:
    engine = TieredEngine.made(pages=16, host_pages=20)
    for prompt in (PROMPT, *OTHERS):
        engine.run(prompt, [7])
        engine.check()
    assert engine.run(PROMPT, [7]).hit_tokens == 0
    assert engine.tiers.pages.evicted > 0
    engine.check_idle()


def test_a_flush_empties_host_memory(engine: TieredEngine) -> None:
    engine.run(PROMPT, [7])
    engine.flush()
    engine.check_idle()
    assert engine.run(PROMPT, [7]).hit_tokens == 0


def test_an_abort_before_the_load_was_issued(engine: TieredEngine) -> None:
    for _ in range(2):
        engine.run(PROMPT, [7])
    push_out(engine)
    engine.retract(engine.admit(PROMPT))
    engine.check()
    assert not engine.tiers.copies.idle
    assert engine.run(PROMPT, [7]).hit_tokens == 5 * PAGE


def test_two_requests_for_one_prefix_in_host_memory(engine: TieredEngine) -> None:
    for _ in range(2):
        engine.run(PROMPT, [7])
    push_out(engine)
    pair = [engine.admit(PROMPT), engine.admit(PROMPT)]
    engine.check()
    assert [running.hit_tokens for running in pair] == [5 * PAGE] * 2
    for running in pair:
        engine.prefill_chunk(running)
        engine.finish(running)


# The device


class NoReads(NoWaiting):
    """`NoWaiting` for reads only: SGLang's tree and allocator run inside it and have tensors of their own."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if any(isinstance(a, OnDevice) for a in args):
            assert name not in READS, f"{name} reads a tensor of the device on the host"
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watched(policy: WritePolicy, monkeypatch: pytest.MonkeyPatch) -> TieredEngine:
    """An engine whose FULL slots are on the device: the tree and the tiers must not read them."""
    engine = TieredEngine.made(pages=16, host_pages=48, policy=policy)
    engine.rows.req_to_token = engine.rows.req_to_token.as_subclass(OnDevice)
    engine.allocator.free_pages = engine.allocator.free_pages.as_subclass(OnDevice)
    engine.slots_seen = []
    for name in ("insert", "init_load_back", "evict", "check_hicache_events"):
        original = getattr(engine.cache, name)

        def without_reads(*arguments: Any, original: Callable = original, **options: Any) -> Any:
            with NoReads() as reads:
                found = original(*arguments, **options)
            engine.slots_seen += reads.launched
            return found

        monkeypatch.setattr(engine.cache, name, without_reads)
    return engine


def test_the_scheduler_does_not_wait_for_the_device(watched: TieredEngine) -> None:
    """Prompts are stored, displaced from the device, and loaded, whole and after the pages still on the device."""
    for _ in range(2):
        watched.run(PROMPT, [7])
    for prompt in OTHERS[:3]:
        watched.run(prompt, [7])
    assert watched.run(PROMPT, [7]).hit_tokens == 5 * PAGE and watched.tiers.copies.records.loaded.pages
    watched.run([*PROMPT[: 3 * PAGE], *OTHERS[4][: 2 * PAGE]], [7])
    watched.round()
    assert "__getitem__" in watched.slots_seen and watched.tiers.copies.records.saved.pages


@pytest.mark.parametrize("place", ["inserted", "load", "leaving_tree"])
def test_a_read_of_the_device_is_noticed(watched: TieredEngine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(watched.tiers, place)

    def planted(*arguments: Any) -> Any:
        some_page = next(iter(watched.tiers.in_tree().values()), None)
        (some_page.page.numbers if some_page is not None else arguments[1]).tolist()
        return original(*arguments)

    monkeypatch.setattr(watched.tiers, place, planted)
    with pytest.raises(AssertionError, match="reads a tensor of the device"):
        test_the_scheduler_does_not_wait_for_the_device(watched)


@pytest.mark.parametrize("policy", list(WritePolicy), ids=[policy.value for policy in WritePolicy])
@pytest.mark.parametrize(
    ("steps", "fault_rate"),
    [(600, 0.05), pytest.param(10_000, 0.05, marks=pytest.mark.slow)],
    ids=["quick", "ten-thousand"],
)
def test_random_requests(policy: WritePolicy, steps: int, fault_rate: float) -> None:
    """Requests that branch off each other, run side by side, are retracted, aborted and flushed, over three tiers.

    Every start compares the hit with the naive model (the longest prefix of some live tail), every forward
    compares all of its pages and its tail with the tokens, and the invariants hold after every step.
    """
    rng, backend = random.Random(steps), Backend(fault_rate)
    engine = TieredEngine.made(
        pages=24,
        host_pages=40,
        policy=policy,
        backend=backend,
        device_slots=6,
        host_slots=24,
        context_tokens=16 * PAGE,
        requests=4,
        chunk_tokens=3 * PAGE,
        interval_tokens=2 * PAGE,
    )
    stems = [some(rng, rng.randint(2, 6) * PAGE) for _ in range(10)]
    running: list[Running] = []
    hits = {"host": 0, "storage": 0}
    for step in range(steps):
        action = rng.random()
        if action < 0.45 and len(running) < 2:
            stem = rng.choice(stems)
            prompt = stem[: rng.choice([len(stem), rng.randint(1, len(stem))])] + some(
                rng, rng.choice([1, 3, 40, 128, 256, 300, 700])
            )
            prompt = prompt[: 9 * PAGE]
            patience_s = rng.choice([0, 30, 30])
            if not engine.arrive(prompt, f"r{step}", patience_s):
                engine.cache.release_aborted_request(handle(f"r{step}"))
            engine.tiers.copies.issue()
            engine.issue()
            expected = longest_stored(engine, prompt)
            free = engine.allocator.available_size() + engine.cache.evictable_size()
            request = engine.admit(prompt)
            if request.hit_tokens != expected:
                assert request.hit_tokens < expected and free < expected + 2 * PAGE, "it would have fitted"
            running.append(request)
        elif action < 0.8 and running:
            request = rng.choice(running)
            if request.length < request.prompt_tokens:
                first = not request.req.kv.holds_kv
                engine.prefill_chunk(request)
                report = request.req.tail_match.report
                for tier in report.pages_from if first and report else ():
                    hits[tier] = hits.get(tier, 0) + 1
            elif len(request.req.output_ids) < 400:
                engine.decode(request, some(rng, rng.randint(1, 200)))
        elif action < 0.97 and running:
            retract_or_finish(engine, rng, running, stems)
        elif action > 0.995:
            retract_all(engine, running)
            engine.flush()
        else:
            engine.round()
        engine.check()
    retract_all(engine, running)
    engine.check_idle()
    assert hits["host"] + hits["storage"] > steps // 200 and min(hits.values()) > steps // 1000, hits
    engine.storage.shutdown()
