"""Compilation for all tests of the experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from dsv4_kernels.host import compile_cache


@pytest.fixture(autouse=True)
def compiled_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles instead of loading from disk, because the emulator needs the PTX; tests share compiled kernels."""
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host reads no tensor back."""

    def refused(self: Tensor) -> None:
        raise AssertionError("a tensor is read back")

    for method in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(Tensor, method, refused)
    yield
