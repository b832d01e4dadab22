"""Ours against SGLang's built-in DeepSeek-V4: the same weights, flags and machine.

    python benchmarks/serve_ab.py --model MODEL --out benchmarks/results/serve_ab_h200.json --picture FILE.png \\
        [--contenders ours builtin+marlin builtin+flashinfer_fp8 …] [--works decode prefill multi_turn profile churn] \\
        [--kv-gib 0.5] [--figures FOLDER] [-- further flags of all servers]

A contender is a server with parts of its own (`lib/contenders.py`; `--help` lists the parts), and every row names the
contenders that it is of. A contender that does not come up is left out; `not_up` has the end of its log. Works with
ample memory are `lib/serve_works.py`'s. Two more:

    churn        returning sessions under equal bytes of KV memory: their number from a quarter of the sessions that our
                 pool holds to twice that number, with prefixes of 16K and of 1.5K tokens (rows: churn_sweep; churn
                 has the best third)
    agreement    log-probabilities of given tokens, both servers and the built-in in another batch (needs a checkpoint
                 with weights: two random initialisations differ)

One server runs after the other. With --in-turns FOLDER all contenders run at once and are loaded in turns. They stay
until --stop, or SIGTERM, so that a long comparison is split over commands of limited time: repeat the command while its
status is 3. It begins no load that --seconds has no room for, and prints what each load needs. The whole of V4-Flash
(all layers, 256 experts, dummy weights) on four GPUs:

    python benchmarks/serve_ab.py --full-size --models FOLDER --tp 4 --in-turns SERVERS --figures FIGURES \\
        --contenders ours builtin+marlin --works decode prefill multi_turn 8k_1k --seconds 560 --out FILE.json

With --accepted 5.45 all servers draft (DSPARK) and accept that many tokens a step whatever the weights are
(SGLANG_SIMULATE_ACC_LEN). With --tp 2 on four GPUs, contenders get pairs of GPUs of their own.

Ours is checked to be live by its start-up line. The rows of the result have a ratio above 1 where ours is better.

Compilation is not measured: the first run of a load may compile kernels (DeepGEMM's products, by number of tokens), and
a server whose kernels are on disk from an earlier run would have the advantage. So loads run unmeasured first on all
servers. A run in which no request got a token for --stall-s seconds or longer is repeated, three times at most; then
the result keeps it, as longest_silence_s shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from lib import contenders as names_of
from lib import serve_load, servers
from lib.contenders import Contender
from lib.equal_memory import builtin_tokens, tokens_that_fit
from lib.model_shapes import write_models
from lib.serve_rows import (
    SWEEP,
    Figures,
    Kept,
    Row,
    as_json,
    best_third_of,
    draw,
    is_builtin,
    keep_figures,
    keep_reason,
    label,
    read_figures,
    read_reasons,
    rows_of,
    table,
)
from lib.serve_turns import Turns
from lib.serve_works import AMPLE, Cell, cells, drafting, steady, warm_up
from lib.servers import STALL_S, SWITCHES, DidNotComeUpError, Server, running
from lib.versions import versions

WORKS = (*AMPLE, "churn", "agreement")
DEFAULT_WORKS = ("decode", "prefill", "multi_turn", "profile", "churn")
DEFAULT_CONTENDERS = ("builtin+marlin", "ours")
CHURN = {16_384: (2, 256, 32), 1_536: (3, 64, 32)}  # prefix of a session -> turns, user and new tokens of each
CHURN_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the sessions that our pool holds
CHURN_AT_ONCE = 16
NOT_FINISHED = 3
"""Exit status of a call that left cells for the next one."""
FULL_SIZE_FLAGS = (
    *("--load-format", "dummy", "--trust-remote-code", "--random-seed", "1", "--context-length", "131072"),
    *("--mem-fraction-static", "0.9", "--max-total-tokens", "2500096", "--max-running-requests", "264"),
    *("--chunked-prefill-size", "8192", "--cuda-graph-bs-decode", *map(str, (1, 2, 4, 8, 16, 32, 64, 128, 256))),
)
"""Two servers of full size fit on four H200s with these: 38 GB of weights and at most 18 GB of pools each a GPU."""
FULL_SIZE_STALL_S = 8.0
DRAFTS = ("--speculative-algorithm", "DSPARK")


@dataclass
class Comparison:
    """Contenders and works of a comparison, and the figures so far.

    Attributes:
        kept: folder of figures; what it has is not measured again.
        settings: flags and variables of the contenders that figures are of.
    """

    model: Path
    contenders: Sequence[Contender]
    works: Sequence[str]
    logs: Path
    kept: Path | None = None
    kv_gib: float = 0.5
    port: int = 30_100
    gpus: int = 1
    accepted: float | None = None
    repeats: int = 3
    requests: Sequence[int] | None = None
    figures: dict[str, Figures] = field(default_factory=dict)
    stages: set[tuple[str, str]] = field(default_factory=set)
    settings: dict[str, dict] = field(default_factory=dict)
    not_up: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the kept figures and reasons."""
        self.not_up |= read_reasons(self.kept)
        for kept in read_figures(self.kept):
            self._note(kept)

    def to_run(self) -> list[Contender]:
        """Return the contenders without a reason for which they did not come up before."""
        for name in self.not_up:
            print(f"{name} did not come up before: delete {self.kept}/not_up/{name}.txt to try it again", flush=True)
        return [contender for contender in self.contenders if contender.name not in self.not_up]

    def cells(self) -> list[Cell]:
        """Return the cells of the works that do not need equal memory."""
        return cells(self.works, self.gpus, self.accepted, self.repeats, self.requests)

    def has(self, name: str, cell: Cell) -> bool:
        """Return whether a contender's figures of a cell are known."""
        return (name, cell.stage) in self.stages

    def keep(self, name: str, cell: Cell, found: Figures) -> None:
        """Print and note a contender's figures of a cell, and write them."""
        self.keep_stage(name, cell.stage, found)
        print_figures(name, found)

    def keep_start(self, name: str, server: Server) -> None:
        """Note the seconds that a contender took to be ready."""
        stage = "start" + drafting(self.accepted)
        self.keep_stage(name, stage, {(stage, 1, "ready_s"): server.ready_s})

    def keep_stage(self, name: str, stage: str, found: Figures) -> None:
        """Note a contender's figures and write them."""
        contender = next(contender for contender in self.contenders if contender.name == name)
        kept = Kept(name, stage, contender.flags, dict(contender.env), found)
        self._note(kept)
        keep_figures(self.kept, kept)

    def _note(self, kept: Kept) -> None:
        self.figures.setdefault(kept.contender, {}).update(kept.figures)
        self.stages.add((kept.contender, kept.stage))
        with_drafts = ", drafting" if any(flag == DRAFTS[0] for flag in kept.flags) else ""
        self.settings[kept.contender + with_drafts] = {"flags": kept.flags, "env": kept.env}

    def did_not_come_up(self, name: str, reason: str) -> None:
        """Note why a contender did not come up, and write it."""
        self.not_up[name] = reason
        keep_reason(self.kept, name, reason)
        print(f"{name} is left out: {reason}", flush=True)

    def rows(self) -> list[Row]:
        """Return the rows of the figures so far, contenders in the order of the command."""
        order = [contender.name for contender in self.contenders]
        known = {name: self.figures[name] for name in [*order, *sorted(self.figures)] if name in self.figures}
        found = rows_of(known)
        return found + best_third_of(found)


