"""Determinism under `--enable-deterministic-inference` on a GPU: bitwise equal answers in any batch, and its price.

    python benchmarks/determinism_gpu.py --model MODEL --out benchmarks/results/determinism_h200.json \\
        [--works proof chunks sglang price speculation] [--resume] [--seconds 560] [--tp 2] [--small] \\
        [-- further server flags, as --load-format dummy]

Works, by the servers that they need; all servers but the last of `price` have the flag:

    proof         sweep and random trace of `lib/determinism_trace.py` (2,200 requests), with a small pool, few device
                  slots for tails, and requests retracted every few steps
    chunks        the same references from another start of the server, which prefills in other chunks
    sglang        on that server `python -m sglang.test.test_deterministic`: single and prefix at once, then
                  radix_cache and p_vs_d
    price         on that server decode and prefill, loads of `lib/serve_load.py`; then on a server without the flag
    speculation   the same greedy references from a server that drafts (EAGLE, with the checkpoint's MTP module)

Without speculation there are three starts, and a run takes about eight minutes on an H200 with six layers of V4-Flash,
if all kernels are compiled already. DeepGEMM compiles a kernel for each range of rows: leave its compilation ahead on,
or bring its cache. `--context-length` must have room for a prompt of 65,536 tokens, `--max-running-requests` for 128.

The result is one JSON object, written after every work: `compared`, `mismatches`, `by_kind`, the first mismatches,
`seen` (hits by tier, retractions), and `rows` of `{work, requests, default, deterministic, ratio}` in tokens a second,
where a ratio below 1 is the price; `not_run` names works that `--seconds` left no time for. The exit status is 1 if
anything differed or was left out. `--resume` adds to what `--out` holds, with the references next to it: works can run
one after the other, each by itself. `--small` is for a CPU.

Weights must be the same at every start. With `--load-format dummy` they are: SGLang seeds the parameters that it fills,
and packed experts are filled by `sglang_dsv4.layers.packed_experts`. A model that gives the same answer to every prompt
is refused: it would prove nothing.
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
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from lib import determinism_trace, serve_load
from lib.determinism_trace import Findings, References, Sizes, read_references, write_references
from lib.servers import Server, running
from lib.versions import versions

FLAG = "--enable-deterministic-inference"
WORKS = ("proof", "chunks", "sglang", "price", "speculation")
LENGTHS = (
    *(1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257),
    *(
        512,
        513,
        515,
        639,
        641,
        767,
    ),  # prefix/test_exact.py: every remainder by 4, 128 and 256 at which parts end
    *(1030, 2049, 4100, 8193, 20_000),
)
LARGE = Sizes(
    lengths=LENGTHS,
    new_tokens=24,
    batches=(2, 3, 7, 16, 33, 64, 128),
    pool_tokens=131_072,
    displaced=80,
    requests=2200,  # some clients disconnect: at least 2,000 are compared
    at_once=96,
    longest=6000,
    repeats=10,
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
TAIL_SLOTS = {False: 64, True: 9}  # device slots, by `--small`
RETRACT_EVERY = 61  # steps
CHUNKS = {False: (2048, 8192), True: (512, 256)}  # tokens of a prefill chunk: of the proof, and of the works after it
SPECULATION = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
TRIALS = {False: 50, True: 3}
MODES = ("single", "prefix", "radix_cache", "p_vs_d")
MODES_AT_ONCE = ("single", "prefix")
HIGHEST_ID_OF_RADIX_CACHE = 50_000
"""SGLang's script draws token ids up to here in that mode, so a model with a smaller vocabulary cannot be asked."""
DECODE = {False: ((1, 16, 64, 128), 4608, 192), True: ((1, 4), 300, 24)}  # requests, context, new tokens
PREFILL = {False: ((8, 8192), (1, 65_536)), True: ((2, 600),)}  # prompts, length
REPEATS = (71, 72, 73)
LARGE_REPEATS = REPEATS[:2]  # of 128 requests, whose prompts take the most time
SGLANG_TIMEOUT_S = 300


