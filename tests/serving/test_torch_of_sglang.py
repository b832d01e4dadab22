"""The torch that SGLang pins, and Python 3.12: `make test TORCH=… PYTHON=…`.

The tests of every commit run with Python 3.11 and the torch of requirements-cpu.txt, a CPU build. Where no CPU build of
SGLang's torch is to be had, its environment takes 6 GB.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from release.dist import interpreters

ROOT = Path(__file__).resolve().parents[2]
PART = (
    "tests/kernels/quant",
    "tests/kernels/rope",
    "tests/serving/test_chat.py",
)
"""Reference ops, and a server."""


@pytest.mark.slow
def test_a_part_of_the_suite_passes(tmp_path: Path) -> None:
    """The tests run in a clone, which lacks uncommitted files; set-up downloads 2.5 GB unless pip has them.

    Where there is no Python 3.12, the Python of this process runs them.
    """
    interpreter = interpreters(()).get("3.12", sys.executable)
    (torch,) = (text for text in importlib.metadata.requires("sglang") if re.match(r"torch *==", text))
    version = torch.split("==")[1].strip()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    make = ["make", "test", f"TORCH={version}", f"PYTHON={interpreter}", f"TEST_ARGS=-n0 {' '.join(PART)}"]
    done = subprocess.run(make, cwd=tmp_path / "clone", capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\n=+ \d+ passed", done.stdout)
    python = tmp_path / "clone" / f".venv-torch-{version}" / "bin" / "python"
    code = "import torch, transformers; print(torch.__version__.split('+')[0], transformers.__version__)"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [version, "5.19.0"]