def print_figures(name: str, figures: Figures) -> None:
    """Print a line for each work of the figures."""
    lines: dict[tuple, list[str]] = {}
    for (work, requests, metric, *prefix), value in figures.items():
        lines.setdefault((label(work, *prefix), requests), []).append(f"{metric} {value:,.4g}")
    for (work, requests), found in lines.items():
        print(f"  {name:24} {work:18} {requests:5}  " + "  ".join(found), flush=True)


# ------------------------------------------------------------------------------------------------ one after the other


def compare(comparison: Comparison) -> None:
    """Run the works that are missing, each contender with its flags, one after the other.

    Raises:
        ValueError: churn of ours has no figures of the built-in, whose bytes of KV memory it gets.
    """
    for contender in comparison.to_run():
        missing = [cell for cell in comparison.cells() if not comparison.has(contender.name, cell)]
        if not missing:
            continue
        print(f"{contender.name}, ample memory", flush=True)
        log = comparison.logs / f"{contender.name}.log"
        try:
            with _server(comparison, contender, contender.flags, log) as server:
                comparison.keep_start(contender.name, server)
                warm_up(server, comparison.works)
                for cell in missing:
                    found = [cell.measure(server, repeat) for repeat in range(cell.repeats)]
                    comparison.keep(contender.name, cell, cell.figures(found))
        except DidNotComeUpError as error:
            comparison.did_not_come_up(contender.name, str(error))
    if "churn" in comparison.works:
        compare_churn(comparison)


