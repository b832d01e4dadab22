"""Compiled CuTe DSL kernels, kept in memory and on disk: a kernel takes seconds to compile and milliseconds to load.

`load_or_compile` returns the function of one configuration: from memory, else from disk, else from the compiler, whose
result it stores on disk as an object file (host code with the cubin inside). An object's name is a hash of everything
that can change it: all source files of this package (a kernel takes constants from several), the DSL's version and
environment, Python's minor version, the architecture, the configuration and the switch of `dependent_launch`. A JSON
file of the same name holds the object's SHA-256; an object with another hash is compiled again, with a log line. Files
are replaced in one step. Of several processes that need the same kernel one compiles while the others wait, at most
LOCK_SECONDS. A process that adds a kernel deletes kernels that no process has loaded for KEEP_DAYS: most are of older
versions. Only files whose names begin with PREFIX are deleted.

`DSV4_KERNEL_CACHE` names the folder; `off` keeps compiled kernels in memory only. The default is
`~/.cache/sglang-dsv4/kernels` (under `XDG_CACHE_HOME` if that is set). Kernels that are missing in a folder that takes
no files go to a temporary folder of the user (`compile_pool.fill` decides that before a server is ready). Anyone who
can write to the folder can run code in this process.

Compiling, exporting and loading need no GPU; calling does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host.environment import KERNEL_CACHE
from dsv4_kernels.host.launch_arguments import Launcher

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = KERNEL_CACHE.name
ARCH_VARIABLE = "CUTE_DSL_ARCH"
"""The DSL's variable: the architecture to compile for, in place of that of the GPU that it finds."""
_SAME_CODE = frozenset(
    f"CUTE_DSL_{name}"
    for name in (
        *("CACHE_DIR", "NO_CACHE", "DISABLE_FILE_CACHING", "JIT_CACHE_MAX_ELEMS"),
        *("LOG_LEVEL", "LOG_TO_CONSOLE", "LOG_TO_FILE"),
    )
)
"""The DSL's variables of its own cache and log. FlashInfer sets CACHE_DIR to a folder in the user's home."""
KEEP_DAYS = 90
PREFIX = "dsv4-kernel-"
"""Prefix of the names of our files: the folder may hold other files."""
LOCK_SECONDS = 600.0
"""How long a process waits for another one that compiles the same kernel; after that it compiles the kernel itself."""
_SYMBOL = "dsv4_kernel"
"""Name of the function inside an object file."""

_in_memory: dict[tuple[str, Hashable, str], Any] = {}
_may_compile = True
_instead: Path | None = None
"""The folder in place of the chosen one, which takes no files."""


@dataclass(frozen=True)
class Origin:
    """The source of a kernel (compiler or disk), and how long it took."""

    name: str
    config: str
    source: str
    """Either "compiled" or "disk"."""
    seconds: float
    kept: bool
    """Whether it is on disk now."""


class KernelMissing(Exception):
    """Raised inside `only_stored` for a kernel that is neither in memory nor on disk."""

    def __init__(self, name: str, config: Hashable, arch: str) -> None:
        super().__init__(f"{name} for {arch} is not on disk: {config!r}")
        self.name, self.config, self.arch = name, config, arch


_origins: list[Origin] = []


def origins() -> tuple[Origin, ...]:
    """Every kernel that this process compiled or loaded, in order."""
    return tuple(_origins)


def folder() -> Path | None:
    """The folder of stored objects, or None if kernels are kept in memory only."""
    if _instead is not None:
        return _instead
    chosen = KERNEL_CACHE.text()
    if chosen is not None and chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dsv4" / "kernels"


def use_temporary_folder() -> Path | None:
    """The user's folder for temporary kernels, which takes the place of `folder` in this process from now on.

    None if there is none: another user could have made a folder of that name, and code in it would run here.
    """
    global _instead
    path = Path(tempfile.gettempdir()) / f"sglang-dsv4-kernels-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return None
    _instead = path
    return path


@contextlib.contextmanager
def only_stored() -> Iterator[None]:
    """Inside, kernels that are neither in memory nor on disk are not compiled: `load_or_compile` raises
    `KernelMissing`."""
    global _may_compile
    before, _may_compile = _may_compile, False
    try:
        yield
    finally:
        _may_compile = before


