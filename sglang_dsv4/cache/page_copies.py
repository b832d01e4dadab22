"""The queue of copies between the pool's pages and host memory, and of tails that a storage backend has delivered.

Copies are queued in the order of the scheduler's decisions and issued in that order, in the stream that runs the
forwards, before the next forward (`issue`). So a page is saved before its next owner writes to it, and loaded before
the request that waits for it runs. Nothing has to be acknowledged or locked on the device, and all ranks make the same
decisions, because none depends on when a copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang_dsv4.cache.host_records import CopyTotals
    from sglang_dsv4.cache.tail_memory import TierSlots


class Records(Protocol):
    """Page records in host memory, and their copies from and to the pool: `HostRecords`."""

    memory: torch.Tensor  # [host slots, record bytes] uint8
    saved: CopyTotals
    loaded: CopyTotals

    def save(self, pages: torch.Tensor, slots: Sequence[int]) -> None: ...  # noqa: D102
    def load(self, slots: Sequence[int], pages: torch.Tensor) -> None: ...  # noqa: D102
    def mark(self) -> Callable[[], bool]: ...  # noqa: D102
    def collect_times(self) -> None: ...  # noqa: D102


class FetchedTails(Protocol):
    """Device slots of tails, which a tail from a storage backend is copied into: `TailMemory`."""

    def load_fetched(self, tail: TierSlots, device_slot: int) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class PoolPage:
    """A page of the pool. Only the device knows its number: SGLang's allocator hands out slots there, and reading one
    would make the scheduler wait for the forward that runs. So a page is named by a tensor and an index into it."""

    numbers: torch.Tensor  # [N] int64 on the pool's device: page numbers
    index: int

    @property
    def number(self) -> int:
        """The page number in the pool. Waits for the device: for checks only."""
        return int(self.numbers[self.index])


@dataclass(frozen=True)
class _Copy:
    """A queued copy of one page."""

    save: bool
    page: PoolPage
    slot: int
    era: int  # within an era a page of the pool has only one content


class PageCopies:
    """Queued copies of pages (both directions) and of fetched tails; `issue` carries them out.

    Attributes:
        records: the page records in host memory.
    """

    def __init__(self, records: Records, tails: FetchedTails, *, on_gpu: bool = False) -> None:
        """Make an empty queue.

        Args:
            records: page records in host memory, with the copies from and to the pool.
            tails: device slots of the pool's tails.
            on_gpu: the pool is on a GPU, so copies are asynchronous.
        """
        self.records, self._tails, self._on_gpu = records, tails, on_gpu
        self._stream: torch.cuda.Stream | None = None  # runs the forwards; known from the first `issue` on
        self.clear()

    def clear(self) -> None:
        """Drop everything that is queued: the pool's pages are given up."""
        self._era = 0
        self._queue: list[_Copy] = []
        self._fetched: list[tuple[TierSlots, int]] = []
        self._when_issued: list[Callable[[], None]] = []

    @property
    def host_slots(self) -> int:
        """Number of page records that host memory holds."""
        return len(self.records.memory)

    @property
    def on_gpu(self) -> bool:
        """Whether page numbers can only be read by waiting for a GPU."""
        return self._on_gpu

    @property
    def has_pages(self) -> bool:
        """Whether a copy of a page is queued."""
        return bool(self._queue)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue and not self._fetched

    # Queueing

    def save(self, page: PoolPage, slot: int) -> None:
        """Queue the copy of a page to a host slot."""
        self._queue.append(_Copy(True, page, slot, self._era))

    def load(self, slot: int, page: PoolPage) -> None:
        """Queue the copy of a host slot to a page."""
        self._queue.append(_Copy(False, page, slot, self._era))

    def load_tail(self, tail: TierSlots, device_slot: int) -> None:
        """Queue the copy of a fetched tail, the only slot of `tail`, to a device slot of tails."""
        self._fetched.append((tail, device_slot))

    def pages_change_owner(self) -> None:
        """Pages of the pool may get other contents from now on: copies queued before and after are not batched."""
        self._era += 1

    def when_issued(self, function: Callable[[], None]) -> None:
        """Call `function` once, when everything that is queued so far is issued; never, if the queue is cleared."""
        self._when_issued.append(function)

    # Issuing

    def between_forwards(self) -> AbstractContextManager[None]:
        """Context of the forwards' stream, to issue copies between forwards: the next one may come much later."""
        if self._stream is None:
            return nullcontext()
        if not self.idle:
            self._stream.wait_stream(torch.cuda.current_stream())  # the current stream computed the page numbers
        return torch.cuda.stream(self._stream)

    def issue(self) -> None:
        """Issue the queued copies in the current stream, which runs the forwards."""
        if self._on_gpu:
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
        for tail, device_slot in self._fetched:
            self._tails.load_fetched(tail, device_slot)
        self._fetched.clear()
        functions, self._when_issued = self._when_issued, []
        for function in functions:
            function()

    def _issue(self, batch: Sequence[_Copy]) -> None:
        slots = [copy.slot for copy in batch]
        runs: list[list[PoolPage]] = []
        for copy in batch:
            last = runs[-1][-1] if runs else None
            if last is not None and last.numbers is copy.page.numbers and last.index + 1 == copy.page.index:
                runs[-1].append(copy.page)
            else:
                runs.append([copy.page])
        if self._on_gpu:  # the tensors were allocated in the scheduler's stream
            for run in runs:
                run[0].numbers.record_stream(self._stream)
        parts = [run[0].numbers[run[0].index : run[-1].index + 1] for run in runs]
        pages = parts[0] if len(parts) == 1 else torch.cat(parts)
        if batch[0].save:
            self.records.save(pages, slots)
        else:
            self.records.load(slots, pages)