class Proof:
    """State that the works share: model, flags, and the references that the first server gave."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model: Path = arguments.model
        self.small: bool = arguments.small
        self.port: int = arguments.port
        self.logs: Path = arguments.logs
        self.out: Path | None = arguments.out
        self.tp, self.given_flags = arguments.tp, arguments.flags
        self.flags = [*arguments.flags, "--tp-size", str(arguments.tp)]
        vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]
        sizes = SMALL if self.small else LARGE
        self.sizes = replace(sizes, last_id=min(vocabulary, 129_000) - 1, requests=arguments.requests or sizes.requests)
        serve_load.LAST_ID = self.sizes.last_id
        self.references = None if arguments.out is None else arguments.out.with_suffix(".references.json")
        self.known: References = {}
        self.found = Findings()
        self.uniques: dict[str, list[int]] = {}
        self.rows: list[dict[str, Any]] = []
        if arguments.resume:
            if arguments.out is None or not arguments.out.exists():
                raise SystemExit(f"--resume: there is nothing to go on from at --out {arguments.out}")
            before = json.loads(arguments.out.read_text())
            self.known, self.found = read_references(self.references), Findings.from_json(before)
            self.uniques, self.rows = before["sglang_test_deterministic"], before["rows"]

    @contextlib.contextmanager
    def server(
        self, name: str, *flags: str, env: dict[str, str] | None = None, alone: bool = False
    ) -> Iterator[Server]:
        """Yield a running server of ours; its log is `name.log`. `alone` as in `lib.servers.running`."""
        log = self.logs / f"{name}.log"
        with mock.patch.dict(os.environ, env or {}):
            with running("ours", self.model, (*self.flags, *flags), self.port, log, alone) as server:
                yield server

    def ask(self, name: str, server: Server, sizes: Sizes) -> None:
        """Run sweep and trace on a server. Comparisons of a work other than the proof carry the work's name."""
        found = determinism_trace.prove(server.url, sizes, self.known)
        found.seen["retracted"] += retractions(server.log.read_text(errors="replace"))
        print(f"{name}\n  " + "\n  ".join(determinism_trace.describe(found)), flush=True)
        self.found.add(found if name == "proof" else found.named(name))
        refuse_mute_models(self.known)

    def limits(self, chunk: int) -> tuple[str, ...]:
        """Return flags of a small pool and of the chunk size."""
        return ("--max-total-tokens", str(self.sizes.pool_tokens), "--chunked-prefill-size", str(chunk))

    def run(self, works: Sequence[str]) -> Iterator[str]:
        """Run the works, references first, starting servers as needed; yield each work's name when it is done."""
        chunk, other_chunk = CHUNKS[self.small]
        few_slots = {"SGLANG_DSV4_TAIL_SLOTS": str(TAIL_SLOTS[self.small])}
        if "proof" in works:
            retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)}
            with self.server("proof", FLAG, *self.limits(chunk), env=few_slots | retract) as server:
                self.ask("proof", server, self.sizes)
            yield "proof"
        if {"chunks", "sglang", "price"} & set(works):
            alone = "price" in works
            with self.server("deterministic", FLAG, "--chunked-prefill-size", str(other_chunk), alone=alone) as server:
                if "chunks" in works:
                    self.ask("chunks", server, once_each(self.sizes))
                    yield "chunks"
                if "sglang" in works:
                    self.sglang(server)
                    yield "sglang"
                deterministic = speeds(server.url, self.small) if "price" in works else {}
        if "price" in works:
            with self.server("default", "--chunked-prefill-size", str(other_chunk), alone=True) as server:
                self.rows = rows_of(speeds(server.url, self.small), deterministic)
            yield "price"
        if "speculation" in works:  # a drafting server refuses sampled requests
            with self.server("speculation", FLAG, *self.limits(chunk), *SPECULATION, env=few_slots) as server:
                self.ask("speculation", server, replace(self.sizes, sampled=False))
            yield "speculation"

    def sglang(self, server: Server) -> None:
        """Record SGLang's unique samples by mode: all 1 if it is deterministic. Modes that flush no cache run at
        once."""
        modes = [mode for mode in MODES if mode != "radix_cache" or self.sizes.last_id >= HIGHEST_ID_OF_RADIX_CACHE]
        port = server.url.rsplit(":", 1)[1]

        def said(mode: str) -> str:
            trials = TRIALS[self.small] if mode != "p_vs_d" else min(8, TRIALS[self.small])
            command = [sys.executable, "-m", "sglang.test.test_deterministic", "--port", port, "--test-mode", mode]
            command += ["--host", "127.0.0.1", "--n-trials", str(trials)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SGLANG_TIMEOUT_S)
                text, error = done.stdout, done.stderr
            except subprocess.TimeoutExpired as late:
                text, error = "", f"not done after {SGLANG_TIMEOUT_S} s: {late}"
            (self.logs / f"test_deterministic_{mode}.log").write_text(text + error)
            return text

        with ThreadPoolExecutor(len(modes)) as pool:
            found = dict(zip(MODES_AT_ONCE, pool.map(said, MODES_AT_ONCE), strict=True))
        found |= {mode: said(mode) for mode in modes if mode not in MODES_AT_ONCE}
        for mode, text in found.items():
            uniques = self.uniques[mode] = unique_samples(mode, text)
            asked = [count for count in uniques if count]  # few trials may leave a prompt out
            self.found.compared[f"sglang {mode}"] += max(1, len(asked))
            self.found.mismatches[f"sglang {mode}"] += sum(count > 1 for count in asked) if asked else 1
            print(f"test_deterministic {mode}: unique samples {uniques}", flush=True)

    def result(self, not_run: Sequence[str]) -> dict[str, Any]:
        """Return the result as it is written."""
        import torch

        return {
            **self.found.as_json(),
            "rows": self.rows,
            "sglang_test_deterministic": self.uniques,
            "not_run": list(not_run),
            "device": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
            "tp": self.tp,
            "versions": versions(),
            "model": json.loads((self.model / "config.json").read_text()),
            "flags": self.given_flags,
            "environment": {name: value for name, value in os.environ.items() if name.startswith("SGLANG_DSV4")},
        }

    def write(self, not_run: Sequence[str]) -> str:
        """Write the result to --out and the references next to it, so that a run that is cut off keeps its figures."""
        text = json.dumps(self.result(not_run))
        if self.out is not None:
            self.out.write_text(text + "\n")
            write_references(self.known, self.references)
        return text