def load_or_compile(name: str, config: Hashable, arch: str, compile: Callable[[], Any]) -> Callable[..., Any]:
    """The compiled function of one configuration of a kernel.

    Call it with positional arguments only: a function that was loaded from disk does not know their names. NamedTuples
    may hold Python's numbers in place of the DSL's.

    Args:
        name: the kernel's name in file names and log lines ("sparse_attention_sm90").
        config: everything that `compile` specialises on besides `arch`, all of it visible in its repr.
        arch: "sm_90a".
        compile: returns the result of `cute.compile`.

    Raises:
        ValueError: the repr of `config` contains an address, so it would never match again.
        KernelMissing: inside `only_stored`.
    """
    early = dependent_launch.is_on()
    key = (name, (config, early), arch)
    function = _in_memory.get(key)
    if function is None:
        text = repr(config) if early else f"{config!r}, no dependent launch"
        if " at 0x" in text:
            raise ValueError(f"the configuration of {name} prints an address: {text}. Use a frozen dataclass of values")
        found = _from_disk_or_compiler(name, text, arch, compile) if _may_compile else _from_disk(name, text, arch)
        if found is None:
            raise KernelMissing(name, config, arch)
        function = _in_memory[key] = Launcher(found)
    return function


def _from_disk_or_compiler(name: str, config: str, arch: str, compile: Callable[[], Any]) -> Callable[..., Any]:
    stored = _Stored.at(folder(), name, config, arch)
    with stored.locked() if stored else contextlib.nullcontext():
        function = _loaded_from(stored, name, config, arch)
        if function is None:
            logger.info("compiling %s for %s: %s", name, arch, config)
            begin = time.perf_counter()
            function = compile()
            seconds = time.perf_counter() - begin
            kept = stored is not None and stored.save(function, seconds)
            _origins.append(Origin(name, config, "compiled", seconds, kept))
            where = f"kept in {stored.object}" if kept else "kept in memory only"
            logger.info("compiled %s for %s in %.1f s, %s", name, arch, seconds, where)
    return function


def _from_disk(name: str, config: str, arch: str) -> Callable[..., Any] | None:
    """The stored function, or None. It needs no lock: files are replaced in one step, and an object whose hash differs
    counts as missing."""
    return _loaded_from(_Stored.named(folder(), name, config, arch), name, config, arch)


def _loaded_from(stored: _Stored | None, name: str, config: str, arch: str) -> Callable[..., Any] | None:
    begin = time.perf_counter()
    function = stored.load() if stored else None
    if function is not None:
        seconds = time.perf_counter() - begin
        _origins.append(Origin(name, config, "disk", seconds, kept=True))
        logger.info("loaded %s for %s in %.0f ms from %s", name, arch, 1e3 * seconds, stored.object)
    return function


