"""Starts, from the command to the first answer: the server is ready in time, or stops with a reason."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from serving.server import Server, free_port, run_until_it_stops, running_server

from sglang_dsv4.cpu import noise
from sglang_dsv4.cpu import quickstart as quickstart_module

ROOT = Path(__file__).resolve().parents[2]

# Put in front of the path of every process of the server; `site` imports it when Python starts.
BREAK_AN_IMPORT = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ImportError("forced by the test")
sys.meta_path.insert(0, Broken())
"""
PRETEND_ANOTHER_VERSION = """
import importlib.metadata as m
real = m.version
m.version = lambda name: "0.5.24" if name == "sglang" else real(name)
"""


def test_one_log_line_says_what_is_live(server: Server) -> None:
    lines = [line for line in server.log.splitlines() if "is live on SGLang 0.5.23" in line]
    assert len(lines) == 1
    for part in ("model DeepseekV4ForCausalLM", "attention backend Dsv4", "kv pool Dsv4", "prefix cache Dsv4"):
        assert part in lines[0]


def test_log_lines_count_the_hooks(server: Server) -> None:
    """The scheduler has the rows of its process and of every process, and its two checks; the launcher has its own."""
    from sglang_dsv4.seam.hooks import HOOKS, SELF_CHECK, Kind, Process

    installed = [hook for hook in HOOKS if hook.kind not in (Kind.ENTRY_POINT, Kind.ATTRIBUTE)]
    in_scheduler = [hook for hook in installed if hook.process in (Process.EVERY, Process.SCHEDULER)]
    in_launcher = [hook for hook in installed if hook.process in (Process.EVERY, Process.LAUNCHER)]
    found = dict(re.findall(r"sglang_dsv4: (\d+) hooks installed in the (\w+)", server.log))
    assert found[str(len(in_scheduler) + len(SELF_CHECK))] == "scheduler"
    assert found[str(len(in_launcher))] == "launcher"


def test_one_log_line_says_what_the_start_took(server: Server) -> None:
    (line,) = [line for line in server.log.splitlines() if "sglang_dsv4 start-up: " in line]
    found = dict(re.findall(r"[:,] ([A-Za-z ]+) ([\d.]+) s", line))
    for phase in ("launcher", "weights", "pools", "kernels", "attention backends", "CUDA graphs"):
        assert float(found[phase]) >= 0
    assert float(found["launcher"]) > 0 and float(found["imports and the rest"]) > 0


def test_messages_about_other_machines_are_not_printed(server: Server) -> None:
    """SGLang printed some twenty irrelevant lines in each process, between the relevant ones."""
    for message in (*noise.WARNINGS, *noise.LOGGED):
        assert message.begin not in server.log, message.why


def test_pool_plan_is_printed_with_its_total(server: Server) -> None:
    assert re.search(r"DeepSeek-V4 pools: 6,144 tokens in pages of 256, 16 requests", server.log)


def test_server_reports_our_backends(server: Server) -> None:
    info = requests.get(f"{server.url}/server_info", timeout=300).json()
    assert info["attention_backend"] == "dsv4"
    assert info["radix_cache_backend"] == "dsv4"
    assert info["page_size"] == 256


def broken_environment(folder: Path, code: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_a_model_that_fails_to_import_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """SGLang itself would warn and serve its own DeepSeek-V4."""
    env = broken_environment(tmp_path, BREAK_AN_IMPORT.format(name="sglang_dsv4.models.deepseek_v4"))
    log = run_until_it_stops(checkpoint, tmp_path / "log", env=env)
    assert "sglang_dsv4.models.deepseek_v4 could not be imported: ImportError('forced by the test')" in log
    assert "What to do" in log and "SGLANG_DSV4=off" in log


@pytest.mark.slow
def test_another_sglang_version_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    env = broken_environment(tmp_path, PRETEND_ANOTHER_VERSION)
    log = run_until_it_stops(checkpoint, tmp_path / "log", env=env)
    assert "SGLang 0.5.24 is installed; this version was tested with 0.5.23 only" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["cache.kv_pool", "cache.pool_configurator", "attention.backend", "prefix.prefix_cache"]
)
def test_a_part_that_fails_to_import_stops_the_server(module: str, checkpoint: Path, tmp_path: Path) -> None:
    env = broken_environment(tmp_path, BREAK_AN_IMPORT.format(name=f"sglang_dsv4.{module}"))
    assert "forced by the test" in run_until_it_stops(checkpoint, tmp_path / "log", env=env)


