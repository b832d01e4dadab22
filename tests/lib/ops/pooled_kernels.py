"""Stand-in kernels for workers of a compile pool, whose object file is a line of text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dsv4_kernels.host import compile_cache

ARCH = "sm_90a"


def stand_in(number: int, caller: int, fault: str = "") -> Callable[..., object]:
    """Return a kernel that is "compiled" into the compiling process's id; with a fault, it fails in any process but the
    caller's."""
    compile_cache._exported = lambda function: function().encode()
    compile_cache._loaded = _loaded

    def compile() -> Callable[[], str]:
        if os.getpid() != caller:
            _fail(fault)
        text = f"compiled by {os.getpid()}"
        return lambda: text

    return compile_cache.load_or_compile("stand_in", number, ARCH, compile)


def todo(count: int, **faults: str) -> list[tuple[str, Callable[[], object]]]:
    """Return kernels "0", "1", ... of this process; `faults` by name with a leading "k"."""
    return [(f"{i}", partial(stand_in, i, os.getpid(), faults.get(f"k{i}", ""))) for i in range(count)]


def authors(folder: Path) -> list[int]:
    """Return the process that compiled each kernel on disk."""
    return [int(path.read_text().split()[-1]) for path in sorted(folder.glob("*.o"))]


def _loaded(path: Path) -> Callable[[], str]:
    text = path.read_text()
    return lambda: text


def _fail(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hangs":
        time.sleep(60)
    elif fault == "raises":
        raise ValueError("a dimension that is none")
    elif fault == "disk full":

        def full(path: Path, contents: bytes) -> None:
            raise OSError(28, "No space left on device")

        compile_cache._write = full
