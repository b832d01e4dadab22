"""Tails on SGLang's radix tree: match, insert, split, lock, evict, retract, flush, and 10,000 random operations against
a model of which prefixes have a tail.

The engine is SGLang's own (benchmarks/lib/prefix_replay.py), without a model. A tail's payload is the token prefix that
it was stored for instead of bytes, so a slot that was reused too early, a stale id or a wrong position is noticed when
a request resumes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from lib import prefix_replay
from lib.prefix_replay import PAGE, Running, tail_engine
from prefix.checked_engine import CheckedEngine, longest_stored, retract_all, retract_or_finish, some
from selection.marks import with_slow_marks


@pytest.fixture(scope="module")
def tokens() -> random.Random:
    return random.Random(11)


@pytest.fixture
def engine() -> Iterator[CheckedEngine]:
    made = CheckedEngine.of(tail_engine(full_tokens=65536, device_slots=32, host_slots=64))
    yield made
    made.check_idle()


def test_the_same_prompt_hits_up_to_its_page_remainder(engine: CheckedEngine, tokens: random.Random) -> None:
    for length in (1, 255, 256, 257, 511, 512, 513, 5000):
        prompt = some(tokens, length)
        assert engine.run(prompt, [7]).hit_tokens == 0
        assert engine.run(prompt, [7]).hit_tokens == (length - 1) // PAGE * PAGE, f"prompt of {length}"


def test_a_conversation_goes_on_from_its_last_page(engine: CheckedEngine, tokens: random.Random) -> None:
    history, before = some(tokens, 700), 0
    for turn in range(6):
        done = engine.run(history, some(tokens, 300))
        assert done.hit_tokens == before // PAGE * PAGE, f"turn {turn}"
        before = done.length
        history = [*done.req.origin_input_ids, *done.req.output_ids, *some(tokens, 90)]


def test_a_conversation_that_ends_with_its_page_loses_nothing(engine: CheckedEngine, tokens: random.Random) -> None:
    """511 tokens and an answer of 2: [0, 512) is computed, and no later forward saves the ring."""
    prompt = some(tokens, 511)
    done = engine.run(prompt, some(tokens, 2))
    assert done.length == 512
    whole = [*prompt, *done.req.output_ids, *some(tokens, 50)]
    assert engine.run(whole, [7]).hit_tokens == 512


def test_a_diverging_request_leaves_a_tail_for_the_third(engine: CheckedEngine, tokens: random.Random) -> None:
    """Learned branch point: 1,100 shared tokens, the interval is 2,048."""
    shared = some(tokens, 1100)
    hits = [engine.run(shared + some(tokens, 3000), [7]).hit_tokens for _ in range(3)]
    assert hits == [0, 0, 1024]


def test_interval_tails_bound_the_cost_of_a_divergence(engine: CheckedEngine, tokens: random.Random) -> None:
    prompt = some(tokens, 9000)
    engine.run(prompt, [7])
    assert engine.run(prompt[:5000] + some(tokens, 500), [7]).hit_tokens == 4096


def test_a_split_leaves_the_tail_at_the_end_it_belongs_to(engine: CheckedEngine, tokens: random.Random) -> None:
    prompt = some(tokens, 1500)
    engine.run(prompt, [7])
    engine.run(prompt[:600] + some(tokens, 400), [7])  # splits the leaf at 512
    engine.check()
    assert engine.run(prompt, [7]).hit_tokens == 1280
    assert engine.run(prompt[:600] + some(tokens, 400), [7]).hit_tokens == 512


def test_a_tail_is_evicted_with_its_pages(engine: CheckedEngine, tokens: random.Random) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    prompt = some(tokens, 3000)
    engine.run(prompt, [7])
    held = len(engine.ledger.store)
    engine.cache.evict(EvictParams(num_tokens=PAGE))
    engine.check()
    assert len(engine.ledger.store) < held
    assert engine.run(prompt, [7]).hit_tokens == 2048


def test_an_evicted_tail_leaves_the_pages(tokens: random.Random) -> None:
    engine = CheckedEngine.of(tail_engine(full_tokens=65536, device_slots=2))
    first, others = some(tokens, 700), [some(tokens, 900) for _ in range(3)]
    engine.run(first, [7])
    for other in others:
        engine.run(other, [7])
    again = engine.admit(first)
    assert (again.hit_tokens, again.req.tail_match.block_tokens) == (0, 512)
    engine.retract(again)
    engine.check_idle()


def test_a_tail_may_be_evicted_for_the_one_that_follows_it(tokens: random.Random) -> None:
    """One slot: the tail at the request's end evicts the tail that the request began at, while it is inserted."""
    engine = CheckedEngine.of(tail_engine(full_tokens=65536, device_slots=1))
    prompt = some(tokens, 300)
    engine.run(prompt, [7])
    running = engine.start(prompt)
    assert running.hit_tokens == 256
    engine.decode(running, some(tokens, 213))
    assert running.length == 512
    engine.finish(running)
    engine.check_idle()
    assert [engine.ledger.store[i].position for i in engine.ledger.store.ids()] == [512]