def once_each(sizes: Sizes) -> Sizes:
    """Return the same sizes with each request of the trace asked about once."""
    different = sizes.requests // sizes.repeats
    return replace(sizes, requests=different, repeats=1)


def refuse_mute_models(known: References) -> None:
    """Refuse a model that gives many prompts the same answer, as a model with weights of zeros does.

    Raises:
        RuntimeError: less than 90 % of the first tokens and log-probabilities are different.
    """
    first = [answer.tokens[0] for answer in known.values() if answer.tokens]
    if len(set(first)) < 0.9 * len(first):
        raise RuntimeError(
            f"{len(first)} requests got {len(set(first))} different first tokens and log-probabilities: this model "
            "proves nothing. Give it weights (with --load-format dummy of a range that FP8 can hold)"
        )


def retractions(log: str) -> int:
    """Return the number of requests that a server has retracted, by its log."""
    return sum(int(count) for count in re.findall(r"#retracted_reqs: (\d+)", log))


def unique_samples(mode: str, said: str) -> list[int]:
    """Return the numbers of different answers that SGLang's script printed; [] if it printed none."""
    if mode == "radix_cache":
        return [1] if "TEST PASSED" in said else [2] if "TEST FAILED" in said else []
    if mode == "p_vs_d":
        return [
            1 if line.startswith("✅") else 2 for line in said.splitlines() if line[:1] in "✅❌" and "match" in line
        ]
    return [int(count) for count in re.findall(r"Unique samples: (\d+)", said)]


Speeds = dict[tuple[str, int], float]  # (work, requests) -> tokens a second


def speeds(url: str, small: bool) -> Speeds:
    """Return tokens a second of decode and prefill. A load of each kind runs unmeasured first, since it may compile
    kernels."""
    requests, context, new_tokens = DECODE[small]
    found: Speeds = {}
    serve_load.run(url, serve_load.decode(requests[1], context, max(8, new_tokens // 8), seed=1))
    for count in requests:
        seeds = LARGE_REPEATS if count == max(requests) else REPEATS
        runs = [serve_load.run(url, serve_load.decode(count, context, new_tokens, seed)) for seed in seeds]
        found["decode", count] = statistics.median(run["tok_s"] for run in runs)
    for prompts, length in PREFILL[small]:
        serve_load.run(url, serve_load.prefill(prompts, length, seed=1))
        runs = [serve_load.run(url, serve_load.prefill(prompts, length, seed)) for seed in REPEATS]
        found[f"prefill_{length}", prompts] = statistics.median(run["tok_s"] for run in runs)
    return found


def rows_of(default: Speeds, deterministic: Speeds) -> list[dict[str, Any]]:
    """Return `{work, requests, default, deterministic, ratio}` of each load, in tokens a second."""
    return [
        {"work": work, "requests": requests, "default": before,
         "deterministic": deterministic[work, requests],
         "ratio": deterministic[work, requests] / before}
        for (work, requests), before in default.items()
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
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
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no work begins on a server after so many seconds"
    )
    parser.add_argument("flags", nargs="*", help="of all servers, after --")
    return parser


def main(arguments_given: Sequence[str] | None = None) -> int:
    """Run the works, print tables, write JSON."""
    arguments = parser().parse_args(arguments_given)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    begin, proof = time.monotonic(), Proof(arguments)
    left = [work for work in WORKS if work in arguments.works]
    with contextlib.closing(proof.run(tuple(left))) as works:
        for work in works:
            left.remove(work)
            text = proof.write(left)
            seconds = time.monotonic() - begin
            print(f"{work}: done after {seconds:.0f} s", flush=True)
            if seconds > arguments.seconds:
                break
    for row in proof.rows:
        print(
            f"{row['work']:16}{row['requests']:6}{row['default']:12,.0f}{row['deterministic']:12,.0f}{row['ratio']:8.3f}"
        )
    print(text)
    return int(proof.found.mismatches.total() > 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main())