@dataclass(frozen=True)
class _Stored:
    """The files of one kernel."""

    object: Path
    facts: dict[str, Any]
    """The inputs that the object was made from; a hash of them is in the object's name."""

    @staticmethod
    def at(folder: Path | None, name: str, config: str, arch: str) -> _Stored | None:
        """The files for a configuration, or None if nothing can be stored in the folder."""
        if folder is None:
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _warn_once(f"compiled kernels are not kept: {error} ({FOLDER_VARIABLE} names another folder)")
            return None
        return _Stored.named(folder, name, config, arch)

    @staticmethod
    def named(folder: Path | None, name: str, config: str, arch: str) -> _Stored | None:
        """The files for a configuration in a folder that may not exist; None without a folder."""
        if folder is None:
            return None
        facts = {"config": config, "arch": arch, "environment": _environment(arch)}
        key = hashlib.sha256(json.dumps([facts, _source_hash()]).encode()).hexdigest()
        return _Stored(folder / f"{PREFIX}{name}-{arch}-{key[:24]}.o", facts)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock on these files, unless another process holds it for longer than LOCK_SECONDS.

        In that case both processes compile, and the files of the later one stay: files are replaced in one step.
        """
        path = self.object.with_suffix(".lock")
        lock = lock_of(path)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            logger.warning(
                "another process has held %s for %.0f s: this one no longer waits for its kernel. If no other process "
                "compiles kernels, one that hangs holds it (`fuser %s` names it)",
                *(path, LOCK_SECONDS, path),
            )
        except OSError as error:  # a read-only folder, or a file system without locks
            _warn_once(f"no locks in {path.parent}, so several processes may compile the same kernel: {error.strerror}")
        try:
            yield
        finally:
            lock.release()

    def load(self) -> Callable[..., Any] | None:
        """The function, or None if it must be compiled."""
        try:
            facts, contents = json.loads(self.object.with_suffix(".json").read_text()), self.object.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            return self._unusable(error)
        found = hashlib.sha256(contents).hexdigest()
        if not isinstance(facts, dict) or facts.get("sha256") != found:  # the loader would crash on a damaged object
            return self._unusable(f"its SHA-256 is {found}, not the recorded one")
        try:
            function = _loaded(self.object)
        except Exception as error:
            return self._unusable(repr(error))
        with contextlib.suppress(OSError):
            os.utime(self.object)  # the time of its last use
        return function

    def _unusable(self, reason: object) -> None:
        logger.warning("%s cannot be used and is compiled again: %s", self.object, reason)

    def save(self, function: Any, seconds: float) -> bool:  # noqa: ANN401 - the result of cute.compile
        """Writes the files; returns whether that was possible."""
        try:
            contents = _exported(function)
            facts = {"sha256": hashlib.sha256(contents).hexdigest(), "compile_seconds": round(seconds, 3)}
            _write(self.object, contents)
            _write(self.object.with_suffix(".json"), (json.dumps(self.facts | facts, indent=1) + "\n").encode())
            _delete_unused(self.object.parent)
        except Exception as error:  # the function works without being stored
            logger.warning("%s is not kept: %s", self.object, error)
            return False
        return True


def lock_of(path: Path) -> FileLock:
    """A lock that every user of the folder can take, whoever created its file."""
    return FileLock(path, mode=0o666)


@functools.cache
def _warn_once(message: str) -> None:
    """Logs a warning that would be the same for each of a server's kernels."""
    logger.warning("%s", message)


def _exported(function: Any) -> bytes:  # noqa: ANN401
    """The object file of a compiled function."""
    from cutlass import cute

    # The exporter looks these symbols up in the process; a kernel compiled for another device has not loaded them.
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return function.dump_to_object(_SYMBOL)


def _loaded(path: Path) -> Callable[..., Any]:
    """The function in an object file."""
    from cutlass import cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=False), _SYMBOL)


def _delete_unused(folder: Path) -> None:
    """Deletes our kernels that no process has loaded for KEEP_DAYS."""
    since = time.time() - KEEP_DAYS * 24 * 3600
    for object in folder.glob(f"{PREFIX}*.o"):
        with contextlib.suppress(OSError):  # another process may delete the same files
            if object.stat().st_mtime < since:
                for suffix in (".json", ".o", ".lock"):
                    object.with_suffix(suffix).unlink(missing_ok=True)


def _write(path: Path, contents: bytes) -> None:
    """Replaces a file in one step. The umask decides who may read it: several users may share the folder."""
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with scratch.open("xb") as file:
            file.write(contents)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _environment(arch: str) -> list[str]:
    """Versions, and the variables that the DSL reads (some change the code: line information, options of ptxas), except
    _SAME_CODE: users who share a folder have their own.

    The variable that names the architecture is left out if it names `arch`: a process without a GPU sets it to compile
    the same code.
    """
    import cutlass

    chosen = f"{ARCH_VARIABLE}={arch}"
    names = sorted(name for name in os.environ if name.startswith("CUTE_DSL_") and name not in _SAME_CODE)
    variables = [f"{name}={os.environ[name]}" for name in names]
    variables = [variable for variable in variables if variable != chosen]
    return [
        f"cutlass {cutlass.__version__} for CUDA {cutlass.CUDA_VERSION}",
        f"python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}",
        *variables,
    ]


@functools.cache
def _source_hash() -> str:
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
