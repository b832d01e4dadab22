"""An index of the prefixes that each rank of a server probably caches, made of the requests that it was given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4_radix_cache.pages import PAGE_TOKENS


@dataclass
class _Page:
    before: bytes | None  # digest of the page before it; None for a prefix's first page
    ranks: set[int] = field(default_factory=set)
    followers: int = 0  # number of pages that continue this one


class RankIndex:
    """Page digests (`page_chain`) of the prompts that each rank was given; the least recently used pages go first.

    Args:
        ranks: number of ranks.
        pages_per_rank: largest number of pages that are remembered of a rank.
    """

    def __init__(self, ranks: int, pages_per_rank: int) -> None:
        self.pages_per_rank = pages_per_rank
        self._pages: dict[bytes, _Page] = {}
        self._of_rank: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(ranks)]

    def __len__(self) -> int:
        """Number of different pages of all ranks."""
        return len(self._pages)

    def limit(self, pages_per_rank: int) -> None:
        """Remember at most this many pages of a rank from the next prompt on."""
        self.pages_per_rank = pages_per_rank

    def stored(self, rank: int) -> int:
        """Number of pages that are remembered of a rank."""
        return len(self._of_rank[rank])

    def costs(self, digests: Sequence[bytes]) -> list[float]:
        """The tokens of a prompt's whole pages that each rank would compute, by rank.

        A page that n different prompts continue (of a system prompt, for example) counts for 1 / n: once a rank has
        computed the page, later prompts find it there.
        """
        known = [self._pages.get(digest) for digest in digests]
        costs, share, missing = [0.0] * len(self._of_rank), 1, [0.0] * (len(digests) + 1)
        for i in range(len(digests) - 1, -1, -1):
            share = max(share, known[i].followers) if known[i] is not None else share
            missing[i] = missing[i + 1] + PAGE_TOKENS / share
        for rank in range(len(costs)):
            end = next((i for i, page in enumerate(known) if page is None or rank not in page.ranks), len(known))
            costs[rank] = missing[end]
        return costs

    def has(self, digests: Sequence[bytes], rank: int) -> int:
        """Number of a prompt's first pages that a rank has."""
        pages = enumerate(map(self._pages.get, digests))
        return next((i for i, page in pages if page is None or rank not in page.ranks), len(digests))

    def note(self, digests: Sequence[bytes], rank: int) -> None:
        """Remember that a rank has the pages of a prompt, which are its most recently used ones now."""
        used, before = self._of_rank[rank], None
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                page = self._pages[digest] = _Page(before)
                if before is not None:
                    self._pages[before].followers += 1
            page.ranks.add(rank)
            before = digest
        for digest in reversed(digests):  # a prefix's first page goes last
            used[digest] = None
            used.move_to_end(digest)
        while len(used) > self.pages_per_rank:
            self._forget(used.popitem(last=False)[0], rank)

    def _forget(self, digest: bytes, rank: int) -> None:
        page = self._pages[digest]
        page.ranks.discard(rank)
        if not page.ranks:
            del self._pages[digest]
            before = self._pages.get(page.before) if page.before is not None else None
            if before is not None:
                before.followers -= 1
