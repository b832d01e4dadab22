"""Cost of speculation on a GPU: a draft and a verify step against a decode step, ours and SGLang's built-in.

    python benchmarks/bench_speculation.py --models FOLDER --out benchmarks/results/speculation_h200.json \\
        [--works graphs agreement decode eagle dspark] [--algorithms eagle dspark] [--contenders ours builtin] \\
        [--requests 1 16 64] [--turns 3] [--resume] [--builtin-flags "--moe-runner-backend marlin"] \\
        [-- further server flags]

Random weights accept almost no draft, so only cost is measured. Each work starts servers of its own:

    graphs      our greedy answers with each algorithm, one request at a time, with CUDA graphs and without: none may
                differ, since the same kernels run on the same shapes
    agreement   our greedy answers with EAGLE and with DSPARK, graphs on, and without speculation: how many requests
                differ, and after how many tokens (products of other batches differ in their last bits on a GPU;
                `--deterministic` adds --enable-deterministic-inference, with which none may differ)
    decode      a decode step, the divisor of the others
    eagle       MTP of the April releases, three drafts a step
    dspark      the draft of the current releases, blocks of five

FOLDER holds `april` and `dspark`, six layers of V4-Flash with all 256 experts; configs and tokenizers are written there
if they are missing, the weights are --load-format dummy. `--tiny` writes small checkpoints with weights instead, which
a CPU can serve for the agreement. `--full-size` writes all 43 layers, for two GPUs:

    python benchmarks/bench_speculation.py --models FOLDER --full-size --works decode eagle dspark --turns 3 \\
        --out benchmarks/results/speculation_h200_x2.json --builtin-flags "--moe-runner-backend marlin" \\
        -- --tp 2 --mem-fraction-static 0.85

Times of a step in microseconds, medians except for the last:

    *_verify    the graph that holds the target, from its first kernel to the end of its last, by SGLang's profiler
    *_draft     busy time of everything else: drafts, acceptance, and the draft's stores for accepted tokens
    *_step      from one verify step to the next, gaps and host included, without the profiler: the requests'
                tokens a step over their tok/s while all of them decode; the shortest of a few runs, since other load of
                the machine only adds to it
    decode, decode_step     the same of a server without speculation

With few requests the host bounds a step, and a machine's host may change its speed by half within seconds. `--turns`
repeats the steps on one server after the other, for servers that run already (`servers.py`).

`--resume` adds to what `--out` holds: works can run one after the other. A row has null for a contender that has not
been measured. `pays` has tokens a step above which speculation pays: a step's time over a decode step's.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import operator
import os
import random
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import serve_load
from lib.model_shapes import write_models
from lib.serve_profile import busy_us, decode_events, gpu_work
from lib.servers import SWITCHES, Server, running
from lib.versions import versions

WORKS = ("graphs", "agreement", "decode", "eagle", "dspark")
CONTENDERS = ("ours", "builtin")
CONTEXT, NEW_TOKENS = 4608, 192
SEEDS = (81, 82, 83)
REQUESTS = (1, 16, 64)
SMALLEST_GRAPH = 12
"""A host launch with at least this many kernels is a graph's replay; no other launch has as many."""

SPECULATION = {
    "eagle": (
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ),
    "dspark": ("--speculative-algorithm", "DSPARK"),
}
MODEL_OF = {"decode": "april", "eagle": "april", "dspark": "dspark"}
DUMMY_FLAGS = (
    *("--load-format", "dummy", "--mem-fraction-static", "0.7"),
    *("--context-length", "65536", "--chunked-prefill-size", "8192"),
)
FEW_GRAPHS = ("--max-running-requests", "24", "--cuda-graph-bs-decode", "1", "4", "16")
DETERMINISTIC = "--enable-deterministic-inference"


# ------------------------------------------------------------------------------------------------ times of steps


@dataclass(frozen=True)
class Replay:
    """One replay of a graph on the GPU; times in microseconds."""

    begin: float
    end: float
    busy: float
    kernels: int


@dataclass(frozen=True)
class Steps:
    """Medians over the steps of a trace, in microseconds."""

    largest: float
    """Time of a step's largest graph, the target's, from its first kernel to the end of its last."""
    others: float
    """Busy time of a step outside of that graph."""


def replays(events: Sequence[dict]) -> list[Replay]:
    """Return the graph replays in a trace of the GPU, in order. Kernels of one host launch share its correlation
    number."""
    launches: dict[Any, list[dict]] = collections.defaultdict(list)
    for event in events:
        launches[event.get("args", {}).get("correlation")].append(event)
    launches.pop(None, None)
    found = [
        Replay(
            begin=min(e["ts"] for e in group),
            end=max(e["ts"] + e["dur"] for e in group),
            busy=busy_us(group),
            kernels=len(group),
        )
        for group in launches.values()
        if len(group) >= SMALLEST_GRAPH
    ]
    return sorted(found, key=lambda replay: replay.begin)