def _server(
    comparison: Comparison, contender: Contender, flags: Sequence[str], log: Path
) -> AbstractContextManager[Server]:
    place = comparison.model, flags, comparison.port, log
    return running(contender.server, *place, alone=True, env=contender.env)


def compare_churn(comparison: Comparison) -> None:
    """Measure churn on each contender, with the KV bytes of the first one of the built-in.

    Raises:
        ValueError: ours is to be measured, and the built-in has no figures.
    """
    memory = ("memory_churn", 1, "kv_bytes")
    ordered = sorted(comparison.contenders, key=lambda contender: contender.server != "builtin")
    known = [found[memory] for name, found in comparison.figures.items() if memory in found and is_builtin(name)]
    size = known[0] if known else None
    flags_of_ours = next((c.flags for c in ordered if c.server == "ours"), ordered[0].flags)
    for contender in ordered:
        if (contender.name, "churn") in comparison.stages or contender.name in comparison.not_up:
            continue
        wanted = comparison.kv_gib * 2**30 if size is None else size
        try:
            if contender.server == "builtin":
                place = comparison.port, comparison.logs
                tokens = builtin_tokens(comparison.model, contender.flags, wanted, *place, contender.env)
            elif size is None:
                raise ValueError("churn gives ours the bytes of KV memory of the built-in: run that first")
            else:
                tokens = tokens_that_fit(comparison.model, size, contender.flags)
            print(f"{contender.name}, {wanted / 2**30:.3f} GiB of KV memory", flush=True)
            flags, log = [*contender.flags, "--max-total-tokens", str(tokens)], f"{contender.name}_churn.log"
            with _server(comparison, contender, flags, comparison.logs / log) as server:
                used, held = server.kv_memory()
                size = used if size is None else size
                found: Figures = {memory: used, ("memory_churn", 1, "kv_tokens"): held}
                found |= under_churn(server, _sessions(tokens_that_fit(comparison.model, size, flags_of_ours)))
                comparison.keep_stage(contender.name, "churn", found)
        except DidNotComeUpError as error:
            comparison.did_not_come_up(contender.name, str(error))


def under_churn(server: Server, sessions: dict[int, list[int]]) -> Figures:
    """Measure every number of sessions with either prefix; the smallest number of each runs unmeasured first."""
    figures: Figures = {}
    for prefix, counts in sessions.items():
        rounds, user, new_tokens = CHURN[prefix]

        def load(count: int, seed: int, of: tuple[int, ...] = (rounds, prefix, user, new_tokens)) -> serve_load.Load:
            return serve_load.churn(count, *of, CHURN_AT_ONCE, seed=seed)

        serve_load.run(server.url, load(min(counts), seed=1000))
        for count in counts:
            found = {(SWEEP, count, k, prefix): v for k, v in steady(server, load(count, seed=count)).items()}
            print_figures(server.contender, found)
            figures |= found
    return figures


