"""Record files under a disk limit, with small records, for tests and for the process that one test kills."""

from __future__ import annotations

from pathlib import Path

from cache.records import random_record
from torch import Tensor

from sglang_dsv4.cache.disk_limit import SUFFIXES, DiskLimit, DiskOptions
from sglang_dsv4.cache.record_files import HEADER, RecordFiles

BYTES = 1000
FILE = HEADER.size + BYTES
IDENTITY = {"weights": "w1"}


def key(i: int, suffix: str = ".page") -> str:
    return f"{i % 256:02x}{i:06x}{suffix}"


def record(seed: int) -> Tensor:
    return random_record(seed, BYTES)


def limited(root: Path, files: int, **options: object) -> RecordFiles:
    return RecordFiles(root, IDENTITY, DiskLimit(root, DiskOptions(files * FILE, **options)))


def taken(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.suffix in SUFFIXES)


def there(files: RecordFiles, count: int) -> list[int]:
    return [i for i in range(count) if files.exists(key(i))]
