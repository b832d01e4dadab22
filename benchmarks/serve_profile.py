"""Kernels of a step of a running SGLang server: launches and busy time, by SGLang's own profiler.

    python benchmarks/serve_profile.py [URL] --requests 16 [--context 4608] [--out FILE.json]     a decode step
    python benchmarks/serve_profile.py [URL] --prefill [--context 65536]                          a chunk of a prompt
    python benchmarks/serve_profile.py [URL] --turn [--requests 16] [--context 4608]     a turn after reused prefixes

--trace FOLDER keeps the profiler's trace, the host's events included. A step's busy time is the time in which at least
one kernel runs, so overlapping kernels (side streams, launches that begin early) count once and gaps do not count. Its
span, from one step to the next, includes the gaps. In the table a kernel's time is from its first CTA to its last; with
launches that begin early it includes waiting, so only busy time and span can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lib.serve_profile import HOST_ROWS, profile_decode, profile_prefill, profile_turn


def main() -> int:
    """Profile, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefill", action="store_true", help="chunks of one prompt instead of decode steps")
    parser.add_argument("--turn", action="store_true", help="a turn of all requests instead of decode steps")
    parser.add_argument("--trace", type=Path, help="folder for the trace of --turn")
    parser.add_argument("--context", type=int, help="tokens of a prompt: 4,608, or 65,536 with --prefill")
    parser.add_argument("--rows", type=int, default=45, help="of the table")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.prefill:
        found = profile_prefill(arguments.url, arguments.context or 65_536)
    elif arguments.turn:
        found = profile_turn(arguments.url, arguments.requests, arguments.context or 4608, arguments.trace)
    else:
        found = profile_decode(arguments.url, arguments.requests, arguments.context or 4608)
    print(
        f"a step: {found.launches:.1f} launches, by {found.host_launches:.1f} of the host; "
        f"{found.busy_us:.0f} us busy of {found.span_us:.0f}"
    )
    for name, launches, us in found.kernels[: arguments.rows]:
        print(f"{us:9.1f} us {launches:8.1f} x {100 * us / found.busy_us:5.1f} %  {name[:140]}")
    for name, calls, us in found.host_calls[:HOST_ROWS]:
        print(f"{us:9.1f} us {calls:8.1f} x  by the host: {name}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(vars(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
