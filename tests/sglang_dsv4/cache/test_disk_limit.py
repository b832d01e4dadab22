"""The disk limit is never exceeded; the oldest files are deleted first, a prefix from its end, no file being read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from cache.limited_files import BYTES, FILE, IDENTITY, key, limited, record, taken, there

from sglang_dsv4.cache.disk_limit import DiskLimit, DiskOptions
from sglang_dsv4.cache.record_files import Fault, RecordFiles


def test_the_oldest_go_first(tmp_path: Path) -> None:
    """Ten files fit; the eleventh shrinks the folder to the share to keep, and recently used files stay."""
    files = limited(tmp_path, 10, keep=0.8)
    for i in range(10):
        assert files.set(key(i), record(i)) and taken(tmp_path) <= 10 * FILE
    files.used([[key(0)], [key(2), key(2, ".tail")]])
    assert there(files, 11) == list(range(10))
    assert files.set(key(10), record(10))
    assert there(files, 11) == [0, 2, 5, 6, 7, 8, 9, 10] and taken(tmp_path) == 8 * FILE
    assert not files.faults


def test_a_prefix_goes_from_its_end(tmp_path: Path) -> None:
    files = limited(tmp_path, 6, keep=1.0)
    for i in range(6):
        files.set(key(i), record(i))
    files.used([[key(i)] for i in range(6)])
    for i, left in ((6, range(5)), (7, range(4)), (8, range(3))):
        files.set(key(i), record(i))
        assert there(files, 6) == list(left)


def test_a_restart_finds_the_ages(tmp_path: Path) -> None:
    """The limit also finds the older files that other servers have left below the folder, and deletes them first."""
    other = RecordFiles(tmp_path, {"weights": "w0"})
    other.set(key(77), record(77))
    files = limited(tmp_path, 10)
    for i in range(8):
        files.set(key(i), record(i))
    time.sleep(0.02)  # times of writing are as coarse as the kernel's clock
    files.used([[key(1)], [key(3)]])
    again = limited(tmp_path, 5, keep=1.0)
    assert again.set(key(8), record(8))
    assert not other.exists(key(77)) and {1, 3, 8} <= set(there(again, 9)) and taken(tmp_path) == 5 * FILE


def test_a_file_that_is_read_stays(tmp_path: Path) -> None:
    """Read by another process: the next oldest file is deleted instead, and this one after it is closed."""
    files = limited(tmp_path, 3, keep=1.0)
    for i in range(3):
        files.set(key(i), record(i))
        time.sleep(0.01)
    (path,) = tmp_path.rglob(key(0))
    program = (
        "import sys; from sglang_dsv4.cache.disk_limit import lock_to_read; file = open(sys.argv[1], 'rb');"
        "lock_to_read(file.fileno()); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert any("locked" in line for line in iter(reader.stdout.readline, ""))
        assert files.set(key(3), record(3)) and there(files, 4) == [0, 2, 3]
        reader.kill()
    assert files.set(key(4), record(4)) and there(files, 5) == [2, 3, 4]


def test_nothing_is_deleted_for_what_can_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = limited(tmp_path, 2)
    files.set(key(0), record(0))
    assert not files.set(key(1), torch.zeros(2 * FILE, dtype=torch.uint8))
    assert not files.set(key(2), torch.zeros(2 * FILE, dtype=torch.uint8))
    assert there(files, 3) == [0] and files.faults == {Fault.UNWRITTEN: 2}
    assert caplog.text.count("leaves no room for a record") == 1


def test_free_space_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk with room for twelve files, four must stay free, and other programs use two."""
    real = os.statvfs

    class Disk:
        f_frsize = 1

        def __init__(self) -> None:
            self.f_bavail = 10 * FILE - taken(tmp_path)

    monkeypatch.setattr(os, "statvfs", lambda path: Disk() if Path(path) == tmp_path else real(path))
    files = RecordFiles(tmp_path, IDENTITY, DiskLimit(tmp_path, DiskOptions(min_free_bytes=4 * FILE)))
    for i in range(9):
        assert files.set(key(i), record(i))
        time.sleep(0.01)
    assert there(files, 9) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("ending", ["deleted by others", "damaged", "cleared"])
def test_what_is_gone_takes_no_room(tmp_path: Path, ending: str) -> None:
    files = limited(tmp_path, 4, keep=1.0)
    for i in range(4):
        files.set(key(i), record(i))
    if ending == "cleared":
        files.clear()
    for i in range(2):
        for path in tmp_path.rglob(key(i)):
            if ending == "damaged":
                path.write_bytes(b"damaged")
                assert files.get(key(i), torch.zeros(BYTES, dtype=torch.uint8)) is None
            else:
                path.unlink()
    for i in range(4, 6):
        assert files.set(key(i), record(i))
    assert there(files, 6) == ([4, 5] if ending == "cleared" else [2, 3, 4, 5])


@pytest.mark.slow
def test_readers_beside_a_writer(tmp_path: Path) -> None:
    """A read returns the record or a miss without a file fault, and the limit holds at all times."""
    files = limited(tmp_path, 12)
    stop, wrong = threading.Event(), []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            i = rng.randrange(60)
            found = files.get(key(i), torch.zeros(BYTES, dtype=torch.uint8))
            if found is not None:
                files.used([[key(i)]])
                if not torch.equal(found, record(i)):
                    wrong.append(i)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    for n in range(240):
        files.set(key(n % 60), record(n % 60))
        if taken(tmp_path) > 12 * FILE:
            wrong.append("too much")
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong and set(files.faults) <= {Fault.MISSING}


@pytest.mark.slow
def test_a_killed_server(tmp_path: Path) -> None:
    """A server is killed while it writes and deletes; the next one finds complete files only, and is within the limit
    after its first write."""
    program = textwrap.dedent(
        """
        import sys, pathlib
        from cache.limited_files import key, limited, record
        files = limited(pathlib.Path(sys.argv[1]), 8)
        print("ready", flush=True)
        for n in range(10**9):
            files.set(key(n % 40), record(n % 40))
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    ) as writer:
        assert any("ready" in line for line in iter(writer.stdout.readline, ""))
        time.sleep(0.3)
        writer.send_signal(signal.SIGKILL)
    files = limited(tmp_path, 8)
    assert files.set(key(50), record(50)) and taken(tmp_path) <= 8 * FILE
    found = there(files, 60)
    assert len(found) > 1
    for i in found:
        assert torch.equal(files.get(key(i), torch.zeros(BYTES, dtype=torch.uint8)), record(i))
    assert not files.faults


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's names and variables; the flag's JSON has precedence."""
    assert DiskOptions.of(None) == DiskOptions(0, 0, 0.9)
    assert DiskOptions.of({"max_size": "200G", "min_free_space": "1Gi"}) == DiskOptions(200 * 10**9, 1 << 30, 0.9)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", "5M")
    assert DiskOptions.of({"eviction_ratio": 0.5}) == DiskOptions(5_000_000, 0, 0.5)
    assert DiskOptions.of({"max_size": 7}).max_bytes == 7


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_size": "much"}, "max_size should be bytes, as 1048576, 200G or 100Gi, not 'much'"),
        ({"max_size": -1}, "max_size"),
        ({"min_free_space": [1]}, "min_free_space"),
        ({"eviction_ratio": 0}, "eviction_ratio should be above 0 and at most 1, not 0"),
        ({"eviction_ratio": "x"}, "eviction_ratio"),
    ],
)
def test_an_option_that_is_none_is_refused(given: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"extra-config: {named}"):
        DiskOptions.of(given)
