"""The ledger of running requests against rings that are really written, with and without speculation."""

from __future__ import annotations

import random

import pytest

from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.requests import Match, TailRequests, Write
from dsv4_radix_cache.store import CheckpointStore


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


def ledger(device_slots: int = 8, draft_tokens: int = 0) -> TailRequests:
    rows = (256, 16) if draft_tokens else (128, 8)
    return TailRequests(CheckpointStore(device_slots, 8), Placement(), *rows, draft_tokens)


@pytest.mark.parametrize("draft_tokens", [0, 1, 4], ids=["plain", "one-draft", "four-drafts"])
@pytest.mark.parametrize("seed", range(20))
def test_rings_are_saved_only_while_they_hold_the_tail(draft_tokens: int, seed: int) -> None:
    """A prefill of any length, then steps that keep 1..k of k tokens; the overshoot is overwritten by the next step."""
    rng = random.Random(seed)
    tails, prompt = ledger(draft_tokens=draft_tokens), rng.randrange(1, 700)
    rings = Rings(tails.ring_rows, tails.state_rows)
    match = Match(prompt, None, 0, 0, prompt, False)
    tails.matched("r", match)
    assert tails.resume("r", 3, 0)[0] is None
    for write in tails.extend("r", 0, prompt):
        assert write.position <= prompt
    rings.write(0, prompt)
    length, saved_at = prompt, []
    step = max(1, draft_tokens)
    while length < prompt + 900:
        saved = tails.decode("r", length, step)
        if saved is not None:
            slot, write = saved
            assert slot == 3 and rings.holds_tail(write.position), f"[0, {length}) saved as {write.position}"
            saved_at.append(write.position)
        rings.write(length, length + step)
        length += rng.randint(1, step)
    expected = [p for p in range(256, length, 256) if p > prompt]
    assert saved_at == expected
    assert len([p for p, _ in tails.to_publish("r", length) if p > prompt]) == 1, "only the newest is held"
    tails.finished("r")
    assert tails.store.device.free == tails.store.device.capacity


def test_an_ended_requests_ring_is_saved_before_the_next_forward() -> None:
    tails = ledger()
    tails.matched("r", Match(500, None, 0, 0, 499, False))
    tails.resume("r", 2, 0)
    tails.extend("r", 0, 500)
    for position in range(500, 512):
        tails.decode("r", position, 1)
    tails.ended("r", 512)
    [(slot, write)] = tails.take_snapshots()
    assert slot == 2 and write.position == 512 and tails.take_snapshots() == []


@pytest.mark.parametrize("draft_tokens", [0, 4], ids=["overshot", "drafts-may-have"])
def test_an_ended_requests_ring_that_moved_on_is_not_saved(draft_tokens: int) -> None:
    tails = ledger(draft_tokens=draft_tokens)
    tails.matched("r", Match(500, None, 0, 0, 499, False))
    tails.resume("r", 2, 0)
    tails.extend("r", 0, 505)
    if not draft_tokens:
        for position in range(505, 514):  # overlap scheduling computes one token more than it keeps
            tails.decode("r", position, 1)
    tails.ended("r", 512 if not draft_tokens else 517)
    assert tails.take_snapshots() == []


def test_a_chunk_that_does_not_continue_is_an_error() -> None:
    tails = ledger()
    tails.matched("r", Match(500, None, 0, 0, 499, False))
    tails.resume("r", 1, 0)
    tails.extend("r", 0, 256)
    with pytest.raises(RuntimeError, match="a chunk begins at 300, but the last one ended at 256"):
        tails.resume("r", 1, 300)


def test_a_request_dropped_from_the_queue_leaves_nothing() -> None:
    tails = ledger()
    match = Match(500, None, 0, 0, 499, False)
    tails.matched("r", match)
    del match
    assert len(tails._matches) == 0 and len(tails) == 0


def test_without_a_free_slot_nothing_is_written() -> None:
    tails = ledger(device_slots=1)
    for request, slot in (("a", 1), ("b", 2)):
        tails.matched(request, Match(600, None, 0, 0, 599, False))
        tails.resume(request, slot, 0)
    assert tails.extend("a", 0, 600) == [Write(512, 0)]
    assert tails.extend("b", 0, 600) == []
    for position in range(600, 768):
        assert tails.decode("b", position, 1) is None
    assert tails.decode("b", 768, 1) is None and tails.skipped == 1
