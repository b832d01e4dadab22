"""Page records in host memory, and the copies between them and the pool.

The stream that runs the forwards orders every copy as the scheduler decided: a page is read before a later forward
overwrites it, and written before a later forward reads it. On a GPU that stream only gathers into a
staging buffer of a few records on the device, or scatters from it; the transfers run in a second stream, one for both
directions, so that they are ordered among themselves too. Host memory is registered with CUDA, and neighbouring host
slots are transferred together, in runs of megabytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.cache.page_records import PageRecords

STAGED_BYTES = 32 << 20
"""Bytes of each of the two staging buffers on a GPU: some 30 records of V4-Flash, half a millisecond of PCIe."""
MAX_STAGED_RECORDS = 64


@dataclass
class CopyTotals:
    """Pages, bytes and seconds of one direction; they only grow. On a GPU the seconds are those of the transfers."""

    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class HostRecords:
    """`slots` page records in host memory.

    Attributes:
        memory: [slots, record_bytes] uint8. The host waits for `mark` before it reads or writes it.
        saved, loaded: totals of the copies to and from it.
    """

    def __init__(self, records: PageRecords, slots: int) -> None:
        """Allocate the records. If the device is a CPU, untouched slots use no memory."""
        self.records = records
        self.memory = torch.empty((slots, records.record_bytes), dtype=torch.uint8)
        self.saved, self.loaded = CopyTotals(), CopyTotals()
        self.batch = max(1, min(MAX_STAGED_RECORDS, STAGED_BYTES // max(1, records.record_bytes)))
        self._gpu = _GpuCopies(self) if records.device.type == "cuda" else None

    def save(self, pages: Tensor, slots: Sequence[int]) -> None:
        """Copy pages of the pool, [N] int64 on its device, into host slots. Slots must differ."""
        self._run(pages, slots, self.saved, self._save_now if self._gpu is None else self._gpu.save)

    def load(self, slots: Sequence[int], pages: Tensor) -> None:
        """Copy host slots into pages of the pool, [N] int64 on its device. Pages must differ."""
        self._run(pages, slots, self.loaded, self._load_now if self._gpu is None else self._gpu.load)

    def mark(self) -> Callable[[], bool]:
        """A function that says whether all copies issued before this call are done."""
        return (lambda: True) if self._gpu is None else self._gpu.mark()

    def collect_times(self) -> None:
        """Add the times of finished transfers to the totals."""
        if self._gpu is not None:
            self._gpu.collect_times()

    def _run(self, pages: Tensor, slots: Sequence[int], totals: CopyTotals, copy: Callable[..., None]) -> None:
        begin = time.perf_counter()
        for first in range(0, len(pages), self.batch):
            chosen = slice(first, first + self.batch)
            copy(pages[chosen], list(slots[chosen]))
        totals.pages += len(pages)
        totals.bytes += len(pages) * self.records.record_bytes
        if self._gpu is None:
            totals.seconds += time.perf_counter() - begin

    def _save_now(self, pages: Tensor, slots: list[int]) -> None:
        staged = torch.zeros(
            (len(slots), self.records.record_bytes), dtype=torch.uint8
        )  # zeros: padding has a defined value too
        self.records.gather(pages, staged)
        self.memory[torch.tensor(slots)] = staged

    def _load_now(self, pages: Tensor, slots: list[int]) -> None:
        self.records.scatter(pages, self.memory[torch.tensor(slots)])


class _GpuCopies:
    """The copies on a GPU: two staging buffers, used alternately, and a stream for the transfers."""

    def __init__(self, host: HostRecords) -> None:
        self._host, self._records = host, host.records
        device = host.records.device
        if host.memory.numel():
            status = torch.cuda.cudart().cudaHostRegister(host.memory.data_ptr(), host.memory.nbytes, 0)
            if int(status) != 0:
                raise MemoryError(
                    f"CUDA can't register {host.memory.nbytes} bytes of host memory (error {int(status)}): lower "
                    "--hicache-size or --hicache-ratio, or raise the limit of locked memory (ulimit -l)"
                )
        self._stream = torch.cuda.Stream(device)
        shape = (2, host.batch, host.records.record_bytes)
        self._staging = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._free: list[Any] = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0
        self._timed: list[tuple[CopyTotals, Any, Any]] = []

    def save(self, pages: Tensor, slots: list[int]) -> None:
        staged, free, forward = self._next(len(slots))
        forward.wait_event(free)
        self._records.gather(pages, staged)
        self._stream.wait_stream(forward)
        with torch.cuda.stream(self._stream), self._timing(self._host.saved):
            for first, end, slot in runs(slots):
                self._host.memory[slot : slot + end - first].copy_(staged[first:end], non_blocking=True)
        free.record(self._stream)

    def load(self, pages: Tensor, slots: list[int]) -> None:
        staged, free, forward = self._next(len(slots))
        self._stream.wait_event(free)
        with torch.cuda.stream(self._stream), self._timing(self._host.loaded):
            for first, end, slot in runs(slots):
                staged[first:end].copy_(self._host.memory[slot : slot + end - first], non_blocking=True)
        forward.wait_stream(self._stream)
        self._records.scatter(pages, staged)
        free.record(forward)

    def mark(self) -> Callable[[], bool]:
        events = [torch.cuda.Event(), torch.cuda.Event()]
        events[0].record(self._stream)
        events[1].record(torch.cuda.current_stream(self._records.device))
        return lambda: all(event.query() for event in events)

    def collect_times(self) -> None:
        while self._timed and self._timed[0][2].query():
            totals, begin, end = self._timed.pop(0)
            totals.seconds += begin.elapsed_time(end) / 1e3

    def _next(self, count: int) -> tuple[Tensor, Any, Any]:
        """The next staging buffer, the event after which it is free, and the stream of the forwards."""
        self._turn ^= 1
        forward = torch.cuda.current_stream(self._records.device)
        return self._staging[self._turn, :count], self._free[self._turn], forward

    def _timing(self, totals: CopyTotals) -> _Timing:
        return _Timing(self._timed, totals)


class _Timing:
    """Context that times a transfer by events of the current stream."""

    def __init__(self, timed: list[tuple[CopyTotals, Any, Any]], totals: CopyTotals) -> None:
        self._timed, self._totals = timed, totals
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> None:
        self._begin.record()

    def __exit__(self, *error: object) -> None:
        self._end.record()
        self._timed.append((self._totals, self._begin, self._end))


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, slot) of each run of neighbours: `slots[first:end]` are slot, slot + 1, …"""
    first = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield first, i, slots[first]
            first = i
