"""The storage tier (`--hicache-storage-backend`): records of prefixes that outlive the server.

Pages are written when their copy to host memory is done, tails likewise; a thread writes both under the digest of their
prefix. When a request arrives and the storage backend may have more of its prefix than device and host memory, threads
look up how much of it is stored and read that into host memory; the request waits as long as
`--hicache-storage-prefetch-policy` allows. The delivered pages are then a host hit like any other (`host_tier`).

A prefix is usable up to its deepest tail before the first page that is missing or damaged; failures are counted, and
the tokens are computed again. With several ranks, rank 0 writes and all ranks read; they agree on the result of every
read before they act on it, since their trees must stay equal. So do the stages of a pipeline, each of which has files
of its own (`sglang_dsv4.pipeline.votes`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dsv4_radix_cache.ledger import Ledger
from dsv4_radix_cache.pages import PAGE_TOKENS
from dsv4_radix_cache.tail_store import CopyState
from sglang_dsv4.pipeline.votes import STATES, Votes
from sglang_dsv4.prefix.host_tier import HostTier
from sglang_dsv4.prefix.tail_nodes import TailNodes

if TYPE_CHECKING:
    from sglang_dsv4.cache.checked_storage import CheckedStorage
    from sglang_dsv4.cache.record_files import Fault, RecordFiles
    from sglang_dsv4.cache.tail_memory import TailMemory, TierSlots

logger = logging.getLogger(__name__)

READERS = 4
NEVER = float("inf")


@dataclass(frozen=True)
class PrefetchOptions:
    """When a request waits for the storage backend, and how long: SGLang's flags."""

    policy: str = "timeout"  # or best_effort, wait_complete
    threshold_tokens: int = 256  # no prefetch for fewer tokens
    timeout_s: float = 1.0
    timeout_s_per_ki_token: float = 0.25

    def seconds(self, tokens: int) -> float:
        """Seconds that a request may wait for this many tokens."""
        if self.policy == "wait_complete":
            return NEVER
        return 0.0 if self.policy == "best_effort" else self.timeout_s + self.timeout_s_per_ki_token * tokens / 1024


class _Found(NamedTuple):
    """The result of a look-up or a read."""

    pages: int  # the prefix is usable up to this page; 0: not at all
    tail: TierSlots | None = None


@dataclass
class _Fetch:
    """A prefix on its way from the storage backend to host memory."""

    handle: Hashable | None  # of the request that waits for it; None: no request waits any longer
    digests: list[bytes]
    begin: int  # number of pages that host memory has
    floor: int  # number of pages that the request can reuse anyway, from host memory or the device
    deadline: float
    work: Future[_Found]
    number: int  # of the fetch, equal on all ranks
    slots: list[int] = field(default_factory=list)  # reserved, for pages from `begin` on, while they are read
    reading: bool = False
    has_failed: bool = False  # `work` has raised an error, which was counted

    @property
    def name(self) -> int:
        """A number for the fetch and its step, a look-up or a read."""
        return 2 * self.number + self.reading

    @property
    def before(self) -> list[bytes]:
        """Digest of the page that the fetched pages follow, as a list; empty at a prefix's beginning."""
        return self.digests[self.begin - 1 : self.begin] if self.begin else []

    def shorten(self, begin: int) -> None:
        """Fetch only from page `begin` on: host memory may have got more pages meanwhile."""
        self.begin = begin

    def read_into(self, slots: list[int], work: Future[_Found]) -> None:
        """Note that the look-up is over, and that `work` reads the pages into `slots`."""
        self.slots, self.work, self.reading, self.has_failed = slots, work, True, False

    def note_failure(self) -> bool:
        """Note that `work` has raised an error; returns whether that was not known yet."""
        was_known, self.has_failed = self.has_failed, True
        return not was_known

    def stop_waiting(self) -> None:
        """Note that no request waits for the fetch any longer; it goes on."""
        self.handle = None


@dataclass
class StorageTotals:
    """Counts since the start; they only grow."""

    pages_written: int = 0
    tails_written: int = 0
    pages_read: int = 0
    tails_read: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0  # from the first page asked for to the last
    write_seconds: float = 0.0  # of the writing thread
    errors: int = 0  # raised by the backend; `RecordFiles` counts its own
    late: int = 0  # requests that stopped waiting
    dropped: int = 0  # prefixes without free slots in a tier, or whose first pages host memory lost meanwhile


