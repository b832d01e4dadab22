"""Chooses defaults: servers of ours that differ in switches or flags, loaded in turns.

    python benchmarks/serve_switches.py VARIANTS.json --folder FOLDER --out FILE.json
        [--works decode prefill multi_turn profile] [--requests 1 4 16 64] [--turns 3] [--seconds 400]

VARIANTS.json has the format of `servers.py`; its first server is the baseline. Servers that run in FOLDER already with
these settings are used. A turn runs a load on one server after the other, in an order that every turn reverses, with
the other servers suspended; the file has every measurement and, for each variant, work and number of requests, the
median over turns of its figure over the baseline's in the same turn. `profile` is a decode step's busy time on the GPU
(mean of eight steps), which the host does not disturb. The file is written after every turn; no turn begins after
--seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from lib import serve_load, servers
from lib.serve_profile import profile_decode
from lib.versions import versions

CONTEXT = 4608
LONG_PROMPT = 65536
WORKS = ("decode", "prefill", "multi_turn", "profile")
Row = dict[str, object]


def measure(url: str, work: str, requests: int, turn: int) -> float:
    """Return tok/s of a load; for `profile`, steps a second of busy GPU time."""
    if work == "decode":
        return serve_load.run(url, serve_load.decode(requests, CONTEXT, 192, 71 + turn))["tok_s"]
    if work == "prefill":
        length = LONG_PROMPT if requests == 1 else 8192
        return serve_load.run(url, serve_load.prefill(requests, length, 171 + turn))["tok_s"]
    if work == "multi_turn":
        load = serve_load.multi_turn(requests, 4, prefixes=4, prefix=4096, user=256, new_tokens=64, seed=71 + turn)
        return serve_load.run(url, load)["tok_s"]
    return 1e6 / profile_decode(url, requests, CONTEXT).busy_us


def cells(works: list[str], requests: list[int]) -> list[tuple[str, int]]:
    """Return (work, requests) in the order in which a turn measures them."""
    of_work = {"decode": requests, "prefill": [8, 1], "multi_turn": [32], "profile": requests}
    return [(work, count) for work in works for count in of_work[work]]


def ratios(rows: list[Row], baseline: str) -> list[Row]:
    """Return a row for each variant, work and number of requests: the median over turns of its figure over the
    baseline's."""
    figures = {(row["variant"], row["work"], row["requests"], row["turn"]): float(row["figure"]) for row in rows}
    keys = dict.fromkeys((variant, work, requests) for variant, work, requests, _ in figures if variant != baseline)
    found = []
    for variant, work, requests in keys:
        turns = [
            figure / figures[baseline, work, requests, turn]
            for (name, *cell, turn), figure in figures.items()
            if name == variant and cell == [work, requests] and (baseline, work, requests, turn) in figures
        ]
        if turns:
            cell = {"variant": variant, "work": work, "requests": requests}
            found.append(cell | {"ratio": statistics.median(turns), "least": min(turns), "most": max(turns)})
    return found


def main() -> None:
    """Start servers that do not run, measure in turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=400.0, help="seconds after which no turn begins")
    parser.add_argument("--about", default="", help="hardware, model and stack, for the file")
    arguments = parser.parse_args()
    begin, about = time.monotonic(), json.loads(arguments.variants.read_text())
    if servers.start_all(about, arguments.folder, 31_000):
        raise SystemExit("not all servers came up: see above")
    running = servers.listed_servers(arguments.folder)
    names, rows = list(about["servers"]), []

    def loaded(name: str, work: str, requests: int, turn: int) -> float:
        with servers.others_suspended(arguments.folder, running[name]["url"]):
            return measure(running[name]["url"], work, requests, turn)

    for work, requests in cells([work for work in arguments.works if work != "profile"], arguments.requests):
        for name in names:  # unmeasured first run: it compiles and captures
            loaded(name, work, requests, turn=-1)
    print(f"warm after {time.monotonic() - begin:.0f} s", flush=True)
    for turn in range(arguments.turns):
        for work, requests in cells(arguments.works, arguments.requests):
            if time.monotonic() - begin > arguments.seconds or (work == "profile" and turn):
                continue
            for name in names if turn % 2 == 0 else reversed(names):
                figure = loaded(name, work, requests, turn)
                rows.append(
                    {"variant": name, "work": work, "requests": requests, "turn": turn, "figure": round(figure, 1)}
                )
        found = {
            "about": arguments.about,
            "versions": versions(),
            "variants": about["servers"],
            "flags": about.get("flags", []),
            "ratios": ratios(rows, names[0]),
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"turn {turn} done after {time.monotonic() - begin:.0f} s", flush=True)
    for row in ratios(rows, names[0]):
        span = f"({row['least']:.3f} to {row['most']:.3f})"
        print(f"{row['variant']:24} {row['work']:10} {row['requests']:4} {row['ratio']:.3f} {span}")
    servers.stop_all(arguments.folder)


if __name__ == "__main__":
    main()
