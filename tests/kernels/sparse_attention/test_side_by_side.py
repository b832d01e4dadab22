"""Launches of the attention while other kernels run, on a GPU: side_by_side.py, a process with a time limit for each
scenario.

python -m pytest tests/kernels/sparse_attention/test_side_by_side.py -q -rs
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ops.attention_cases import build
from ops.side_by_side import CASES, HOLD, NOT_PROMISED, SCENARIOS

LIMIT_SECONDS = 240
"""Seconds, mostly for compiling; a scenario takes a few seconds."""
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from ops import side_by_side; side_by_side.main(*sys.argv[2:])"


@pytest.fixture(scope="module")
def kernel(kernel_on_gpu: Callable[[str], str]) -> str:
    return kernel_on_gpu("sparse_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(kernel: str, scenario: str) -> None:
    """The launch ends and has the bits of a launch that runs alone."""
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[2] / "lib"), scenario, kernel]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{scenario} hangs: not done after {LIMIT_SECONDS} seconds", pytrace=False)
    if answer.returncode == NOT_PROMISED:
        pytest.skip(answer.stdout.strip())
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.split()[-1] == "done"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_what_holds_multiprocessors_says_so_and_ends_when_it_is_released(target: str) -> None:
    from ptx_emulator import run_ptx

    started, released = np.zeros(5, np.int32), np.ones(1, np.int32)
    run_ptx(HOLD.replace("sm_90", target), "hold", 4, 32, [started, released])
    assert started.tolist() == [1, 1, 1, 1, 0]


def test_the_cases_are_what_the_scenarios_need() -> None:
    """The call determines how often keys are divided, and not which kernel computes it."""
    problems = {name: build(spec).problem() for name, spec in CASES.items()}
    blocks = {name: -(-problem.num_heads // 64) for name, problem in problems.items()}
    items = {name: p.num_tokens * p.max_kv_splits * blocks[name] for name, p in problems.items()}
    assert all(items[name] > 148 for name in ("whole", "parts", "two_blocks_of_heads"))
    assert problems["parts"].max_kv_splits > 1 and problems["two_blocks_of_heads"].max_kv_splits > 1
    assert problems["whole"].max_kv_splits == problems["pieces"].max_kv_splits == 1 and problems["pieces"].split_keys
    assert problems["few_tokens"].max_steps <= 9 and problems["few_tokens"].split_keys is None
