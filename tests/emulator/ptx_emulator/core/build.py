"""Builds the C++ core as one shared library, cached by the hash of its sources, the compiler and the flags."""

from __future__ import annotations

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

CORE = Path(__file__).resolve().parent
# -ffp-contract=off: a PTX mul and add round twice unless the program contains fma.
FLAGS = [
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-fno-semantic-interposition",
    "-march=x86-64-v3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-ftree-vectorize",
    "-frounding-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dsv4-emulator"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _digest(*parts: bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little") + part)
    return h.hexdigest()[:24]


def build_core() -> Path:
    """The path of the library; compiles only sources that changed since the last build.

    Of several processes that need the same library, one builds it while the others wait.
    """
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    headers = b"".join(p.read_bytes() for p in sorted(CORE.glob("*.h")))
    common = _digest(version, " ".join(FLAGS).encode(), headers)
    sources = sorted(CORE.glob("*.cpp"))
    objects = {src: cache / f"{src.stem}-{_digest(common.encode(), src.read_bytes())}.o" for src in sources}
    library = cache / f"core-{_digest(*[o.name.encode() for o in objects.values()])}.so"
    if library.exists():
        return library

    def compile_one(source: Path, target: Path) -> None:
        _replace(target, [compiler, *FLAGS, "-c", str(source)])

    with FileLock(cache / "build.lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        if library.exists():
            return library
        missing = [(source, target) for source, target in objects.items() if not target.exists()]
        for done in [pool.submit(compile_one, source, target) for source, target in missing]:
            done.result()
        _replace(library, [compiler, "-shared", *map(str, objects.values())])
    return library


def _replace(target: Path, command: list[str]) -> None:
    """Runs a compiler that writes `target`, which appears only when complete."""
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    subprocess.run([*command, "-o", str(temporary)], check=True)
    os.replace(temporary, target)
