"""`--enable-deterministic-inference` on a GPU: that a request has the same bits in every company, and what that costs.

    python benchmarks/exact_gpu.py --model MODEL --out benchmarks/results/exact_h200.json \\
        [--works proof chunks speculation sglang price] [--resume] [--tp 2] [--small] [-- further server flags]

Works, each with servers of its own that have the flag:

    proof         `exact_trace.py`'s sweep and random trace (2,000 requests), with a small pool, few device slots for
                  checkpoints, and requests retracted every few steps
    chunks        the same references from another start of the server, which prefills in other chunks
    speculation   the same greedy references from one that drafts (EAGLE, by the checkpoint's MTP module)
    sglang        `python -m sglang.test.test_deterministic`: single, prefix, radix_cache, and p_vs_d beside them
    price         decode and prefill of a server with the flag beside one without it: loads of `serve_load.py`

The result is one JSON object: `compared`, `mismatches`, `by_kind`, the first mismatches, what was seen (hits by tier,
retractions), and `rows` of `{work, requests, default, exact, ratio}` in tokens a second, where a ratio below 1 is the
price. The exit status is 1 if anything differed. `--resume` adds to what `--out` holds, with the references beside it:
works can run one after the other, each by itself. `--small` is for a CPU. On a GPU the flag stops the server as long as
its routed experts are SGLang's (`sglang_dsv4.exact`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import exact_trace
import serve_load
from exact_trace import Findings, References, Sizes, read_references, write_references
from serve_ab import Server, running, versions

FLAG = "--enable-deterministic-inference"
WORKS = ("proof", "chunks", "speculation", "sglang", "price")
LENGTHS = (
    *(1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257),
    *(512, 513, 515, 639, 641, 767),  # tests/radix/test_exact.py: every remainder by 4, 128 and 256 at which parts end
    *(1030, 2049, 4100, 8193, 20_000),
)
LARGE = Sizes(
    lengths=LENGTHS,
    new_tokens=24,
    batches=(2, 3, 7, 16, 33, 64, 128),
    pool_tokens=131_072,
    displaced=80,
    requests=2000,
    at_once=96,
    longest=6000,
)
SMALL = Sizes(
    lengths=(3, 130, 513, 770),
    new_tokens=6,
    batches=(3, 9),
    pool_tokens=6144,
    displaced=10,
    requests=60,
    at_once=12,
    longest=700,
)
TAIL_SLOTS = {False: 64, True: 9}  # on the device; by whether it is small
RETRACT_EVERY = 61  # steps
CHUNKS = {False: (8192, 1024), True: (512, 256)}  # tokens of a prefill chunk, of the proof and of "chunks"
SPECULATION = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
TRIALS = {False: 50, True: 3}
MODES = ("single", "prefix", "radix_cache", "p_vs_d")
HIGHEST_ID_OF_RADIX_CACHE = 50_000
"""SGLang's script draws token ids up to here in that mode: a smaller vocabulary can't be asked."""
DECODE = {False: ((1, 16, 64, 128), 4608, 192), True: ((1, 4), 300, 24)}  # requests, context, new tokens
PREFILL = {False: ((8, 8192), (1, 65_536)), True: ((2, 600),)}  # prompts, length
REPEATS = (71, 72, 73)


class Proof:
    """What the works share: the model, flags, and the references that the first server gave."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model: Path = arguments.model
        self.small: bool = arguments.small
        self.port: int = arguments.port
        self.logs: Path = arguments.logs
        self.flags = [*arguments.flags, "--tp-size", str(arguments.tp)]
        vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]
        sizes = SMALL if self.small else LARGE
        self.sizes = replace(sizes, last_id=min(vocabulary, 129_000) - 1, requests=arguments.requests or sizes.requests)
        serve_load.LAST_ID = self.sizes.last_id
        self.references = None if arguments.out is None else arguments.out.with_suffix(".references.json")
        self.known: References = {}
        self.found = Findings()
        self.before: dict[str, Any] = {}
        if arguments.resume:
            if arguments.out is None or not arguments.out.exists():
                raise SystemExit(f"--resume: there is nothing to go on from at --out {arguments.out}")
            self.before = json.loads(arguments.out.read_text())
            self.known, self.found = read_references(self.references), Findings.from_json(self.before)

    @contextlib.contextmanager
    def server(self, name: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
        """A running server of ours; its log is `name.log`."""
        with mock.patch.dict(os.environ, env or {}):
            with running("ours", self.model, (*self.flags, *flags), self.port, self.logs / f"{name}.log") as server:
                yield server

    def ask(self, name: str, chunk: int, sizes: Sizes, *flags: str, retract: bool = True) -> None:
        """Sweep and trace of a server with a small pool."""
        env = {"SGLANG_DSV4_TAIL_SLOTS": str(TAIL_SLOTS[self.small])}
        if retract:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)}
        limits = ("--max-total-tokens", str(sizes.pool_tokens), "--chunked-prefill-size", str(chunk))
        with self.server(name, FLAG, *limits, *flags, env=env) as server:
            found = exact_trace.prove(server.url, sizes, self.known)
            found.seen["retracted"] += retractions(server.log.read_text(errors="replace"))
        print(f"{name}\n  " + "\n  ".join(exact_trace.describe(found)), flush=True)
        self.found.add(found)

    def proof(self) -> None:
        """The work of that name."""
        self.ask("proof", CHUNKS[self.small][0], self.sizes)

    def chunks(self) -> None:
        """The work of that name: a tenth of the trace, the same requests first."""
        self.ask("chunks", CHUNKS[self.small][1], replace(self.sizes, requests=max(10, self.sizes.requests // 10)))

    def speculation(self) -> None:
        """The work of that name. Sampled requests are refused there, so none is asked."""
        self.ask("speculation", CHUNKS[self.small][0], replace(self.sizes, sampled=False), *SPECULATION, retract=False)

    def sglang(self) -> dict[str, list[int]]:
        """Unique samples by mode: all 1 if it is deterministic."""
        uniques: dict[str, list[int]] = {}
        with self.server("sglang", FLAG) as server:
            port = server.url.rsplit(":", 1)[1]
            for mode in MODES:
                if mode == "radix_cache" and self.sizes.last_id < HIGHEST_ID_OF_RADIX_CACHE:
                    continue
                command = [sys.executable, "-m", "sglang.test.test_deterministic", "--port", port, "--test-mode", mode]
                trials = TRIALS[self.small] if mode != "p_vs_d" else min(8, TRIALS[self.small])
                done = subprocess.run(
                    [*command, "--host", "127.0.0.1", "--n-trials", str(trials)], capture_output=True, text=True
                )
                (self.logs / f"test_deterministic_{mode}.log").write_text(done.stdout + done.stderr)
                uniques[mode] = unique_samples(mode, done.stdout)
                asked = [count for count in uniques[mode] if count]  # few trials may leave a prompt out
                self.found.compared[f"sglang {mode}"] += max(1, len(asked))
                self.found.mismatches[f"sglang {mode}"] += sum(count > 1 for count in asked) if asked else 1
                print(f"test_deterministic {mode}: unique samples {uniques[mode]}", flush=True)
        return uniques

    def price(self) -> list[dict[str, Any]]:
        """Rows of both modes."""
        figures = {}
        for mode, flags in (("default", ()), ("exact", (FLAG,))):
            with self.server(f"price_{mode}", *flags) as server:
                figures[mode] = speeds(server.url, self.small)
        return rows_of(figures["default"], figures["exact"])


def retractions(log: str) -> int:
    """Requests that a server has retracted, by its log."""
    return sum(int(count) for count in re.findall(r"#retracted_reqs: (\d+)", log))


def unique_samples(mode: str, said: str) -> list[int]:
    """The numbers of different answers in what SGLang's script said; [] if it said none."""
    if mode == "radix_cache":
        return [1] if "TEST PASSED" in said else [2] if "TEST FAILED" in said else []
    if mode == "p_vs_d":
        return [
            1 if line.startswith("✅") else 2 for line in said.splitlines() if line[:1] in "✅❌" and "match" in line
        ]
    return [int(count) for count in re.findall(r"Unique samples: (\d+)", said)]


Speeds = dict[tuple[str, int], float]  # (work, requests) -> tokens a second


def speeds(url: str, small: bool) -> Speeds:
    """Of decode and prefill. Every load runs once before it is measured: kernels may be compiled for its shapes."""
    requests, context, new_tokens = DECODE[small]
    found: Speeds = {}
    for count in requests:
        serve_load.run(url, serve_load.decode(count, context, max(8, new_tokens // 8), seed=1))
        runs = [serve_load.run(url, serve_load.decode(count, context, new_tokens, seed)) for seed in REPEATS]
        found["decode", count] = statistics.median(run["tok_s"] for run in runs)
    for prompts, length in PREFILL[small]:
        serve_load.run(url, serve_load.prefill(prompts, length, seed=1))
        runs = [serve_load.run(url, serve_load.prefill(prompts, length, seed)) for seed in REPEATS]
        found[f"prefill_{length}", prompts] = statistics.median(run["tok_s"] for run in runs)
    return found


def rows_of(default: Speeds, exact: Speeds) -> list[dict[str, Any]]:
    """`{work, requests, default, exact, ratio}` of each load, in tokens a second."""
    return [
        {"work": work, "requests": requests, "default": before, "exact": exact[work, requests],
         "ratio": exact[work, requests] / before}
        for (work, requests), before in default.items()
    ]  # fmt: skip


def main(arguments_given: Sequence[str] | None = None) -> int:
    """Run the works, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[w for w in WORKS if w != "speculation"])
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--requests", type=int, help="of the trace")
    parser.add_argument("--small", action="store_true", help="little of everything, for a CPU")
    parser.add_argument("--resume", action="store_true", help="add to what --out holds")
    parser.add_argument("--port", type=int, default=30_200)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="of all servers, behind --")
    arguments = parser.parse_args(arguments_given)
    import torch

    arguments.logs.mkdir(parents=True, exist_ok=True)
    proof = Proof(arguments)
    uniques: dict[str, list[int]] = proof.before.get("sglang_test_deterministic", {})
    rows: list[dict[str, Any]] = proof.before.get("rows", [])
    for work in WORKS:  # the proof first: the others compare with its references
        if work not in arguments.works:
            continue
        made = getattr(proof, work)()
        if work == "sglang":
            uniques = made
        elif work == "price":
            rows = made
    for row in rows:
        print(f"{row['work']:16}{row['requests']:6}{row['default']:12,.0f}{row['exact']:12,.0f}{row['ratio']:8.3f}")
    result = {
        **proof.found.as_json(),
        "rows": rows,
        "sglang_test_deterministic": uniques,
        "device": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "tp": arguments.tp,
        "versions": versions(),
        "model": json.loads((arguments.model / "config.json").read_text()),
        "flags": arguments.flags,
        "environment": {name: value for name, value in os.environ.items() if name.startswith("SGLANG_DSV4")},
    }
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
        write_references(proof.known, proof.references)
    print(text)
    return int(proof.found.mismatches.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
