"""Compilation for all tests of the experts."""

from __future__ import annotations

import pytest

from dsv4_kernels.host import compile_cache


@pytest.fixture(autouse=True)
def compiled_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles instead of loading from disk, because the emulator needs the PTX; tests share compiled kernels."""
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
