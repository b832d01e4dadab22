"""Records on disk: any fault of a file is a counted miss, and never yields another record's bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cache.records import random_record
from torch import Tensor

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE, HEADER, LEFT_OVER_S, Fault, RecordFiles

BYTES = 5000
KEY, OTHER = "ab12.page", "cd34.page"
IDENTITY = {"weights": "w1", "rows": "fp8"}


def record(seed: int) -> Tensor:
    return random_record(seed, BYTES)


@pytest.fixture
def files(tmp_path: Path) -> RecordFiles:
    return RecordFiles(tmp_path, IDENTITY)


def read(files: RecordFiles, key: str = KEY, nbytes: int = BYTES) -> Tensor | None:
    return files.get(key, torch.zeros(nbytes, dtype=torch.uint8))


def open_by(monkeypatch: pytest.MonkeyPatch, mode: str, instead: Callable[[Path], object]) -> None:
    """Open files in one mode by another function; in other modes as before."""
    real = Path.open

    def opened(path: Path, how: str = "r", **options: object) -> object:
        return instead(path) if how == mode else real(path, how, **options)

    monkeypatch.setattr(Path, "open", opened)


def test_round_trip_and_a_second_server(files: RecordFiles, tmp_path: Path) -> None:
    assert not files.exists(KEY) and files.set(KEY, record(1)) and files.exists(KEY)
    assert torch.equal(read(files), record(1))
    assert torch.equal(read(RecordFiles(tmp_path, IDENTITY)), record(1))
    assert files.batch_set([KEY, OTHER], [record(2), record(3)])  # existing records stay
    assert [
        bool(torch.equal(*pair))
        for pair in zip(
            files.batch_get([KEY, OTHER], [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]),
            [record(1), record(3)],
            strict=True,
        )
    ] == [True, True]
    assert not files.faults and files.bytes_written == 2 * BYTES


def test_a_missing_file_is_a_miss(files: RecordFiles) -> None:
    assert read(files) is None and files.faults == {Fault.MISSING: 1}


def truncate_to(nbytes: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:nbytes]


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE = {
    "empty": (truncate_to(0), Fault.TRUNCATED),
    "half-a-header": (truncate_to(40), Fault.TRUNCATED),
    "header-alone": (truncate_to(HEADER.size), Fault.TRUNCATED),
    "last-byte-gone": (truncate_to(HEADER.size + BYTES - 1), Fault.TRUNCATED),
    "a-byte-too-many": (lambda data: data + b"\0", Fault.CORRUPT),
    "twice": (lambda data: data + data, Fault.CORRUPT),
    "magic": (flip(0), Fault.CORRUPT),
    "length": (flip(8), Fault.FOREIGN),
    "identity": (flip(16), Fault.FOREIGN),
    "key": (flip(32), Fault.FOREIGN),
    "checksum": (flip(64), Fault.CORRUPT),
    "first-bit": (flip(HEADER.size), Fault.CORRUPT),
    "a-bit-inside": (flip(HEADER.size + 2222), Fault.CORRUPT),
    "last-bit": (flip(HEADER.size + BYTES - 1), Fault.CORRUPT),
    "zeros": (lambda data: bytes(len(data)), Fault.CORRUPT),
}


@pytest.mark.parametrize(("damage", "fault"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_miss_and_written_anew(
    files: RecordFiles, damage: Callable[[bytes], bytes], fault: Fault
) -> None:
    files.set(KEY, record(1))
    path = files.folder / KEY[:2] / KEY
    path.write_bytes(damage(path.read_bytes()))
    assert read(files) is None and files.faults == {fault: 1}
    assert not files.exists(KEY) and files.set(KEY, record(1))
    assert torch.equal(read(files), record(1))


def test_a_record_under_anothers_name_is_a_miss(files: RecordFiles) -> None:
    files.set(KEY, record(1))
    (files.folder / OTHER[:2]).mkdir()
    (files.folder / KEY[:2] / KEY).rename(files.folder / OTHER[:2] / OTHER)
    assert read(files, OTHER) is None and files.faults == {Fault.FOREIGN: 1}


def test_two_identities_in_a_folder_share_nothing(files: RecordFiles, tmp_path: Path) -> None:
    files.set(KEY, record(1))
    other = RecordFiles(tmp_path, IDENTITY | {"weights": "w2"})
    assert not other.exists(KEY) and read(other) is None
    assert list(other.others().values()) == [["weights"]]
    source, target = files.folder / KEY[:2] / KEY, other.folder / KEY[:2] / KEY
    target.parent.mkdir()
    target.write_bytes(source.read_bytes())  # a copied file
    assert read(other) is None and other.faults == {Fault.MISSING: 1, Fault.FOREIGN: 1}
    other.set(KEY, record(2))
    assert torch.equal(read(files), record(1)) and torch.equal(read(other), record(2))
    other.clear()
    assert not other.exists(KEY) and torch.equal(read(files), record(1))


WRITER = """
import sys, torch
from pathlib import Path
from sglang_dsv4.cache.record_files import RecordFiles
files = RecordFiles(Path(sys.argv[1]), {identity})
print("ready", flush=True)
for i in range(100000):
    files.set(f"{{i:04x}}.page", torch.full((1 << 20,), i % 251, dtype=torch.uint8))
