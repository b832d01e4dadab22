"""Pages of stored prefixes in host memory: which slot holds which page, and which page has to go.

A page is named by the digest of the prefix that it ends (`page_chain`), not by a place in SGLang's tree, so it does not
matter to it how the tree splits, evicts or rebuilds its nodes. Bookkeeping alone: no tensor, no stream, no clock, so
every rank of a tensor-parallel group that makes the same calls takes the same decisions.

The pages are closed under prefix: a page is here only while the page before it is. So one goes only when nothing
follows it, the least recently used of those first, and a prefix that nobody asks for is given back from its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4_radix_cache.policy import CreditHeap


@dataclass
class HostPage:
    """One page: its slot, the page before it, and what keeps it."""

    slot: int
    before: bytes | None  # digest of the page before it; None for a prefix's first page
    following: int = 0  # pages whose `before` is this one
    pins: int = 0
    used: int = 0  # when it was used last, in uses of this store


class HostPages:
    """Slots `0 .. capacity-1` of page records by digest. All methods are O(log n) a page."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in pages; 0 makes a tier that keeps nothing."""
        self.capacity = capacity
        self.evicted = 0  # pages that had to go; only ever grows
        self.reset()

    def reset(self) -> None:
        """Forget every page."""
        self._free = list(range(self.capacity - 1, -1, -1))
        self._pages: dict[bytes, HostPage] = {}
        self._ends = CreditHeap()  # pages that nothing follows, by their last use
        self._use = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    @property
    def free(self) -> int:
        """Slots that hold no page and are not reserved."""
        return len(self._free)

    def slot(self, digest: bytes) -> int:
        """The slot of a page that is here."""
        return self._pages[digest].slot

    def get(self, digest: bytes) -> HostPage | None:
        """The page's entry, or None; a page that went and came back has another one."""
        return self._pages.get(digest)

    def reach(self, digests: Sequence[bytes], begin: int = 0) -> int:
        """The first index from `begin` on whose page is not here; len(digests) if all are."""
        end = begin
        while end < len(digests) and digests[end] in self._pages:
            end += 1
        return end

    def path(self, digest: bytes) -> list[bytes]:
        """The pages of a prefix that is here, by its last page's digest."""
        found: list[bytes] = []
        at: bytes | None = digest
        while at is not None:
            found.append(at)
            at = self._pages[at].before
        return found[::-1]

    def touch(self, digests: Iterable[bytes]) -> None:
        """A prefix is used: its pages become the most recently used ones, equally."""
        self._use += 1
        for digest in digests:
            page = self._pages.get(digest)
            if page is not None:
                self._renew(digest, page)

    def put(self, digest: bytes, before: bytes | None) -> tuple[int | None, list[tuple[bytes, int]]]:
        """A slot for a page that is not here yet.

        Args:
            digest: of the prefix that it ends.
            before: the page before it, which must be here; None for the first page of a prefix.

        Returns:
            The slot, or None where every page is pinned or is part of this one's prefix; and (digest, slot) of the
            page that had to go, if one had to.
        """
        slot, lost = self.reserve(keep=before)
        if slot is not None:
            self.publish(digest, before, slot)
        return slot, lost

    def reserve(self, keep: bytes | None = None) -> tuple[int | None, list[tuple[bytes, int]]]:
        """A slot for a page whose bytes come later; `publish` or `give_back` it. The page `keep` does not go for it."""
        lost: list[tuple[bytes, int]] = []
        if not self._free:
            victim = self._ends.least(lambda d: not self._pages[d].pins and d != keep)
            if victim is None:
                return None, lost
            lost.append((victim, self._drop(victim)))
            self.evicted += 1
        return self._free.pop(), lost

    def publish(self, digest: bytes, before: bytes | None, slot: int) -> None:
        """The reserved slot holds this page.

        Raises:
            ValueError: the page is here already, or the page before it is not.
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
        """A reserved slot is not needed."""
        self._free.append(slot)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep pages, and so all before them, until `unpin`."""
        for digest in digests:
            self._pages[digest].pins += 1

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Undo one `pin`."""
        for digest in digests:
            page = self._pages[digest]
            assert page.pins > 0, f"page {digest.hex()} is not pinned"
            page.pins -= 1

    def check(self, reserved: int = 0) -> None:
        """Assert that slots are free, reserved or one page's, that pages are closed under prefix, and who may go."""
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

    def _drop(self, digest: bytes) -> int:
        page = self._pages.pop(digest)
        self._ends.discard(digest)
        if page.before is not None:
            earlier = self._pages[page.before]
            earlier.following -= 1
            if not earlier.following:
                self._ends.put(page.before, earlier.used)
        self._free.append(page.slot)
        return page.slot
