"""`make test` does not pass by skipping: it demands every module whose absence makes tests skip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def demanded() -> set[str]:
    """Return the modules that the Makefile demands."""
    line = re.search(r'^TEST_NEEDS := DSV4_TESTS_NEED="([^"]*)"$', (ROOT / "Makefile").read_text(), re.M)
    return set(line[1].split())


def test_every_module_that_a_test_skips_without_is_demanded() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    skipped = set(re.findall(r'importorskip\("([\w.]+)"', sources))
    assert "cutlass" in skipped and skipped <= demanded()


def test_both_targets_demand_them() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if " -m pytest " in line]
    assert len(recipes) == 2 and all("$(TEST_NEEDS)" in line for line in recipes)


def test_a_missing_package_is_an_error_not_a_skip() -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", "tests/test_layering.py"]
    for needed, status in (("sys", 0), ("sys no_such_module", 4)):
        environment = os.environ | {"DSV4_TESTS_NEED": needed}
        found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert found.returncode == status, found.stdout + found.stderr
        assert ("the tests need no_such_module, which this Python cannot import" in found.stderr) == (status != 0)
