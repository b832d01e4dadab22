"""Where kernels run in the emulator: its modules' place on the import path, and a fixture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_kernels import compile_cache
from dsv4_kernels.sparse_attention import scratch

sys.path.append(str(Path(__file__).resolve().parents[1] / "emulator"))


@pytest.fixture(scope="module")
def compiled_here() -> Iterator[None]:
    """Kernels are compiled in the emulator, which needs their PTX: none from disk, and none is left behind.

    Nor is memory of one kernel's launches, which the emulator would copy for the other's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.FOLDER_VARIABLE, "off")
        patch.setattr(scratch, "_by_stream", {})
        patch.setattr(scratch, "_graph_counters", {})
        compile_cache.forget()
        yield
        compile_cache.forget()
