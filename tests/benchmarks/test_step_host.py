"""The benchmark of a decode step's host time runs, and counts nested functions of ours once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from step_host import Clock

ROOT = Path(__file__).resolve().parents[2]


def test_a_function_inside_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: now)
    clock = Clock()

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    inner = clock.timed("inner", lambda: spend(5))

    def both() -> None:
        spend(1)
        inner()
        spend(2)

    clock.timed("outer", both)()
    inner()
    clock.end_step()
    clock.end_step()
    assert clock.steps == [{"inner": 10, "outer": 3}, {}]


@pytest.mark.slow
def test_it_measures_steps_of_a_scheduler(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks/step_host.py"), "--model", str(checkpoint), "--out", str(out)]
    subprocess.run([*command, "--requests", "1", "3", "--steps", "40"], check=True, timeout=300, env=os.environ)
    rows = json.loads(out.read_text())["rows"]
    assert [row["requests"] for row in rows] == [1, 3]
    for row in rows:
        assert 0 < row["ours_us"] < row["step_us"]
        parts = row["parts_us"]
        assert {"before_forward", "init_forward_metadata_out_graph", "carry_request_slots"} <= set(parts)
        assert all(parts[name] > 0 for name in ("before_forward", "init_forward_metadata_out_graph"))
