"""Servers that are forked from a process which has imported SGLang.

Importing takes each of a server's three processes some seconds of CPU, which is most of its start-up time.

    Preloaded(ENV).start(argv, env, log) -> Started        as `python -m sglang.launch_server argv…`

A forked process does the same after its imports: `sglang.launch_server` runs as `__main__`, and processes that SGLang
starts by multiprocessing's "spawn" go through multiprocessing's own `spawn_main`, in a child that was forked before the
launcher did anything. SGLang loads the package's plugin afterwards in every process. A server that needs a variable
that is read while SGLang is imported, or a `sitecustomize`, cannot be started here: `may_start` says so, and it is
started from a command, as users do. The session's `server` and all servers of `test_startup.py` are started from a
command too.

As a script this file is the process that has imported SGLang. It reads requests from its standard input, a JSON line
each, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The top-level imports of SGLang's launcher, HTTP server, scheduler and detokenizer, and the torch module that a
# scheduler imports. No more, since some packages read a server's environment when they are imported (prometheus_client
# does).
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "torch._inductor.compile_fx",
)
READ_LATER = (
    *("SGLANG_DSV4_", "SGLANG_HICACHE_", "SGLANG_DISAGGREGATION_", "SGLANG_HOST_IP"),
    *("ORACLE_", "PYTEST_", "PYTHONPATH"),
)
"""Prefixes of variables that are read after the imports only."""
STEMS = 2
"""Number of processes that a server spawns: a scheduler and a detokenizer. Python itself starts any further process."""


def python_path(env: Mapping[str, str]) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def imports_the_same(env: Mapping[str, str], imported_in: Mapping[str, str]) -> bool:
    """Whether SGLang's imports would be the same in another environment."""
    differ = {name for name in {*env, *imported_in} if env.get(name) != imported_in.get(name)}
    customised = any(Path(path, "sitecustomize.py").exists() for path in python_path(env))
    return all(name.startswith(READ_LATER) for name in differ) and not customised


class Started:
    """A server's process, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, pid: int, parent: Preloaded) -> None:
        self.pid, self.returncode = pid, None
        self._parent = parent

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode


class Preloaded:
    """The process that has imported SGLang, and forks servers."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env, self._lock = dict(env), threading.Lock()
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env, start_new_session=True
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def may_start(self, env: Mapping[str, str]) -> bool:
        return imports_the_same(env, self._env)

    def start(self, argv: list[str], env: Mapping[str, str], log: Path) -> Started:
        return Started(self.ask(start={"argv": argv, "env": dict(env), "log": str(log)}), self)

    def ask(self, **request: object) -> Any:
        with self._lock:  # servers may be started side by side
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        assert line, f"the process that has imported SGLang has ended: exit status {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


# ---- the process itself


def serve_requests() -> None:
    """Serve requests until the input ends. Returns early in a forked process, which becomes a server's process."""
    for module in MODULES:
        __import__(module)
    assert "prometheus_client" not in sys.modules, "it has looked for the folder of a server's metrics by now"
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if not pid:
            return become_launcher(**request["start"])
        print(pid, flush=True)


def become_launcher(argv: list[str], env: dict[str, str], log: str) -> None:
    import multiprocessing.util
    import runpy

    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, descriptor)
    os.close(file)
    os.close(nothing)
    take(env)
    stems: list[socket.socket] = []
    for _ in range(STEMS):
        mine, its = socket.socketpair()
        if not os.fork():
            mine.close()
            for other in stems:
                other.close()
            return become_spawned(its)
        its.close()
        mine.set_inheritable(False)
        stems.append(mine)
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_from_stem(path: bytes, args: list[Any], descriptors: list[int]) -> int:
        if not stems or "--multiprocessing-fork" not in map(os.fsdecode, args):
            return spawn(path, args, descriptors)
        with stems.pop() as stem:
            body = json.dumps([[*map(os.fsdecode, args)], [*descriptors], dict(os.environ)]).encode()
            socket.send_fds(stem, [len(body).to_bytes(4, "little")], descriptors)
            stem.sendall(body)
            return int.from_bytes(stem.recv(4), "little")

    multiprocessing.util.spawnv_passfds = spawn_from_stem
    sys.argv = ["", *argv]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def become_spawned(its: socket.socket) -> None:
    """Wait for the launcher to spawn a process, and become that process."""
    from multiprocessing import spawn

    length, received, _, _ = socket.recv_fds(its, 4, 16)
    if not length:  # the launcher has ended without spawning it
        return
    body = b""
    while len(body) < int.from_bytes(length, "little"):
        body += its.recv(1 << 16)
    args, descriptors, env = json.loads(body)
    # Duplicated to high numbers first: the parent's pickle names descriptors by numbers that may be in use here.
    high = [duplicate_above(descriptor, 1000) for descriptor in received]
    its = socket.socket(fileno=duplicate_above(its.detach(), 1000))
    for source, descriptor in zip(high, descriptors, strict=True):
        os.dup2(source, descriptor, inheritable=False)
        os.close(source)
    take(env)
    its.sendall(os.getpid().to_bytes(4, "little"))
    its.close()
    sys.argv = ["-c", *args[args.index("--multiprocessing-fork") :]]
    spawn.spawn_main(**{name: int(value) for name, value in (word.split("=") for word in named(args))})


def named(args: list[str]) -> list[str]:
    """Return arguments such as `pipe_handle=7` out of `python -c "… spawn_main(tracker_fd=5, pipe_handle=7)" …`."""
    (code,) = [word for word in args if "spawn_main(" in word]
    return code.partition("spawn_main(")[2].rstrip(")").split(", ")


def duplicate_above(descriptor: int, least: int) -> int:
    import fcntl

    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(descriptor)
    return high


def take(env: dict[str, str]) -> None:
    """Set the environment, and the state that Python derives from it at its start."""
    sys.path[1:1] = [path for path in python_path(env) if path not in sys.path]
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)


if __name__ == "__main__":
    # `python -m` puts the working directory here, in place of this file's folder.
    sys.path[0] = os.getcwd()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(BrokenPipeError):
        serve_requests()
