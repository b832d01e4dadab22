"""Running servers that benchmarks use instead of starting their own. The benchmarks' own tests start servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from lib import servers, sessions
from serving import stand_in

BENCHMARKS = Path(servers.__file__).parents[1]
FLAGS = ("--tp-size", "1", "--chunked-prefill-size", "2048", "--sleep-on-idle")


class Healthy(BaseHTTPRequestHandler):
    """Answers every GET."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_last_of_a_flag_counts_and_their_order_does_not(tmp_path: Path) -> None:
    one = servers.identity("ours", tmp_path, FLAGS, {})
    assert one == servers.identity("ours", tmp_path, ("--sleep-on-idle", "--tp-size", "8", *FLAGS), {})
    assert one != servers.identity("ours", tmp_path, (*FLAGS, "--chunked-prefill-size", "512"), {})


def test_only_the_server_that_is_asked_for_is_taken(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with another contender, model, flag or switch is not used, nor is a server that does not answer."""
    monkeypatch.setenv("SGLANG_DSV4_SEQUENCE_PARALLEL", "on")
    monkeypatch.setenv(servers.FOLDER_VARIABLE, str(tmp_path))
    env = dict(os.environ)
    then = {**env, "SGLANG_DSV4": "", "HOME": "/elsewhere"}
    suspended = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.killpg(suspended.pid, signal.SIGSTOP)
    about = {"url": url, "log": "log", "ready_s": 3.0, "pid": suspended.pid}
    found = {"identity": servers.identity("ours", tmp_path, FLAGS, then), **about}
    (tmp_path / servers.LIST).write_text(json.dumps({"one": found}))

    taken = servers.already_running("ours", tmp_path, FLAGS, env)
    assert taken is not None and (taken.url, taken.ready_s, taken.log) == (url, 3.0, Path("log"))
    with servers.running("ours", tmp_path, FLAGS, 1, tmp_path / "own.log") as running:
        assert running.url == url
    assert not (tmp_path / "own.log").exists()

    os.killpg(suspended.pid, signal.SIGTERM)  # delivered when the process continues
    assert suspended.wait(timeout=10) == -signal.SIGTERM

    assert servers.already_running("builtin", tmp_path, FLAGS, env) is None
    assert servers.already_running("ours", tmp_path / "other", FLAGS, env) is None
    assert servers.already_running("ours", tmp_path, FLAGS[:-1], env) is None
    assert servers.already_running("ours", tmp_path, FLAGS, {**env, "DSV4_DEPENDENT_LAUNCH": "off"}) is None
    assert servers.already_running("ours", tmp_path, FLAGS, {}) is None
    (tmp_path / servers.LIST).write_text(json.dumps({"one": {**found, "url": "http://127.0.0.1:1"}}))
    assert servers.already_running("ours", tmp_path, FLAGS, env) is None


def assert_soon(holds: Callable[[], bool]) -> None:
    """Assert that a condition holds within ten seconds: a signal reaches a process that waits for a disk later."""
    until = time.monotonic() + 10
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    assert holds()


def test_others_are_suspended_while_one_is_measured(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(servers.FOLDER_VARIABLE, str(tmp_path))
    other = subprocess.Popen(["sh", "-c", "sleep 60; true"], start_new_session=True)

    def states() -> list[str]:
        """Return the states of all processes in `other`'s process group: R, S, T for stopped, …"""
        stats = [Path(f"/proc/{pid}/stat") for pid in os.listdir("/proc") if pid.isdigit()]
        fields = [stat.read_text().rpartition(")")[2].split() for stat in stats if stat.exists()]
        return [state for state, _, group, *_ in fields if int(group) == other.pid]

    try:
        # A shell waits uninterruptibly (D) between vfork and exec: stopped there, it would never show T.
        assert_soon(lambda: states() == ["S", "S"])
        about = {"identity": servers.identity("ours", tmp_path, FLAGS, os.environ), "log": "log", "ready_s": 3.0}
        idle = {"identity": {}, "url": "http://127.0.0.1:1", "pid": other.pid}
        (tmp_path / servers.LIST).write_text(
            json.dumps({"idle": idle, "one": {**about, "url": url, "pid": os.getpgid(0)}})
        )
        with servers.running("ours", tmp_path, FLAGS, 1, tmp_path / "log"):
            assert "T" not in states()
        with servers.running("ours", tmp_path, FLAGS, 1, tmp_path / "log", alone=True):
            assert_soon(lambda: states() == ["T", "T"])
        assert_soon(lambda: "T" not in states())
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()


def test_nodes_of_one_machine(tmp_path: Path) -> None:
    """Each node has the common flags and its own; the first node is the process that was started."""
    program = "import os, sys; print(os.environ['NCCL_HOSTID'], os.getpid(), *sys.argv[1:])"
    script = servers.nodes_script([sys.executable, "-c", program, "--tp", "2 x"], 2, 31_000, tmp_path / "log")
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    first = process.communicate(timeout=60)[0]
    meet = "--tp 2 x --dist-init-addr 127.0.0.1:31500"
    assert first == f"node0 {process.pid} {meet} --node-rank 0 --port 31000\n"
    deadline = time.monotonic() + 60
    while not (second := (tmp_path / "log.node1").read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    name, _, rest = second.split(" ", 2)
    assert (name, rest) == ("node1", f"{meet} --node-rank 1 --port 32000\n")


IMPORTS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lib import servers, sessions
sessions.SECONDS_AT_SIGTERM = 0.3
folder = Path(sys.argv[1])
"""
SCRIPTS = {
    "one server": """
with servers.running("builtin", folder, [], 31_470, folder / "one.log") as server:
    print(server.log, flush=True)
    time.sleep(60)
""",
    "several at once": """
servers.start_all({"model": str(folder), "servers": {"one": {"contender": "ours"}}}, folder, 31_480)
with servers.others_suspended(folder, "of another server"):
    print(folder / "one.log", flush=True)
    ThreadPoolExecutor().submit(time.sleep, 1)
    time.sleep(60)
""",
    "while it starts": """
answers = servers._answers
servers._answers = lambda url: answers(url) and print(folder / "one.log", flush=True)
servers.start_all({"model": str(folder), "servers": {"one": {"contender": "ours"}}}, folder, 31_490)
""",
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_servers_end_with_a_benchmark_that_sigterm_ends(case: str, tmp_path: Path) -> None:
    """A time limit ended a benchmark and left its servers, and the next benchmark took the old server at its port for
    its own. A server's child that ignores SIGTERM ends, too, and so does a suspended server."""
    script = IMPORTS + SCRIPTS[case]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([stand_in.install(tmp_path), str(BENCHMARKS)])}
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as benchmark:
        log = next(line for line in benchmark.stdout if line.endswith(".log\n")).strip()
        assert Path(log).exists()
        session = int(subprocess.check_output(["pgrep", "-f", f"sglang.launch_server.*{tmp_path}"]).split()[0])
        assert len(sessions._processes_of(session)) == 2
        benchmark.terminate()
        assert benchmark.wait(timeout=30) == 128 + signal.SIGTERM
    assert not sessions._processes_of(session)


def test_a_port_that_is_in_use_is_named(url: str, tmp_path: Path) -> None:
    """A server that an earlier benchmark left would be taken for the new one."""
    port = int(url.rpartition(":")[2])
    with pytest.raises(servers.DidNotComeUpError, match=f"port {port} should be free for the ours server"):
        servers.start("ours", tmp_path, FLAGS, port, tmp_path / "log", {})
    assert not (tmp_path / "log").exists()


def test_a_second_call_goes_on_with_the_servers_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with other settings is started anew; the one that failed has its reason, and no entry."""
    monkeypatch.setenv("PYTHONPATH", stand_in.install(tmp_path))
    monkeypatch.setattr(sessions, "SECONDS_TO_END", 0.3)
    failing = {"contender": "builtin", "flags": ["--moe-runner-backend", "humming"]}
    about = {"model": str(tmp_path), "servers": {"one": {"contender": "ours"}, "failing": failing}}
    try:
        assert servers.start_all(about, tmp_path, 31_500, seconds=0) == {}  # no time to wait
        assert "ready_s" not in servers.listed_servers(tmp_path)["one"]
        failed = servers.start_all(about, tmp_path, 31_500)
        assert failed.keys() == {"failing"} and stand_in.REASON in failed["failing"]
        first = servers.listed_servers(tmp_path)
        assert first.keys() == {"one"} and first["one"]["ready_s"] > 0
        del about["servers"]["failing"]
        assert servers.start_all(about, tmp_path, 31_500) == {} and servers.listed_servers(tmp_path) == first
        about["servers"]["one"]["flags"] = ["--tp", "2"]
        about["servers"]["two"] = {"contender": "builtin"}
        assert servers.start_all(about, tmp_path, 31_500) == {}
        second = servers.listed_servers(tmp_path)
        assert second["one"]["pid"] != first["one"]["pid"] and second["one"]["url"] != second["two"]["url"]
        assert not sessions.leader_runs(first["one"]["pid"])
        servers.stop_all(tmp_path, but=["two"])
        assert servers.listed_servers(tmp_path).keys() == {"two"}
    finally:
        servers.stop_all(tmp_path)
    assert not any(sessions.leader_runs(found["pid"]) for found in second.values())


def test_a_server_without_its_port_is_not_waited_for(tmp_path: Path) -> None:
    """The server goes on running, and its log has the error."""
    log = tmp_path / "log"
    log.write_text("ERROR:    [Errno 98] error while attempting to bind on (...): address already in use")
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(RuntimeError, match="address already in use"):
        servers.wait("ours", process, "http://127.0.0.1:1", log, time.monotonic())
    process.kill()
