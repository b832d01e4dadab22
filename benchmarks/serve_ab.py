"""Ours against SGLang's built-in DeepSeek-V4: the same weights, flags and machine, one server after the other.

    python benchmarks/serve_ab.py --model MODEL --out benchmarks/results/serve_ab_h200.json --picture FILE.png \\
        [--works decode prefill multi_turn profile churn agreement] [--kv-gib 0.5] [--builtin-flags FLAGS] \\
        [--figures FOLDER] [--contenders ours builtin] [-- further server flags]

Works (loads are `lib/serve_load.py`'s):

    decode       1, 16, 64 and 128 requests of 4.6K tokens; tok/s while all of them decode
    prefill      eight prompts of 8K tokens; one of 64K
    multi_turn   32 conversations of four turns over four shared prefixes of 4K, which all fit into the pool
    profile      launches, busy time and span of a decode step and of a prefill chunk, and the host calls that
                 enqueue its work (a graph is one call); KV bytes a token
    churn        returning sessions under equal bytes of KV memory: their number from a quarter of the sessions that our
                 pool holds to twice that number, with prefixes of 16K and of 1.5K tokens (rows: churn_sweep; churn
                 has the best third)
    agreement    log-probabilities of given tokens, both servers and the built-in in another batch (needs a checkpoint
                 with weights: two random initialisations differ)

With --figures, a server's figures are kept in a folder and not measured again: where the time of a command is limited,
several calls with one server (`--contenders`) or one work each fill the folder, and the last call has all rows. For
example the whole of V4-Flash on two GPUs, in less than ten minutes a call (MODEL: its config, dummy weights):

    for server in builtin ours; do python benchmarks/serve_ab.py --model MODEL --contenders $server --figures FOLDER \\
        --works decode prefill multi_turn profile --stall-s 8 --out benchmarks/results/serve_ab_h200_x2.json \\
        --builtin-flags "--moe-runner-backend marlin" -- --tp 2 --load-format dummy --trust-remote-code \\
        --context-length 131072 --mem-fraction-static 0.85 --max-running-requests 160 --chunked-prefill-size 8192 \\
        --cuda-graph-bs-decode 1 2 4 8 16 32 64 128 --random-seed 1; done

Ours is checked to be live by its start-up line. The rows of the result have a ratio above 1 where ours is better.

Compilation is not measured: the first run of a load may compile kernels (DeepGEMM's products, by number of tokens), and
a server whose kernels are on disk from an earlier run would have the advantage. So every load runs unmeasured first on
both servers. A run in which no request got a token for STALL_S or longer is repeated, MOST_RUNS times at most; then the
result keeps it, as longest_silence_s shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import serve_load
from lib.equal_memory import builtin_tokens, tokens_that_fit
from lib.serve_profile import Profile, profile_decode, profile_prefill
from lib.servers import CONTENDERS, STALL_S, SWITCHES, Server, running
from lib.versions import versions

WORKS = ("decode", "prefill", "multi_turn", "profile", "churn", "agreement")
WORKS_OF = {  # names of the rows that only this work has
    "decode": ("decode",),
    "prefill": ("prefill",),
    "multi_turn": ("multi_turn",),
    "profile": ("memory",),
}
DECODE_REQUESTS = (1, 16, 64, 128)
CONTEXT = 4608
CHURN = {16_384: (2, 256, 32), 1_536: (3, 64, 32)}  # prefix of a session -> turns, user and new tokens of each
SWEEP = "churn_sweep"
CHURN_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the sessions that our pool holds
CHURN_AT_ONCE = 16
LESS_IS_BETTER = ("ttft", "itl", "bytes", "launches", "busy", "span", "recomputed", "distance", "silence")
PRINTED_KERNELS = 30
PRINTED_HOST_CALLS = 5
REPEATS = (71, 72, 73)  # seeds of the short works; their medians count
MOST_RUNS = 3  # runs of a load after the first, repeated because of stalls


@dataclass(frozen=True)
class Row:
    """One figure of both servers."""

    work: str
    requests: int
    metric: str
    ours: float
    builtin: float
    prefix: int | None = None
    """In the churn sweep, the tokens that a session begins with; `requests` are the sessions."""

    @classmethod
    def of(cls, key: Key, ours: float, builtin: float) -> Row:
        """Return the row of a figure that both servers have."""
        work, requests, metric, *prefix = key
        return cls(work, requests, metric, ours, builtin, *prefix)

    @property
    def ratio(self) -> float | None:
        """Above 1 where ours is better; None where the divisor is 0."""
        less = any(word in self.metric for word in LESS_IS_BETTER)
        a, b = (self.builtin, self.ours) if less else (self.ours, self.builtin)
        return a / b if b else None


# ------------------------------------------------------------------------------------------------ works

Key = tuple[str, int, str] | tuple[str, int, str, int]  # work, requests, metric, and the prefix of a churn sweep
Figures = dict[Key, float]


def with_ample_memory(server: Server, works: Sequence[str]) -> Iterator[tuple[str, Figures]]:
    """Run the works that do not need equal KV memory; yield each work with its figures."""
    yield "start", {("start", 1, "ready_s"): server.ready_s}
    # How a load is cut into batches changes the numbers of tokens, so conversations run once for each measurement.
    serve_load.run(server.url, serve_load.decode(24, 4096, 8, seed=1))
    serve_load.run(server.url, serve_load.prefill(1, 65_536, seed=2))
    serve_load.run(server.url, serve_load.prefill(8, 8192, seed=3))
    for seed in REPEATS:
        serve_load.run(server.url, _conversations(seed + 1000))
    if "decode" in works:
        figures: Figures = {}
        for requests in DECODE_REQUESTS:
            # One request's 256 tokens take half a second, in which any other program of the machine shows.
            seeds = REPEATS if requests < 32 else (requests,)
            runs = [_steady(server, serve_load.decode(requests, CONTEXT, 256, seed)) for seed in seeds]
            _note(figures, "decode", requests, _medians(runs))
        yield "decode", figures
    if "prefill" in works:
        figures = {}
        for prompts, length in ((8, 8192), (1, 65_536)):
            work = "prefill" if prompts > 1 else "prefill_64k"
            runs = [_steady(server, serve_load.prefill(prompts, length, seed)) for seed in REPEATS]
            _note(figures, work, prompts, _medians(runs))
        yield "prefill", figures
    if "multi_turn" in works:
        figures = {}
        runs = [_steady(server, _conversations(seed)) for seed in REPEATS]
        _note(figures, "multi_turn", 32, _medians(runs))
        yield "multi_turn", figures
    if "profile" in works:
        figures = {}
        for requests in (1, 64):
            _note(figures, "decode", requests, _of_step(profile_decode(server.url, requests, CONTEXT)))
        _note(figures, "prefill_64k", 1, _of_step(profile_prefill(server.url, 65_536)))
        size, tokens = server.kv_memory()
        _note(figures, "memory", 1, {"kv_bytes_per_token": size / tokens})
        yield "profile", figures


def _conversations(seed: int) -> serve_load.Load:
    return serve_load.multi_turn(32, 4, prefixes=4, prefix=4096, user=256, new_tokens=64, seed=seed)


def _steady(server: Server, load: serve_load.Load) -> dict[str, float]:
    """Return the figures of the first run without a stall, or of the run with the shortest stall."""
    runs = []
    for _ in range(1 + MOST_RUNS):
        runs.append(serve_load.run(server.url, load))
        if runs[-1][serve_load.SILENCE] < server.stall_s:
            break
        print(f"    a stall of {runs[-1][serve_load.SILENCE]:.1f} s: run again", flush=True)
    return min(runs, key=lambda run: run[serve_load.SILENCE])


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {metric: statistics.median(run[metric] for run in runs) for metric in runs[0]}


def _of_step(found: Profile) -> dict[str, float]:
    for name, launches, us in found.kernels[:PRINTED_KERNELS]:
        print(f"    {us:9.1f} us {launches:7.1f} x  {name[:120]}")
    for name, calls, us in found.host_calls[:PRINTED_HOST_CALLS]:
        print(f"    {us:9.1f} us {calls:7.1f} x  by the host: {name}")
    host = {"host_launches_per_step": found.host_launches} if found.host_launches else {}  # if the trace has them
    times = {"busy_us_per_step": found.busy_us, "span_us_per_step": found.span_us}
    return {"launches_per_step": found.launches, **times, **host}


def under_churn(server: Server, sessions: dict[int, list[int]]) -> Figures:
    """Measure every number of sessions with either prefix; the smallest number of each runs unmeasured first."""
    figures: Figures = {}
    for prefix, counts in sessions.items():
        rounds, user, new_tokens = CHURN[prefix]

        def load(count: int, seed: int, of: tuple[int, ...] = (rounds, prefix, user, new_tokens)) -> serve_load.Load:
            return serve_load.churn(count, *of, CHURN_AT_ONCE, seed=seed)

        serve_load.run(server.url, load(min(counts), seed=1000))
        for count in counts:
            _note(figures, SWEEP, count, _steady(server, load(count, seed=count)), prefix)
    return figures


def logprobs(server: Server, vocab: int, prompts: int, length: int) -> tuple[list[float], list[float]]:
    """Return log-probabilities of the tokens of random prompts: each prompt alone, and all of them at once."""
    rng = random.Random(5)
    asked = [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(prompts)]

    def of(answer: dict) -> list[float]:
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"] if entry[0] is not None]

    body = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True, "logprob_start_len": 0}
    alone = [value for prompt in asked for value in of(server.post("/generate", {"input_ids": prompt, **body}))]
    together = [value for answer in server.post("/generate", {"input_ids": asked, **body}) for value in of(answer)]
    return alone, together


def _note(figures: Figures, work: str, requests: int, found: dict[str, float], *prefix: int) -> None:
    for metric, value in found.items():
        figures[work, requests, metric, *prefix] = value
    print(
        f"  {_label(work, *prefix):18} {requests:5}  " + "  ".join(f"{k} {v:,.4g}" for k, v in found.items()),
        flush=True,
    )


def _label(work: str, prefix: int | None = None) -> str:
    return work if prefix is None else f"{work} {prefix}"


# ------------------------------------------------------------------------------------------------ both servers


def compare(
    model: Path,
    works: Sequence[str],
    flags_of: Mapping[str, Sequence[str]],
    kv_gib: float,
    port: int,
    logs: Path,
    contenders: Sequence[str] = CONTENDERS,
    kept: Path | None = None,
) -> list[Row]:
    """Run the works on both servers, each with its flags.

    Args:
        contenders: the servers to run. A figure that only one server has gets no row.
        kept: folder of earlier figures, which are not measured again.

    Raises:
        ValueError: churn of ours has no figures of the built-in, whose bytes of KV memory it gets.
    """
    figures: dict[str, Figures] = {name: {} for name in CONTENDERS}
    for name, stage, found in read_figures(kept):
        print(f"{name}, {stage}: measured before", flush=True)
        figures[name].update(found)
    ample = sorted(set(works) - {"churn", "agreement"})
    for name in contenders:
        missing = [work for work in ample if not any(key[0] in WORKS_OF[work] for key in figures[name])]
        if missing:
            print(f"{name}, ample memory", flush=True)
            with running(name, model, flags_of[name], port, logs / f"{name}.log", alone=True) as server:
                for work, found in with_ample_memory(server, missing):
                    keep_figures(kept, name, work, found)
                    figures[name].update(found)
    if "churn" in works:
        size, tokens, sessions = kv_gib * 2**30, None, {}
        for name in CONTENDERS:
            before = figures[name].get(("memory_churn", 1, "kv_bytes"))
            if name == "builtin" and before is not None:
                size = before
            if before is not None or name not in contenders:
                continue
            if name == "ours":
                if ("memory_churn", 1, "kv_bytes") not in figures["builtin"]:
                    raise ValueError("churn gives ours the bytes of KV memory of the built-in: run that first")
                tokens = tokens_that_fit(model, size, flags_of["ours"])
                sessions = _sessions(tokens)
            print(f"{name}, {size / 2**30:.3f} GiB of KV memory", flush=True)
            if name == "builtin":
                tokens = builtin_tokens(model, flags_of[name], size, port, logs)
            limit = ("--max-total-tokens", str(tokens))
            flags = (*flags_of[name], *limit)
            with running(name, model, flags, port, logs / f"{name}_churn.log", alone=True) as server:
                used, held = server.kv_memory()
                _note(figures[name], "memory_churn", 1, {"kv_bytes": used, "kv_tokens": held})
                if name == "builtin":
                    size = used
                    sessions = _sessions(tokens_that_fit(model, size, flags_of["ours"]))
                figures[name].update(under_churn(server, sessions))
            keep_figures(kept, name, "churn", {k: v for k, v in figures[name].items() if "churn" in k[0]})
    rows = [
        Row.of(key, ours=figures["ours"][key], builtin=value)
        for key, value in figures["builtin"].items()
        if key in figures["ours"]
    ]
    if "agreement" in works and set(contenders) == set(CONTENDERS):
        rows += agreement(model, flags_of, port, logs)
    return rows + best_third_of(rows)


def keep_figures(folder: Path | None, name: str, stage: str, figures: Figures) -> None:
    """Write a server's figures; without a folder do nothing."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [[*key, value] for key, value in figures.items()]
        (folder / f"{name}.{stage}.json").write_text(json.dumps(rows))


