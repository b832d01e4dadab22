"""``make serve``: start SGLang's server on loopback, wait until it answers, and print the command to type next.

    python -m sglang_dsv4.cpu.quickstart --model-path DIR [--port 30000] [further sglang.launch_server flags]

It runs ``python -m sglang.launch_server`` unchanged; SGLang finds this package by its entry points. Standard library
only, so that a missing dependency is reported by SGLang and not here. Ctrl-C and SIGTERM end the server; a second one
ends it without waiting for its requests.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from sglang_dsv4 import env

HOST = "127.0.0.1"
DEFAULT_CHECKPOINT = Path("trained")  # as in the Makefile: a part of the repository
START_TIMEOUT_S = 600  # for a machine under load; an idle one needs less than a minute
# SGLang's names of DeepSeek-V4's formats. Without them thoughts and tool calls stay in the text of an answer.
PARSERS = {"--reasoning-parser": "deepseek-v4", "--tool-call-parser": "deepseekv4"}


MOST_THREADS = 4
"""Threads of a rank: the products of the default checkpoint are too small for more."""


def use_few_threads_that_sleep() -> None:
    """Set the number of OpenMP's threads, and that they sleep while they wait, unless the user set them.

    Threads that spin while they wait for each other make a busy machine many times slower.
    """
    env.set_default("OMP_NUM_THREADS", str(min(MOST_THREADS, len(os.sched_getaffinity(0)))))
    env.set_default("OMP_WAIT_POLICY", "passive")


def no_checkpoint(model: Path) -> str:
    """The line for a folder without a checkpoint."""
    return (
        f"No checkpoint at {model}: there is no config.json in it. MODEL names a folder; for a model of the Hugging "
        "Face hub, name the folder that `hf download` prints."
    )


def why_port_is_unusable(port: int) -> str | None:
    """Why a server can't bind ``port`` on loopback now; None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            return f"Port {port} is reserved for privileged users (as ports below 1024 usually are)."
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"Port {port} is taken by another program."
            return f"Port {port} can't be used: {error.strerror}."
    return None


def is_ready(port: int) -> bool:
    """Whether the server answers ``/health`` with 200 (SGLang answers 503 until its warm-up request is done)."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def next_command(port: int, model: str) -> str:
    """The chat request to type once the server is ready."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "temperature": 0}
    )
    return (
        f"curl -s http://{HOST}:{port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"     -d {shlex.quote(body)}"
    )


def what_to_type(port: int, model: Path) -> str:
    """The chat request, and for the default checkpoint a note of what to expect of it."""
    command = next_command(port, str(model))
    if model != DEFAULT_CHECKPOINT:
        return command
    return (
        f'{command}\n\nThis model is small: ask it "What is 17 + 25?" or what benchmarks/train_tiny/README.md says. '
        "MODEL=<checkpoint folder> serves your own."
    )


def parser_flags(server_flags: list[str]) -> list[str]:
    """The flags for the parsers of reasoning and tool calls, except those that `server_flags` has."""
    given = {flag.split("=")[0] for flag in server_flags}
    return [word for flag, name in PARSERS.items() if flag not in given for word in (flag, name)]


def main() -> int:
    """Run the server until it ends, Ctrl-C or SIGTERM; returns its exit status, 1 if it could not start."""
    parser = argparse.ArgumentParser(description="Serve a DeepSeek-V4 checkpoint on loopback.")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, default=30000)
    arguments, server_flags = parser.parse_known_args()

    if not (arguments.model_path / "config.json").is_file():
        print(no_checkpoint(arguments.model_path), file=sys.stderr)
        return 1
    if not 1 <= arguments.port <= 65535:
        print(f"{arguments.port} is no port: name one from 1 to 65535, as in make serve PORT=30001", file=sys.stderr)
        return 1
    obstacle = why_port_is_unusable(arguments.port)
    if obstacle is not None:
        print(f"{obstacle} Choose another one: make serve PORT=30001", file=sys.stderr)
        return 1

    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(arguments.model_path), "--host", HOST, "--port", str(arguments.port)),
        *("--uvicorn-access-log-exclude-prefixes", "/health"),  # polled below, and not to be logged
        "--sleep-on-idle",  # else an idle server keeps a core busy
        *parser_flags(server_flags),
        *server_flags,
    ]
    print("+", shlex.join(command), flush=True)
    begin = time.monotonic()
    use_few_threads_that_sleep()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    server = subprocess.Popen(command)
    try:
        while not is_ready(arguments.port):
            status = server.poll()
            if status is not None:
                print(f"\nThe server stopped before it was ready (exit status {status}). The reason is above.")
                return 1
            if time.monotonic() - begin > START_TIMEOUT_S:
                server.terminate()
                print(f"\nThe server was not ready after {START_TIMEOUT_S} s; stopped it.", file=sys.stderr)
                return 1
            time.sleep(0.5)
        print(
            f"\nReady after {time.monotonic() - begin:.0f} s at http://{HOST}:{arguments.port}. Ctrl-C stops it. "
            f"In another terminal:\n\n{what_to_type(arguments.port, arguments.model_path)}\n",
            flush=True,
        )
        return server.wait()
    except KeyboardInterrupt:
        return stop(server)


def stop(server: subprocess.Popen[bytes]) -> int:
    """Ask the server to end, and wait for it; returns 0, the exit status of a server that was asked to end."""
    server.terminate()
    try:
        server.wait()
    except KeyboardInterrupt:  # asked a second time
        server.kill()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