def steps(events: Sequence[dict]) -> Steps:
    """Return the step times in a trace of decoding.

    Raises:
        RuntimeError: the trace has less than three replays of a graph.
    """
    events = gpu_work(events)
    found = replays(events)
    sizes = collections.Counter()
    for replay in found:
        sizes[replay.kernels] += replay.busy
    # The target has more layers than a draft, and reads more.
    busy = {size: total / sum(r.kernels == size for r in found) for size, total in sizes.items()}
    of_target = [r for r in found if busy[r.kernels] == max(busy.values())]
    if len(of_target) < 3:
        raise RuntimeError(
            f"the trace has {len(found)} replays of a CUDA graph, {len(of_target)} of the largest, expected at least "
            f"three: are graphs on, and are all requests decoding while the profiler runs? Sizes: {dict(sizes)}"
        )
    others = []
    for before, after in itertools.pairwise(of_target):
        between = [e for e in events if before.end <= e["ts"] < after.begin]
        others.append(busy_us(between))
    return Steps(
        largest=statistics.median(r.end - r.begin for r in of_target),
        others=statistics.median(others),
    )


def rows_of(work: str, found: Steps, step_us: float) -> dict[str, float]:
    """Return microseconds by row name."""
    if work == "decode":
        return {"decode": found.largest, "decode_step": step_us}
    return {f"{work}_verify": found.largest, f"{work}_draft": found.others, f"{work}_step": step_us}


def step_us(url: str, requests: int) -> float:
    """Return the microseconds of a whole step from the client's tok/s: the shortest of a few runs."""
    runs = [serve_load.run(url, serve_load.decode(requests, CONTEXT, NEW_TOKENS, seed)) for seed in SEEDS]
    return min(1e6 * requests * run.get("tokens_a_step", 1.0) / run["tok_s"] for run in runs)


# ------------------------------------------------------------------------------------------------ the results


class Results:
    """The figures measured so far, as they are written."""

    def __init__(self, before: dict[str, Any]) -> None:
        self.times: dict[tuple[str, int], dict[str, float | None]] = {
            (row["work"], row["requests"]): {name: row[f"{name}_us"] for name in CONTENDERS}
            for row in before.get("rows", [])
        }
        self.agreement: list[dict[str, Any]] = before.get("agreement", [])
        self.about: dict[str, Any] = before.get("about", {})

    def note(self, contender: str, requests: int, figures: dict[str, float], *, again: bool = False) -> None:
        """Add a contender's figures; of a figure that is measured again the smaller value stays."""
        for work, us in figures.items():
            row = self.times.setdefault((work, requests), dict.fromkeys(CONTENDERS))
            before = row[contender]
            row[contender] = min(us, before) if again and before is not None else us
            print(f"  {contender:8} {work:14} {requests:4} requests {us:10.0f} us", flush=True)

    def pays(self) -> list[dict[str, Any]]:
        """Return the tokens a step, bonus token included, above which speculation is faster than decoding."""
        found = []
        for (work, requests), of_step in self.times.items():
            algorithm, _, what = work.partition("_")
            decode = self.times.get(("decode_step", requests))
            if what != "step" or algorithm == "decode" or decode is None:
                continue
            row = {"algorithm": algorithm, "requests": requests}
            for name in CONTENDERS:
                known = of_step[name] is not None and decode[name] is not None
                row[name] = of_step[name] / decode[name] if known else None
            found.append(row)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the result for the file."""
        rows = [
            {"work": work, "requests": requests, **{f"{name}_us": us for name, us in row.items()}}
            for (work, requests), row in self.times.items()
        ]
        return {"rows": rows, "pays": self.pays(), "agreement": self.agreement, "about": self.about}


def measure(server: Server, work: str, requests: int) -> dict[str, float]:
    """Return a step's times; the first profile, unmeasured, compiles what is still missing."""
    decode_events(server.url, requests, CONTEXT)
    found = steps(decode_events(server.url, requests, CONTEXT))
    return rows_of(work, found, step_us(server.url, requests))


# ------------------------------------------------------------------------------------------------ agreement


def prompts(count: int, last_id: int) -> list[list[int]]:
    """Return prompts whose lengths are around the ends of compression groups, windows and pages."""
    rng = random.Random(11)
    lengths = [1, 3, 127, 128, 130, 251, 254, 256, 300, 511, 512, 600]
    return [[rng.randrange(3, last_id) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def answers(server: Server, asked: Iterable[list[int]], at_once: int, new_tokens: int) -> list[list[int]]:
    """Return the greedy tokens of each prompt."""

    def one(prompt: list[int]) -> list[int]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, asked))


def compared(plain: list[list[int]], drafted: list[list[int]]) -> dict[str, Any]:
    """Return how many requests differ, and after how many tokens the first ones do."""
    agreed = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        for one, other in zip(plain, drafted, strict=True)
    ]
    differ = sorted(i for i in agreed if i is not None)
    return {"requests": len(plain), "tokens": len(plain[0]), "mismatches": len(differ), "after": differ[:10]}


