"""The host tier (`--enable-hierarchical-cache`): which pages of stored prefixes are on the device and in host memory.

SGLang's tree knows the device alone. A page that leaves the tree is found again by the digest of its prefix
(`page_chain`): its bytes in host memory (`HostPages`), its tail in the tail store. So a prefix comes back as an insert
into the tree, with pages that queued copies fill afterwards, and nothing here depends on the shape that the tree had
when the prefix left it. The copies themselves are `sglang_dsv4.cache.page_copies`.

Why not SGLang's controller (`HybridCacheController`, `UnifiedRadixCache.init_hicache`): it moves tree nodes, so a
node's pages, its tail and the acknowledgements of each have to agree through every split, eviction and abort, on every
rank, and each rank judges for itself whether a load-back fits. Its advantage would be that the transfer overlaps with
the first layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from dsv4_radix_cache.host_pages import HostPage, HostPages
from sglang_dsv4.cache.page_copies import PageCopies, PoolPage


class WritePolicy(Enum):
    """When a page is saved to host memory (`--hicache-write-policy`)."""

    WRITE_THROUGH = "write_through"  # when it enters the tree
    SELECTIVE = "write_through_selective"  # when a request has hit it
    WRITE_BACK = "write_back"  # when it leaves the tree


@dataclass(frozen=True)
class TreePage:
    """A page of the tree: the page of the pool that holds it, and the digest of the page before it."""

    page: PoolPage
    before: bytes | None


class HostTier:
    """The pages of one worker's stored prefixes, on the device and in host memory.

    Attributes:
        copies: the queue of page copies, which the forwards issue.
        pages: the pages in host memory.
        policy: when pages are saved.
    """

    def __init__(
        self,
        copies: PageCopies,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        *,
        on_freed: Callable[[bytes, int], None] = lambda digest, slot: None,
        reports_saved: bool = False,
    ) -> None:
        """Start with an empty tree and empty host memory.

        Args:
            copies: the pool's queue of page copies.
            policy: when pages are saved.
            on_freed: called with (digest, host slot) of each page whose host copy was freed, before its slot is filled
                again.
            reports_saved: whether `pop_saved` will be called, for a storage backend.
        """
        self.copies, self.pages, self.policy = copies, HostPages(copies.host_slots), policy
        self._on_freed, self._reports_saved = on_freed, reports_saved
        self.reset()

    def reset(self) -> None:
        """Forget all pages: the tree was emptied. Queued copies are dropped."""
        self.copies.clear()
        self.pages.reset()
        self._in_tree: dict[bytes, TreePage] = {}
        self._saves: list[tuple[bytes, HostPage]] = []  # queued, for `pop_saved`
        self._issued: deque[tuple[Callable[[], bool], list[tuple[bytes, HostPage]]]] = deque()
        self.from_storage: set[bytes] = set()  # pages that a storage backend delivered and no request has loaded yet

    # The tree

    def inserted(self, digests: Sequence[bytes], numbers: torch.Tensor, hit_pages: int = 0) -> list[int]:
        """Note that the tree holds the pages of a prefix, and save the pages that the policy chooses.

        Args:
            digests: of the pages.
            numbers: [len(digests)] int64 on the pool's device, the pages of the pool that hold them; where the tree
                held a page already, it keeps the older page.
            hit_pages: pages that the inserting request reused from the cache.

        Returns:
            Indices of the pages that are new to the tree.
        """
        new = []
        for i, digest in enumerate(digests):
            if digest not in self._in_tree:
                self._in_tree[digest] = TreePage(PoolPage(numbers, i), digests[i - 1] if i else None)
                new.append(i)
        self.pages.touch(digests)
        if self.policy is not WritePolicy.WRITE_BACK:
            self._save(digests if self.policy is WritePolicy.WRITE_THROUGH else digests[:hit_pages])
        return new

    def last_pages(self, digest: bytes, count: int) -> list[bytes]:
        """Digests of the last `count` pages of a prefix of the tree, given the digest of its last page."""
        found: list[bytes] = []
        at: bytes | None = digest
        for _ in range(count):
            found.append(at)
            at = self._in_tree[at].before
        return found[::-1]

    def leaving_tree(self, digests: Sequence[bytes]) -> None:
        """Forget pages that the tree is about to give up; under write-back, save them first."""
        if self.policy is WritePolicy.WRITE_BACK:
            for digest in reversed(digests):  # a node's last page first: the other pages are on its path
                self._save(self._unsaved_path(digest))
        for digest in digests:
            del self._in_tree[digest]
        self.copies.pages_change_owner()

    def _unsaved_path(self, digest: bytes) -> list[bytes]:
        """The pages of a prefix up to this page, from the first page on that host memory lacks."""
        path: list[bytes] = []
        at: bytes | None = digest
        while at is not None and at not in self.pages:
            path.append(at)
            at = self._in_tree[at].before
        return path[::-1]

    def _save(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if digest in self.pages:
                continue
            page = self._in_tree[digest]
            if page.before is not None and page.before not in self.pages:
                return  # there was no slot for the page before it
            slot, freed = self.pages.put(digest, page.before)
            self._host_copies_freed(freed)
            if slot is None:
                return
            self.copies.save(page.page, slot)
            if self._reports_saved:
                if not self._saves:
                    self.copies.when_issued(self._saves_issued)
                self._saves.append((digest, self.pages.get(digest)))

    def _host_copies_freed(self, freed: Sequence[tuple[bytes, int]]) -> None:
        for digest, slot in freed:
            self.from_storage.discard(digest)
            self._on_freed(digest, slot)

    # A hit

    def first_missing(self, digests: Sequence[bytes], begin: int) -> int:
        """The first page from `begin` on that host memory lacks; len(digests) if it has all."""
        return self.pages.first_missing(digests, begin)

    @contextmanager
    def pinned(self, digests: Sequence[bytes]) -> Iterator[None]:
        """Keep pages in host memory inside the block."""
        self.pages.pin(digests)
        try:
            yield
        finally:
            self.pages.unpin(digests)

    def load(self, digests: Sequence[bytes], lacking: Iterable[bytes]) -> int:
        """Queue the copies to the device of pages that a request hits, and that host memory and the tree hold.

        Host memory keeps the pages until the copies are issued.

        Args:
            digests: of the pages.
            lacking: the pages among them that the device lacked.

        Returns:
            Number of `digests` that came from the storage backend and are hit for the first time.
        """
        for digest in lacking:
            self.copies.load(self.pages.slot(digest), self._in_tree[digest].page)
        loading = list(digests)
        self.pages.pin(loading)
        self.copies.when_issued(lambda: self.pages.unpin(loading))
        fetched = self.from_storage.intersection(digests)
        self.from_storage -= fetched
        return len(fetched)

    # Pages from a storage backend

    def reserve(self, count: int, before: Sequence[bytes]) -> list[int] | None:
        """Host slots that a storage backend will fill; None if too few can be freed.

        `before`: the page that the new pages follow, which is then pinned until `unpin`; empty at a prefix's beginning.
        """
        assert not self.copies.has_pages, "copies are issued before a storage backend fills slots that they may touch"
        slots: list[int] = []
        for _ in range(count):
            slot, freed = self.pages.reserve(before[0] if before else None)
            self._host_copies_freed(freed)
            if slot is None:
                self.give_back(slots)
                return None
            slots.append(slot)
        self.pages.pin(before)
        return slots

    def unpin(self, before: Sequence[bytes]) -> None:
        """Undo the pin of `reserve`."""
        self.pages.unpin(before)

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots that were reserved and not filled."""
        for slot in slots:
            self.pages.give_back(slot)

    def fetched(self, digest: bytes, before: bytes | None, slot: int) -> None:
        """Publish a page that was read into `slot`; free the slot if the page is stored already or `before` is not."""
        if digest in self.pages or (before is not None and before not in self.pages):
            self.pages.give_back(slot)
            return
        self.pages.publish(digest, before, slot)
        self.from_storage.add(digest)

    # Pages for a storage backend

    def _saves_issued(self) -> None:
        self._issued.append((self.copies.records.mark(), self._saves))
        self._saves = []

    def pop_saved(self) -> list[tuple[bytes, int]]:
        """(digest, slot) of pages whose copy to host memory finished since the last call, and that are still stored."""
        self.copies.records.collect_times()
        arrived: list[tuple[bytes, HostPage]] = []
        while self._issued and self._issued[0][0]():
            arrived += self._issued.popleft()[1]
        return [(digest, page.slot) for digest, page in arrived if self.pages.get(digest) is page]

    # Checks

    def check(self, reserved: int = 0) -> None:
        """Assert the invariants of both tiers; `reserved` host slots are being filled by a storage backend."""
        self.pages.check(reserved)
        numbers = [] if self.copies.on_gpu else [page.page.number for page in self._in_tree.values()]
        assert len(numbers) == len(set(numbers)), "two digests share a page of the pool"
        for page in self._in_tree.values():
            assert page.before is None or page.before in self._in_tree, "a page of the tree lacks the page before it"

    def in_tree(self) -> dict[bytes, TreePage]:
        """The tree's pages by digest (a copy)."""
        return dict(self._in_tree)
