"""Records as files (`--hicache-storage-backend file`), under SGLang's storage interface.

SGLang's own backend of that name writes files in place and checks nothing: it reads the incomplete file that a crash
leaves as if it were complete, and neither names nor files tell which weights they belong to. The layout here:

    FOLDER/IDENTITY/identity.json            everything that the bytes depend on (`prefix.identity`), as text
    FOLDER/IDENTITY/ab/abcdef….page, .tail   a header of 96 bytes, then the record

A file gets its name when it is complete and on the disk, so a file with a name is complete, whichever process was
killed. The header repeats identity and key and has a checksum of the record: a file that was truncated, damaged, or
copied from another folder is a miss; it is counted by its reason and deleted, so that it is written again. A directory,
link or pipe with a record's name is treated alike. A file that the disk can't read is overwritten.

Faults of the disk cost time, never an answer: a failed write is counted and logged, and writing pauses for a while.
`disk_limit` can limit the disk space.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from sglang_dsv4 import env
from sglang_dsv4.cache.disk_limit import DiskLimit, lock_to_read

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"  # SGLang's
DEFAULT_FOLDER = "~/.cache/sglang-dsv4/prefixes"
MAGIC = b"DSV4REC\x01"
HEADER = struct.Struct("<8sQ16s32s16s16x")  # magic, record bytes, identity, key, checksum
REST_S = 30
"""Pause of writing after a failed write."""
LEFT_OVER_S = 600
"""Age from which an unfinished file counts as left by a crash, and is deleted."""


class Fault(Enum):
    """Why a record could not be read or written."""

    MISSING = "missing"  # deleted since its key was looked up, or before its tail or the next page
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"  # wrong checksum, no header, or bytes after the record
    FOREIGN = "foreign"  # has another identity, key or size, or is no file
    UNREADABLE = "unreadable"  # the file system raised an error
    UNWRITTEN = "unwritten"


class RecordFiles(HiCacheStorage):
    """Records of one identity in a folder. Safe for concurrent use by several threads and processes.

    Attributes:
        batch: records to ask for in one call: one, since files are read in parallel by several calls.
        folder: the folder of this identity.
        faults: how often each fault occurred; the counts only grow.
        bytes_read, bytes_written: of records, without headers.
    """

    batch = 1

    def __init__(self, root: Path, identity: Mapping[str, str], limit: DiskLimit | None = None) -> None:
        """Open the folder, and create it if needed. A folder that cannot be created or written is a warning.

        Args:
            root: the folder of all identities.
            identity: everything that the records' bytes depend on.
            limit: of the files below `root`; None for no limit.
        """
        self.identity = dict(identity)
        self._digest = identity_digest(identity)
        self.root, self.folder = root, root / self._digest.hex()
        self._limit = limit
        self.faults: Counter[Fault] = Counter()
        self.bytes_read = self.bytes_written = 0
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._unreadable: set[str] = set()  # keys whose files raised an error, until they are written anew
        self._resting_until = 0.0
        self._was_full = False
        self._open()

    @staticmethod
    def root_from_environment(configured: str | None) -> Path:
        """`configured` (`--file-storage-path`), else SGLang's variable, else a folder in the user's cache."""
        return Path(configured or env.text(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()

    # -- SGLang's interface -------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a file of that key exists, and raised no error when it was last read; `get` may find it damaged."""
        return self._path(key).is_file() and key not in self._unreadable

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ANN401
        """Number of the first keys, pages of one prefix, whose files exist.

        A page without a file was deleted, and is counted, if its own tail or the next page has a file: a prefix is
        written from its first page on, and `disk_limit` deletes it from its last.
        """
        found = next((index for index, key in enumerate(keys) if not self.exists(key)), len(keys))
        if found < len(keys):
            later = (f"{Path(keys[found]).stem}.tail", *keys[found + 1 : found + 2])
            if any(map(self.exists, later)):
                with self._lock:
                    self.faults[Fault.MISSING] += 1
                logger.info("prefix storage: %s is missing: its tokens are computed again", self._path(keys[found]))
        return found

    def get(self, key: str, target_location: Tensor | None = None, target_sizes: Any = None) -> Tensor | None:  # noqa: ANN401
        """Read a record.

        Args:
            key: of the record.
            target_location: [bytes] uint8 on the host, contiguous; undefined after a miss.

        Returns:
            `target_location`, or None: a miss, whose reason is counted.
        """
        try:
            fault = self._read(key, memoryview(target_location.numpy()))
        except FileNotFoundError:
            fault = Fault.MISSING
        except OSError as error:
            fault = Fault.UNREADABLE
            self._unreadable.add(key)
            logger.warning("prefix storage: %s can't be read, and is computed again: %s", self._path(key), error)
        if fault is None:
            with self._lock:
                self.bytes_read += target_location.numel()
            return target_location
        with self._lock:
            self.faults[fault] += 1
        if fault in (Fault.TRUNCATED, Fault.CORRUPT, Fault.FOREIGN):
            logger.warning("prefix storage: %s is %s: deleted, and computed again", self._path(key), fault.value)
            with contextlib.suppress(OSError):
                _delete(self._path(key))
                if self._limit is not None:
                    self._limit.removed(self._path(key))
        return None

    def set(self, key: str, value: Tensor | None = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ANN401
        """Write a record, [bytes] uint8 on the host, unless it exists; False if it could not be written."""
        if self.exists(key):
            return True
        if time.monotonic() < self._resting_until:
            with self._lock:
                self.faults[Fault.UNWRITTEN] += 1
            return False
        nbytes = HEADER.size + value.numel()
        if self._limit is not None and not self._limit.make_room(nbytes):
            with self._lock:
                self.faults[Fault.UNWRITTEN] += 1
                is_first, self._was_full = not self._was_full, True
            if is_first:
                logger.warning(
                    "prefix storage: the limit of %s leaves no room for a record of %d bytes; further ones are counted",
                    self.root,
                    nbytes,
                )
            return False
        try:
            self._write(key, memoryview(value.numpy()))
            if self._limit is not None:
                self._limit.added(self._path(key), nbytes)
        except OSError as error:
            with self._lock:
                self.faults[Fault.UNWRITTEN] += 1
                self._resting_until = time.monotonic() + REST_S
            logger.warning(
                "prefix storage: %s can't be written (%s); requests are still served, and nothing is written for %d s. "
                "Free space in %s or start with another folder (%s)",
                self._path(key).name,
                error,
                REST_S,
                self.root,
                FOLDER_VARIABLE,
            )
            return False
        with self._lock:
            self.bytes_written += value.numel()
            self._unreadable.discard(key)
        return True

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[Tensor] | None = None,
        target_sizes: Any = None,  # noqa: ANN401
    ) -> list[Tensor | None]:
        """`get` for each key."""
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Tensor] | None = None,
        target_locations: Any = None,  # noqa: ANN401
        target_sizes: Any = None,  # noqa: ANN401
    ) -> bool:
        """`set` for each key; returns whether all of them were written."""
        return all([self.set(key, value) for key, value in zip(keys, values, strict=True)])

    @property
    def is_limited(self) -> bool:
        """Whether `used` has an effect."""
        return self._limit is not None

    def used(self, prefix: Sequence[Sequence[str]]) -> None:
        """Renew a prefix: the keys of each of its pages, in page order; records that do not exist are ignored."""
        if self._limit is not None:
            self._limit.used([[self._path(key) for key in keys] for keys in prefix])

    def clear(self) -> None:
        """Delete the records of this identity; files of other identities stay."""
        if self._limit is not None:
            for path in self.folder.glob("*/*"):
                self._limit.removed(path)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._open()

    # -- files --------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _header(self, key: str, record: memoryview) -> bytes:
        checksum = blake2b(record, digest_size=16).digest()
        return HEADER.pack(MAGIC, record.nbytes, self._digest, blake2b(key.encode(), digest_size=32).digest(), checksum)

    def _read(self, key: str, target: memoryview) -> Fault | None:
        path = self._path(key)
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            return Fault.FOREIGN
        with path.open("rb", buffering=0) as file:
            if self._limit is not None:
                lock_to_read(file.fileno())
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                return Fault.TRUNCATED
            magic, nbytes, identity, name, checksum = HEADER.unpack(header)
            if magic != MAGIC:
                return Fault.CORRUPT
            if identity != self._digest or name != blake2b(key.encode(), digest_size=32).digest():
                return Fault.FOREIGN
            if nbytes != target.nbytes:
                return Fault.FOREIGN
            surplus = os.fstat(file.fileno()).st_size - HEADER.size - nbytes
            if surplus:
                return Fault.TRUNCATED if surplus < 0 else Fault.CORRUPT
            done = 0
            while done < nbytes:
                count = file.readinto(target[done:])
                if not count:
                    return Fault.TRUNCATED
                done += count
        return None if blake2b(target, digest_size=16).digest() == checksum else Fault.CORRUPT

    def _write(self, key: str, record: memoryview) -> None:
        path = self._path(key)
        self._clear(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{key}.{os.getpid()}.{next(self._names)}.tmp")
        try:
            with unfinished.open("xb", buffering=0) as file:
                for part in (memoryview(self._header(key, record)), record):
                    done = 0
                    while done < part.nbytes:
                        done += file.write(part[done:])
                os.fsync(file.fileno())
            unfinished.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _clear(self, path: Path) -> None:
        """Delete a directory or link with the record's name, and files or links with the names of its folders."""
        in_the_way = [place for place in (self.folder, path.parent) if os.path.lexists(place) and not place.is_dir()]
        if path.is_dir() or path.is_symlink():
            in_the_way.append(path)
        for place in in_the_way:
            logger.warning("prefix storage: %s stands in the place of records: deleted", place)
            with self._lock:
                self.faults[Fault.FOREIGN] += 1
            _delete(place)

    def _open(self) -> None:
        """Create the folder, delete the unfinished files of crashes, and log the other identities."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            note = self.folder / "identity.json"
            if not note.exists():
                note.write_text(json.dumps(self.identity, indent=1))
        except OSError as error:
            logger.warning("prefix storage: %s can't be written: %s. Existing records are read.", self.folder, error)
        now = time.time()
        for left in self.folder.glob("*/.*.tmp"):
            with contextlib.suppress(OSError):
                if now - left.stat().st_mtime > LEFT_OVER_S:
                    left.unlink()
        for name, differing in self.others().items():
            logger.info("prefix storage: %s is of another server and not read: other %s", name, ", ".join(differing))

    def others(self) -> dict[str, list[str]]:
        """Folder name of each other identity -> names of the fields in which it differs."""
        found = {}
        for note in sorted(self.root.glob("*/identity.json")):
            if note.parent != self.folder:
                try:
                    other = json.loads(note.read_text())
                    names = sorted({*other, *self.identity})
                    found[note.parent.name] = [n for n in names if other.get(n) != self.identity.get(n)]
                except (OSError, ValueError, TypeError):
                    found[note.parent.name] = ["identity.json, which can't be read"]
        return found


def _delete(place: Path) -> None:
    """Delete a file, a link, a pipe, or a directory with everything in it."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


def identity_digest(identity: Mapping[str, str]) -> bytes:
    """The 16-byte digest that names an identity."""
    return blake2b(json.dumps(dict(identity), sort_keys=True).encode(), digest_size=16).digest()