def agreement(arguments: argparse.Namespace, algorithm: str, flags: Sequence[str], work: str) -> list[dict[str, Any]]:
    """Compare our answers with an algorithm to our answers without it, for one request at a time and for sixteen; or to
    the same algorithm's answers without graphs, for one."""
    model = arguments.models / MODEL_OF[algorithm]
    asked = prompts(24, json.loads((model / "config.json").read_text())["vocab_size"] - 1)
    other = () if work == "agreement" else (*SPECULATION[algorithm], "--disable-cuda-graph")
    given, numbers = [], (1, 16) if work == "agreement" else (1,)
    for name, more in (("other", other), ("drafted", SPECULATION[algorithm])):
        log = arguments.logs / f"{work}_{algorithm}_{name}.log"
        with running("ours", model, (*flags, *more), arguments.port, log) as server:
            given.append([answers(server, asked, at_once, arguments.new_tokens) for at_once in numbers])
    found = []
    for at_once, one, drafted in zip(numbers, *given, strict=True):
        about = {"work": work, "algorithm": algorithm, "at_once": at_once, "deterministic": DETERMINISTIC in flags}
        found.append(about | compared(one, drafted))
        print(f"  {found[-1]}", flush=True)
    return found


# ------------------------------------------------------------------------------------------------ all of it


def run(arguments: argparse.Namespace, results: Results) -> None:
    """Run the works one after the other; results are written after each server."""
    write_models(arguments.models, arguments.tiny, arguments.full_size)
    common = [*([] if arguments.tiny else DUMMY_FLAGS), "--random-seed", "1"]
    flag = (DETERMINISTIC,) if arguments.deterministic else ()
    for work in [work for work in arguments.works if work in ("graphs", "agreement")]:
        for algorithm in arguments.algorithms:
            found = agreement(arguments, algorithm, (*common, *FEW_GRAPHS, *flag, *arguments.flags), work)
            key = operator.itemgetter("work", "algorithm", "deterministic")
            same = set(map(key, found))
            kept = [row for row in results.agreement if key(row) not in same]
            results.agreement = kept + found
            save(arguments.out, results)
    largest = max(arguments.requests)
    graphs = ("--max-running-requests", str(largest + 8), "--cuda-graph-bs-decode", *map(str, arguments.requests))
    for work in [work for work in arguments.works if work == "decode" or work in arguments.algorithms]:
        for turn, contender in itertools.product(range(arguments.turns), arguments.contenders):
            more = SPECULATION.get(work, ())
            own = shlex.split(arguments.builtin_flags) if contender == "builtin" else ()
            model, log = arguments.models / MODEL_OF[work], arguments.logs / f"{work}_{contender}.log"
            flags = (*common, *graphs, *arguments.flags, *more, *own)
            with running(contender, model, flags, arguments.port, log, alone=True) as server:
                for requests in arguments.requests:
                    if turn:
                        found = {f"{work}_step": step_us(server.url, requests)}
                    else:
                        found = measure(server, work, requests)
                    results.note(contender, requests, found, again=turn > 0)
                    save(arguments.out, results)


def save(out: Path | None, results: Results) -> None:
    """Write the results so far."""
    if out is not None:
        out.write_text(json.dumps(results.as_json(), indent=1) + "\n")


def main() -> int:
    """Measure, print, write JSON; return 1 if answers differ that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of the two models")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--algorithms", nargs="+", choices=list(SPECULATION), default=list(SPECULATION))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS)
    parser.add_argument("--turns", type=int, default=1, help="how often steps are measured, in turns with the other")
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer of the agreement")
    parser.add_argument("--deterministic", action="store_true", help=f"the agreement under {DETERMINISTIC}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="small checkpoints with weights")
    size.add_argument("--full-size", action="store_true", help="all 43 layers of V4-Flash")
    parser.add_argument("--resume", action="store_true", help="add to what --out holds")
    parser.add_argument("--port", type=int, default=30_200)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--builtin-flags", default="", help="of the built-in alone")
    parser.add_argument("flags", nargs="*", help="of all servers, after --")
    arguments = parser.parse_args()
    before = {}
    if arguments.resume:
        if arguments.out is None or not arguments.out.exists():
            raise SystemExit(f"--resume: there is nothing to go on from at --out {arguments.out}")
        before = json.loads(arguments.out.read_text())
    import torch

    arguments.logs.mkdir(parents=True, exist_ok=True)
    results = Results(before)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    flags = [*arguments.flags, arguments.builtin_flags]
    results.about = {"gpu": gpus, "versions": versions(), "flags": flags, "switches": switches}
    run(arguments, results)
    print(json.dumps(results.as_json()["pays"], indent=1))
    must_agree = [row for row in results.agreement if row["work"] == "graphs" or row["deterministic"] or not gpus]
    return int(any(row["mismatches"] for row in must_agree))


if __name__ == "__main__":
    sys.exit(main())
