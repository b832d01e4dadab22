"""The ledger of running requests against rings that are really written, with and without speculation."""

from __future__ import annotations

import random

import pytest

from dsv4_radix_cache.accounting import Stop
from dsv4_radix_cache.ledger import Ledger, Match
from dsv4_radix_cache.moves import TailWrite
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.tail_store import TailStore
from sglang_dsv4.cache.geometry import PoolGeometry


class Rings:
    """Position last written to each row of a request's window ring and compressor state."""

    def __init__(self, ring_rows: int, state_rows: int) -> None:
        self.window = [-1] * ring_rows
        self.state = [-1] * state_rows

    def write(self, begin: int, end: int) -> None:
        for position in range(begin, end):
            self.window[position % len(self.window)] = position
            self.state[position % len(self.state)] = position

    def holds_tail(self, position: int) -> bool:
        window = [self.window[p % len(self.window)] for p in range(position - 128, position)]
        state = [self.state[p % len(self.state)] for p in range(position - 4, position)]
        return window == [*range(position - 128, position)] and state == [*range(position - 4, position)]


def new_ledger(device_slots: int = 8, draft_tokens: int = 0) -> Ledger:
    rows = (256, 16) if draft_tokens else (128, 8)
    return Ledger(TailStore(device_slots, 8), Placement(), *rows, draft_tokens, strict=True)


