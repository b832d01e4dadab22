"""A limit on the disk space of record files, with the options of SGLang's own file backend.

`--hicache-storage-backend-extra-config '{"max_size": "200G", "min_free_space": "10G", "eviction_ratio": 0.9}'`, or
`SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE`, `…_MIN_FREE_SPACE`, `…_EVICTION_RATIO`. `max_size` bounds all records below the
folder, including those of other servers and earlier versions: records out of use are the oldest, and are deleted first.

A file's age is its modification time, which is renewed when the prefix is used. So no other state is needed: a server
that was killed finds the ages again. The ages of a prefix's pages differ by a nanosecond, the later page being older: a
prefix is deleted from its end, since a page without the pages before it is useless. A file that is being read, by this
process or another, is locked (`flock`) and not deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.utils.common import human_readable_int

logger = logging.getLogger(__name__)

SUFFIXES = (".page", ".tail")
SCANS_SHARE = 0.01
"""Share of the time that may go into scanning for files that other servers have written and used."""
FLAG = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True)
class DiskOptions:
    """Limits on the disk space of records; 0 for no limit."""

    max_bytes: int = 0
    min_free_bytes: int = 0
    keep: float = 0.9  # share of `max_bytes` to shrink to when files are deleted

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> DiskOptions:
        """The options of the flag's JSON, which has precedence, and of SGLang's variables.

        Raises:
            ValueError: an option is no size or ratio.
        """
        given = dict(extra or {})

        def option(name: str, variable: Any) -> Any:  # noqa: ANN401
            return variable.get() if given.get(name) is None else given[name]

        ratio = option("eviction_ratio", envs.SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO)
        try:
            keep = float(ratio)
        except (TypeError, ValueError):
            keep = 0.0
        if not 0 < keep <= 1:
            raise ValueError(f"{FLAG}: eviction_ratio should be above 0 and at most 1, not {ratio!r}")
        return cls(
            _size("max_size", option("max_size", envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE)),
            _size("min_free_space", option("min_free_space", envs.SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE)),
            keep,
        )


def _size(name: str, value: Any) -> int:  # noqa: ANN401
    if value is None or value == "":
        return 0
    try:
        size = human_readable_int(value) if isinstance(value, str) else int(value)
    except (argparse.ArgumentTypeError, TypeError, ValueError):
        size = -1
    if size < 0:
        raise ValueError(f"{FLAG}: {name} should be bytes, as 1048576, 200G or 100Gi, not {value!r}")
    return size


@dataclass(frozen=True)
class _File:
    nbytes: int
    age: int  # modification time in nanoseconds; the least is the oldest


class DiskLimit:
    """The files below a folder, and the deletion of the oldest. One thread writes; every thread may report uses."""

    def __init__(self, root: Path, options: DiskOptions) -> None:
        """Start without a scan: the first write scans the folder."""
        self._root, self._options = root, options
        self._files: dict[Path, _File] = {}
        self._total = 0
        self._lock = threading.Lock()  # not held for all deletions at once: readers need it too
        self._next_scan = 0.0
        self.deleted = 0  # number of files; only grows

    def make_room(self, nbytes: int) -> bool:
        """Delete the oldest files until a file of this size may be written; False if it still may not."""
        if self._options.max_bytes and nbytes > self._options.max_bytes:
            return False
        if not self._next_scan:
            self._scan()
        if self._fits(nbytes, 1.0):
            return True
        if time.monotonic() >= self._next_scan:
            self._scan()
        with self._lock:
            ages = sorted((file.age, path) for path, file in self._files.items())
        for _, path in ages:
            if self._fits(nbytes, self._options.keep):
                break
            with self._lock:
                self._delete(path)
        return self._fits(nbytes, 1.0)

    def added(self, path: Path, nbytes: int) -> None:
        """Note a file that was written."""
        with self._lock:
            self._remember(path, nbytes, time.time_ns())

    def removed(self, path: Path) -> None:
        """Note a file that was deleted, but not by this object."""
        with self._lock:
            self._forget(path)

    def used(self, prefix: Sequence[Iterable[Path]]) -> None:
        """Renew a prefix: the files of each of its pages, in page order; files that do not exist are ignored."""
        with self._lock:
            now = time.time_ns()
            for later, paths in enumerate(prefix):
                for path in paths:
                    if path in self._files:
                        with contextlib.suppress(OSError):
                            os.utime(path, ns=(now - later, now - later))
                            self._files[path] = _File(self._files[path].nbytes, now - later)

    def _fits(self, nbytes: int, share: float) -> bool:
        options = self._options
        if options.max_bytes and self._total + nbytes > share * options.max_bytes:
            return False
        if not options.min_free_bytes:
            return True
        at = os.statvfs(self._root)
        return at.f_bavail * at.f_frsize - nbytes >= options.min_free_bytes

    def _delete(self, path: Path) -> None:
        file = self._files.get(path)
        if file is None:
            return
        try:
            with path.open("rb") as opened:
                if is_read(opened.fileno()):
                    return
                now = os.fstat(opened.fileno()).st_mtime_ns
                if now > file.age:  # another server has used it
                    self._files[path] = _File(file.nbytes, now)
                    return
                path.unlink()
                self.deleted += 1
        except FileNotFoundError:
            pass
        except OSError:  # the folder can't be written
            return
        self._forget(path)

    def _scan(self) -> None:
        """Scan the folder. An age that is renewed meanwhile is noticed when its file would be deleted (`_delete`)."""
        begin, found = time.monotonic(), {}
        for folder, _, names in os.walk(self._root):
            for name in names:
                if name.endswith(SUFFIXES):
                    with contextlib.suppress(OSError):
                        path = Path(folder, name)
                        at = path.stat()
                        found[path] = _File(at.st_size, at.st_mtime_ns)
        with self._lock:
            self._files, self._total = found, sum(file.nbytes for file in found.values())
        took = time.monotonic() - begin
        self._next_scan = time.monotonic() + max(60.0, took / SCANS_SHARE)
        logger.info("prefix storage: %d files of %d bytes below %s", len(found), self._total, self._root)

    def _remember(self, path: Path, nbytes: int, age: int) -> None:
        self._forget(path)
        self._files[path] = _File(nbytes, age)
        self._total += nbytes

    def _forget(self, path: Path) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            self._total -= file.nbytes


def lock_to_read(descriptor: int) -> None:
    """Lock an open file: until it is closed, no `DiskLimit` deletes it. On a file system without locks the file may
    be deleted meanwhile; it can still be read to its end."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_read(descriptor: int) -> bool:
    """Whether another reader holds the file's lock; if not, this descriptor locks readers out until it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