def _sessions(tokens: int) -> dict[int, list[int]]:
    return {
        prefix: [max(2, round(share * tokens / (prefix + 2 * (user + new)))) for share in CHURN_SHARES]
        for prefix, (_, user, new) in CHURN.items()
    }


# ------------------------------------------------------------------------------------------------ agreement


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


def agreement(comparison: Comparison) -> list[Row]:
    """Return mean absolute differences of log-probabilities: ours against the built-in; for comparison the built-in
    against itself in another batch; and ours against itself. The first contender of either server."""
    found, name = {}, {}
    vocab = json.loads((comparison.model / "config.json").read_text())["vocab_size"]
    for contender in comparison.contenders:
        if contender.server not in found:
            log = comparison.logs / f"{contender.name}_agreement.log"
            with _server(comparison, contender, (*contender.flags, "--disable-radix-cache"), log) as server:
                found[contender.server] = logprobs(server, vocab, prompts=8, length=700)
                name[contender.server] = contender.name
    ours, builtin = found["ours"][0], found["builtin"][0]
    apart = statistics.mean(abs(a - b) for a, b in zip(ours, builtin, strict=True))
    itself = {of: statistics.mean(abs(a - b) for a, b in zip(*values, strict=True)) for of, values in found.items()}
    of = {"contender": name["builtin"], "of_ours": name["ours"]}
    return [
        Row("agreement", 8, "logprob_distance", ours=apart, builtin=itself["builtin"], **of),
        Row("agreement", 8, "logprob_distance_itself", **itself, **of),
    ]


# ------------------------------------------------------------------------------------------------ in turns


def compare_in_turns(comparison: Comparison, turns: Turns) -> list[str]:
    """Start contenders, load them in turns; return what is left for another call."""
    missing = {
        contender.name: [cell.stage for cell in comparison.cells() if not comparison.has(contender.name, cell)]
        for contender in comparison.to_run()
    }
    wanted = [name for name, stages in missing.items() if stages]
    if not wanted:  # servers of other contenders stay for the call that wants them
        return []
    for cell in comparison.cells():
        without = sum(cell.stage in stages for stages in missing.values())
        print(f"{cell.stage:28} {cell.seconds:5.0f} s a contender, {without} without it", flush=True)
    ready, failed = turns.start(comparison.contenders, wanted)
    for name, reason in failed.items():
        comparison.did_not_come_up(name, reason)
    for name, server in ready.items():
        comparison.keep_start(name, server)
    if starting := [f"start of {name}" for name in wanted if name not in ready and name not in failed]:
        return starting
    if cold := turns.warm_up(ready, comparison.works, warm_up):
        return [f"unmeasured loads of {name}" for name in cold]
    left = turns.measure(ready, comparison.cells(), comparison.has, comparison.keep)
    comparison.not_up |= turns.failures
    return left


# ------------------------------------------------------------------------------------------------ command


