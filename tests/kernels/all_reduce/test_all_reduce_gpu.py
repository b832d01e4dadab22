"""Sums over ranks on several GPUs of one host: `ranks_on_gpus.py`, a group of processes with a time limit a scenario.

python -m pytest tests/kernels/all_reduce/test_all_reduce_gpu.py -m gpu -q -rs
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ops.ranks_on_gpus import SCENARIOS

LIMIT_SECONDS = 180
"""Seconds, mostly for imports and compiling."""
LIB = Path(__file__).parents[2] / "lib"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(kernel_on_gpu: Callable[[str], str], scenario: str, ranks: int) -> None:
    kernel_on_gpu("all_reduce")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} NVIDIA GPUs of one host: torch sees {torch.cuda.device_count()}")
    program = (
        f"import sys; sys.path.insert(0, {str(LIB)!r}); from ops.ranks_on_gpus import main; main({scenario!r}, {ranks})"
    )
    try:
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{scenario} hangs: not done after {LIMIT_SECONDS} seconds", pytrace=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.split()[-1] == "done"
