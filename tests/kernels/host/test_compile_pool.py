"""Missing kernels are compiled by several processes, each kernel once, whatever happens to a process, a file or the
folder."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ops import pooled_kernels
from ops.pooled_kernels import authors, todo

from dsv4_kernels.host import compile_cache, compile_pool

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setattr(compile_cache, "_instead", None)
    for name in ("_exported", "_loaded"):  # replaced by stand-ins
        monkeypatch.setattr(compile_cache, name, getattr(compile_cache, name))
    return tmp_path / "kernels"


def fill(kernels: list[tuple[str, Callable[[], object]]], workers: int | None = 2) -> int:
    return compile_pool.fill(kernels, pooled_kernels.ARCH, lambda *said: None, workers)


def ready(kernels: list[tuple[str, Callable[[], object]]]) -> list[str]:
    """The origins, "disk" or "compiled", of the kernels that this process had to get; calls every kernel."""
    known = len(compile_cache.origins())
    for _, compile in kernels:
        assert compile()().startswith("compiled by ")
    return [origin.source for origin in compile_cache.origins()[known:]]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_workers_compile_what_is_missing_and_the_caller_loads_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_pool, "SECONDS_A_LINE", 0.0)
    said, kernels = [], todo(5)
    kernels[0][1]()  # already on disk
    compile_cache._in_memory.clear()
    assert compile_pool.fill(kernels, pooled_kernels.ARCH, lambda *line: said.append(line), 2) == 4
    assert ready(kernels) == ["disk"] * 4  # the first was loaded during the search for missing kernels
    ours, *theirs = sorted(authors(folder), key=lambda pid: pid != os.getpid())
    assert ours == os.getpid() and os.getpid() not in theirs and len(theirs) == 4
    counts = [(done, count) for done, count, _, _ in said]
    assert counts == sorted(counts) and counts[-1] == (4, 4)
    compile_cache._in_memory.clear()
    assert fill(kernels) == 0 and not warnings(caplog)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("killed", "compiled the kernel '1' was ended by signal 9; the server compiles it by itself"),
        ("hangs", "compiled the kernel '1' had not finished after 2 s; the server compiles it by itself"),
        ("raises", "the kernel '1' was not compiled, the server tries by itself: ValueError: a dimension that is none"),
    ],
)
def test_a_worker_that_fails_costs_its_kernel(
    folder: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "hangs":
        monkeypatch.setattr(compile_pool, "TASK_SECONDS", 2.0)
        monkeypatch.setattr(compile_cache, "LOCK_SECONDS", 0.2)
    kernels = todo(4, k1=fault)
    done = fill(kernels)
    assert done == (3 if fault != "hangs" else done)  # on a slow machine a healthy worker may be late, too
    assert any(message in text for text in warnings(caplog))
    assert "compiled" in ready(kernels)
    assert os.getpid() in authors(folder) and len(authors(folder)) == 4


def test_a_folder_that_is_full_ends_the_pool(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels = todo(6, **{f"k{i}": "disk full" for i in range(6)})
    assert fill(kernels) == 0
    messages = warnings(caplog)
    assert (
        f"compiled ones are not kept in {folder}" in messages[0] and len(messages) <= 2
    )  # one message from each of two workers
    assert ready(kernels) == ["compiled"] * 6


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's temporary folder, which does not exist; the chosen folder takes no files."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, str(tmp_path / "file" / "kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp" / f"sglang-dsv4-kernels-{os.geteuid()}"


def test_kernels_go_to_a_temporary_folder_if_the_chosen_one_takes_no_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with a read-only home compiled its 101 kernels one after the other, at every start."""
    kernels = todo(4)
    assert fill(kernels) == 4
    assert ready(kernels) == ["disk"] * 4 and os.getpid() not in authors(temporary)
    (said,) = warnings(caplog)
    assert f"kernels are kept in {temporary} for now" in said and compile_cache.FOLDER_VARIABLE in said
    compile_cache._in_memory.clear()
    monkeypatch.setattr(compile_cache, "_instead", None)
    assert fill(kernels) == 0  # the next start finds them
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("kind", ["open to others", "a link", "another user's", "a file"])
def test_a_temporary_folder_that_others_can_write_is_not_used(
    temporary: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An object file in it would run in this process."""
    if kind == "a link":
        (temporary.parent / "elsewhere").mkdir(mode=0o700)
        temporary.symlink_to(temporary.parent / "elsewhere")
    elif kind == "a file":
        temporary.write_text("")
    else:
        temporary.mkdir(mode=0o700)
        temporary.chmod(0o722 if kind == "open to others" else 0o700)
    if kind == "another user's":
        path = temporary.with_name(f"sglang-dsv4-kernels-{os.geteuid() + 1}")
        temporary.rename(path)
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(compile_pool, "_Worker", None)
    kernels = todo(2)
    assert fill(kernels) == 0
    assert "kernels are compiled one after the other and not kept" in warnings(caplog)[-1]
    assert ready(kernels) == ["compiled"] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_with_nothing_to_share_there_is_no_pool(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One core, or the cache switched off."""
    if workers == 2:
        monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(compile_pool, "_Worker", None)
    kernels = todo(3)
    assert fill(kernels, workers) == 0 and ready(kernels) == ["compiled"] * 3


def test_a_damaged_file_is_compiled_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels = todo(3)
    ready(kernels)
    for path in sorted(folder.glob("*.o"))[:2]:
        path.write_text("compiled by nobody")
    compile_cache._in_memory.clear()
    assert fill(kernels) == 2 and ready(kernels) == ["disk"] * 2
    assert sorted(author == os.getpid() for author in authors(folder)) == [False, False, True]
    assert "its SHA-256 is" in warnings(caplog)[0]


def test_ranks_wait_for_the_one_that_compiles(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The lock is released once everything is on disk; a rank that waited has nothing left to compile."""
    folder.mkdir()
    kernels, lock = todo(3), folder / "dsv4-kernel-pool.lock"
    held = lock.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def other_rank() -> None:
        ready(kernels)
        compile_cache._in_memory.clear()
        held.close()

    waited = threading.Timer(0.5, other_rank)
    with caplog.at_level(logging.INFO, logger=compile_pool.__name__):
        waited.start()
        assert fill(kernels) == 0
        waited.join()
    assert any("another process compiles kernels" in message for message in caplog.messages)
    assert set(authors(folder)) == {os.getpid()} and not warnings(caplog)


def test_a_lock_that_is_never_released_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    monkeypatch.setattr(compile_cache, "LOCK_SECONDS", 0.2)
    with (folder / "dsv4-kernel-pool.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert fill(todo(2)) == 2
    assert f"`fuser {folder}/dsv4-kernel-pool.lock` names the other one" in warnings(caplog)[0]


def test_as_many_workers_as_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    for gigabytes, expected in ((100, 16), (4.5, 4), (0.3, 1)):
        monkeypatch.setattr(compile_pool, "_available_bytes", lambda value=gigabytes: value * 1e9)
        assert compile_pool.most_workers() == expected


RANK = """
import json, sys
from functools import partial
from dsv4_kernels.host import compile_cache, compile_pool
from dsv4_kernels.moe import gpu as moe
from dsv4_kernels.quant import gpu as quant

todo = [("swiglu", partial(moe.compile, True, "sm_90a")), ("swiglu", partial(moe.compile, False, "sm_90a")),
        ("fp8_quantise", partial(quant.compile, "sm_90a"))]
done = compile_pool.fill(todo, "sm_90a", lambda *said: None, 2)
for _, compile in todo:
    compile()
print(json.dumps([done, [origin.source for origin in compile_cache.origins()]]))
"""


@pytest.mark.slow
def test_real_kernels_of_two_ranks(folder: Path) -> None:
    """Workers compile without a GPU for a named architecture; a process that names none finds their kernels."""
    env = {name: value for name, value in os.environ.items() if name != compile_cache.ARCH_VARIABLE}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)
    ]
    answers = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    assert sorted(done for done, _ in answers) == [0, 3]
    assert [sources for _, sources in answers] == [["disk"] * 3] * 2
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in folder.glob("*.o"))
    assert len(list(folder.glob("*.o"))) == 3
