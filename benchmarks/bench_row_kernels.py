"""The row kernels between the products of a layer, against the card's copy bandwidth.

    python benchmarks/bench_row_kernels.py [--ops REGEX] [--tokens 1,64,8192] [--impl sm90] [--ref] [--out FILE.json]

Flash's sizes: hidden 4096, 64 heads of 512 (and 16, a rank of four), q_lora 1024, 256 experts, 6 a token, 2048
intermediate channels. Each op is first compared with its reference (WRONG is the largest relative distance, in the
Frobenius norm). Then its calls over several sets of inputs are captured in a CUDA graph, and the time is the median of
a replay over its calls: launch to launch, as in a captured decode step. Calls alternate between sets that are twice the
L2 cache in size, at most MOST_SETS: with few tokens inputs come from L2, as in a forward, where a product has just
written them.

    floor = bytes / copy bandwidth        read once and written once; the bandwidth measured in the same run

`--ref` also times the reference, the chain of PyTorch kernels. The last line is the result as JSON.

    python benchmarks/bench_row_kernels.py --chain [--tokens 1,4,16,64] [--layers 43] [--out FILE.json]

times the launches of all these small kernels: all layers' boundaries and row kernels in one CUDA graph, each reading an
earlier kernel's result ("us"); the same with every launch allowed to begin while the launch before ends
(`device.dependent_launch`, "early"). Before that, REPLAYS replays of the early graph must have the bits of the kernels
launched one by one. Products and attention are left out: in a decode step they run between these kernels.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lib.measuring import gpu_state, interleaved, l2_bytes, measure_ceilings
from lib.row_kernel_chain import Chain, check_chain, launched
from lib.row_kernel_works import WORKS
from lib.versions import versions

from dsv4_kernels import registry

TOKENS = (1, 16, 64, 128, 1024, 8192)
CHAIN_TOKENS = (1, 4, 16, 64)
LAYERS = 43
MOST_SETS = 200
MOST_SET_BYTES = 8 << 30
SECONDS_PER_CASE = 0.1
WRONG = 0.01


def distance(name: str, tokens: int, device: torch.device, impl: str) -> float:
    """Return the largest relative distance of an implementation's results from the reference's, on the same inputs.

    Raises:
        AssertionError: the distance is above WRONG.
    """
    made = []
    for which in (impl, "ref"):
        torch.manual_seed(1)
        made.append([x.clone() for x in WORKS[name](tokens, device).call(which)])
    found = max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in zip(*made, strict=True)
    )
    assert found <= WRONG, f"{name} of {tokens} tokens is off by {found:.3g}; nothing is timed"
    return found


def number_of_sets(bytes_a_set: int, device: torch.device) -> int:
    """Return the number of sets that are twice the L2 cache, within MOST_SETS and MOST_SET_BYTES."""
    wanted = -(-2 * l2_bytes(device) // bytes_a_set) + 1
    return max(1, min(wanted, MOST_SETS, MOST_SET_BYTES // bytes_a_set))


def run_case(name: str, tokens: int, device: torch.device, impl: str, bandwidth: float, with_ref: bool) -> dict:
    """Return one row of the result."""
    error = distance(name, tokens, device, impl)
    first = WORKS[name](tokens, device)
    sets = [first] + [WORKS[name](tokens, device) for _ in range(number_of_sets(first.bytes, device) - 1)]

    def calls(which: str) -> list[Callable[[], object]]:
        return [lambda work=work: work.call(which) for work in sets]

    contenders = {"ours": calls(impl)}
    # A reference that copies a list to the host cannot be captured.
    if with_ref and registry.chosen(first.op, device, torch.bfloat16, "ref").graph_safe:
        contenders["ref"] = calls("ref")
    times = interleaved(contenders, device, SECONDS_PER_CASE * len(contenders) if device.type == "cuda" else 0.0)
    return {
        "name": name,
        "tokens": tokens,
        "us": round(times["ours"].median_us, 3),
        "spread": round(times["ours"].spread, 4),
        "ref_us": round(times["ref"].median_us, 3) if "ref" in times else None,
        "bytes": first.bytes,
        "floor_us": round(1e6 * first.bytes / bandwidth, 3),
        "sets": len(sets),
        "rel_err": float(f"{error:.3e}"),
    }


def run_chain(device: torch.device, impl: str, tokens: Sequence[int], layers: int) -> dict:
    """Measure the chain; print it row by row; return the result."""
    print(f"{'tokens':>6} {'launches':>9} {'us':>9} {'each':>7} {'early us':>9} {'each':>7} {'ratio':>7}")
    rows = []
    for count in tokens:
        chain = Chain(count, layers, device, impl)
        check_chain(chain)
        contenders = {"after": [launched(chain, False)], "early": [launched(chain, True)]}
        times = interleaved(contenders, device, 1.0 if device.type == "cuda" else 0.0)
        after, early, launches = times["after"].median_us, times["early"].median_us, layers * Chain.LAUNCHES
        rows.append(
            {"tokens": count, "launches": launches, "us": round(after, 2), "early_us": round(early, 2)}
            | {"spread": round(times["after"].spread, 4), "early_spread": round(times["early"].spread, 4)}
        )
        each = f"{after / launches:7.2f} {early:9.1f} {early / launches:7.2f} {early / after:7.3f}"
        print(f"{count:6} {launches:9} {after:9.1f} {each}", flush=True)
    return about(device, impl) | {"layers": layers, "rows": rows}


def about(device: torch.device, impl: str) -> dict:
    """Return the card, its state, the implementation and versions, for a result."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "impl": impl,
        "versions": versions(),
        "state": gpu_state() if on_gpu else None,
    }


def line(row: dict) -> str:
    """Return a row of the table."""
    reference = f"{row['ref_us']:10.1f}" if row["ref_us"] else f"{'-':>10}"
    share = row["floor_us"] / row["us"]
    return (
        f"{row['name']:26} {row['tokens']:6} {row['us']:9.2f} {row['floor_us']:9.2f} {share:6.0%} {reference} "
        f"{row['rel_err']:9.1e}"
    )


def run(device: torch.device, impl: str, ops: str, tokens: Sequence[int], with_ref: bool) -> dict:
    """Measure the ops; print them row by row; return the result."""
    bandwidth = measure_ceilings(device).bytes_per_second
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"{'op':26} {'tokens':>6} {'us':>9} {'floor':>9} {'of it':>6} {'ref us':>10} {'error':>9}")
    rows = []
    for name in WORKS:
        if re.search(ops, name):
            for count in tokens:
                rows.append(run_case(name, count, device, impl, bandwidth, with_ref))
                print(line(rows[-1]), flush=True)
    return about(device, impl) | {"copy_bytes_per_second": bandwidth, "rows": rows}


def main() -> None:
    """Run the ops or the chain; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression of names of rows")
    parser.add_argument("--tokens", help="of a call, separated by commas")
    parser.add_argument("--impl", help="by name; default: the kernel for this GPU")
    parser.add_argument("--ref", action="store_true", help="time the references too")
    parser.add_argument("--chain", action="store_true", help="many launches one after the other, and early ones")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the chain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    impl = options.impl or registry.chosen("norm_rope_store", device, torch.bfloat16).name
    tokens: Sequence[int] = CHAIN_TOKENS if options.chain else TOKENS
    if options.tokens:
        tokens = [int(count) for count in options.tokens.split(",")]
    if options.chain:
        result = run_chain(device, impl, tokens, options.layers)
    else:
        result = run(device, impl, options.ops, tokens, options.ref)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
