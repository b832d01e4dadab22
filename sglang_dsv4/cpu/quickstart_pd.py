"""``make serve-pd``: a prefill server, a decode server and SGLang's router on loopback; one address answers.

    python -m sglang_dsv4.cpu.quickstart_pd --model-path DIR [--port 30000] [flags of both servers]

The router listens on the port, the servers on the two after it, and the prefill server's bootstrap on the third. The
three commands are printed; they are the ones of `docs/disaggregation.md`. Ctrl-C and SIGTERM end all of them, and so
does the end of any. Standard library only, as `quickstart`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from sglang_dsv4 import env
from sglang_dsv4.cpu.quickstart import (
    HOST,
    START_TIMEOUT_S,
    is_ready,
    no_checkpoint,
    parser_flags,
    use_few_threads_that_sleep,
    what_to_type,
    why_port_is_unusable,
)

ROUTER = "sglang-router==0.3.2"
TRANSFERS = ("--disaggregation-transfer-backend", "mooncake_tcp")


def server_command(side: str, model: Path, port: int, bootstrap_port: int, flags: list[str]) -> list[str]:
    """The command of the server for a side, ``prefill`` or ``decode``."""
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--host", HOST, "--port", str(port)),
        *("--disaggregation-mode", side, "--disaggregation-bootstrap-port", str(bootstrap_port), *TRANSFERS),
        *(("--disaggregation-decode-enable-radix-cache",) if side == "decode" else ()),
        *("--uvicorn-access-log-exclude-prefixes", "/health", "--sleep-on-idle"),
        *parser_flags(flags),
        *flags,
    ]


def router_command(port: int, prefill: int, decode: int, bootstrap_port: int) -> list[str]:
    """The command of SGLang's router in front of both servers."""
    return [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--prefill", f"http://{HOST}:{prefill}", str(bootstrap_port), "--decode", f"http://{HOST}:{decode}"),
        *("--host", HOST, "--port", str(port)),
    ]


def main() -> int:
    """Run the three until one ends, Ctrl-C or SIGTERM; returns 0 if asked to end, 1 if one could not start or ended."""
    parser = argparse.ArgumentParser(description="Serve a DeepSeek-V4 checkpoint by two servers and a router.")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, default=30000)
    arguments, flags = parser.parse_known_args()
    obstacle = what_is_missing(arguments.model_path, arguments.port)
    if obstacle is not None:
        print(obstacle, file=sys.stderr)
        return 1

    router, prefill, decode, bootstrap = range(arguments.port, arguments.port + 4)
    use_few_threads_that_sleep()
    env.set_default("SGLANG_HOST_IP", HOST)  # by which the servers find each other; SGLang would look for a route
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    begin, processes = time.monotonic(), []
    try:
        for side, port in (("prefill", prefill), ("decode", decode)):
            processes.append(begin_command(server_command(side, arguments.model_path, port, bootstrap, flags)))
        if not (wait_for(processes, prefill) and wait_for(processes, decode)):
            return 1
        processes.append(begin_command(router_command(router, prefill, decode, bootstrap)))
        if not wait_for(processes, router):
            return 1
        print(
            f"\nReady after {time.monotonic() - begin:.0f} s at http://{HOST}:{router}. Ctrl-C stops all three. "
            f"In another terminal:\n\n{what_to_type(router, arguments.model_path)}\n",
            flush=True,
        )
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
        print("\nA server or the router has ended; the reason is above. Stopping the others.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        stop(processes)


def what_is_missing(model: Path, port: int) -> str | None:
    """Why the servers can't be started; None if they can."""
    if not (model / "config.json").is_file():
        return no_checkpoint(model)
    if not 1 <= port <= 65532:
        return f"{port} and the three ports after it are not all ports: name one from 1 to 65532."
    if importlib.util.find_spec("sglang_router") is None:
        return f"SGLang's router is not installed: pip install --no-deps {ROUTER}"
    for one in range(port, port + 4):
        if (obstacle := why_port_is_unusable(one)) is not None:
            return f"{obstacle} Four ports in a row are needed: choose another first one, make serve-pd PORT=30010"
    return None


def begin_command(command: list[str]) -> subprocess.Popen[bytes]:
    """Print a command and start it."""
    print("+", shlex.join(command), flush=True)
    return subprocess.Popen(command)


def wait_for(processes: list[subprocess.Popen[bytes]], port: int) -> bool:
    """Wait until the server on this port answers; False if one of the processes ends before, or after ten minutes."""
    begin = time.monotonic()
    while not is_ready(port):
        if any(process.poll() is not None for process in processes):
            print("\nA server or the router stopped before all were ready. The reason is above.", file=sys.stderr)
            return False
        if time.monotonic() - begin > START_TIMEOUT_S:
            print(f"\nPort {port} did not answer within {START_TIMEOUT_S} s; stopping.", file=sys.stderr)
            return False
        time.sleep(0.5)
    return True


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to end, the router first, and wait for them; a second Ctrl-C ends them at once."""
    try:
        for process in reversed(processes):
            process.terminate()
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
