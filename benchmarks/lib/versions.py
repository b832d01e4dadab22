"""Versions of the packages that decide a result."""

from __future__ import annotations

import importlib.metadata
import sys

PACKAGES = (
    "sglang-dsv4",
    "sglang",
    "torch",
    "nvidia-cutlass-dsl",
    "sgl-flash-mla",
    "sgl-deep-gemm",
    "sglang-kernel",
    "flashinfer-python",
)
CUTLASS = "nvidia-cutlass-dsl"


def versions() -> dict[str, str]:
    """Return versions of Python and of the installed packages of ours and of the contenders, by name."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == CUTLASS and "cutlass" in sys.modules:  # unpacked, not installed
                found[package] = sys.modules["cutlass"].__version__
    return found
