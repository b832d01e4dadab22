"""Starts `python -m sglang.launch_server` for a test and stops it; the tests talk to it over HTTP only."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import requests
import torch
from serving.network_namespaces import CABLE, Host
from serving.preloaded import Preloaded, Started

READY_TIMEOUT_S = 300  # a loaded machine; the time that start-up took is printed and judged by one test
VOCAB_SIZE = 1024
# One thread: the tiny model's products are small, and threads that wait for each other on a busy machine cost seconds.
ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# 24 pages of 256 tokens and 16 request slots: small enough that a handful of requests fills the pool.
POOL_TOKENS = 6144
MAX_RUNNING = 16
# Fewer device slots for tails than requests may run or prefixes are stored.
TAILS = {"SGLANG_DSV4_TAIL_SLOTS": "9", "SGLANG_DSV4_TAIL_HOST_SLOTS": "40", "SGLANG_DSV4_TAIL_INTERVAL": "512"}
# An idle server polls for requests without pause otherwise, and takes a core from the tests that run at the same time.
SLEEP_ON_IDLE = "--sleep-on-idle"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    port: int
    log_path: Path
    process: subprocess.Popen[bytes] | Started
    ready_s: float
    address: str = LOOPBACK

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0)

    def chat(self, text: str, **options: Any) -> Any:
        """Return the openai client's response to one greedy chat turn."""
        options = {"max_tokens": 16, "temperature": 0, **options}
        return self.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], **options
        )

    def generate(self, input_ids: list[int], **sampling_params: Any) -> dict[str, Any]:
        """Return the result of SGLang's own endpoint, greedy by default, with the log-probability of each output
        token."""
        sampling_params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True, **sampling_params}
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        response = requests.post(f"{self.url}/generate", json=body, timeout=300)
        assert response.status_code == 200, response.text
        return response.json()

    def is_alive(self) -> bool:
        """Whether the server answers with a token. (/health_generate asks for one too, but looks for it once a
        second.)"""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        return (
            self.process.poll() is None
            and requests.post(f"{self.url}/generate", json=body, timeout=120).status_code == 200
        )


def free_port() -> int:
    """Return a free port below the range that the system gives to any process. A server binds its port seconds later,
    and hangs if another process has it by then."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("none of 100 ports from 20,000 to 32,000 is free")


def output_logprobs(result: dict[str, Any]) -> list[float]:
    """Return the log-probability of each output token of a /generate result."""
    return [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


_preloaded: Preloaded | None = None


def preloaded() -> Preloaded:
    """Return this process's `Preloaded`. A new one is started when it is gone: an engine that shuts down ends all
    children of its process."""
    global _preloaded
    if _preloaded is None or not _preloaded.is_alive():
        _preloaded = Preloaded({**os.environ, **ENV})
    return _preloaded


def start(
    checkpoint: Path,
    log_path: Path,
    flags: tuple[str, ...],
    env: dict[str, str],
    from_command: bool,
    host: Host | None = None,
) -> tuple[subprocess.Popen | Started, int]:
    """Start a server, on this machine or on a host; return its process and its port."""
    port = free_port()
    argv = ["--model-path", str(checkpoint), "--port", str(port), *flags]
    if host is not None:
        argv += ["--host", host.address]
        env = env | {"SGLANG_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": CABLE}
    paths = (env.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))  # the session's has `strict_bookkeeping`
    env = {**os.environ, **ENV, **env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # The kernels' packages look for a GPU while they are imported, and CUDA's state does not survive a fork.
    if host is None and not from_command and not torch.cuda.is_available() and preloaded().may_start(env):
        return preloaded().start(argv, env, log_path), port
    command = [*(host.command if host else ()), sys.executable, "-m", "sglang.launch_server", *argv]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    return process, port


def stop(process: subprocess.Popen | Started) -> None:
    """End the server and every process it started (they share its session)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def is_ready(port: int, address: str = LOOPBACK) -> bool:
    try:
        return requests.get(f"http://{address}:{port}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def wait_until(holds: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait for something that a server does after its start; a request that it does not answer counts as False."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except (requests.RequestException, OSError):
            pass
        time.sleep(0.5)
    raise AssertionError("what the test waits for did not happen")


@contextmanager
def running_server(
    checkpoint: Path,
    log_path: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    from_command: bool = False,
    host: Host | None = None,
) -> Iterator[Server]:
    """Start a server, yield it once it answers, and stop it. Its log is shown if it does not start.

    Args:
        from_command: start it as a user does, which takes longer (see `serving.preloaded`).
        host: the network namespace that it runs in; None: this process's.
    """
    begin = time.monotonic()
    address = LOOPBACK if host is None else host.address
    process, port = start(checkpoint, log_path, flags, env or {}, from_command, host)
    try:
        while not is_ready(port, address):
            waited = time.monotonic() - begin
            assert process.poll() is None and waited < READY_TIMEOUT_S, (
                f"server not ready after {waited:.0f} s, exit status {process.poll()}:\n{log_path.read_text()[-6000:]}"
            )
            time.sleep(0.5)
        yield Server(port, log_path, process, time.monotonic() - begin, address)
    finally:
        stop(process)


def run_until_it_stops(checkpoint: Path, log_path: Path, *flags: str, env: dict[str, str]) -> str:
    """Start a server that must stop by itself; return its log."""
    process, port = start(checkpoint, log_path, flags, env, from_command=True)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while process.poll() is None:
            assert not is_ready(port), f"the server started although it must not:\n{log_path.read_text()[-3000:]}"
            assert time.monotonic() < deadline, (
                f"the server neither stopped nor started:\n{log_path.read_text()[-3000:]}"
            )
            time.sleep(0.5)
        assert process.returncode != 0
        return log_path.read_text(errors="replace")
    finally:
        stop(process)


def account(result: dict[str, Any]) -> dict[str, Any]:
    """Return the prefix statistics in a response."""
    return result["meta_info"]["prefix_cache"][0]


def flush(server: Server) -> None:
    """Empty the device and host memory once the server is idle."""
    deadline = time.monotonic() + 60
    while requests.post(f"{server.url}/flush_cache", timeout=300).status_code != 200:
        assert time.monotonic() < deadline, "the server does not become idle"
        time.sleep(0.1)


def wait_for_files(folder: Path) -> int:
    """Wait until no file has been added for a second; return the number of files."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 1:
        found = len(list(folder.rglob("*.page"))) + len(list(folder.rglob("*.tail")))
        if found != before:
            before, since = found, time.monotonic()
        time.sleep(0.05)
    return before
