"""Build the C++ core into one shared library, cached by the hash of its sources, the compiler and the flags."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

CORE = Path(__file__).resolve().parent
# -ffp-contract=off: a PTX mul and add are two roundings unless the program says fma.
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


def build_core(verbose: bool = False) -> Path:
    """Path of the library; compiles only the files that changed since the last build."""
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
    for src, obj in objects.items():
        if obj.exists():
            continue
        if verbose:
            print(f"[emulator] compiling {src.name}", flush=True)
        temporary = obj.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([compiler, *FLAGS, "-c", str(src), "-o", str(temporary)], check=True)
        os.replace(temporary, obj)
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    subprocess.run([compiler, "-shared", "-o", str(temporary), *map(str, objects.values())], check=True)
    os.replace(temporary, library)
    return library


if __name__ == "__main__":
    print(build_core(verbose=True))