def test_an_admitted_requests_tail_is_not_evicted_before_it_is_restored(tokens: random.Random) -> None:
    engine = CheckedEngine.of(tail_engine(full_tokens=65536, device_slots=1))
    prompt = some(tokens, 700)
    engine.run(prompt, [7])
    waiting = engine.admit(prompt)
    assert waiting.hit_tokens == 512
    engine.run(some(tokens, 900), [7])  # finds no slot: the only one is pinned
    engine.prefill_chunk(waiting)
    engine.finish(waiting)
    engine.check_idle()


def test_equal_requests_side_by_side_keep_one_tail(engine: CheckedEngine, tokens: random.Random) -> None:
    prompt = some(tokens, 700)
    pair = [engine.admit(prompt), engine.admit(prompt)]
    for running in pair:
        engine.prefill_chunk(running)
        engine.check()
    for running in pair:
        engine.decode(running, some(tokens, 3))
        engine.finish(running)
    assert len(engine.ledger.store) == 1


def test_retraction_and_abort_give_everything_back(engine: CheckedEngine, tokens: random.Random) -> None:
    """A retracted request keeps its published chunks, loses its decoded tokens, and is computed again."""
    prompt = some(tokens, 20_000)
    running = engine.admit(prompt)
    engine.prefill_chunk(running)
    engine.prefill_chunk(running)
    engine.retract(running)
    assert engine.ledger.store.device.in_use == 0
    again = engine.start(prompt)
    assert again.hit_tokens == 16384
    engine.decode(again, some(tokens, 700))
    assert engine.ledger.store.device.in_use == 1
    engine.retract(again)
    assert engine.ledger.store.device.in_use == 0


def test_salts_and_extra_keys_are_namespaces(engine: CheckedEngine, tokens: random.Random) -> None:
    prompt = some(tokens, 700)
    engine.run(prompt, [7])
    for how in ({"cache_salt": "a"}, {"extra_key": "b"}):
        assert engine.run(prompt, [7], **how).hit_tokens == 0
        assert engine.run(prompt, [7], **how).hit_tokens == 512


def test_flush_empties_every_pool(engine: CheckedEngine, tokens: random.Random) -> None:
    prompt = some(tokens, 5000)
    engine.run(prompt, some(tokens, 300))
    engine.flush()
    engine.check_idle()
    assert len(engine.ledger.store) == 0 and engine.ledger.store.device.free == 32
    assert engine.run(prompt, [7]).hit_tokens == 0


def test_a_prefix_without_its_tail_is_refused(engine: CheckedEngine, tokens: random.Random) -> None:
    with pytest.raises(RuntimeError, match="begins at 256, but it was never matched"):
        engine.ledger.resume(1, 1, 256)
    engine.ledger.finished(1, 1)


@pytest.mark.parametrize("seed", with_slow_marks(range(4), quick=range(2)))
@pytest.mark.parametrize(("device", "host"), [(6, 0), (6, 20), (40, 40)], ids=["no-host", "tiers", "roomy"])
def test_random_requests(seed: int, device: int, host: int) -> None:
    """Requests that branch off each other, run side by side, are retracted and flushed, in 40 pages.

    Every start compares the hit with the naive model and the restored tail with its prefix; 12 runs of 850 operations.
    """
    rng = random.Random(seed)
    made = tail_engine(
        full_tokens=40 * PAGE,
        device_slots=device,
        host_slots=host,
        context_tokens=16 * PAGE,
        requests=4,
        chunk_tokens=3 * PAGE,
        interval_tokens=2 * PAGE,
    )
    engine = CheckedEngine.of(made)
    stems: list[list[int]] = [[rng.randrange(1000, 100_000)]]
    running: list[Running] = []
    hits = 0
    for _step in range(850):
        action = rng.random()
        if action < 0.35 and len(running) < 3:
            stem = rng.choice(stems)
            prompt = stem[: rng.randint(1, len(stem))] + some(rng, rng.choice([1, 3, 40, 128, 256, 300, 700]))
            prompt = prompt[: 10 * PAGE]
            engine.issue()
            expected = longest_stored(engine, prompt)
            request = engine.admit(prompt)
            assert request.hit_tokens == expected
            hits += bool(expected)
            running.append(request)
        elif action < 0.75 and running:
            request = rng.choice(running)
            if request.length < request.prompt_tokens:
                engine.prefill_chunk(request)
            elif len(request.req.output_ids) < 500:
                engine.decode(request, some(rng, rng.randint(1, 200)))
        elif action < 0.93 and running:
            retract_or_finish(engine, rng, running, stems)
        elif action > 0.996:
            retract_all(engine, running)
            engine.flush()
        engine.check()
    retract_all(engine, running)
    engine.check_idle()
    assert hits > 10 and (
        device > 20 or engine.ledger.store.counters.lost + engine.ledger.store.counters.device_drops > 20
    )


def test_the_paged_policy_runs_in_the_same_engine(tokens: random.Random) -> None:
    """The comparison of benchmarks/prefix_simulation.py drives SGLang's own policy with the same calls."""
    engine = prefix_replay.paged_engine(full_tokens=65536, swa_tokens=8192)
    prompt = some(tokens, 1500)
    assert [engine.run(prompt, some(tokens, 300)).hit_tokens for _ in range(2)] == [0, 1280]
    engine.cache.sanity_check()
