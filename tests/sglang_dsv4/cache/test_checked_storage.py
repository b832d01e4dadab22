"""SGLang's own storage backends: through either interface a record is read back complete or is a miss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cache.records import random_record
from cache.zero_copy_storage import FromConfig, ZeroCopy
from torch import Tensor

from sglang_dsv4.cache.checked_storage import ALIGNMENT, READ_SLOTS, CheckedStorage, StagedRecords, stage
from sglang_dsv4.cache.record_files import FOLDER_VARIABLE, Fault
from sglang_dsv4.prefix.tier_setup import other_backend

BYTES = 5000
KEY, OTHER = "ab12.page", "cd34.tail"
IDENTITY = {"weights": "w1", "rows": "fp8"}


def record(seed: int, nbytes: int = BYTES) -> Tensor:
    return random_record(seed, nbytes)


def empty(nbytes: int = BYTES) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


Damage = Callable[[Callable[[bytes], bytes]], None]


STORAGES = ["values", "zero copy", *(["nixl"] if find_spec("nixl") else [])]  # it need not be installed


@pytest.fixture(params=STORAGES)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Damage]:
    """A function that opens the storage backend under an identity, and a function that changes every stored object."""
    staged = StagedRecords(READ_SLOTS + 1, 3 * BYTES)
    if request.param == "nixl":
        monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path))
        backend = other_backend("nixl", {"plugin": {"posix": {"active": True}}}, 0, 1, staged)

        def damage(change: Callable[[bytes], bytes]) -> None:
            for path in filter(Path.is_file, tmp_path.rglob("*")):
                path.write_bytes(change(path.read_bytes()))
    elif request.param == "values":
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        module = {"module_path": "sglang.srt.mem_cache.hicache_storage", "class_name": "HiCacheFile"}
        backend = other_backend("dynamic", {"backend_name": "theirs", **module}, 0, 1, staged)

        def damage(change: Callable[[bytes], bytes]) -> None:
            for path in tmp_path.glob("*.bin"):
                path.write_bytes(change(path.read_bytes()))
    else:
        module = {"module_path": FromConfig.__module__, "class_name": "FromConfig"}
        backend = other_backend("dynamic", {"backend_name": "fake", **module}, 0, 1, staged)

        def damage(change: Callable[[bytes], bytes]) -> None:
            backend.objects = {key: change(value) for key, value in backend.objects.items()}

    registered = stage(backend, staged)
    assert (registered is None) == (request.param == "values")
    return lambda **other: CheckedStorage(backend, registered, IDENTITY | other), damage


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_round_trip(made: tuple[Any, Damage]) -> None:
    """Records of two sizes are read back; another identity does not find them."""
    opened, _ = made
    storage, other = opened(), opened(weights="w2")
    assert not storage.exists(KEY) and storage.get(KEY, empty()) is None
    assert storage.set(KEY, record(1)) and storage.set(OTHER, record(2, 3 * BYTES))
    assert storage.batch_exists([KEY, OTHER, "ef.page", KEY]) == 2 and not other.exists(KEY)
    assert torch.equal(storage.get(KEY, empty()), record(1))
    assert torch.equal(storage.get(OTHER, empty(3 * BYTES)), record(2, 3 * BYTES))
    assert storage.faults == {Fault.MISSING: 1}


@pytest.mark.parametrize(
    "change",
    [flip(2222), flip(BYTES + 3), lambda data: data[:100], lambda data: b"", lambda data: data[:-ALIGNMENT]],
    ids=["bit of the record", "bit of the checksum", "cut short", "empty", "a block shorter"],
)
def test_a_damaged_object_is_a_miss(made: tuple[Any, Damage], change: Callable[[bytes], bytes]) -> None:
    """Even if the target memory still holds another complete record with its checksum."""
    opened, damage = made
    storage = opened()
    storage.set(KEY, record(1))
    damage(change)
    storage.set(OTHER, record(2))
    assert torch.equal(storage.get(OTHER, empty()), record(2))
    assert storage.get(KEY, empty()) is None
    assert sum(storage.faults.values()) == 1


def test_an_object_under_another_key_is_a_miss(made: tuple[Any, Damage]) -> None:
    opened, damage = made
    storage = opened()
    storage.set(KEY, record(1))
    stored: list[bytes] = []
    damage(lambda data: stored.append(data) or data)  # type: ignore[func-returns-value]
    storage.set(OTHER, record(2))
    damage(lambda data: stored[0])
    assert torch.equal(storage.get(KEY, empty()), record(1)) and storage.get(OTHER, empty()) is None
    assert storage.faults == {Fault.CORRUPT: 1}


def test_many_at_once(made: tuple[Any, Damage]) -> None:
    """More records than slots, one of them missing, read by several threads."""
    opened, _ = made
    storage = opened()
    keys = [f"{i:04x}.page" for i in range(2 * READ_SLOTS + 5)]
    for i, key in enumerate(keys):
        assert i == 3 or storage.set(key, record(i))

    def read(_: int) -> Sequence[Tensor | None]:
        return storage.batch_get(keys, [empty() for _ in keys])

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(read, range(8)):
            for i, one in enumerate(found):
                assert one is None if i == 3 else torch.equal(one, record(i))
    assert storage.faults == {Fault.MISSING: 8}


def test_zero_copy_asks_for_a_batch() -> None:
    backend, staged = ZeroCopy(), StagedRecords(READ_SLOTS + 1, BYTES)
    storage = CheckedStorage(backend, stage(backend, staged), IDENTITY)
    keys = [f"{i:04x}.page" for i in range(READ_SLOTS + 2)]
    for key in keys:
        storage.set(key, record(1))
    storage.batch_get(keys, [empty() for _ in keys])
    assert backend.batches == [READ_SLOTS, 2] and storage.batch == READ_SLOTS


def test_a_storage_that_fails_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    backend, staged = ZeroCopy(), StagedRecords(READ_SLOTS + 1, BYTES)
    storage = CheckedStorage(backend, stage(backend, staged), IDENTITY)
    storage.set(KEY, record(1))
    backend.down = True
    assert not storage.exists(KEY) and storage.get(KEY, empty()) is None and not storage.set(OTHER, record(2))
    assert storage.faults == {Fault.UNREADABLE: 2, Fault.UNWRITTEN: 1} and "no connection" in caplog.text
    backend.down = False
    assert torch.equal(storage.get(KEY, empty()), record(1))


def test_a_storage_that_does_not_keep_bytes_is_refused() -> None:
    """SGLang's `sim` remembers which keys were written, but not their bytes."""
    staged = StagedRecords(READ_SLOTS + 1, BYTES)
    backend = other_backend("sim", None, 0, 1, staged)
    with pytest.raises(ValueError, match=r"--hicache-storage-backend sim: a record of 5000 bytes .* not found whole"):
        CheckedStorage(backend, stage(backend, staged), IDENTITY).probe("sim", BYTES)


def test_one_that_works_is_not(made: tuple[Any, Damage]) -> None:
    opened, _ = made
    for _ in range(2):  # the second server finds the records of the first
        opened().probe("theirs", BYTES)


@pytest.mark.parametrize("name", ["mooncake", "nixl", "nothing"])
def test_a_storage_that_is_not_installed_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mooncake", "mooncake.store", "nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "sglang.srt.mem_cache.storage.nixl.hicache_nixl", raising=False)
    with pytest.raises(ValueError, match=f"--hicache-storage-backend {name} can't be opened: "):
        other_backend(name, None, 0, 1, StagedRecords(READ_SLOTS + 1, BYTES))
