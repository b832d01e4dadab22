"""Storage backends of SGLang's registry other than files (`--hicache-storage-backend mooncake`, `nixl`, `dynamic`, …).

SGLang's controller calls a storage backend through one of two interfaces, and a backend may implement only one:

    values     `get` into a tensor, `set` from one: `file`, or the backend that `dynamic` loads
    zero copy  `batch_get_v1` and `batch_set_v1` of slots in host memory that was registered before
               (`register_mem_pool_host`): mooncake, nixl and others, which raise or assert in the first interface

`CheckedStorage` uses the interface that the backend implements. Zero copy goes through a few registered slots
(`StagedRecords`), into which a record and its checksum are copied: so the host memory of prefixes, possibly hundreds of
gigabytes, need not be registered with the backend. The checksum costs many times that copy. Keys contain the
identity of the records, and checksums cover the key, so a record of other weights or of another key, a truncated or a
damaged record is a miss.
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
"""Alignment of slots and of records that are stored by zero copy: O_DIRECT requires it."""
READ_SLOTS = 16
PROBE_KEY = "probe"


class StagedRecords:
    """Slots in host memory that a storage backend reads and fills, with the interface of SGLang's host pools.

    SGLang indexes a host pool by token, and a backend stores a page of tokens as one object. Here a page is one token,
    and a token is one slot.

    Attributes:
        kv_buffer: [slots, bytes] uint8; the memory that a backend registers.
    """

    layout = "page_first"
    page_size = 1
    dtype = torch.uint8
    device = "cpu"
    pin_memory = False
    allocator = None

    def __init__(self, slots: int, largest_record: int) -> None:
        """Allocate the slots. `largest_record` in bytes, without its checksum."""
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
        """Set the size of the record that the backend will read from the slot, or fill it with."""
        self._used[slot] = stored_bytes(record_bytes)

    def read(self, slot: int, key: str, target: Tensor) -> bool:
        """Copy a slot's record to `target`, [bytes] uint8; False if it is damaged."""
        stored = self.kv_buffer[slot, : target.numel() + CHECKSUM_BYTES]
        return _read_checked(stored, key, target)

    # The interface of SGLang's host pools

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes of the slots' records."""
        slots = indices.tolist()
        return [self.kv_buffer[slot].data_ptr() for slot in slots], [self._used[slot] for slot in slots]

    def get_size_per_token(self) -> int:
        """Bytes of a slot."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes of a slot, which has no values in addition to the keys."""
        return self.size_per_token

    def is_stride_page_aligned(self, alignment: int) -> bool:
        """Whether slots begin and end at multiples of `alignment`."""
        return ALIGNMENT % alignment == 0

    def get_data_page(self, index: Tensor | int, flat: bool = True) -> Tensor:
        """A slot, for backends that copy it."""
        return self.kv_buffer[int(index)]

    def get_dummy_flat_data_page(self) -> Tensor:
        """Memory of a slot's size, for backends that copy it."""
        return torch.zeros_like(self.kv_buffer[0])

    def set_from_flat_data_page(self, index: Tensor | int, data_page: Tensor) -> None:
        """Fill a slot, for backends that copy it."""
        self.kv_buffer[int(index)] = data_page.view(torch.uint8)


class CheckedStorage:
    """One of SGLang's backends, with the identity in its keys and a checksum in its records.

    Safe for use by several threads; zero copy does one read and one write at a time, as in SGLang.

    Attributes:
        batch: records to ask for in one call.
        is_limited: False: the backend decides by itself which records it keeps.
        faults: how often a record was missing or damaged, or the backend failed.
    """

    is_limited = False

    def __init__(self, backend: HiCacheStorage, staged: StagedRecords | None, identity: Mapping[str, str]) -> None:
        """Wrap `backend`. `staged`: the slots that it has registered (`stage`); None if it takes values."""
        self._backend, self._prefix, self._staged = backend, identity_digest(identity).hex(), staged
        self.batch = 1 if staged is None else READ_SLOTS
        self.faults: Counter[Fault] = Counter()
        self._reading, self._writing, self._counting = threading.Lock(), threading.Lock(), threading.Lock()

    def exists(self, key: str) -> bool:
        """Whether the backend has a record of this key."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Number of keys before the first key without a record; 0 if the backend fails."""
        try:
            return int(self._backend.batch_exists([self._full(key) for key in keys]))
        except Exception as error:
            self._note(Fault.UNREADABLE, f"can't be asked for {keys[0]}: {error}")
            return 0

    def get(self, key: str, target: Tensor) -> Tensor | None:
        """Read a record into `target`, [bytes] uint8, and return it; None for a miss, which leaves it undefined."""
        return self.batch_get([key], [target])[0]

    def batch_get(self, keys: Sequence[str], targets: Sequence[Tensor]) -> list[Tensor | None]:
        """`get` for each key."""
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
        """Write a record, [bytes] uint8; False if it could not be written."""
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
        """Let the backend delete its records."""
        self._backend.clear()

    def probe(self, name: str, record_bytes: int) -> None:
        """Write a record and read it back.

        Raises:
            ValueError: the record could not be read back.
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
                faults.append(None if _read_checked(stored, key, target) else Fault.CORRUPT)
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
                if not all(read) and len(some) > 1:  # a missing record may fail the whole batch
                    read = [self._backend.batch_get_v1([some[i]], slots[i : i + 1])[0] for i in range(len(some))]
                for slot, (key, target) in enumerate(zip(some, into, strict=True)):
                    if not read[slot]:
                        faults.append(Fault.MISSING)
                    else:
                        faults.append(None if self._staged.read(slot, key, target) else Fault.CORRUPT)
        return faults

    def _note(self, fault: Fault, what: str, count: int = 1) -> None:
        with self._counting:
            self.faults[fault] += count
            is_first = self.faults[fault] == count
        if what and is_first:
            logger.warning("prefix storage: the storage %s; further ones are counted", what)


def stage(backend: HiCacheStorage, staged: StagedRecords) -> StagedRecords | None:
    """`staged`, registered with a backend that implements zero copy; None for a backend that takes values."""
    inner: Any = getattr(backend, "_backend", backend)  # SGLang's injector of failures wraps the backend
    if type(inner).batch_get_v1 is HiCacheStorage.batch_get_v1:
        return None
    backend.register_mem_pool_host(staged)
    return staged


def stored_bytes(record_bytes: int) -> int:
    """Bytes of a record with its checksum, rounded up to `ALIGNMENT`."""
    return -(-(record_bytes + CHECKSUM_BYTES) // ALIGNMENT) * ALIGNMENT


def checksum(key: str, record: Tensor) -> Tensor:
    """The checksum of a key and its record: [16] uint8."""
    digest = blake2b(key.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(memoryview(record.numpy()))
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _read_checked(stored: Tensor, key: str, target: Tensor) -> bool:
    target.copy_(stored[: target.numel()])
    return torch.equal(checksum(key, target), stored[target.numel() : target.numel() + CHECKSUM_BYTES])