def read_figures(folder: Path | None) -> Iterator[tuple[str, str, Figures]]:
    """Yield (contender, stage, figures) of all files in the folder."""
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        name, stage, _ = path.name.split(".")
        rows = json.loads(path.read_text())
        yield name, stage, {tuple(key): value for *key, value in rows}


def _sessions(tokens: int) -> dict[int, list[int]]:
    return {
        prefix: [max(2, round(share * tokens / (prefix + 2 * (user + new)))) for share in CHURN_SHARES]
        for prefix, (_, user, new) in CHURN.items()
    }


def agreement(model: Path, flags_of: Mapping[str, Sequence[str]], port: int, logs: Path) -> list[Row]:
    """Return mean absolute differences of log-probabilities: ours against the built-in; for comparison the built-in
    against itself in another batch; and ours against itself."""
    found = {}
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    for name in CONTENDERS:
        with running(
            name, model, (*flags_of[name], "--disable-radix-cache"), port, logs / f"{name}_agreement.log"
        ) as server:
            found[name] = logprobs(server, vocab, prompts=8, length=700)
    ours, builtin = found["ours"][0], found["builtin"][0]
    apart = statistics.mean(abs(a - b) for a, b in zip(ours, builtin, strict=True))
    itself = {name: statistics.mean(abs(a - b) for a, b in zip(*values, strict=True)) for name, values in found.items()}
    return [
        Row("agreement", 8, "logprob_distance", ours=apart, builtin=itself["builtin"]),
        Row("agreement", 8, "logprob_distance_itself", **itself),
    ]


