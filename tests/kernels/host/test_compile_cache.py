"""Compiled kernels on disk: found again, not found when anything differs, compiled again when damaged.

The bookkeeping is tested with a stand-in for compiler, exporter and loader. Real kernels are compiled (for sm_90a and
sm_100a, which needs no GPU), exported and loaded in separate processes: once the DSL has loaded its runtime library,
the emulator cannot replace it in that process. Loaded kernels are compared with compiled ones where there is a GPU
(test_sparse_attention_gpu.py).
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsv4_kernels.host import compile_cache

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@dataclass(frozen=True)
class Config:
    """Compile-time parameters of the small kernel."""

    factor: int = 2


class Counted:
    """A stand-in for a kernel: "compiled" into a function whose object file holds its configuration."""

    def __init__(self, config: Config = Config(), arch: str = "sm_90a") -> None:  # noqa: B008 - frozen
        self.config, self.arch, self.compilations = config, arch, 0

    def compile(self) -> Callable[[], str]:
        self.compilations += 1
        return lambda: f"{self.config} {self.arch}"

    def get(self) -> Callable[..., str]:
        return compile_cache.load_or_compile("scale", self.config, self.arch, self.compile)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, str(tmp_path / "kernels"))

    def loaded(path: Path) -> Callable[[], str]:
        contents = path.read_text()
        if not contents.startswith("Config"):
            raise RuntimeError("no such symbol")
        return lambda: contents

    monkeypatch.setattr(compile_cache, "_exported", lambda function: function().encode())
    monkeypatch.setattr(compile_cache, "_loaded", loaded)
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    return tmp_path / "kernels"


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.o"))


def test_a_kernel_is_compiled_once_and_found_on_disk(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = Counted()
    before = len(compile_cache.origins())
    with caplog.at_level(logging.INFO, logger=compile_cache.__name__):
        first = kernel.get()
        assert kernel.get() is first and kernel.compilations == 1
        compile_cache._in_memory.clear()
        loaded = kernel.get()
    assert loaded() == first() == "Config(factor=2) sm_90a" and loaded is not first and kernel.compilations == 1
    assert [o.source for o in compile_cache.origins()[before:]] == ["compiled", "disk"]
    assert [record.message.split()[0] for record in caplog.records] == ["compiling", "compiled", "loaded"]
    (path,) = objects(folder)
    facts = json.loads(path.with_suffix(".json").read_text())
    assert (facts["config"], facts["arch"]) == ("Config(factor=2)", "sm_90a")
    assert {file.suffix for file in folder.iterdir()} == {".o", ".json", ".lock"}  # no temporary file is left


def test_another_configuration_architecture_source_or_environment_is_another_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counted(Config(2), "sm_90a").get()
    for other in (Counted(Config(3), "sm_90a"), Counted(Config(2), "sm_100a")):
        other.get()
        assert other.compilations == 1
    compile_cache._in_memory.clear()
    for change in (
        lambda: monkeypatch.setattr(compile_cache, "_source_hash", lambda: "edited"),
        lambda: monkeypatch.setattr("cutlass.__version__", "99"),
        lambda: monkeypatch.setenv("CUTE_DSL_LINEINFO", "1"),
    ):
        change()
        again = Counted(Config(2), "sm_90a")
        again.get()
        assert again.compilations == 1
        compile_cache._in_memory.clear()
    assert len(objects(folder)) == 6


def test_users_with_other_folders_of_the_dsl_and_another_log_share_a_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counted(Config(2), "sm_90a").get()
    for name in compile_cache._SAME_CODE:
        monkeypatch.setenv(name, "/home/b/.cache/flashinfer/cute_dsl")
    compile_cache._in_memory.clear()
    again = Counted(Config(2), "sm_90a")
    again.get()
    assert again.compilations == 0 and len(objects(folder)) == 1


def test_variables_that_do_not_count_do_not_change_the_code() -> None:
    """CuTe DSL declares for each setting whether the code depends on it."""
    env_manager = importlib.import_module("cutlass.base_dsl.env_manager")
    settings = vars(env_manager.EnvironmentVarManager)
    of_dsl = {
        f"CUTE_DSL_{setting.source}": setting.affects_compile
        for setting in settings.values()
        if isinstance(setting, env_manager.EnvVar) and isinstance(setting.source, str)
    }
    assert of_dsl["CUTE_DSL_LINEINFO"]
    assert not any(of_dsl.get(name, False) for name in compile_cache._SAME_CODE)


def test_the_source_hash_covers_every_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes constants from other files than its own."""
    for name, text in (("host/compile_cache.py", "a"), ("sparse_attention/sm90/launch.py", "b"), ("kv_layout.py", "c")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(compile_cache, "__file__", str(tmp_path / "host" / "compile_cache.py"))
    hashes = {compile_cache._source_hash.__wrapped__()}
    for name in ("sparse_attention/sm90/launch.py", "kv_layout.py", "sparse_attention/new.py"):
        (tmp_path / name).write_text("edited")
        hashes.add(compile_cache._source_hash.__wrapped__())
    (tmp_path / "kv_layout.py").rename(tmp_path / "renamed.py")
    hashes.add(compile_cache._source_hash.__wrapped__())
    assert len(hashes) == 5


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip_a_byte(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


DAMAGE = {
    "truncated": (_truncate, "SHA-256"),
    "flipped": (_flip_a_byte, "SHA-256"),
    "empty": (lambda path: path.write_bytes(b""), "SHA-256"),
    "no_object": (Path.unlink, ""),
    "no_facts": (lambda path: path.with_suffix(".json").unlink(), ""),
    "other_facts": (lambda path: path.with_suffix(".json").write_text("[]"), "SHA-256"),
    "broken_facts": (lambda path: path.with_suffix(".json").write_text("{"), "compiled again"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_compiled_again_and_replaced(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, message = DAMAGE[name]
    kernel = Counted()
    kernel.get()
    damage(objects(folder)[0])
    for expected in (2, 2):
        compile_cache._in_memory.clear()
        assert callable(kernel.get()) and kernel.compilations == expected
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == bool(message) and all(message in text for text in warnings)


def test_an_object_that_does_not_load_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hash is right, the function is missing."""
    kernel = Counted()
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "_exported", lambda function: b"another program's")
        kernel.get()
    compile_cache._in_memory.clear()
    assert kernel.get()() == "Config(factor=2) sm_90a" and kernel.compilations == 2
    assert "no such symbol" in caplog.text and "compiled again" in caplog.text


def test_a_function_that_does_not_export_works_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(function: object) -> bytes:
        raise RuntimeError("no symbols")

    monkeypatch.setattr(compile_cache, "_exported", failing)
    assert Counted().get()() == "Config(factor=2) sm_90a"
    assert "is not kept: no symbols" in caplog.text and not objects(folder)


def test_a_kernel_that_no_process_has_loaded_for_long_is_deleted(folder: Path) -> None:
    old, used, new = (Counted(Config(factor=factor)) for factor in (2, 3, 4))
    old.get()
    used.get()
    long_ago = time.time() - (compile_cache.KEEP_DAYS + 1) * 24 * 3600
    for file in folder.glob("*.o"):
        os.utime(file, (long_ago, long_ago))
    compile_cache._in_memory.clear()
    used.get()
    new.get()
    compile_cache._in_memory.clear()
    assert len(list(folder.iterdir())) == 2 * 3
    for kernel in (old, used, new):
        kernel.get()
    assert [kernel.compilations for kernel in (old, used, new)] == [2, 1, 1]


def test_what_is_not_ours_is_not_deleted(folder: Path) -> None:
    """The folder may hold other programs' files: an object file and its neighbours stay, however old they are."""
    folder.mkdir()
    others = [folder / name for name in ("main.o", "main.json", "main.lock", "sparse_attention_sm90.o")]
    long_ago = time.time() - 10 * compile_cache.KEEP_DAYS * 24 * 3600
    for file in others:
        file.write_text("another program's")
        os.utime(file, (long_ago, long_ago))
    Counted().get()
    assert all(file.exists() for file in others)
    assert all(file.name.startswith(compile_cache.PREFIX) for file in folder.iterdir() if file not in others)


def test_a_lock_that_is_never_released_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process hangs while it compiles; this one compiles after a while, and its result is stored."""
    monkeypatch.setattr(compile_cache, "LOCK_SECONDS", 0.2)
    Counted().get()
    (held,) = folder.glob("*.lock")
    objects(folder)[0].unlink()
    compile_cache._in_memory.clear()
    kernel = Counted()
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert kernel.get()() == "Config(factor=2) sm_90a"
    assert kernel.compilations == 1 and len(objects(folder)) == 1
    (message,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert f"another process has held {held} for 0 s" in message and f"fuser {held}" in message


def test_a_lock_that_is_released_in_time_is_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that waited finds the kernel that the other one compiled."""
    Counted().get()
    compile_cache._in_memory.clear()
    kernel = Counted()
    file = next(folder.glob("*.lock")).open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    release = threading.Timer(0.3, file.close)
    release.start()
    begin = time.monotonic()
    kernel.get()
    release.join()
    assert time.monotonic() - begin >= 0.25 and kernel.compilations == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_off_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    kernel = Counted()
    kernel.get()
    compile_cache._in_memory.clear()
    kernel.get()
    assert kernel.compilations == 2 and not folder.exists() and compile_cache.folder() is None


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compile_cache.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile_cache.folder() == Path("/somewhere/sglang-dsv4/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compile_cache.folder() == Path.home() / ".cache/sglang-dsv4/kernels"


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    """One, not one a kernel: a home that takes no files gave two for each of a server's 63 kernels."""
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, str(tmp_path / "file" / "kernels"))
    assert all(callable(Counted(Config(factor)).get()) for factor in (2, 3))
    assert caplog.text.count("compiled kernels are not kept") == 1


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_decides_who_reads_a_kernel(folder: Path, umask: int, mode: int) -> None:
    """Kernels had mode 600 always, so of two users of one folder the second could not read the first one's."""
    before = os.umask(umask)
    try:
        Counted().get()
    finally:
        os.umask(before)
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {".o": mode, ".json": mode, ".lock": 0o666}


def test_a_folder_without_locks_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: object, timeout: float) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compile_cache.FileLock, "acquire", refused)
    kernels = [Counted(Config(factor)) for factor in (2, 3)]
    assert all(callable(kernel.get()) for kernel in kernels)
    assert len(objects(folder)) == 2 and caplog.text.count(f"no locks in {folder}") == 1


def test_a_configuration_with_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match="prints an address"):
        compile_cache.load_or_compile("scale", object(), "sm_90a", lambda: None)


REAL_KERNEL = """
import json, sys
import cutlass
from cuda.bindings import driver
from cutlass import cute
from cutlass.cute import runtime
from dsv4_kernels.host import compile_cache

arch = sys.argv[1]

@cute.kernel
def scale(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] * 2.0

@cute.jit
def launch(x: cute.Tensor, stream: driver.CUstream):
    scale(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

def compiled():
    x = runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16)
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=False)
    return cute.compile(launch, x, stream, options=f"--gpu-arch {arch}")

for _ in range(2):
    assert callable(compile_cache.load_or_compile("scale", "x * 2", arch, compiled))
    compile_cache._in_memory.clear()
print(json.dumps([origin.source for origin in compile_cache.origins()]))
"""


def start(program: Path, *arguments: str) -> subprocess.Popen:
    if not program.exists():  # another process may be reading it
        program.write_text(REAL_KERNEL)  # the DSL reads the source of the functions that it compiles
    return subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_real_kernel_is_exported_and_loaded(tmp_path: Path, folder: Path, arch: str) -> None:
    answer, _ = start(tmp_path / "program.py", arch).communicate(timeout=120)
    assert json.loads(answer) == ["compiled", "disk"]
    assert objects(folder)[0].read_bytes().startswith(b"\x7fELF")


def test_of_several_processes_one_compiles(tmp_path: Path, folder: Path) -> None:
    """Ranks of tensor parallelism start together and need the same kernel."""
    ranks = [start(tmp_path / "program.py", "sm_90a") for _ in range(3)]
    sources = sorted(json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert sources == [["compiled", "disk"], ["disk", "disk"], ["disk", "disk"]]
    assert len(objects(folder)) == 1
