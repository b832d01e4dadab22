"""A prefill server, a decode server and SGLang's router, of which a server can be killed and started again.

Needs `sglang-router`, in the version of `cpu.quickstart_pd.ROUTER`. `serving.pair` has two servers without a router.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serving import held_resources
from serving.pair import ENV, HOST, words_of
from serving.server import READY_TIMEOUT_S, TAILS, Server, free_port, is_ready, start, stop, wait_until

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8", "--chunked-prefill-size", "512")
DECODE = ("--disaggregation-decode-enable-radix-cache",)
PATIENCE = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "200"}
PATIENCE |= {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "100"}
# The router must find a server that has come back at once, and may not ask again for what a test has aborted. Checks of
# a server's health are requests, too, which would be held in the end.
ROUTER_FLAGS = ("--disable-circuit-breaker", "--disable-retries", "--health-check-interval-secs", "86400")
ROUTER_FLAGS += ("--health-failure-threshold", "100000", "--policy", "round_robin", "--log-level", "warn")


@contextmanager
def server_at(port: int, checkpoint: Path, log: Path, flags: tuple[str, ...], env: dict[str, str]) -> Iterator[Server]:
    begin = time.monotonic()
    process, _ = start(checkpoint, log, (*flags, "--port", str(port)), env, from_command=False)
    try:
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() - begin < READY_TIMEOUT_S, log.read_text()[-4000:]
            time.sleep(0.5)
        yield Server(port, log, process, time.monotonic() - begin)
    finally:
        stop(process)


class Sides:
    """The two servers, at ports that stay the same when a server is started again, and the router."""

    def __init__(self, stack: ExitStack, checkpoint: Path, folder: Path, flags: tuple[str, ...]) -> None:
        self._stack, self._checkpoint, self._folder, self._flags = stack, checkpoint, folder, flags
        self._env = ENV | TAILS | PATIENCE | held_resources.install(folder / "held")
        self._bootstrap, self._starts = free_port(), itertools.count()
        self._ports = {"prefill": free_port(), "decode": free_port()}
        self.servers: dict[str, Server] = {}
        with ThreadPoolExecutor(2) as starting:
            list(starting.map(self.start, self._ports))
        self.router = self._start_router()

    def start(self, side: str) -> None:
        flags = (*words_of(side, self._bootstrap), *FLAGS, *self._flags, *(DECODE if side == "decode" else ()))
        log = self._folder / f"{side}-{next(self._starts)}"
        server = server_at(self._ports[side], self._checkpoint, log, flags, self._env)
        self.servers[side] = self._stack.enter_context(server)

    def kill(self, side: str) -> None:
        """End all processes of a server at once, as an out-of-memory killer does."""
        os.killpg(self.servers[side].process.pid, signal.SIGKILL)

    def held(self) -> dict[str, dict[str, int]]:
        """Return what each side holds for requests, by name."""
        return {side: held_resources.counts(self._folder / "held", side) for side in self._ports}

    def _start_router(self) -> str:
        port, log = free_port(), (self._folder / "router").open("wb")
        prefill, decode = (f"http://{HOST}:{port}" for port in self._ports.values())
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", *ROUTER_FLAGS]
        command += ["--prefill", prefill, str(self._bootstrap), "--decode", decode]
        command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._stack.callback(stop, process)
        wait_until(lambda: is_ready(port))
        return f"http://{HOST}:{port}"
