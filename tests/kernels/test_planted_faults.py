"""Faults planted in the source of kernels (planted_faults.toml): each makes the test fail that its row names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ops.planted_source import ROOT, VARIABLE, changed

from dsv4_kernels.host import compile_cache

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

HERE = Path(__file__).parent
FAULTS = tomllib.loads((HERE / "planted_faults.toml").read_text())["fault"]
CLASSES = {key for row in tomllib.loads((HERE / "faults.toml").read_text())["kernel"] for key in row}
EACH_FAULT = pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda f: f"{f['file'].removeprefix('kernels/')}: {f['name']}"
)
RESULTS = r"^E +(assert |AssertionError|.*EmulationError: |.*cudaErrorLaunchFailure|.*IndexError|.*out of bounds)"
"""Messages of expected failures: a result differs, or the emulator raised, which CuTe DSL calls a failed launch."""


@EACH_FAULT
def test_the_place_is_there(fault: dict[str, str]) -> None:
    """The changed source is Python, and differs."""
    assert fault["class"] in CLASSES and fault["before"] != fault["after"]
    compile(changed(fault), fault["file"], "exec")


@pytest.mark.slow
@EACH_FAULT
def test_a_quick_test_fails(fault: dict[str, str]) -> None:
    test = str(HERE / fault["test"])
    environment = {**os.environ, VARIABLE: json.dumps(fault), compile_cache.FOLDER_VARIABLE: "off"}
    arguments = ["-n0", "-q", "-x", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "ops.planted_source"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, test],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT / "tests" / "lib")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-4000:] + run.stderr[-1000:]
    assert re.search(RESULTS, run.stdout, re.MULTILINE), run.stdout[-4000:]
