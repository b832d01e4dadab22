"""The third tier (`--hicache-storage-backend`): records of prefixes that outlive the server.

Pages are written when they have arrived in host memory, checkpoints when their copy has; both by a thread of its own,
under the digest of their prefix. When a request arrives whose prefix the storage may know better than device and host
memory do, threads look how far it is stored and read it into host memory, and the request waits for that, as
`--hicache-storage-prefetch-policy` says. What comes is then a host hit like any other (`tiers`).

A prefix is usable up to its deepest checkpoint before the first page that is missing or damaged; what fails is counted
and computed again. On several ranks rank 0 writes, all read, and what each of them found is agreed on before anything
is done about it, since their trees must stay equal.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dsv4_radix_cache.ring import PAGE_TOKENS
from dsv4_radix_cache.store import CopyState

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from sglang_dsv4.cache.checked_storage import CheckedStorage
    from sglang_dsv4.cache.record_files import Fault, RecordFiles
    from sglang_dsv4.cache.tail_storage import TailSlots, TailStorage
    from sglang_dsv4.prefix.tail_component import TailComponent
    from sglang_dsv4.prefix.tiers import PrefixTiers

logger = logging.getLogger(__name__)

READERS = 4
NEVER = float("inf")


@dataclass(frozen=True)
class PrefetchOptions:
    """When a request waits for the storage, and how long: SGLang's flags."""

    policy: str = "timeout"  # best_effort, wait_complete
    threshold_tokens: int = 256  # it is not asked for less
    timeout_s: float = 1.0
    timeout_s_per_ki_token: float = 0.25

    def seconds(self, tokens: int) -> float:
        """How long a request may wait for so many tokens."""
        if self.policy == "wait_complete":
            return NEVER
        return 0.0 if self.policy == "best_effort" else self.timeout_s + self.timeout_s_per_ki_token * tokens / 1024


class _Found(NamedTuple):
    """What a look-up or a read came to."""

    pages: int  # the prefix is usable up to here, in pages; 0: not at all
    tail: TailSlots | None = None


@dataclass
class _Fetch:
    """A prefix on its way from the storage to host memory."""

    handle: Hashable | None  # of the request that waits for it; None: nobody does any more
    digests: list[bytes]
    begin: int  # pages that host memory has
    floor: int  # pages that the request has anyway, in host memory or on the device
    deadline: float
    work: Future[_Found]
    slots: list[int] = field(default_factory=list)  # reserved, for pages from `begin` on; while it is read
    reading: bool = False

    @property
    def before(self) -> list[bytes]:
        """The page that those which are read follow, if they follow one."""
        return self.digests[self.begin - 1 : self.begin] if self.begin else []


@dataclass
class StorageTotals:
    """Only ever grow."""

    pages_written: int = 0
    tails_written: int = 0
    pages_read: int = 0
    tails_read: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0  # from the first page asked for to the last
    write_seconds: float = 0.0  # of the thread that writes
    errors: int = 0  # that the backend raised; `RecordFiles` counts its own
    late: int = 0  # requests that did not wait any longer
    dropped: int = 0  # prefixes that were read, and found no room or no agreement among ranks