"""


def test_a_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    """kill -9 while megabytes are written: every named file is a complete record; leftovers are deleted."""
    script = textwrap.dedent(WRITER).format(identity=IDENTITY)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 60
    while len(list(tmp_path.rglob("*.page"))) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    process.wait()
    files = RecordFiles(tmp_path, IDENTITY)
    names = [path.name for path in files.folder.rglob("*.page")]
    assert len(names) >= 5
    for name in names:
        target = torch.zeros(1 << 20, dtype=torch.uint8)
        assert files.get(name, target) is not None and bool((target == int(name[:4], 16) % 251).all())
    (files.folder / names[0][:2] / f".{names[0]}.1.1.tmp").write_bytes(b"half")
    left = list(files.folder.rglob("*.tmp"))
    for path in left:
        os.utime(path, times=(time.time() - 2 * LEFT_OVER_S,) * 2)
    RecordFiles(tmp_path, IDENTITY)
    assert left and not list(files.folder.rglob("*.tmp"))


def test_a_full_disk_is_a_warning(
    files: RecordFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full instead of the file: the write fails, no file is left, and writing pauses."""
    files.set(KEY, record(1))

    def full(path: Path) -> object:
        path.touch()
        return open("/dev/full", "wb", buffering=0)

    open_by(monkeypatch, "xb", full)
    assert not files.set(OTHER, record(2)) and not files.exists(OTHER)
    assert "No space left on device" in caplog.text and FOLDER_VARIABLE in caplog.text
    assert not list(files.folder.rglob("*.tmp"))
    caplog.clear()
    assert not files.set("ef56.page", record(3)) and not caplog.text, "it rests"
    assert files.faults == {Fault.UNWRITTEN: 2} and torch.equal(read(files), record(1))
    monkeypatch.undo()
    files._resting_until = 0
    assert files.set(OTHER, record(2)) and torch.equal(read(files, OTHER), record(2))


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stands for a read-only folder, which the tests' user could write to if it is root."""
    (tmp_path / "file").touch()
    files = RecordFiles(tmp_path / "file" / "below", IDENTITY)
    assert "can't be written" in caplog.text
    assert not files.exists(KEY) and not files.set(KEY, record(1)) and read(files) is None
    assert files.faults[Fault.UNWRITTEN] == 1


def make_directory(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").touch()


def make_link(path: Path) -> None:
    path.symlink_to(path.parent)


IN_THE_WAY = {"directory": make_directory, "pipe": os.mkfifo, "link": make_link}


@pytest.mark.parametrize("stands", IN_THE_WAY.values(), ids=IN_THE_WAY)
@pytest.mark.parametrize("asked", [True, False], ids=["read-first", "written-first"])
def test_what_stands_in_a_records_place_is_replaced(
    files: RecordFiles, stands: Callable[[Path], None], asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory under a page's name was a miss when read, but existed when the page was written: never repaired."""
    path = files.folder / KEY[:2] / KEY
    path.parent.mkdir()
    stands(path)
    assert not files.exists(KEY)
    if asked:
        assert read(files) is None and files.faults == {Fault.FOREIGN: 1} and not os.path.lexists(path)
    assert files.set(KEY, record(1)) and torch.equal(read(files), record(1))
    assert path.is_file() and path.parent.is_dir() and not files.faults[Fault.UNWRITTEN]


@pytest.mark.parametrize("level", [1, 2], ids=["folder-of-an-identity", "folder-of-records"])
@pytest.mark.parametrize("link", [False, True], ids=["file", "dangling-link"])
def test_what_stands_in_a_folders_place_is_replaced(tmp_path: Path, level: int, link: bool) -> None:
    """Each record below such a place paused writing for 30 s."""
    folder = RecordFiles(tmp_path, IDENTITY).folder
    if level == 1:
        (folder / "identity.json").unlink()
        folder.rmdir()
    place = folder if level == 1 else folder / KEY[:2]
    if link:
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.write_text("in the way")
    files = RecordFiles(tmp_path, IDENTITY)
    assert files.set(KEY, record(1)) and torch.equal(read(files), record(1))
    assert files.faults == {Fault.FOREIGN: 1}


def test_an_unreadable_file_is_a_miss_and_written_anew(
    files: RecordFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files.set(KEY, record(1))

    def failing(path: Path) -> object:
        raise OSError(5, "Input/output error")

    open_by(monkeypatch, "rb", failing)
    assert read(files) is None and files.faults == {Fault.UNREADABLE: 1} and "can't be read" in caplog.text
    monkeypatch.undo()
    assert not files.exists(KEY), "or it would not be written"
    assert files.set(KEY, record(2)) and files.exists(KEY) and torch.equal(read(files), record(2))


PAGES = [f"{name}.page" for name in ("aa01", "bb02", "cc03")]


@pytest.mark.parametrize(
    ("gone", "found", "counted"),
    [
        (["aa01.page"], 0, 1),
        (["bb02.page"], 1, 1),
        (["cc03.page"], 2, 1),  # its tail is there
        (["cc03.page", "cc03.tail"], 2, 0),
        (["bb02.page", "cc03.page", "cc03.tail"], 1, 0),
        ([], 3, 0),
    ],
    ids=["first", "middle", "last", "a-shorter-prefix", "a-still-shorter-prefix", "none"],
)
def test_a_page_that_was_deleted_is_counted(files: RecordFiles, gone: list[str], found: int, counted: int) -> None:
    for key in (*PAGES, "cc03.tail"):
        files.set(key, record(1))
    for key in gone:
        (files.folder / key[:2] / key).unlink()
    assert files.batch_exists(PAGES) == found and files.faults[Fault.MISSING] == counted


def test_the_folder_comes_from_flag_variable_or_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/somewhere")
    assert RecordFiles.root_from_environment(None) == Path("/somewhere")
    assert RecordFiles.root_from_environment("/flag") == Path("/flag")
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert RecordFiles.root_from_environment(None) == Path("~/.cache/sglang-dsv4/prefixes").expanduser()