class StorageTier:
    """Writes the pages and tails that arrive in host memory, and fetches prefixes for requests. One per worker."""

    def __init__(
        self,
        open_backend: Callable[[], RecordFiles | CheckedStorage],
        host: HostTier,
        nodes: TailNodes,
        ledger: Ledger,
        memory: TailMemory,
        *,
        writes: bool = True,
        options: PrefetchOptions | None = None,
        votes: Votes | None = None,
    ) -> None:
        """Open the storage backend.

        Args:
            open_backend: opens the storage backend under the identity of the present weights; called again by `reset`.
            host: the host tier.
            nodes: the tails by prefix.
            ledger: the tail store, through its ledger.
            memory: the bytes of the tails.
            writes: whether this rank writes.
            options: of prefetches.
            votes: the agreement of the ranks; None for one rank.
        """
        self._open, self.backend = open_backend, open_backend()
        self._host, self._nodes, self._ledger, self._memory = host, nodes, ledger, memory
        self._writes, self._options, self._votes = writes, options or PrefetchOptions(), votes or Votes(list)
        self.totals = StorageTotals()
        self._earlier_faults: Counter[Fault] = Counter()
        self._writer = ThreadPoolExecutor(1, "prefix-storage-write")
        self._planner = ThreadPoolExecutor(READERS, "prefix-storage-plan")
        self._readers = ThreadPoolExecutor(READERS, "prefix-storage-read")
        self._busy: dict[int, Future[None]] = {}  # host slots that are being written to the storage backend
        self._last_write: Future[None] | None = None
        # tail id -> (prefix, whether its copy to the host is done; None: not issued yet)
        self._new_tails: dict[int, tuple[bytes, Callable[[], bool] | None]] = {}
        self._fetches: list[_Fetch] = []  # in the order of the requests
        self._numbers = itertools.count()

    # Writing

    def tail_published(self, digest: bytes, tail_id: int) -> None:
        """Queue a new tail of the tree, to be written when its copy to the host is done."""
        if self._writes:
            self._new_tails.setdefault(tail_id, (digest, None))

    def wait_for_slot(self, slot: int) -> None:
        """Cancel the write of a host slot that is to be filled again, or wait for it if it is under way."""
        work = self._busy.pop(slot, None)
        if work is not None and not work.cancel():
            wait([work])

    def _write_pages(self) -> None:
        pages = self._host.pop_saved()
        self._busy = {slot: work for slot, work in self._busy.items() if not work.done()}
        if pages and self._writes:
            renew = self._renewal([digest for digest, _ in pages])
            renew()  # before the writes too, or the first pages of a prefix might be deleted for its last ones
            for digest, slot in pages:
                self._busy[slot] = self._submit(page_key(digest), self._host.copies.records.memory[slot])
                tail_id = self._nodes.tail_of(digest)
                if tail_id is not None:
                    self.tail_published(digest, tail_id)
            renew()

    def _renewal(self, digests: Sequence[bytes]) -> Callable[[], None]:
        """A function that queues the renewal of these pages' prefixes as the most recently used files."""
        if not self.backend.is_limited:
            return lambda: None
        kept, backend = self._host.pages, self.backend
        followed = {kept.get(digest).before for digest in digests}
        prefixes = [keys_of(kept.path(digest)) for digest in digests if digest not in followed]

        def renew() -> None:
            for prefix in prefixes:
                self._writer.submit(backend.used, prefix)

        return renew

    def _write_tails(self) -> None:
        """Write tails whose copy to the host is done. Their bytes are copied here: the slot may be reused."""
        store, host = self._ledger.store, self._memory.host
        for tail_id, (digest, done) in list(self._new_tails.items()):
            # A tail whose page is saved to host memory later is queued again then (`_write_pages`).
            if tail_id not in store or digest not in self._host.pages:
                del self._new_tails[tail_id]
                continue
            state = store[tail_id].host_state
            if state is CopyState.ABSENT:
                del self._new_tails[tail_id]
            elif state is CopyState.PRESENT:
                done = done or self._host.copies.records.mark()
                if done():
                    self._submit(tail_key(digest), host.record(store[tail_id].host_slot))
                    del self._new_tails[tail_id]
                else:
                    self._new_tails[tail_id] = (digest, done)

    def _submit(self, key: str, record: Tensor) -> Future[None]:
        self._last_write = self._writer.submit(self._write, key, record)
        return self._last_write

    def _write(self, key: str, record: Tensor) -> None:
        begin = time.perf_counter()
        try:
            written = not self.backend.exists(key) and self.backend.set(key, record)
        except Exception:
            self.totals.errors += 1
            if self.totals.errors == 1:
                logger.exception("prefix storage: %s was not written; further errors are counted", key)
            return
        if written:
            if key.endswith(TAIL_SUFFIX):
                self.totals.tails_written += 1
            else:
                self.totals.pages_written += 1
            self.totals.bytes_written += record.numel()
            self.totals.write_seconds += time.perf_counter() - begin

    # Reading

    def prefetch(self, handle: Hashable, digests: Sequence[bytes], floor: int) -> None:
        """Look up more of a new request's prefix, which device and host memory have up to page `floor`."""
        begin = self._host.first_missing(digests, 0)
        tokens = (len(digests) - floor) * PAGE_TOKENS
        if tokens < self._options.threshold_tokens:
            return
        if any(fetch.handle == handle for fetch in self._fetches):
            return
        digests = list(digests)
        deadline = time.monotonic() + self._options.seconds(tokens)
        work = self._planner.submit(self._look, digests, begin, floor)
        self._fetches.append(_Fetch(handle, digests, begin, floor, deadline, work, next(self._numbers)))

    def is_waiting(self, handle: Hashable) -> bool:
        """Whether the request should wait for its fetch."""
        return any(fetch.handle == handle for fetch in self._fetches)

    def forget(self, handle: Hashable) -> None:
        """Note that a request is gone; pages that are being read for it stay in host memory."""
        for fetch in self._fetches:
            if fetch.handle == handle:
                fetch.stop_waiting()

    def _look(self, digests: list[bytes], begin: int, floor: int) -> _Found:
        end = begin
        if begin < len(digests):
            end += self.backend.batch_exists([page_key(digest) for digest in digests[begin:]])
        for pages in range(end, floor, -1):
            if self.backend.exists(tail_key(digests[pages - 1])):
                return _Found(pages)
        return _Found(0)

    def _read(self, fetch: _Fetch, slots: list[int], end: int, ready: Callable[[], bool]) -> _Found:
        """Read pages [begin, end) into their slots, and the deepest tail among them."""
        while not ready():  # copies that were issued before may still touch the slots
            time.sleep(1e-4)
        begin, memory = time.perf_counter(), self._host.copies.records.memory
        keys = [page_key(digest) for digest in fetch.digests[fetch.begin : end]]
        targets, backend = [memory[slot] for slot in slots], self.backend
        some = [slice(first, first + backend.batch) for first in range(0, len(keys), backend.batch)]
        parts = self._readers.map(lambda part: backend.batch_get(keys[part], targets[part]), some)
        got = list(chain.from_iterable(parts))
        usable = fetch.begin + next((i for i, record in enumerate(got) if record is None), len(got))
        self.totals.pages_read += usable - fetch.begin
        self.totals.bytes_read += (usable - fetch.begin) * memory.shape[1]
        found = _Found(0)
        for pages in range(usable, fetch.floor, -1):
            key = tail_key(fetch.digests[pages - 1])
            if self.backend.exists(key):
                tail = self._memory.new_host_slot()
                record = tail.record(0)
                if self.backend.get(key, record) is not None:
                    tail.set_record(0, record)
                    self.totals.tails_read += 1
                    self.totals.bytes_read += record.numel()
                    found = _Found(pages, tail)
                    break
        self.totals.read_seconds += time.perf_counter() - begin
        if backend.is_limited:  # the request does not wait for this
            self._writer.submit(backend.used, keys_of(fetch.digests[:usable]))
        return found

    # Every round of the scheduler

    def poll(self) -> dict[Hashable, tuple[int, int]]:
        """Queue due writes, and publish finished reads.

        Returns:
            Handle -> (first token, tokens delivered) of each request whose wait is over.
        """
        self._memory.issue(self._ledger.pop_ring_saves(), self._ledger.pop_copies())
        self._write_pages()
        self._write_tails()
        over: dict[Hashable, tuple[int, int]] = {}
        now, states = time.monotonic(), []
        for fetch in self._fetches:
            done = fetch.work.done()
            pages = self._result(fetch).pages if done else 0
            states += [int(done), pages, -pages, int(now < fetch.deadline)]
        agreed = self._votes.agree([fetch.name for fetch in self._fetches], states)  # as many fetches on all ranks
        remaining = []
        for i, fetch in enumerate(self._fetches):
            done, least, minus_most, in_time = agreed[STATES * i : STATES * (i + 1)]
            if not done:
                if not in_time and fetch.handle is not None:
                    self.totals.late += 1
                    over[fetch.handle] = (0, 0)
                    fetch.stop_waiting()
                remaining.append(fetch)
            elif not fetch.reading:
                if self._start_reading(fetch, least):
                    remaining.append(fetch)
                else:
                    over[fetch.handle] = (0, 0)
            else:
                pages = self._publish(fetch, least if least == -minus_most else 0)
                over[fetch.handle] = (fetch.floor * PAGE_TOKENS, max(0, pages - fetch.floor) * PAGE_TOKENS)
        self._fetches = remaining
        over.pop(None, None)
        return over

    def _start_reading(self, fetch: _Fetch, end: int) -> bool:
        """Reserve host slots for the pages before page `end`, and start to read; False if there is nothing to read."""
        begin = self._host.first_missing(fetch.digests, 0)
        if end <= fetch.floor or begin < fetch.begin:
            return False
        fetch.shorten(min(begin, end))
        slots = self._host.reserve(end - fetch.begin, fetch.before)
        if slots is None:
            self.totals.dropped += 1
            return False
        ready = self._host.copies.records.mark()
        fetch.read_into(slots, self._planner.submit(self._read, fetch, slots, end, ready))
        return True

    def _publish(self, fetch: _Fetch, pages: int) -> int:
        """Publish the pages that were read, up to their tail; returns the number of usable pages."""
        digests, host = fetch.digests, self._host
        host.unpin(fetch.before)
        count = max(0, pages - fetch.begin)
        for i, slot in enumerate(fetch.slots[:count], fetch.begin):
            host.fetched(digests[i], digests[i - 1] if i else None, slot)
        host.give_back(fetch.slots[count:])
        if not pages or host.first_missing(digests[:pages], 0) < pages:
            self.totals.dropped += int(bool(pages))
            return 0
        if self._nodes.tail_of(digests[pages - 1]) is not None:
            return pages
        tail_id = self._ledger.reserve(pages * PAGE_TOKENS)
        if tail_id is None:
            self.totals.dropped += 1
            return 0
        host.copies.load_tail(self._result(fetch).tail, self._ledger.device_slot(tail_id))
        self._nodes.add_detached(digests[:pages], tail_id)
        return pages

    def _result(self, fetch: _Fetch) -> _Found:
        """A thread's result; `_Found(0)` if the backend raised an error.

        Asked for in every round until all ranks have a result, so an error is counted at the first time.
        """
        error = fetch.work.exception()
        if error is None:
            return fetch.work.result()
        if fetch.note_failure():
            self.totals.errors += 1
            if self.totals.errors == 1:
                logger.error("prefix storage: a prefix can't be fetched; further errors are counted", exc_info=error)
        return _Found(0)

    @property
    def fetching(self) -> int:
        """Number of prefixes that are looked up or read."""
        return len(self._fetches)

    @property
    def reserved(self) -> int:
        """Number of host slots that are being filled."""
        return sum(len(fetch.slots) for fetch in self._fetches)

    @property
    def idle(self) -> bool:
        """Whether no write and no fetch is queued or under way."""
        is_written = self._last_write is None or self._last_write.done()  # one thread writes, in order
        return is_written and not self._fetches and not self._new_tails

    def reset(self) -> None:
        """Stop writes and fetches, since host memory is emptied, and open the backend anew. Written records stay."""
        for work in self._busy.values():
            work.cancel()
        running = [work for work in (*self._busy.values(), *(f.work for f in self._fetches)) if not work.cancelled()]
        wait(running)
        self._busy.clear()
        self._new_tails.clear()
        self._fetches.clear()
        self._earlier_faults.update(self.backend.faults)
        self.backend = self._open()

    @property
    def faults(self) -> Counter[Fault]:
        """Faults of records since the start, by kind."""
        return self._earlier_faults + self.backend.faults

    def shutdown(self) -> None:
        """Finish the writes that are queued, and stop."""
        self._planner.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()


TAIL_SUFFIX = ".tail"


def page_key(digest: bytes) -> str:
    """The key of a page's record."""
    return f"{digest.hex()}.page"


def tail_key(digest: bytes) -> str:
    """The key of a tail's record."""
    return f"{digest.hex()}{TAIL_SUFFIX}"


def keys_of(digests: Sequence[bytes]) -> list[tuple[str, str]]:
    """(page key, tail key) of each page."""
    return [(page_key(digest), tail_key(digest)) for digest in digests]
