"""Storages of SGLang's registry other than files (`--hicache-storage-backend mooncake`, `nixl`, `dynamic`, …).

SGLang's controller speaks to a storage in one of two ways, and a storage may serve only one of them:

    values     `get` into a tensor, `set` from one: `file`, or what `dynamic` loads
    zero copy  `batch_get_v1` and `batch_set_v1` of slots in host memory that was registered before
               (`register_mem_pool_host`): mooncake, nixl and others, which raise or assert in the first way

Whichever a storage has is used here; zero copy by way of a few registered slots (`StagedRecords`), into which a record
and its checksum are copied: the checksum costs many times that copy, and the host's memory of prefixes, which may be
hundreds of gigabytes, need not be registered with it. Keys carry the identity of the records, and checksums the key, so
a record of other weights, of another key, cut short or damaged is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from sglang_dsv4.cache.record_files import Fault, identity_digest

logger = logging.getLogger(__name__)

CHECKSUM_BYTES = 16
ALIGNMENT = 4096
"""Of slots and of what is stored by zero copy: O_DIRECT wants it."""
READ_SLOTS = 16
PROBE_KEY = "probe"


class StagedRecords:
    """Slots in host memory that a storage reads and fills, with what it asks of one of SGLang's host pools.

    An index of SGLang's is a token, and a page of tokens an object of the storage; here a page is one token, a slot.

    Attributes:
        kv_buffer: [slots, bytes] uint8; what a storage registers.
    """

    layout = "page_first"
    page_size = 1
    dtype = torch.uint8
    device = "cpu"
    pin_memory = False
    allocator = None

    def __init__(self, slots: int, largest_record: int) -> None:
        """`largest_record`: in bytes, without its checksum."""
        self.size_per_token = stored_bytes(largest_record)
        memory = torch.zeros(slots * self.size_per_token + ALIGNMENT, dtype=torch.uint8)
        first = -memory.data_ptr() % ALIGNMENT
        self.kv_buffer = memory[first : first + slots * self.size_per_token].view(slots, -1)
        self._used = [self.size_per_token] * slots

    def put(self, slot: int, key: str, record: Tensor) -> None:
        """Fill a slot with a record, [bytes] uint8."""
        self.reserve(slot, record.numel())
        end = record.numel() + CHECKSUM_BYTES
        self.kv_buffer[slot, : record.numel()] = record
        self.kv_buffer[slot, record.numel() : end] = checksum(key, record)
        self.kv_buffer[slot, end : self._used[slot]] = 0

    def reserve(self, slot: int, record_bytes: int) -> None:
        """A record of this size is what the storage reads from the slot, or fills it with."""
        self._used[slot] = stored_bytes(record_bytes)

    def take(self, slot: int, key: str, target: Tensor) -> bool:
        """Copy a slot's record to `target`, [bytes] uint8. False: it is damaged."""
        stored = self.kv_buffer[slot, : target.numel() + CHECKSUM_BYTES]
        return _take(stored, key, target)

    # What storages ask

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Address and bytes of each slot's record."""
        slots = indices.tolist()
        return [self.kv_buffer[slot].data_ptr() for slot in slots], [self._used[slot] for slot in slots]

    def get_size_per_token(self) -> int:
        """Bytes of a slot."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes of a slot; there are no values beside the keys."""
        return self.size_per_token

    def is_stride_page_aligned(self, alignment: int) -> bool:
        """Whether slots begin and end at multiples of this."""
        return ALIGNMENT % alignment == 0

    def get_data_page(self, index: Tensor | int, flat: bool = True) -> Tensor:
        """A slot, for storages that copy it."""
        return self.kv_buffer[int(index)]

    def get_dummy_flat_data_page(self) -> Tensor:
        """Memory of a slot's size, for storages that copy it."""
        return torch.zeros_like(self.kv_buffer[0])

    def set_from_flat_data_page(self, index: Tensor | int, data_page: Tensor) -> None:
        """Fill a slot, for storages that copy it."""
        self.kv_buffer[int(index)] = data_page.view(torch.uint8)


