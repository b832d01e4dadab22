"""Pages of stored prefixes in host memory: which host slot holds which page, and which page's host copy is freed.

A page is named by the digest of the prefix that it ends (`page_chain`), not by a node of SGLang's tree, so it does not
matter how the tree splits, evicts or rebuilds its nodes. Bookkeeping alone: no tensor, no stream, no clock, so all
ranks of a tensor-parallel group that make the same calls come to the same decisions.

The pages are closed under prefix: a page is stored only while the page before it is. So only a page that no stored page
follows may be freed, the least recently used of these first, and an unused prefix shrinks from its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4_radix_cache.eviction_policy import CreditHeap


@dataclass
class HostPage:
    """One page: its host slot, the page before it, and what keeps it stored."""

    slot: int
    before: bytes | None  # digest of the page before it; None for a prefix's first page
    following: int = 0  # pages whose `before` is this one
    pins: int = 0
    used: int = 0  # the store's use count when it was last used


class HostPages:
    """Host slots `0 .. capacity-1` of page records, by digest. All methods are O(log n) a page."""

    def __init__(self, capacity: int) -> None:
        """Make an empty store. `capacity` in pages; 0 makes a tier that stores nothing."""
        self.capacity = capacity
        self.evicted = 0  # pages freed to make room; only grows
        self.reset()

    def reset(self) -> None:
        """Forget every page."""
        self._free = list(range(self.capacity - 1, -1, -1))
        self._pages: dict[bytes, HostPage] = {}
        self._ends = CreditHeap()  # pages that no page follows, by their last use
        self._use = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    @property
    def free(self) -> int:
        """Number of slots that hold no page and are not reserved."""
        return len(self._free)

    def slot(self, digest: bytes) -> int:
        """The slot of a stored page."""
        return self._pages[digest].slot

    def get(self, digest: bytes) -> HostPage | None:
        """The page's entry, or None. A page that was freed and stored again has a new entry."""
        return self._pages.get(digest)

    def first_missing(self, digests: Sequence[bytes], begin: int = 0) -> int:
        """The first index from `begin` on whose page is not stored; len(digests) if none is missing."""
        end = begin
        while end < len(digests) and digests[end] in self._pages:
            end += 1
        return end

    def path(self, digest: bytes) -> list[bytes]:
        """Digests of all pages of a stored prefix, given the digest of its last page."""
        found: list[bytes] = []
        at: bytes | None = digest
        while at is not None:
            found.append(at)
            at = self._pages[at].before
        return found[::-1]

    def touch(self, digests: Iterable[bytes]) -> None:
        """Make the stored pages of a prefix the most recently used ones, all equally."""
        self._use += 1
        for digest in digests:
            page = self._pages.get(digest)
            if page is not None:
                self._renew(digest, page)

    def put(self, digest: bytes, before: bytes | None) -> tuple[int | None, list[tuple[bytes, int]]]:
        """Store a page that is not stored yet.

        Args:
            digest: of the prefix that the page ends.
            before: the page before it, which must be stored; None for the first page of a prefix.

        Returns:
            The slot, or None if no page may be freed, because each is pinned, precedes a pinned page, or belongs to
            this page's prefix; and (digest, slot) of the page that was freed for it, if any.
        """
        slot, freed = self.reserve(keep=before)
        if slot is not None:
            self.publish(digest, before, slot)
        return slot, freed

    def reserve(self, keep: bytes | None = None) -> tuple[int | None, list[tuple[bytes, int]]]:
        """Reserve a slot for a page whose bytes come later; the caller calls `publish` or `give_back` for it.

        Returns:
            The slot, or None; and (digest, slot) of the page that was freed for it, which is never the page `keep`.
        """
        freed: list[tuple[bytes, int]] = []
        if not self._free:
            victim = self._ends.least(lambda d: not self._pages[d].pins and d != keep)
            if victim is None:
                return None, freed
            freed.append((victim, self._free_page(victim)))
            self.evicted += 1
        return self._free.pop(), freed

    def publish(self, digest: bytes, before: bytes | None, slot: int) -> None:
        """Store a page in a slot that was reserved.

        Raises:
            ValueError: the page is stored already, or the page before it is not.
        """
        if digest in self._pages:
            raise ValueError(f"page {digest.hex()} is in host memory already, in slot {self._pages[digest].slot}")
        if before is not None:
            if before not in self._pages:
                raise ValueError(f"page {digest.hex()} comes without the page before it, {before.hex()}")
            self._pages[before].following += 1
            self._ends.discard(before)
        page = self._pages[digest] = HostPage(slot, before)
        self._use += 1
        self._renew(digest, page)

    def give_back(self, slot: int) -> None:
        """Free a reserved slot that is not needed."""
        self._free.append(slot)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep pages, and so all pages before them, until `unpin`."""
        for digest in digests:
            self._pages[digest].pins += 1

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Undo one `pin`."""
        for digest in digests:
            page = self._pages[digest]
            assert page.pins > 0, f"page {digest.hex()} is not pinned"
            page.pins -= 1

    def check(self, reserved: int = 0) -> None:
        """Assert that each slot is free, reserved or of one page, that pages are closed under prefix, and that exactly
        the pages which no page follows may be freed."""
        slots = [page.slot for page in self._pages.values()] + self._free
        assert len(slots) == len(set(slots)), "a slot has two owners"
        assert len(slots) + reserved == self.capacity, (
            f"{len(self._pages)} pages + {self.free} free + {reserved} reserved != {self.capacity} slots"
        )
        following = dict.fromkeys(self._pages, 0)
        for digest, page in self._pages.items():
            if page.before is not None:
                assert page.before in self._pages, f"page {digest.hex()} lacks the page before it"
                following[page.before] += 1
        for digest, page in self._pages.items():
            assert page.following == following[digest], f"page {digest.hex()} counts {page.following} after it"
            assert (digest in self._ends) == (not page.following), f"page {digest.hex()} is in the wrong queue"

    def _renew(self, digest: bytes, page: HostPage) -> None:
        page.used = self._use
        if not page.following:
            self._ends.put(digest, self._use)

    def _free_page(self, digest: bytes) -> int:
        """Forget a page and free its slot; returns the slot."""
        page = self._pages.pop(digest)
        self._ends.discard(digest)
        if page.before is not None:
            earlier = self._pages[page.before]
            earlier.following -= 1
            if not earlier.following:
                self._ends.put(page.before, earlier.used)
        self._free.append(page.slot)
        return page.slot
