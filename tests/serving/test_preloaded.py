"""Servers that may be forked from a process that has imported SGLang: a wrong yes would test a different program."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.preloaded import imports_the_same
from serving.server import TAILS

BEFORE = {"PATH": "/bin", "SGLANG_DSV4_TAIL_SLOTS": "9", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        (TAILS, True),
        ({"PYTHONPATH": "/nowhere"}, True),
        ({"SGLANG_TEST_RETRACT": "1"}, False),  # read when the scheduler is imported
        ({"SGLANG_DSV4": "off"}, False),
        ({"OMP_NUM_THREADS": "2"}, False),
    ],
    ids=str,
)
def test_variables_that_imports_read(changes: dict[str, str], same: bool) -> None:
    assert imports_the_same(BEFORE | changes, BEFORE) == same


def test_a_variable_that_was_there() -> None:
    assert not imports_the_same({name: BEFORE[name] for name in ("PATH",)}, BEFORE)


def test_a_customised_start(tmp_path: Path) -> None:
    assert imports_the_same(BEFORE | {"PYTHONPATH": str(tmp_path)}, BEFORE)
    (tmp_path / "sitecustomize.py").write_text("")
    assert not imports_the_same(BEFORE | {"PYTHONPATH": str(tmp_path)}, BEFORE)
