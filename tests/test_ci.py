""".ci/run with a stand-in for `make`: it runs every part, fails if any fails, and ends with the closing lines."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKE = """#!/bin/sh
echo "asked: $*"
[ -z "$LEFT" ] || sleep "$LEFT" &
case $1 in
test) echo "===== 3 passed, 1 skipped in 2.00s ====="; exit ${RC_TEST:-0} ;;
lint) echo "All checks passed!"; exit ${RC_LINT:-0} ;;
test-slow) echo "===== 5 passed in 63.00s (0:01:03) ====="; exit ${RC_SLOW:-0} ;;
dist) echo "sglang-dsv4 0.1.0 of commit 0123456789ab, metadata checked"; exit ${RC_DIST:-0} ;;
esac
exit 9
"""


def run(folder: Path, **statuses: str) -> subprocess.CompletedProcess[str]:
    make = folder / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"} | statuses
    return subprocess.run([ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60)


def test_the_commit_chooses_the_shard_and_closing_lines_come_last(tmp_path: Path) -> None:
    done = run(tmp_path)
    lines = done.stdout.splitlines()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    asked = [line.removeprefix("asked: ") for line in lines if line.startswith("asked: ")]
    assert asked[:2] == ["test", "lint"] and asked[2].startswith("test-slow SHARD=") and asked[3:] == ["dist"]
    assert asked[2].endswith("/8 MINUTES=20") and (not commit or f"={commit}/8" in asked[2])
    assert lines[-4:] == [
        "test: exit status 0: ===== 3 passed, 1 skipped in 2.00s =====",
        "lint: exit status 0: All checks passed!",
        "slow: exit status 0: ===== 5 passed in 63.00s (0:01:03) =====",
        "dist: exit status 0: sglang-dsv4 0.1.0 of commit 0123456789ab, metadata checked",
    ]
    assert done.returncode == 0


@pytest.mark.parametrize("failing", ["RC_TEST", "RC_LINT", "RC_SLOW", "RC_DIST"])
def test_any_failure_fails_and_the_rest_still_runs(tmp_path: Path, failing: str) -> None:
    done = run(tmp_path, **{failing: "2"})
    assert done.returncode == 1 and done.stdout.count("asked: ") == 4
    assert done.stdout.count("exit status 2") == 1


def test_a_process_that_is_left_behind_delays_nothing(tmp_path: Path) -> None:
    """Servers outlive a process of the tests that the kernel has ended, and hold its output."""
    begin = time.monotonic()
    assert run(tmp_path, LEFT="40").returncode == 0
    assert time.monotonic() - begin < 30
