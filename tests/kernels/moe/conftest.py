"""A fixture of all tests of experts."""

from __future__ import annotations

import pytest

from dsv4_kernels.host import compile_cache


@pytest.fixture(autouse=True)
def compiled_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator needs the PTX that compiling gives; kernels compiled in one test serve the others."""
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
