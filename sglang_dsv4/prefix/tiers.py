"""Whole prefixes beyond the device (`--enable-hierarchical-cache`): their pages in host memory, and on the way there.

SGLang's tree knows the device alone. What leaves it is found again by the digest of its prefix (`page_chain`): its
pages in `HostPages`, its tail checkpoint in the store, which it never left. So a prefix comes back as an insert into
the tree, with pages that copies fill afterwards, and nothing here depends on how the tree was shaped when it went.

Copies are queued in the order of the scheduler's decisions and issued, in that order, in the stream that runs the
forwards, before the next one (`issue`): a page is saved before whoever gets it next writes to it, and loaded before the
request that waits for it runs. There is nothing to acknowledge and nothing to lock on the device, and all ranks take
the same decisions, because none depends on when a copy is done.

Where a page lies in the pool only the device knows: SGLang's allocator hands out slots there, and reading one would
have the scheduler wait for the forward that runs. So the host has names for pages, digests, and passes tensors on.

Why not SGLang's controller (`HybridCacheController`, `UnifiedRadixCache.init_hicache`): it moves tree nodes, so a
node's pages, its tail and the acknowledgements of each have to agree through every split, eviction and abort, on every
rank, and whether a load-back fits is each rank's own judgement. What it would add is an overlap of the transfer with
the first layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from dsv4_radix_cache.host_pages import HostPage, HostPages

if TYPE_CHECKING:
    from sglang_dsv4.cache.host_records import CopyTotals
    from sglang_dsv4.cache.tail_storage import TailSlots
    from sglang_dsv4.prefix.storage import PrefixStorage


class WritePolicy(Enum):
    """When a page is saved to host memory (`--hicache-write-policy`)."""

    WRITE_THROUGH = "write_through"  # when the tree gets it
    SELECTIVE = "write_through_selective"  # when a request has hit it
    WRITE_BACK = "write_back"  # when the tree loses it


class Records(Protocol):
    """What moves the bytes: `HostRecords`."""

    memory: torch.Tensor  # [slots, bytes] uint8
    saved: CopyTotals
    loaded: CopyTotals

    def save(self, pages: torch.Tensor, slots: Sequence[int]) -> None: ...  # noqa: D102
    def load(self, slots: Sequence[int], pages: torch.Tensor) -> None: ...  # noqa: D102
    def mark(self) -> Callable[[], bool]: ...  # noqa: D102
    def collect_times(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class DevicePage:
    """A page of the tree: where its number in the pool is to be read, and the digest of the page before it."""

    numbers: torch.Tensor  # [N] int64 on the pool's device: of the pages that came with it
    index: int
    before: bytes | None

    @property
    def number(self) -> int:
        """Its number in the pool. Waits for the device: for checks alone."""
        return int(self.numbers[self.index])


@dataclass(frozen=True)
class _Copy:
    """A queued copy of one page."""

    save: bool
    page: DevicePage
    slot: int
    era: int  # within one, a page of the pool has no other contents


class PrefixTiers:
    """The pages of one worker's stored prefixes, on the device and in host memory, and the copies between the two.

    Attributes:
        pages: those in host memory.
        policy: when they get there.
        drop_tail: called with the digest of a page that host memory has lost; set by whoever keeps tails for it.
        land: copies a checkpoint that was read from the storage to a device slot; set by whoever has these.
        storage: the third tier; None without one.
    """

    def __init__(
        self,
        pages: HostPages,
        records: Records,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        *,
        on_gpu: bool = False,
    ) -> None:
        self.on_gpu = on_gpu
        self._stream: torch.cuda.Stream | None = None  # of the forwards, known from the first one on
        self.pages, self.records, self.policy = pages, records, policy
        self.drop_tail: Callable[[bytes], None] = lambda digest: None
        self.land: Callable[[TailSlots, int], None] = lambda tail, device_slot: None
        self.storage: PrefixStorage | None = None
        self.reset()

    def reset(self) -> None:
        """The tree was emptied. Nothing of it is to be read or written any more; what is queued is dropped."""
        if self.storage is not None:
            self.storage.reset()
        self.pages.reset()
        self._on_device: dict[bytes, DevicePage] = {}
        self._era = 0
        self._queue: list[_Copy] = []
        self._unwritten: list[tuple[bytes, HostPage]] = []  # saved, not issued: for the storage
        self._issued: deque[tuple[Callable[[], bool], list[tuple[bytes, HostPage]]]] = deque()
        self._landings: list[tuple[TailSlots, int]] = []
        self._loading: list[bytes] = []  # pinned until their load is issued
        self.from_storage: set[bytes] = set()  # pages that a prefetch brought and nobody has loaded yet

    # The tree

    def inserted(self, digests: Sequence[bytes], numbers: torch.Tensor, hit_pages: int = 0) -> list[int]:
        """The tree holds the pages of a prefix now.

        Args:
            digests: of its pages.
            numbers: [len(digests)] int64 on the pool's device, the pages of the pool that hold them; where the tree
                had one before, it keeps that one.
            hit_pages: how many of them its request took from the cache.

        Returns:
            Indices of the pages that are new to the tree.
        """
        new = []
        for i, digest in enumerate(digests):
            if digest not in self._on_device:
                self._on_device[digest] = DevicePage(numbers, i, digests[i - 1] if i else None)
                new.append(i)
        self.pages.touch(digests)
        if self.policy is not WritePolicy.WRITE_BACK:
            self._save(digests if self.policy is WritePolicy.WRITE_THROUGH else digests[:hit_pages])
        return new

    def pages_to(self, digest: bytes, count: int) -> list[bytes]:
        """The last `count` pages of a prefix of the tree."""
        found: list[bytes] = []
        at: bytes | None = digest
        for _ in range(count):
            found.append(at)
            at = self._on_device[at].before
        return found[::-1]

    def evicting(self, lost: Sequence[bytes]) -> None:
        """The tree is about to give these pages back."""
        if self.policy is WritePolicy.WRITE_BACK:
            for digest in reversed(lost):  # a node's last page first: the others are on its path
                self._save(self._path(digest))
        for digest in lost:
            del self._on_device[digest]
        self._era += 1

    def _path(self, digest: bytes) -> list[bytes]:
        """The pages of a prefix that end with this one, from the first that host memory lacks."""
        path: list[bytes] = []
        at: bytes | None = digest
        while at is not None and at not in self.pages:
            path.append(at)
            at = self._on_device[at].before
        return path[::-1]

    def _save(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if digest in self.pages:
                continue
            page = self._on_device[digest]
            if page.before is not None and page.before not in self.pages:
                return  # there was no slot for the page before it
            slot, gone = self.pages.put(digest, page.before)
            self._lost(gone)
            if slot is None:
                return
            self._queue.append(_Copy(True, page, slot, self._era))
            if self.storage is not None:
                self._unwritten.append((digest, self.pages.get(digest)))

    def _lost(self, gone: Sequence[tuple[bytes, int]]) -> None:
        for digest, slot in gone:
            if self.storage is not None:
                self.storage.wait_for_slot(slot)
            self.from_storage.discard(digest)
            self.drop_tail(digest)

    # A hit

    def reach(self, digests: Sequence[bytes], begin: int) -> int:
        """How many pages of a prefix the device's first `begin` and host memory hold in a row."""
        return self.pages.reach(digests, begin)

    def pin(self, digests: Sequence[bytes]) -> None:
        """Keep pages in host memory, until `unpin`, or until the `load` of them is issued."""
        self.pages.pin(digests)

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Undo one `pin`."""
        self.pages.unpin(digests)

    def load(self, digests: Sequence[bytes], lacking: Iterable[bytes]) -> int:
        """A request hits these pages, which are pinned and in the tree: fill those that the device lacked.

        Args:
            digests: of the pages.
            lacking: those of them that are to be filled.

        Returns:
            How many of `digests` came from the storage, and are hit for the first time.
        """
        for digest in lacking:
            self._queue.append(_Copy(False, self._on_device[digest], self.pages.slot(digest), self._era))
        self._loading += digests
        fetched = self.from_storage.intersection(digests)
        self.from_storage -= fetched
        return len(fetched)

    # Pages from the storage

    def reserve(self, count: int, before: Sequence[bytes]) -> list[int] | None:
        """Slots for pages that the storage is to fill, or None. `before`: the page that they follow, or none."""
        assert not self._queue, "copies are issued before the storage fills slots that they may touch"
        slots: list[int] = []
        for _ in range(count):
            slot, gone = self.pages.reserve(before[0] if before else None)
            self._lost(gone)
            if slot is None:
                self.give_back(slots)
                return None
            slots.append(slot)
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Slots that were reserved and not filled."""
        for slot in slots:
            self.pages.give_back(slot)

    def fetched(self, digest: bytes, before: bytes | None, slot: int) -> None:
        """The storage has filled a reserved slot with this page."""
        if digest in self.pages or (before is not None and before not in self.pages):
            self.pages.give_back(slot)
            return
        self.pages.publish(digest, before, slot)
        self.from_storage.add(digest)

    def land_tail(self, tail: TailSlots, device_slot: int) -> None:
        """Copy a checkpoint that the storage has read, the only slot of `tail`, to a device slot of checkpoints."""
        self._landings.append((tail, device_slot))

    # The stream

    @property
    def idle(self) -> bool:
        """Nothing is queued."""
        return not self._queue and not self._landings

    def between_forwards(self) -> AbstractContextManager[None]:
        """The stream of the forwards, for what is issued although no forward is due: none may come for long."""
        if self._stream is None:
            return nullcontext()
        if not self.idle:
            self._stream.wait_stream(torch.cuda.current_stream())  # where page numbers were computed
        return torch.cuda.stream(self._stream)

    def issue(self) -> None:
        """Issue the queued copies in the current stream, which runs the forwards."""
        if self.on_gpu:
            self._stream = torch.cuda.current_stream()
        batch: list[_Copy] = []
        slots: set[int] = set()
        for copy in self._queue:
            if batch and ((copy.save, copy.era) != (batch[0].save, batch[0].era) or copy.slot in slots):
                self._issue(batch)
                batch, slots = [], set()
            batch.append(copy)
            slots.add(copy.slot)
        if batch:
            self._issue(batch)
        self._queue.clear()
        for tail, device_slot in self._landings:
            self.land(tail, device_slot)
        self._landings.clear()
        self.pages.unpin(self._loading)
        self._loading.clear()
        if self._unwritten:
            self._issued.append((self.records.mark(), self._unwritten))
            self._unwritten = []

    def _issue(self, batch: Sequence[_Copy]) -> None:
        slots = [copy.slot for copy in batch]
        runs: list[list[DevicePage]] = []
        for copy in batch:
            last = runs[-1][-1] if runs else None
            if last is not None and last.numbers is copy.page.numbers and last.index + 1 == copy.page.index:
                runs[-1].append(copy.page)
            else:
                runs.append([copy.page])
        if self.on_gpu:  # they were allocated in the scheduler's stream
            for run in runs:
                run[0].numbers.record_stream(self._stream)
        parts = [run[0].numbers[run[0].index : run[-1].index + 1] for run in runs]
        pages = parts[0] if len(parts) == 1 else torch.cat(parts)
        if batch[0].save:
            self.records.save(pages, slots)
        else:
            self.records.load(slots, pages)

    def written(self) -> list[tuple[bytes, int]]:
        """(digest, slot) of pages that have arrived in host memory since the last call, and are still there."""
        self.records.collect_times()
        arrived: list[tuple[bytes, HostPage]] = []
        while self._issued and self._issued[0][0]():
            arrived += self._issued.popleft()[1]
        return [(digest, page.slot) for digest, page in arrived if self.pages.get(digest) is page]

    def check(self) -> None:
        """Assert the invariants of both tiers' books."""
        self.pages.check(0 if self.storage is None else self.storage.reserved)
        numbers = [] if self.on_gpu else [page.number for page in self._on_device.values()]
        assert len(numbers) == len(set(numbers)), "two digests share a page of the pool"
        for page in self._on_device.values():
            assert page.before is None or page.before in self._on_device, "a page of the tree lacks the one before it"

    def on_device(self) -> dict[bytes, DevicePage]:
        """A copy of the tree's pages by digest."""
        return dict(self._on_device)
