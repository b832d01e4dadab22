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
from pathlib import Path

from lib.servers import start_all, stop_all


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
    return int(bool(start_all(json.loads(arguments.servers.read_text()), arguments.folder, arguments.port)))


if __name__ == "__main__":
    sys.exit(main())