@pytest.mark.parametrize("draft_tokens", [0, 1, 4], ids=["plain", "one-draft", "four-drafts"])
@pytest.mark.parametrize("seed", range(20))
def test_rings_are_saved_only_while_they_hold_the_tail(draft_tokens: int, seed: int) -> None:
    """A prefill of any length, then steps that keep 1..k of k tokens; the overshoot is overwritten by the next step."""
    rng = random.Random(seed)
    ledger, prompt = new_ledger(draft_tokens=draft_tokens), rng.randrange(1, 700)
    rings = Rings(ledger.ring_rows, ledger.state_rows)
    ledger.admit(3, 1, Match(prompt, None, 0, 0, prompt, False))
    assert ledger.resume(3, 1, 0) is None
    written = [write.position for write in ledger.extend(3, 1, 0, prompt)]
    assert sorted(written) == sorted({prompt // 256 * 256, (prompt - 1) // 256 * 256} - {0})
    rings.write(0, prompt)
    length, saved_at = prompt, []
    step = max(1, draft_tokens)
    while length < prompt + 900:
        write = ledger.decode(3, 1, length, step)
        if write is not None:
            assert rings.holds_tail(write.position), f"[0, {length}) saved as {write.position}"
            saved_at.append(write.position)
        rings.write(length, length + step)
        length += rng.randint(1, step)
    expected = [p for p in range(256, length, 256) if p > prompt]
    assert saved_at == expected
    assert len([p for p, _ in ledger.to_publish(3, 1, length) if p > prompt]) == 1, "only the newest is held"
    ledger.finished(3, 1)
    assert ledger.store.device.free == ledger.store.device.capacity


@pytest.mark.parametrize("draft_tokens", [2, 4, 6])
@pytest.mark.parametrize("seed", range(20))
def test_steps_whose_begins_are_learnt_later(draft_tokens: int, seed: int) -> None:
    """The next step is prepared when the begin of the last step is known, but not how many of its tokens were kept."""
    rng = random.Random(seed)
    state_rows = PoolGeometry(ratios=(4,), draft_tokens=draft_tokens).state_rows(4)
    ledger = Ledger(TailStore(8, 8), Placement(), 256, state_rows, draft_tokens)
    prompt = rng.randrange(1, 700)
    rings = Rings(ledger.ring_rows, ledger.state_rows)
    started(ledger, 3, prompt, prompt)
    rings.write(0, prompt)
    length, last, known, saved_at = prompt, None, 0, []
    while length < prompt + 900:
        if last is not None:
            ledger.wrote(3, 1, last, draft_tokens)
            known = last
        write = ledger.decoded_page(3, 1)
        if write is not None:
            assert rings.holds_tail(write.position), f"step {last} saved as {write.position}"
            saved_at.append(write.position)
        rings.write(length, length + draft_tokens)
        last, length = length, length + rng.randint(1, draft_tokens)
    assert saved_at == [p for p in range(256, known + 1, 256) if p > prompt]
    # A chunk of a mixed batch begins after the tokens of the last step that were kept.
    ledger.wrote(3, 1, last, draft_tokens)
    assert ledger.resume(3, 1, length) is None
    with pytest.raises(RuntimeError, match="a chunk begins at"):
        ledger.resume(3, 1, last + draft_tokens + 1)


def started(ledger: Ledger, slot: int, prompt: int, computed: int, generation: int = 1) -> None:
    """A cold request whose first `computed` tokens came in one chunk."""
    ledger.admit(slot, generation, Match(prompt, None, 0, 0, prompt - 1, False))
    ledger.resume(slot, generation, 0)
    ledger.extend(slot, generation, 0, computed)


def test_an_ended_requests_ring_is_saved_before_the_next_forward() -> None:
    ledger = new_ledger()
    started(ledger, 2, 500, 500)
    for position in range(500, 512):
        ledger.decode(2, 1, position, 1)
    ledger.ended(2, 1, 512)
    [(slot, write)] = ledger.pop_ring_saves()
    assert slot == 2 and write.position == 512 and ledger.pop_ring_saves() == []


@pytest.mark.parametrize("draft_tokens", [0, 4], ids=["overshot", "drafts-may-have"])
def test_an_ended_requests_ring_that_moved_on_is_not_saved(draft_tokens: int) -> None:
    ledger = new_ledger(draft_tokens=draft_tokens)
    started(ledger, 2, 500, 505)
    if not draft_tokens:
        for position in range(505, 514):  # overlap scheduling computes one token more than it keeps
            ledger.decode(2, 1, position, 1)
    ledger.ended(2, 1, 512 if not draft_tokens else 517)
    assert ledger.pop_ring_saves() == []


def test_unreported_steps_do_not_move_a_tail() -> None:
    """Positions come from the batch: a ledger that counted would save the ring of 763 tokens as that of 512."""
    ledger = new_ledger()
    started(ledger, 2, 500, 500)
    assert ledger.decode(2, 1, 763, 1) is None
    write = ledger.decode(2, 1, 768, 1)
    assert write is not None and write.position == 768


def test_a_slot_s_next_request_is_another_one() -> None:
    """The slot number alone would give it the tails of the first request."""
    ledger = new_ledger()
    started(ledger, 2, 600, 600)
    assert [position for position, _ in ledger.to_publish(2, 1, 600)] == [512]
    assert ledger.to_publish(2, 2, 600) == [] and ledger.decode(2, 2, 768, 1) is None
    ledger.ended(2, 2, 768)
    ledger.finished(2, 2)
    assert [position for position, _ in ledger.to_publish(2, 1, 600)] == [512]
    ledger.admit(2, 2, None)  # `finished` was never called for the first request
    assert ledger.store.device.in_use == 0 and ledger.to_publish(2, 1, 600) == []


def test_a_chunk_that_does_not_continue_is_an_error() -> None:
    ledger = new_ledger()
    started(ledger, 1, 500, 256)
    with pytest.raises(RuntimeError, match="a chunk begins at 300, but the last one ended at 256"):
        ledger.resume(1, 1, 300)


def test_a_bookkeeping_error_costs_the_tails_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Without `strict` the error is logged once and counted, and the request loses its tails; other requests go on."""
    ledger = new_ledger()
    ledger.strict = False
    for slot in (1, 2, 3):
        started(ledger, slot, 2000, 512)
    assert ledger.store.device.in_use == 3
    for slot in (1, 2):
        assert ledger.resume(slot, 1, 700) is None
        assert ledger.extend(slot, 1, 700, 2000) == [] and ledger.decode(slot, 1, 2048, 1) is None
    assert ledger.resume(3, 1, 512) is None
    assert [write.position for write in ledger.extend(3, 1, 512, 2000)] == [1792]
    assert ledger.totals.errors == 2 and ledger.store.device.in_use == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "the server goes on" in caplog.text


def test_contradicting_counts_cost_the_report_and_not_the_server() -> None:
    """A match whose stored blocks end before its hit: a strict ledger raises the error of `explain`."""
    for strict in (True, False):
        ledger = new_ledger()
        ledger.strict = strict
        tail, _ = ledger.store.reserve(256)
        ledger.store.publish(tail.id, None)
        match = Match(600, tail.id, 256, 0, 600, False)
        ledger.admit(1, 1, match)
        if strict:
            with pytest.raises(ValueError, match="not a prefix match"):
                ledger.resume(1, 1, 256)
        else:
            assert ledger.resume(1, 1, 256) == tail.id
            assert ledger.extend(1, 1, 256, 600) == []
            assert match.report is None and ledger.totals.errors == 1 and not ledger.totals.hit


def test_reports_add_up() -> None:
    ledger = new_ledger()
    started(ledger, 1, 600, 600)
    tail, _ = ledger.store.reserve(256)
    ledger.store.publish(tail.id, None)
    ledger.admit(2, 1, Match(600, tail.id, 256, 512, 600, False))
    assert ledger.resume(2, 1, 256) == tail.id
    assert ledger.totals.hit == {"device": 256}
    assert sum(ledger.totals.recomputed.values()) == 600 + 600 - 256
    assert ledger.totals.recomputed[Stop.NO_TAIL] == 256


def test_a_pin_ends_when_a_request_resumes_or_gives_up() -> None:
    """Two requests wait for one tail: when the second one resumes and unpins, the pin of the first one stays."""
    ledger = new_ledger()
    tail, _ = ledger.store.reserve(256)
    ledger.store.publish(tail.id, None)
    for receipt, slot in ((71, 1), (72, 2)):
        ledger.pin(receipt, tail.id)
        ledger.admit(slot, 1, Match(600, tail.id, 256, 256, 600, False), receipt)
    assert tail.pins == 2
    ledger.resume(2, 1, 256)
    for receipt in (72, None):
        ledger.unpin(receipt)
        assert tail.pins == 1
    ledger.unpin(71)
    assert tail.pins == 0


def test_without_a_free_slot_nothing_is_written() -> None:
    ledger = new_ledger(device_slots=1)
    for slot in (1, 2):
        ledger.admit(slot, 1, Match(600, None, 0, 0, 599, False))
        ledger.resume(slot, 1, 0)
    assert ledger.extend(1, 1, 0, 600) == [TailWrite(512, 0)]
    assert ledger.extend(2, 1, 0, 600) == []
    for position in range(600, 768):
        assert ledger.decode(2, 1, position, 1) is None
    refused = ledger.store.counters.refused
    assert ledger.decode(2, 1, 768, 1) is None and ledger.store.counters.refused == refused + 1