@pytest.mark.slow
def test_plain_command_without_flags_is_ready_in_a_minute(checkpoint: Path, tmp_path: Path) -> None:
    with running_server(checkpoint, tmp_path / "log", from_command=True) as server:
        print(f"ready after {server.ready_s:.1f} s")
        assert server.chat("Hello!").choices[0].message.content
        info = requests.get(f"{server.url}/server_info", timeout=300).json()
        assert (info["max_total_num_tokens"], info["max_running_requests"]) == (65536, 32)
        # The promise is for a quiet machine: not judged while other processes compute.
        if os.getloadavg()[0] < os.cpu_count() + 1:
            assert server.ready_s < 60


def quickstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_dsv4.cpu.quickstart", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_quickstart_says_that_the_port_is_taken(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = quickstart("--model-path", str(checkpoint), "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.strip() == f"Port {port} is taken by another program. Choose another one: make serve PORT=30001"


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Port 80 is reserved for privileged users"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "Port 80 is taken by another program."),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), "Port 80 can't be used: Cannot assign."),
    ],
    ids=["privileged", "taken", "other"],
)
def test_quickstart_says_what_is_wrong_with_the_port(
    error: OSError, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was wrong: port 80 "was taken by another program". A privileged user may run this test, so the
    kernel's answer is replaced."""

    class Socket(socket.socket):
        def bind(self, address: object) -> None:
            raise error

    monkeypatch.setattr(quickstart_module.socket, "socket", Socket)
    assert (quickstart_module.why_port_is_unusable(80) or "").startswith(named)


def test_quickstart_says_what_to_expect_of_the_small_model() -> None:
    assert "This model is small" in quickstart_module.what_to_type(30000, quickstart_module.DEFAULT_CHECKPOINT)
    assert "small" not in quickstart_module.what_to_type(30000, Path("checkpoints/mine"))


def test_quickstart_passes_the_parsers_that_the_user_did_not_name() -> None:
    both = ["--reasoning-parser", "deepseek-v4", "--tool-call-parser", "deepseekv4"]
    assert quickstart_module.parser_flags(["--tp", "2"]) == both
    assert quickstart_module.parser_flags(["--reasoning-parser=deepseek-r1"]) == both[2:]
    assert quickstart_module.parser_flags(["--tool-call-parser", "deepseekv3"]) == both[:2]


def test_clean_leaves_the_users_checkpoints(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("tiny", "mine"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["mine"]


def test_quickstart_says_that_there_is_no_such_port(checkpoint: Path) -> None:
    """A port of 70000 used to end with the socket's OverflowError."""
    done = quickstart("--model-path", str(checkpoint), "--port", "70000")
    assert done.returncode == 1
    assert done.stderr.strip().startswith("70000 is no port")


def test_quickstart_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    done = quickstart("--model-path", str(tmp_path), "--port", str(free_port()))
    assert done.returncode == 1
    assert done.stderr.startswith(f"No checkpoint at {tmp_path}") and "MODEL names a folder" in done.stderr


def test_setup_says_that_python_is_missing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup_venv.sh", tmp_path)
    env = {**os.environ, "PYTHON": "python3.11-that-is-not-here", "VENV": ".venv", "TORCH_INDEX": ""}
    done = subprocess.run(["sh", "setup_venv.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("Python 3.11 is missing")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_setup_refuses_a_python_that_sglang_has_no_wheel_for(tmp_path: Path, version: str) -> None:
    shutil.copy(ROOT / "setup_venv.sh", tmp_path)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "VENV": ".venv", "TORCH_INDEX": ""}
    done = subprocess.run(["sh", "setup_venv.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / ".venv").exists()
    assert done.stderr.strip().startswith(f'Python 3.11, 3.12 or 3.13 is needed and "{python}" is {version}')