def parse() -> argparse.Namespace:
    """Return the command's arguments."""
    about = f"{__doc__.splitlines()[0]}\n\nparts of a contender:\n{names_of.table()}"
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path)
    which.add_argument("--full-size", action="store_true", help="all layers of V4-Flash, dummy weights: in --models")
    parser.add_argument("--models", type=Path, default=Path("/tmp/full_size"), help="folder for --full-size")
    parser.add_argument("--works", nargs="+", choices=WORKS, help=f"by default {' '.join(DEFAULT_WORKS)}")
    parser.add_argument("--kv-gib", type=float, default=0.5, help="KV memory of each server under churn")
    parser.add_argument("--contenders", nargs="+", default=DEFAULT_CONTENDERS)
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a server")
    parser.add_argument("--accepted", type=float, help="tokens a step of servers that draft")
    parser.add_argument("--repeats", type=int, choices=(1, 2, 3), default=3, help="of short loads")
    parser.add_argument("--requests", nargs="+", type=int, help="of decode and 8k_1k, in place of their numbers")
    parser.add_argument("--in-turns", type=Path, help="folder of servers that run at once")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call, with --in-turns")
    parser.add_argument("--stop", action="store_true", help="end the servers of --in-turns, measure nothing")
    parser.add_argument("--figures", type=Path, help="folder of what was measured, to go on from")
    parser.add_argument("--stall-s", type=float, help="seconds of silence after which a run is repeated")
    parser.add_argument("--port", type=int, default=30_100)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("flags", nargs="*", help="of all servers, after --")
    arguments = parser.parse_args()
    if arguments.in_turns is None and (arguments.stop or arguments.full_size):
        parser.error("--stop and --full-size want --in-turns FOLDER")
    at_once = [work for work in DEFAULT_WORKS if work in AMPLE]
    arguments.works = arguments.works or (DEFAULT_WORKS if arguments.in_turns is None else at_once)
    if arguments.in_turns is not None and not set(arguments.works) <= set(AMPLE):
        parser.error("churn and agreement need servers of their own: run them without --in-turns")
    return arguments


def main() -> int:
    """Compare, print a table, draw, write JSON; return NOT_FINISHED if something is left for another call."""
    begin, arguments = time.monotonic(), parse()
    if arguments.stop:
        servers.stop_all(arguments.in_turns)
        return 0
    import torch

    gpus = torch.cuda.device_count()
    comparison = comparison_of(arguments)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    Server.stall_s = arguments.stall_s or (FULL_SIZE_STALL_S if arguments.full_size else STALL_S)
    left: list[str] = []
    if arguments.in_turns is None:
        compare(comparison)
    else:
        place = arguments.in_turns, comparison.model, gpus, arguments.tp
        left = compare_in_turns(comparison, Turns(*place, arguments.seconds, begin))
    rows = comparison.rows()
    if "agreement" in arguments.works and {c.server for c in comparison.contenders} == set(servers.CONTENDERS):
        rows += agreement(comparison)
    print(table(rows))
    if arguments.picture is not None:
        draw(rows, arguments.picture)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": [torch.cuda.get_device_name(i) for i in range(gpus)],
        "versions": versions(),
        "model": json.loads((comparison.model / "config.json").read_text()),
        "tp": arguments.tp,
        "contenders": comparison.settings,
        "switches": {name: os.environ.get(name, "") for name in SWITCHES},
        "not_up": comparison.not_up,
        "left": left,
        "rows": [as_json(row) for row in rows],
    }
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)
    return NOT_FINISHED if left else 0


def comparison_of(arguments: argparse.Namespace) -> Comparison:
    """Return the comparison that the command asks for; with --full-size the model's folder is written."""
    model, flags, env = arguments.model, [*arguments.flags], {}
    if arguments.full_size:
        write_models(arguments.models, tiny=False, full_size=True)
        model = arguments.models / ("april" if arguments.accepted is None else "dspark")
        flags = [*FULL_SIZE_FLAGS, *flags]
    if arguments.tp > 1:
        flags += ["--tp", str(arguments.tp)]
    if arguments.in_turns is not None:
        flags.append("--sleep-on-idle")
    if arguments.accepted is not None:
        flags += DRAFTS
        env["SGLANG_SIMULATE_ACC_LEN"] = str(arguments.accepted)
    found = [names_of.contender(name, flags, arguments.tp, env) for name in arguments.contenders]
    place = arguments.logs, arguments.figures, arguments.kv_gib, arguments.port
    how = arguments.tp, arguments.accepted, arguments.repeats, arguments.requests
    return Comparison(model, found, arguments.works, *place, *how)


if __name__ == "__main__":
    sys.exit(main())