def best_third_of(rows: Sequence[Row]) -> list[Row]:
    """For either prefix of the churn sweep, take the third of the numbers of sessions with the best tok/s against the
    built-in. Return the mean of both prefixes' rows as work "churn"."""
    chosen: dict[str, list[Row]] = {}
    for prefix in CHURN:
        sweep = [row for row in rows if row.prefix == prefix]
        speeds = sorted((r for r in sweep if r.metric == "tok_s"), key=lambda r: -(r.ratio or 0))
        best = {row.requests for row in speeds[: max(1, len(speeds) // 3)]}
        for row in sweep:
            if row.requests in best:
                chosen.setdefault(row.metric, []).append(row)
    return [
        Row("churn", round(statistics.mean(r.requests for r in same)), metric,
            ours=statistics.mean(r.ours for r in same), builtin=statistics.mean(r.builtin for r in same))
        for metric, same in chosen.items()
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ table and picture


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    lines = [f"{'work':18}{'requests':>9}  {'metric':20}{'ours':>14}{'built-in':>14}{'ratio':>8}"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        work = _label(row.work, row.prefix)
        lines.append(f"{work:18}{row.requests:9}  {row.metric:20}{row.ours:14,.4g}{row.builtin:14,.4g}{ratio:>8}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw hit rate and tok/s over the number of sessions, and decode tok/s over requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("decode", None, "tok_s")] + [
        (SWEEP, prefix, metric) for prefix in CHURN for metric in ("hit_rate", "tok_s")
    ]
    panels = [p for p in panels if any((row.work, row.prefix, row.metric) == p for row in rows)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), squeeze=False)
    for axis, (work, prefix, metric) in zip(axes[0], panels, strict=True):
        found = sorted(
            (r for r in rows if (r.work, r.prefix, r.metric) == (work, prefix, metric)), key=lambda r: r.requests
        )
        for name, style in (("ours", "o-"), ("builtin", "s--")):
            axis.plot([r.requests for r in found], [getattr(r, name) for r in found], style, label=name)
        title = f"{work}: {metric}" if prefix is None else f"prefixes of {prefix:,}: {metric}"
        axis.set(title=title, xlabel="requests" if prefix is None else "sessions")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def as_json(row: Row) -> dict:
    """Return the row for the file, with a prefix where it has one."""
    fields = {**vars(row), "ratio": row.ratio}
    return {name: value for name, value in fields.items() if name != "prefix" or value is not None}


def main() -> int:
    """Compare, print a table, draw, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS[:-1])
    parser.add_argument("--kv-gib", type=float, default=0.5, help="KV memory of either server under churn")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="servers to run")
    parser.add_argument("--figures", type=Path, help="folder of what was measured, to go on from")
    parser.add_argument(
        "--stall-s", type=float, default=STALL_S, help="seconds of silence after which a run is repeated"
    )
    parser.add_argument("--port", type=int, default=30_100)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--builtin-flags", default="", help="of the built-in alone: a MoE runner that it finds there")
    parser.add_argument("flags", nargs="*", help="of both servers, after --")
    arguments = parser.parse_args()
    import torch

    arguments.logs.mkdir(parents=True, exist_ok=True)
    flags_of = {"ours": arguments.flags, "builtin": [*arguments.flags, *shlex.split(arguments.builtin_flags)]}
    Server.stall_s = arguments.stall_s
    rows = compare(
        *(arguments.model, arguments.works, flags_of, arguments.kv_gib, arguments.port, arguments.logs),
        *(arguments.contenders, arguments.figures),
    )
    print(table(rows))
    if arguments.picture is not None:
        draw(rows, arguments.picture)
    result = {
        "gpu": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": versions(),
        "model": json.loads((arguments.model / "config.json").read_text()),
        "flags": flags_of,
        "switches": {name: os.environ.get(name, "") for name in SWITCHES},
        "rows": [as_json(row) for row in rows],
    }
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
