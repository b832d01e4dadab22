"""A pytest plugin that plants one fault in the source of a module, without writing to the file.

    DSV4_PLANTED='{"file": "kernels/rope/gpu.py", "before": …, "after": …}' python -m pytest -p ops.planted_source …

The module is compiled from the changed text. `inspect` and `linecache` show that text, too, because CuTe DSL takes a
kernel's source from there. The run ends with an error if no module was changed.
"""

from __future__ import annotations

import json
import linecache
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parents[3]
VARIABLE = "DSV4_PLANTED"

_planted: list[str] = []


def changed(fault: dict[str, str]) -> str:
    """Return the text of the file with the fault.

    Raises:
        ValueError: the part that the fault replaces does not stand exactly once in the file.
    """
    text = (ROOT / fault["file"]).read_text()
    if text.count(fault["before"]) != 1:
        raise ValueError(
            f"{fault['file']} has {text.count(fault['before'])} places for {fault['before']!r}; expected 1"
        )
    return text.replace(fault["before"], fault["after"])


def pytest_configure() -> None:
    """Replace the code of the module when it is imported."""
    fault = json.loads(os.environ[VARIABLE])
    path, text = ROOT / fault["file"], changed(fault)
    get_code = SourceFileLoader.get_code

    def code_of(self: SourceFileLoader, name: str) -> CodeType | None:
        if Path(self.path).resolve() != path:
            return get_code(self, name)
        _planted.append(name)
        # Without a time, linecache does not compare the entry with the file.
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
        return compile(text, self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = code_of  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if the module was not imported."""
    if not _planted:
        raise pytest.UsageError(f"nothing was planted: no test imported {os.environ[VARIABLE]}")
