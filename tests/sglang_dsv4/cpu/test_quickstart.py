"""`make serve` and the quick start behind it, with a program in the place of SGLang's server: signals and threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving.server import free_port, is_ready

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60

# Answers /health, and ends with SIGTERM, unless a test asks for another behaviour.
SERVER = """
import http.server, json, os, signal, sys, time
from pathlib import Path
how = os.environ["HOW"]
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stubborn" else lambda *_: sys.exit(0))
seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
Path(os.environ["SEEN"]).write_text(json.dumps({**seen, "pid": os.getpid()}))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if how == "not ready" else 200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process and the processes that it started, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def quickstart(folder: Path, how: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], int]]:
    """Start the quick start; yield its process, what the server wrote when it began, and the port."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(SERVER)
    (folder / "config.json").write_text("{}")
    port, seen = free_port(), folder / "seen"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    env = {**inherited, "SGLANG_DSV4": "off", "PYTHONPATH": str(folder), "HOW": how, "SEEN": str(seen), **env}
    command = [sys.executable, "-m", "sglang_dsv4.cpu.quickstart", "--model-path", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: seen.exists() and seen.read_text().endswith("}"))
        yield process, json.loads(seen.read_text()), port
    finally:
        end_session(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "ctrl-c"])
@pytest.mark.parametrize("how", ["ready", "not ready"])
def test_a_signal_ends_the_server(tmp_path: Path, how: str, number: int) -> None:
    with quickstart(tmp_path, how) as (process, seen, port):
        if how == "ready":
            wait_for(lambda: is_ready(port))
            for line in process.stdout:
                if line.startswith("Ready after"):
                    break
        process.send_signal(number)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0 and "stopped before it was ready" not in output
        assert not is_running(seen["pid"])


def test_a_second_signal_ends_a_server_that_does_not_end(tmp_path: Path) -> None:
    with quickstart(tmp_path, "stubborn") as (process, seen, _):
        wait_for(lambda: any(line.startswith("Ready after") for line in process.stdout))
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None and is_running(seen["pid"])  # it waits for the server
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0 and not is_running(seen["pid"])


def test_it_sets_threads_that_sleep(tmp_path: Path) -> None:
    """Only the Makefile used to set them: without it a prefill of 256 tokens took 20 s on a busy machine."""
    with quickstart(tmp_path, "ready") as (_, seen, _):
        assert seen["OMP_NUM_THREADS"] == str(min(4, len(os.sched_getaffinity(0))))
        assert seen["OMP_WAIT_POLICY"] == "passive"


def test_the_users_threads_stay(tmp_path: Path) -> None:
    with quickstart(tmp_path, "ready", OMP_NUM_THREADS="3", OMP_WAIT_POLICY="active") as (_, seen, _):
        assert (seen["OMP_NUM_THREADS"], seen["OMP_WAIT_POLICY"]) == ("3", "active")


PYTHON = """#!/bin/sh
trap 'echo ended > ended; exit 0' TERM
echo $$ > started
while :; do sleep 0.1; done
"""


def test_sigterm_to_make_serve_reaches_python(tmp_path: Path) -> None:
    """A shell between make and the server used to end alone, and the server went on."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements-cpu.txt", "requirements-test.txt", "pyproject.toml", "setup_venv.sh"):
        (tmp_path / name).touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    checksum = subprocess.run(["cksum"], input=b"", capture_output=True, check=True).stdout.split()[0].decode()
    (tmp_path / ".venv" / f".ready-{checksum}").touch()
    make = subprocess.Popen(["make", "serve", "MODEL=mine"], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "started").exists)
        make.send_signal(signal.SIGTERM)
        make.wait(TIMEOUT_S)
        wait_for((tmp_path / "ended").exists)
    finally:
        end_session(make)