class CheckedStorage:
    """Another backend of SGLang's: its keys carry the identity, and its records a checksum.

    Safe to be used by several threads; zero copy is one read and one write at a time, as in SGLang.

    Attributes:
        batch: how many records are best asked for at once.
        is_limited: False: what the backend keeps is its own affair.
        faults: how often a record was missing or damaged, or the backend failed.
    """

    is_limited = False

    def __init__(self, backend: HiCacheStorage, staged: StagedRecords | None, identity: Mapping[str, str]) -> None:
        """`staged`: what the backend has registered (`stage`); None for one that takes values."""
        self._backend, self._prefix, self._staged = backend, identity_digest(identity).hex(), staged
        self.batch = 1 if staged is None else READ_SLOTS
        self.faults: Counter[Fault] = Counter()
        self._reading, self._writing, self._counting = threading.Lock(), threading.Lock(), threading.Lock()

    def exists(self, key: str) -> bool:
        """Whether there is a record."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str]) -> int:
        """How many of the keys, from the first one on, have a record. 0 if the backend fails."""
        try:
            return int(self._backend.batch_exists([self._full(key) for key in keys]))
        except Exception as error:
            self._note(Fault.UNREADABLE, f"can't be asked for {keys[0]}: {error}")
            return 0

    def get(self, key: str, target: Tensor) -> Tensor | None:
        """Read a record into `target`, [bytes] uint8; None for a miss. The target is undefined then."""
        return self.batch_get([key], [target])[0]

    def batch_get(self, keys: Sequence[str], targets: Sequence[Tensor]) -> list[Tensor | None]:
        """`get` of each key."""
        try:
            found = (self._values if self._staged is None else self._staged_records)(keys, targets)
        except Exception as error:
            self._note(Fault.UNREADABLE, f"can't read {keys[0]}: {error}", len(keys))
            return [None] * len(keys)
        for key, fault in zip(keys, found, strict=True):
            if fault is not None:
                self._note(fault, f"has no whole record {key}: computed again" if fault is Fault.CORRUPT else "")
        return [target if fault is None else None for fault, target in zip(found, targets, strict=True)]

    def set(self, key: str, record: Tensor) -> bool:
        """Write a record, [bytes] uint8."""
        full = self._full(key)
        try:
            if self._staged is None:
                written = bool(self._backend.set(full, torch.cat([record, checksum(full, record)])))
            else:
                with self._writing:
                    self._staged.put(READ_SLOTS, full, record)
                    (written,) = self._backend.batch_set_v1([full], torch.tensor([READ_SLOTS]))
        except Exception as error:
            self._note(Fault.UNWRITTEN, f"can't write {key}: {error}")
            return False
        if not written:
            self._note(Fault.UNWRITTEN, "")
        return bool(written)

    def clear(self) -> None:
        """Whatever the backend does."""
        self._backend.clear()

    def probe(self, name: str, record_bytes: int) -> None:
        """Write a record and read it.

        Raises:
            ValueError: it did not come back.
        """
        record = torch.arange(record_bytes, dtype=torch.int64).to(torch.uint8)
        found = torch.zeros_like(record)
        key = f"{PROBE_KEY}{record_bytes}"
        written = self.set(key, record)
        if not (written and self.exists(key) and self.get(key, found) is not None and torch.equal(found, record)):
            how = "values (get, set)" if self._staged is None else "zero copy (batch_get_v1, batch_set_v1)"
            raise ValueError(
                f"--hicache-storage-backend {name}: a record of {record_bytes} bytes that was written by {how} should "
                f"be read again, but was {'not found whole' if written else 'not written'} (the log may say why). Set "
                "the storage up, or choose another: `file` needs nothing"
            )

    def _full(self, key: str) -> str:
        return f"{self._prefix}-{key}"

    def _values(self, keys: Sequence[str], targets: Sequence[Tensor]) -> list[Fault | None]:
        faults: list[Fault | None] = []
        for key, target in zip(map(self._full, keys), targets, strict=True):
            stored = torch.empty(target.numel() + CHECKSUM_BYTES, dtype=torch.uint8)
            if self._backend.get(key, stored) is None:
                faults.append(Fault.MISSING)
            else:
                faults.append(None if _take(stored, key, target) else Fault.CORRUPT)
        return faults

    def _staged_records(self, keys: Sequence[str], targets: Sequence[Tensor]) -> list[Fault | None]:
        faults: list[Fault | None] = []
        with self._reading:
            for first in range(0, len(keys), READ_SLOTS):
                some = [self._full(key) for key in keys[first : first + READ_SLOTS]]
                into = targets[first : first + READ_SLOTS]
                for slot, target in enumerate(into):
                    self._staged.reserve(slot, target.numel())
                slots = torch.arange(len(some))
                read = list(self._backend.batch_get_v1(some, slots))
                if not all(read) and len(some) > 1:  # one that is missing may fail all of them
                    read = [self._backend.batch_get_v1([some[i]], slots[i : i + 1])[0] for i in range(len(some))]
                for slot, (key, target) in enumerate(zip(some, into, strict=True)):
                    if not read[slot]:
                        faults.append(Fault.MISSING)
                    else:
                        faults.append(None if self._staged.take(slot, key, target) else Fault.CORRUPT)
        return faults

    def _note(self, fault: Fault, what: str, count: int = 1) -> None:
        with self._counting:
            self.faults[fault] += count
            is_first = self.faults[fault] == count
        if what and is_first:
            logger.warning("prefix storage: the storage %s; further ones are counted", what)


def stage(backend: HiCacheStorage, staged: StagedRecords) -> StagedRecords | None:
    """Let a backend that serves zero copy register `staged`; None for one that takes values."""
    inner: Any = getattr(backend, "_backend", backend)  # SGLang's injector of failures wraps one
    if type(inner).batch_get_v1 is HiCacheStorage.batch_get_v1:
        return None
    backend.register_mem_pool_host(staged)
    return staged


def stored_bytes(record_bytes: int) -> int:
    """Of a record with its checksum, in whole units of `ALIGNMENT`."""
    return -(-(record_bytes + CHECKSUM_BYTES) // ALIGNMENT) * ALIGNMENT


def checksum(key: str, record: Tensor) -> Tensor:
    """[16] uint8, of a record under its key."""
    digest = blake2b(key.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(memoryview(record.numpy()))
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _take(stored: Tensor, key: str, target: Tensor) -> bool:
    target.copy_(stored[: target.numel()])
    return torch.equal(checksum(key, target), stored[target.numel() : target.numel() + CHECKSUM_BYTES])