class PrefixStorage:
    """Writes what arrives in host memory, and fetches what a request asks for. One for each worker."""

    def __init__(
        self,
        open_backend: Callable[[], RecordFiles | CheckedStorage],
        tiers: PrefixTiers,
        tails: TailComponent,
        storage: TailStorage,
        *,
        writes: bool = True,
        options: PrefetchOptions | None = None,
        least_of_ranks: Callable[[list[int]], list[int]] = list,
    ) -> None:
        """Start it.

        Args:
            open_backend: the storage for the weights that are loaded now, by SGLang's interface: `batch_exists`,
                `batch_get` into tensors (`batch` at once, from several threads), `exists`, `get`, `set`; and it counts
                `faults`. Asked again when the cache is flushed, as it is when
                weights are exchanged.
            tiers: where pages are.
            tails: where checkpoints are.
            storage: their bytes.
            writes: whether this rank writes.
            options: of prefetches.
            least_of_ranks: the least of each number over the ranks.
        """
        self._open, self.backend = open_backend, open_backend()
        self._tiers, self._tails, self._storage = tiers, tails, storage
        self._writes, self._options, self._agree = writes, options or PrefetchOptions(), least_of_ranks
        self.totals = StorageTotals()
        self._earlier_faults: Counter[Fault] = Counter()
        self._writer = ThreadPoolExecutor(1, "prefix-storage-write")
        self._planner = ThreadPoolExecutor(READERS, "prefix-storage-plan")
        self._readers = ThreadPoolExecutor(READERS, "prefix-storage-read")
        self._busy: dict[int, Future[None]] = {}  # host slots that are being written to the storage
        self._last_write: Future[None] | None = None
        # Checkpoint id -> (prefix, whether its copy is done; None: not issued yet)
        self._new_tails: dict[int, tuple[bytes, Callable[[], bool] | None]] = {}
        self._fetches: list[_Fetch] = []  # in the order of the requests
        self._is_suspended = False

    def suspend(self) -> None:
        """Weights were exchanged, and nothing was flushed: pages of now are of no identity. Until `reset` none is
        written, and nothing is fetched."""
        self._is_suspended = True
        self._new_tails.clear()
        logger.warning(
            "prefix storage: weights were exchanged without a flush; nothing is written or read until /flush_cache"
        )

    # Writing

    def tail_published(self, digest: bytes, checkpoint_id: int) -> None:
        """The tree got a checkpoint."""
        if self._writes and not self._is_suspended:
            self._new_tails.setdefault(checkpoint_id, (digest, None))

    def wait_for_slot(self, slot: int) -> None:
        """A host slot is to be filled anew: don't write it any more, or wait for the write that is under way."""
        work = self._busy.pop(slot, None)
        if work is not None and not work.cancel():
            wait([work])

    def _write_pages(self) -> None:
        pages = self._tiers.written()
        self._busy = {slot: work for slot, work in self._busy.items() if not work.done()}
        if pages and self._writes and not self._is_suspended:
            renew = self._renewal([digest for digest, _ in pages])
            renew()  # before, too, or the first pages of a prefix may have to go for its last ones
            for digest, slot in pages:
                self._busy[slot] = self._submit(page_key(digest), self._tiers.records.memory[slot])
                checkpoint_id = self._tails.checkpoint_of(digest)
                if checkpoint_id is not None:
                    self.tail_published(digest, checkpoint_id)
            renew()

    def _renewal(self, digests: Sequence[bytes]) -> Callable[[], None]:
        """Makes the prefixes that these pages belong to the most recently used ones, when it is their turn."""
        if not self.backend.is_limited:
            return lambda: None
        kept, backend = self._tiers.pages, self.backend
        followed = {kept.get(digest).before for digest in digests}
        prefixes = [keys_of(kept.path(digest)) for digest in digests if digest not in followed]

        def renew() -> None:
            for prefix in prefixes:
                self._writer.submit(backend.used, prefix)

        return renew

    def _write_tails(self) -> None:
        """Those whose copy to the host was issued, and is done. Their bytes are copied here: the slot may be reused."""
        store, host = self._tails.tails.store, self._storage.host
        for checkpoint_id, (digest, done) in list(self._new_tails.items()):
            # A checkpoint whose page comes to host memory later is named again then.
            if checkpoint_id not in store or digest not in self._tiers.pages:
                del self._new_tails[checkpoint_id]
                continue
            state = store[checkpoint_id].host_state
            if state is CopyState.ABSENT:
                del self._new_tails[checkpoint_id]
            elif state is CopyState.PRESENT:
                done = done or self._tiers.records.mark()
                if done():
                    self._submit(tail_key(digest), host.record(store[checkpoint_id].host_slot))
                    del self._new_tails[checkpoint_id]
                else:
                    self._new_tails[checkpoint_id] = (digest, done)

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
        """A request arrived whose prefix device and host memory have up to page `floor`: look for more of it."""
        begin = self._tiers.reach(digests, 0)
        tokens = (len(digests) - floor) * PAGE_TOKENS
        if self._is_suspended or tokens < self._options.threshold_tokens:
            return
        if any(fetch.handle == handle for fetch in self._fetches):
            return
        digests = list(digests)
        deadline = time.monotonic() + self._options.seconds(tokens)
        work = self._planner.submit(self._look, digests, begin, floor)
        self._fetches.append(_Fetch(handle, digests, begin, floor, deadline, work))

    def is_waiting(self, handle: Hashable) -> bool:
        """Whether the request should wait."""
        return any(fetch.handle == handle for fetch in self._fetches)

    def forget(self, handle: Hashable) -> None:
        """The request does not wait any longer."""
        for fetch in self._fetches:
            if fetch.handle == handle:
                fetch.handle = None

    def _look(self, digests: list[bytes], begin: int, floor: int) -> _Found:
        end = begin
        if begin < len(digests):
            end += self.backend.batch_exists([page_key(digest) for digest in digests[begin:]])
        for pages in range(end, floor, -1):
            if self.backend.exists(tail_key(digests[pages - 1])):
                return _Found(pages)
        return _Found(0)

    def _read(self, fetch: _Fetch, end: int, ready: Callable[[], bool]) -> _Found:
        """Pages [begin, end) into their slots, and the deepest checkpoint that they reach."""
        while not ready():  # copies that were issued before may still touch the slots
            time.sleep(1e-4)
        begin, memory = time.perf_counter(), self._tiers.records.memory
        keys = [page_key(digest) for digest in fetch.digests[fetch.begin : end]]
        targets, backend = [memory[slot] for slot in fetch.slots], self.backend
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
                landing = self._storage.landing()
                record = landing.record(0)
                if self.backend.get(key, record) is not None:
                    landing.set_record(0, record)
                    self.totals.tails_read += 1
                    self.totals.bytes_read += record.numel()
                    found = _Found(pages, landing)
                    break
        self.totals.read_seconds += time.perf_counter() - begin
        if backend.is_limited:  # the request does not wait for that
            self._writer.submit(backend.used, keys_of(fetch.digests[:usable]))
        return found

    # Every round of the scheduler

    def poll(self) -> dict[Hashable, tuple[int, int]]:
        """Hand over what is to be written; take in what was read.

        Returns:
            Requests whose wait is over -> (first token, tokens) that came for them.
        """
        self._storage.issue_due(self._tails.tails)
        self._write_pages()
        self._write_tails()
        over: dict[Hashable, tuple[int, int]] = {}
        if not self._fetches:  # the same on all ranks
            return over
        now, states = time.monotonic(), []
        for fetch in self._fetches:
            done = fetch.work.done()
            pages = self._result(fetch).pages if done else 0
            states += [int(done), pages, -pages, int(now < fetch.deadline)]
        agreed = self._agree(states)
        remaining = []
        for i, fetch in enumerate(self._fetches):
            done, least, most, in_time = agreed[4 * i : 4 * i + 4]
            if not done:
                if not in_time and fetch.handle is not None:
                    self.totals.late += 1
                    over[fetch.handle] = (0, 0)
                    fetch.handle = None
                remaining.append(fetch)
            elif not fetch.reading:
                if self._start_reading(fetch, least):
                    remaining.append(fetch)
                else:
                    over[fetch.handle] = (0, 0)
            else:
                pages = self._take_in(fetch, least if least == -most else 0)
                over[fetch.handle] = (fetch.floor * PAGE_TOKENS, max(0, pages - fetch.floor) * PAGE_TOKENS)
        self._fetches = remaining
        over.pop(None, None)
        return over

    def _start_reading(self, fetch: _Fetch, end: int) -> bool:
        begin = self._tiers.reach(fetch.digests, 0)
        if end <= fetch.floor or begin < fetch.begin:
            return False
        fetch.begin = min(begin, end)
        slots = self._tiers.reserve(end - fetch.begin, fetch.before)
        if slots is None:
            self.totals.dropped += 1
            return False
        fetch.slots, fetch.reading = slots, True
        self._tiers.pin(fetch.before)  # and with it all that come before it
        ready = self._tiers.records.mark()
        fetch.work = self._planner.submit(self._read, fetch, end, ready)
        return True

    def _take_in(self, fetch: _Fetch, pages: int) -> int:
        """Publish what was read, up to its checkpoint; the number of pages that are usable now."""
        digests, tiers = fetch.digests, self._tiers
        tiers.unpin(fetch.before)
        count = max(0, pages - fetch.begin)
        for i, slot in enumerate(fetch.slots[:count], fetch.begin):
            tiers.fetched(digests[i], digests[i - 1] if i else None, slot)
        tiers.give_back(fetch.slots[count:])
        if not pages or tiers.reach(digests[:pages], 0) < pages:
            self.totals.dropped += int(bool(pages))
            return 0
        if self._tails.checkpoint_of(digests[pages - 1]) is not None:
            return pages
        checkpoint_id = self._tails.tails.adopt(pages * PAGE_TOKENS)
        if checkpoint_id is None:
            self.totals.dropped += 1
            return 0
        tiers.land_tail(self._result(fetch).tail, self._tails.tails.store[checkpoint_id].device_slot)
        self._tails.park(digests[:pages], checkpoint_id)
        return pages

    def _result(self, fetch: _Fetch) -> _Found:
        """What a thread found; nothing, if it met an error of its backend."""
        error = fetch.work.exception()
        if error is None:
            return fetch.work.result()
        self.totals.errors += 1
        if self.totals.errors == 1:
            logger.error("prefix storage: a prefix can't be fetched; further errors are counted", exc_info=error)
        return _Found(0)

    @property
    def reserved(self) -> int:
        """Host slots that are being filled."""
        return sum(len(fetch.slots) for fetch in self._fetches)

    @property
    def idle(self) -> bool:
        """Nothing is written, read, or waits to be."""
        is_written = self._last_write is None or self._last_write.done()  # one thread writes, in turn
        return is_written and not self._fetches and not self._new_tails

    def reset(self) -> None:
        """Host memory is emptied: stop what is under way. What was written stays."""
        for work in self._busy.values():
            work.cancel()
        running = [work for work in (*self._busy.values(), *(f.work for f in self._fetches)) if not work.cancelled()]
        wait(running)
        self._busy.clear()
        self._new_tails.clear()
        self._fetches.clear()
        self._earlier_faults.update(self.backend.faults)
        self.backend = self._open()
        self._is_suspended = False

    @property
    def faults(self) -> Counter[Fault]:
        """What went wrong with records, since the start."""
        return self._earlier_faults + self.backend.faults

    def shutdown(self) -> None:
        """Finish the writes that are queued, and stop."""
        self._planner.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()


def suspend_without_flush(
    result: tuple[bool, str],
    updater: SchedulerWeightUpdaterManager,
    request: UpdateWeightFromDiskReqInput,
    *_: object,
) -> None:
    """After ``SchedulerWeightUpdaterManager.flush_cache_after_weight_update``, which every exchange of weights
    calls, from disk or from a trainer.

    Where it flushes, the storage was opened anew, for the weights that are there now.
    """
    tiers = getattr(updater.tp_worker.model_runner.token_to_kv_pool, "prefix_tiers", None)
    if tiers is not None and tiers.storage is not None and not (request.flush_cache and result[0]):
        tiers.storage.suspend()


TAIL_SUFFIX = ".tail"


def page_key(digest: bytes) -> str:
    """The name of a page's record."""
    return f"{digest.hex()}.page"


def tail_key(digest: bytes) -> str:
    """The name of a checkpoint's record."""
    return f"{digest.hex()}{TAIL_SUFFIX}"


def keys_of(digests: Sequence[bytes]) -> list[tuple[str, str]]:
    """The names of what may be stored of each page."""
    return [(page_key(digest), tail_key(digest)) for digest in digests]
