"""The first command of the README, run in a fresh clone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from serving.server import free_port, is_ready, stop

ROOT = Path(__file__).resolve().parents[2]
SETUP_TIMEOUT_S = 1200  # downloads included


@pytest.mark.slow
def test_make_serve_on_a_fresh_clone(tmp_path: Path) -> None:
    """Needs git, make and pip's index. The clone lacks uncommitted files, as a user's does."""
    clone, log_path, port = tmp_path / "clone", tmp_path / "log", free_port()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            ["make", "serve", f"PORT={port}", f"PYTHON={sys.executable}"],
            cwd=clone,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + SETUP_TIMEOUT_S
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()[-4000:]
            time.sleep(1)
        body = {"model": "any", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        answer = requests.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        while "Ready after" not in log_path.read_text():
            assert time.monotonic() < deadline
            time.sleep(1)
    finally:
        stop(process)
    log = log_path.read_text()
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in log
    # CuTe DSL compiles for GPUs without one; CUDA's libraries, gigabytes in size, must not be installed.
    cuda = [line for line in log.splitlines() if "Collecting nvidia" in line and "nvidia-cutlass-dsl" not in line]
    assert not cuda
    again = subprocess.run(["make", "setup", f"PYTHON={sys.executable}"], cwd=clone, capture_output=True, text=True)
    assert "Nothing to be done" in again.stdout  # set-up is not repeated
    assert subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True).stdout == b""
