"""Starts servers for several benchmarks: ours or SGLang's built-in, each a `python -m sglang.launch_server`.

    python benchmarks/servers.py start SERVERS.json --folder FOLDER [--port 31000]
    python benchmarks/servers.py stop --folder FOLDER

A benchmark starts the servers that it needs one after the other, and a start takes a minute in which the GPU is almost
idle. Where several fit into its memory, `start` starts them at once and returns when all of them answer. A benchmark
with FOLDER in the variable BENCHMARK_SERVERS uses such a server instead of starting one, if contender, model, flags and
SGLang's and our variables are equal; otherwise it starts its own. A step of one request, which the host bounds, took
twice as long with three idle servers on the machine: a benchmark that measures times suspends them meanwhile. Give all
of them --sleep-on-idle. With --nnodes N in its flags a server is N nodes on this machine: on one GPU that shows whether
ranks agree, not how fast they are. SERVERS.json, where a server's own model, flags and env are optional:

    {"model": FOLDER, "flags": [of all], "servers": {name: {"contender": "ours", "model": …, "flags": […], "env": {…}}}}
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lib.servers import LIST, end_session, environment_of, identity, listed_servers, start, wait


def start_all(about: Mapping, folder: Path, port: int) -> int:
    """Start all servers that SERVERS.json names at once and list the ones that are ready; return how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    model, common, begin, processes = Path(about["model"]), about.get("flags", []), time.monotonic(), {}
    for i, (name, server) in enumerate(about["servers"].items()):
        contender, flags = server["contender"], [*common, *server.get("flags", [])]
        env, log, url = (
            environment_of(contender, server.get("env")),
            folder / f"{name}.log",
            f"http://127.0.0.1:{port + i}",
        )
        where = Path(server.get("model", model))
        process = start(contender, where, flags, port + i, log, env)
        processes[name] = process, {
            "identity": identity(contender, where, flags, env), "url": url, "log": str(log), "pid": process.pid
        }  # fmt: skip
    listed, failed = listed_servers(folder), 0
    for name, (process, found) in processes.items():
        try:
            contender = found["identity"]["contender"]
            found["ready_s"] = wait(contender, process, found["url"], Path(found["log"]), begin)
            print(f"{name}: ready after {found['ready_s']:.0f} s", flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{name}: {error}", flush=True)
            end_session(process.pid)
            continue
        listed[name] = found
        (folder / LIST).write_text(json.dumps(listed, indent=1))
    return failed


def stop_all(folder: Path) -> None:
    """End the servers of FOLDER with all their processes."""
    for found in listed_servers(folder).values():
        end_session(found["pid"])
    (folder / LIST).write_text("{}")


def main() -> int:
    """Start or stop servers; return 1 if one failed to start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "stop"))
    parser.add_argument("servers", type=Path, nargs="?", help="SERVERS.json")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=31_000, help="of the first one")
    arguments = parser.parse_args()
    if arguments.what == "stop":
        stop_all(arguments.folder)
        return 0
    if arguments.servers is None:
        parser.error("start wants SERVERS.json")
    return int(start_all(json.loads(arguments.servers.read_text()), arguments.folder, arguments.port) > 0)


if __name__ == "__main__":
    sys.exit(main())
