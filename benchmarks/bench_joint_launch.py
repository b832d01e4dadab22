"""The joint launches of a layer against the same kernels launched one by one, and on two streams.

    PYTHONPATH=tests/lib python benchmarks/bench_joint_launch.py [--cases REGEX] [--tokens 1,4,8,16] [--out FILE.json]

Sizes of V4-Flash on one of four ranks (`ops.joint_cases.FLASH_TP4`); the cases are those of
`dsv4_kernels.joint_launches`, entries of CSA and of HCA layers apart. Contenders, in CUDA graphs:

    separate    every kernel by a launch of its own that begins early (`device.dependent_launch`)
    streams     the same, the first kernel on one stream, the others on another; they join after each call
    joint       one launch (`dsv4_kernels.host.joint_launch`)

First the bits of `joint` are compared with those of `separate`; if one differs nothing is timed. Calls alternate
between sets of inputs whose weights are twice the L2 cache. Times are from one call to the next, in microseconds. The
last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from lib.measuring import gpu_state, interleaved, l2_bytes
from lib.versions import versions
from ops.joint_cases import FLASH_TP4, NAMES, PRODUCTS, SMALL, Case, Sizes, case_of
from ops.number_formats import same_bits

from dsv4_kernels import registry

TOKENS = (1, 4, 8, 16)
SECONDS = 0.1
MOST_SETS = 12
LEAST_CALLS = 24
"""Calls of a graph at least: a replay costs the host some 8 us."""


def on_two_streams(case: Case, side: object) -> None:
    """Launch the first kernel on the current stream and the others on `side`."""
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for call in case.calls[1:]:
            call()
    case.calls[0]()
    current.wait_stream(side)


def sets_of(name: str, sizes: Sizes, tokens: int, kernel: str, device: torch.device) -> list[Case]:
    """Return cases whose weights together are twice the L2 cache; one for kernels without a weight matrix."""
    first = case_of(name, sizes, tokens, kernel, device)
    weights = sum(weight.nbytes for weight in first.weights)
    count = 1 if name not in PRODUCTS else min(MOST_SETS, 1 + 2 * l2_bytes(device) // max(1, weights))
    return [first, *(case_of(name, sizes, tokens, kernel, device) for _ in range(count - 1))]


def run_case(name: str, sizes: Sizes, tokens: int, kernel: str, device: torch.device) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: a joint launch has other bits than separate launches.
    """
    expected = case_of(name, sizes, tokens, kernel, device).separately()
    found = case_of(name, sizes, tokens, kernel, device).jointly()
    assert all(map(same_bits, found, expected)), f"{name} of {tokens} tokens: other bits; nothing is timed"
    sets = sets_of(name, sizes, tokens, kernel, device)
    turns = -(-LEAST_CALLS // len(sets))
    contenders = {
        "separate": [case.separately for case in sets] * turns,
        "joint": [case.jointly for case in sets] * turns,
    }
    if device.type == "cuda":
        side = torch.cuda.Stream()
        contenders["streams"] = [lambda case=case: on_two_streams(case, side) for case in sets] * turns
    times = interleaved(contenders, device, SECONDS * len(contenders) if device.type == "cuda" else 0.0)
    row = {"name": name, "tokens": tokens, "launches": len(sets[0].calls), "sets": len(sets)}
    for contender, timing in times.items():
        row |= {f"{contender}_us": round(timing.median_us, 2), f"{contender}_spread": round(timing.spread, 4)}
    return row


def run(cases: str, tokens: tuple[int, ...], sizes: Sizes, kernel: str, device: torch.device) -> dict:
    """Measure the cases; print them row by row; return the result."""
    print(f"{'case':14} {'tokens':>6} {'launches':>8} {'separate':>9} {'streams':>9} {'joint':>9} {'ratio':>6}")
    rows = []
    for name in NAMES:
        if not re.search(cases, name) or (name in PRODUCTS and kernel != "sm90"):
            continue
        for count in tokens:
            rows.append(row := run_case(name, sizes, count, kernel, device))
            best = min(row["separate_us"], row.get("streams_us", row["separate_us"]))
            print(
                f"{name:14} {count:6} {row['launches']:8} {row['separate_us']:9.2f} {row.get('streams_us', 0.0):9.2f} "
                f"{row['joint_us']:9.2f} {row['joint_us'] / best:6.2f}",
                flush=True,
            )
    on_gpu = device.type == "cuda"
    return {
        "benchmark": "joint_launch",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "versions": versions(),
        "state": gpu_state() if on_gpu else None,
        "rows": rows,
    }


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="a regular expression of their names")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--impl", help="by name; default: the kernels for this GPU")
    parser.add_argument("--small", action="store_true", help="sizes for the emulator")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = options.impl or registry.chosen("norm_rope_store", device, torch.bfloat16).name
    tokens = tuple(int(count) for count in options.tokens.split(","))
    result = run(options.cases, tokens, SMALL if options.small else FLASH_TP4, kernel, device)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
