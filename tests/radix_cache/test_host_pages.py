"""Pages in host memory: closed under prefix, freed from the end, and 10,000 random calls against plain dicts."""

from __future__ import annotations

import random

import pytest

from dsv4_radix_cache.host_pages import HostPages


def path(pages: HostPages, *names: str) -> list[int | None]:
    """Store a prefix, page after page; returns its slots."""
    digests = [name.encode() for name in names]
    slots = []
    for i, digest in enumerate(digests):
        slot, _ = (pages.slot(digest), []) if digest in pages else pages.put(digest, digests[i - 1] if i else None)
        slots.append(slot)
    return slots


def test_a_prefix_goes_from_its_end_and_the_oldest_first() -> None:
    pages = HostPages(5)
    path(pages, "a", "ab", "abc")
    path(pages, "x", "xy")
    _, gone = pages.put(b"n", None)
    assert [digest for digest, _ in gone] == [b"abc"]
    pages.touch([b"a", b"ab"])
    _, gone = pages.put(b"m", None)
    assert [digest for digest, _ in gone] == [b"xy"]
    assert pages.first_missing([b"a", b"ab", b"abc"]) == 2 and pages.first_missing([b"x", b"xy"], 1) == 1
    pages.check()


def test_a_page_does_not_go_for_the_one_that_follows_it() -> None:
    pages = HostPages(2)
    assert path(pages, "a", "ab", "abc")[2] is None
    assert len(pages) == 2


def test_pinned_pages_and_all_before_them_stay() -> None:
    pages = HostPages(3)
    path(pages, "a", "ab")
    pages.pin([b"ab"])
    path(pages, "x")
    assert [digest for digest, _ in pages.put(b"y", None)[1]] == [b"x"]
    pages.pin([b"y"])
    assert pages.put(b"z", None) == (None, [])
    pages.unpin([b"ab"])
    assert [digest for digest, _ in pages.put(b"z", None)[1]] == [b"ab"]


def test_a_page_without_the_one_before_it_is_refused() -> None:
    pages = HostPages(3)
    slot, _ = pages.reserve()
    with pytest.raises(ValueError, match="comes without the page before it"):
        pages.publish(b"ab", b"a", slot)
    pages.publish(b"a", None, slot)
    with pytest.raises(ValueError, match="in host memory already"):
        pages.publish(b"a", None, slot)


def test_no_host_memory_keeps_nothing() -> None:
    assert HostPages(0).put(b"a", None) == (None, [])


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_random_calls(capacity: int) -> None:
    """The model: digest -> (slot, page before it). A page may be freed only if it ends a prefix and is not pinned."""
    rng, pages = random.Random(capacity), HostPages(capacity)
    model: dict[bytes, tuple[int, bytes | None]] = {}
    pins: list[list[bytes]] = []
    reserved: list[int] = []
    went = 0

    def take_off(gone: list[tuple[bytes, int]]) -> None:
        for digest, slot in gone:
            assert model.pop(digest)[0] == slot
            assert all(before != digest for _, before in model.values())
            assert all(digest not in pinned for pinned in pins)

    for _ in range(3500):
        action, digest = rng.random(), bytes(rng.choices(b"ab", k=rng.randint(1, 6)))
        prefix = [digest[:i] for i in range(1, len(digest) + 1)]
        if action < 0.6:
            for i, page in enumerate(prefix):
                if page in pages:
                    continue
                slot, gone = pages.put(page, prefix[i - 1] if i else None)
                take_off(gone)
                went += len(gone)
                if slot is None:
                    break
                model[page] = (slot, prefix[i - 1] if i else None)
        elif action < 0.7:
            pages.touch(prefix)
        elif action < 0.78 and digest in pages and len(pins) < 3:
            pages.pin([digest])
            pins.append([digest])
        elif action < 0.88 and pins:
            pages.unpin(pins.pop(rng.randrange(len(pins))))
        elif action < 0.94 and len(reserved) < 3:
            slot, gone = pages.reserve()
            take_off(gone)
            if slot is not None:
                reserved.append(slot)
        elif reserved:
            pages.give_back(reserved.pop())
        assert {d: (pages.slot(d), pages.get(d).before) for d in model} == model and len(pages) == len(model)
        assert pages.first_missing(prefix) == next(
            (i for i, page in enumerate(prefix) if page not in model), len(prefix)
        )
        pages.check(len(reserved))
    assert went > 100 or capacity > 20
