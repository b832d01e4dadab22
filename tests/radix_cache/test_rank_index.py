"""The index of the prefixes that ranks have: costs, shared beginnings, and the pages that are forgotten first."""

from __future__ import annotations

from array import array

from dsv4_radix_cache.page_chain import PageChain
from dsv4_radix_cache.pages import PAGE_TOKENS
from dsv4_radix_cache.rank_index import RankIndex


def pages(*names: int) -> list[bytes]:
    """Return the digests of a prompt of one page a name."""
    tokens = array("q", [name for name in names for _ in range(PAGE_TOKENS)])
    return PageChain(None).digests(tokens, len(names))


def test_a_rank_computes_what_follows_its_longest_prefix() -> None:
    index = RankIndex(3, 100)
    index.note(pages(1, 2, 3), 0)
    index.note(pages(1, 2), 2)
    assert index.costs(pages(1, 2, 3, 4)) == [PAGE_TOKENS, 4 * PAGE_TOKENS, 2 * PAGE_TOKENS]
    assert [index.has(pages(1, 2, 3, 4), rank) for rank in range(3)] == [3, 0, 2]
    assert index.costs(pages(2, 1)) == [2 * PAGE_TOKENS] * 3
    assert index.costs([]) == [0, 0, 0]


def test_a_prefix_is_cached_up_to_its_first_missing_page() -> None:
    index = RankIndex(2, 2)
    index.note(pages(1, 2), 0)
    index.note(pages(7), 0)  # the deepest page of the older prompt goes first
    assert index.has(pages(1, 2), 0) == 1
    index.note(pages(8), 0)
    assert index.has(pages(1, 2), 0) == 0


def test_a_beginning_that_many_prompts_share_counts_for_one_share() -> None:
    index = RankIndex(2, 100)
    for name in range(10, 14):
        index.note(pages(1, 2, name), 0)
    assert index.costs(pages(1, 2, 10)) == [0, 2 * PAGE_TOKENS / 4 + PAGE_TOKENS]
    assert index.costs(pages(1, 2, 99)) == [PAGE_TOKENS, 2 * PAGE_TOKENS / 4 + PAGE_TOKENS]


def test_pages_are_bounded() -> None:
    index = RankIndex(2, 4)
    for name in range(100):
        index.note(pages(1, name, name + 1000), name % 2)
        assert index.stored(0) <= 4 and index.stored(1) <= 4 and len(index) <= 8
    assert index.costs(pages(1, 98, 1098))[0] == 0


def test_followers_are_counted_down() -> None:
    index = RankIndex(1, 3)
    index.note(pages(1, 2), 0)
    index.note(pages(1, 3), 0)
    index.note(pages(1, 4), 0)  # page 2 is forgotten
    assert len(index) == 3
    assert RankIndex(2, 3).costs(pages(1, 5)) == [2 * PAGE_TOKENS] * 2
    other = RankIndex(2, 3)
    for name in (2, 3, 4):
        other.note(pages(1, name), 0)
    assert other.costs(pages(1, 9))[1] == PAGE_TOKENS / 2 + PAGE_TOKENS
