"""Works of a comparison of served models, in cells: one load, repeated, and the seconds that it is expected to take.

decode       1, 4, 16, 64 and 128 requests of 4.6K tokens; tok/s while all of them decode; of contenders with `gpu_time`
             also gpu_step_ms, the time of a step between SGLang's events around its forward: without the sampler, and
             with the host's preparation of a step if the GPU waits for it, so that less than step_ms shows a gap of
             the host, and as much shows none
prefill      eight prompts of 8K tokens; one of 64K
long         one prompt of 256K tokens, which needs --context-length 270336
multi_turn   32 conversations of four turns over four shared prefixes of 4K, which all fit into the pool
8k_1k        1, 16, 64 and 256 requests of 8,192 tokens answered with 1,024: the form in which others publish
profile      launches, busy time and span of a decode step and of a prefill chunk, and the host calls that
             enqueue its work (a graph is one call); KV bytes a token
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lib import serve_load
from lib.serve_profile import Profile, profile_decode, profile_prefill
from lib.serve_rows import Figures
from lib.servers import Server

AMPLE = ("decode", "prefill", "long", "multi_turn", "8k_1k", "profile")
"""Works that do not need equal KV memory."""
DECODE_REQUESTS = (1, 4, 16, 64, 128)
PUBLISHED_REQUESTS = (1, 16, 64, 256)
CONTEXT = 4608
REPEATS = (71, 72, 73)  # seeds of the short loads; their medians count
MOST_RUNS = 3  # runs of a load after the first, repeated because of stalls
PRINTED_KERNELS = 30
PRINTED_HOST_CALLS = 5

# The built-in with Marlin, V4-Flash at full size on four H200s, 2026-11-26: what a load takes at most.
PREFILL_TOK_S = 24_000
STEP_S = {1: 0.008, 4: 0.009, 16: 0.013, 64: 0.021, 128: 0.026, 256: 0.045}
DRAFTED_STEP_S = {1: 0.011, 4: 0.015, 16: 0.026, 64: 0.041, 128: 0.07, 256: 0.14}
FLUSH_S = 0.5
PROFILE_S = 30
KV_BYTES = "kv_bytes_per_token"
GPU_SHARE = "gpu_share"

OfSeed = Callable[[int], serve_load.Load]
Measured = dict[str, float]
Measure = Callable[[Server, int], Measured]
"""Runs a cell's load once on a server; the number is that of the repetition."""


@dataclass(frozen=True)
class Cell:
    """One load with its figures' place in the result."""

    stage: str
    """Name for files and lists."""
    work: str
    requests: int
    measure: Measure
    repeats: int
    seconds: float
    """Expected seconds on one server of full size, all repetitions."""

    def figures(self, runs: Sequence[Measured]) -> Figures:
        """Return the medians of all repetitions."""
        keys = {metric: ("memory", 1) if metric == KV_BYTES else (self.work, self.requests) for metric in runs[0]}
        return {(*keys[metric], metric): statistics.median(run[metric] for run in runs) for metric in runs[0]}


def drafting(accepted: float | None) -> str:
    """Return what the names of rows end with if servers draft and accept so many tokens a step."""
    return "" if accepted is None else f"_dspark_{accepted:g}"


def cells(
    works: Sequence[str],
    gpus: int = 1,
    accepted: float | None = None,
    repeats: int = 3,
    requests: Collection[int] | None = None,
) -> list[Cell]:
    """Return the cells of works of AMPLE, in the order in which they are measured.

    Args:
        works: names.
        gpus: of a server; tok/s of `8k_1k` are also given a GPU.
        accepted: tokens a step of servers that draft, which is part of the rows' names.
        repeats: of short loads.
        requests: numbers of requests of `decode` and `8k_1k`, in place of theirs.
    """
    drafts = drafting(accepted)
    step_s = STEP_S if accepted is None else DRAFTED_STEP_S
    short = REPEATS[:repeats]

    def cell(
        work: str, requests: int, load: OfSeed, prompt: int, new_tokens: int, seeds: Sequence[int] = short
    ) -> Cell:
        def measure(server: Server, repeat: int) -> Measured:
            found = steady(server, load(seeds[repeat]), requests if work == "decode" else None)
            if work == "decode":
                found["step_ms"] = 1e3 * requests * found.get("tokens_a_step", 1.0) / found["tok_s"]
                if GPU_SHARE in found:
                    found["gpu_step_ms"] = found.pop(GPU_SHARE) * found["step_ms"]
            if work == "8k_1k":
                found["tok_s_a_gpu"] = found["tok_s"] / gpus
            return found

        steps = new_tokens / (accepted or 1.0)
        once = requests * prompt / PREFILL_TOK_S + steps * step_s.get(requests, 0.03) + FLUSH_S
        name = work + drafts
        return Cell(f"{name}_{requests}", name, requests, measure, len(seeds), len(seeds) * once)

    def profile(work: str, requests: int, measure: Measure) -> Cell:
        name = work + drafts
        return Cell(f"profile_{name}_{requests}", name, requests, measure, 1, PROFILE_S)

    of_work = {
        # One request's 256 tokens take half a second, in which any other program of the machine shows.
        "decode": [
            cell("decode", n, _decode(n), CONTEXT, 256, short if n < 32 else (n,)) for n in requests or DECODE_REQUESTS
        ],
        "prefill": [
            cell("prefill", 8, lambda seed: serve_load.prefill(8, 8192, seed), 8192, 1),
            cell("prefill_64k", 1, lambda seed: serve_load.prefill(1, 65_536, seed), 65_536, 1),
        ],
        "long": [cell("prefill_256k", 1, lambda seed: serve_load.prefill(1, 262_144, seed), 262_144, 1, short[:1])],
        # The prefixes are computed once: 512 tokens a conversation.
        "multi_turn": [cell("multi_turn", 32, conversations, 512 + 4 * (256 + 64), 4 * 64)],
        "8k_1k": [cell("8k_1k", n, _published(n), 8192, 1024, (n,)) for n in requests or PUBLISHED_REQUESTS],
        "profile": [
            *(profile("decode", n, _profiled(n)) for n in (1, 64)),
            profile("prefill_64k", 1, _profiled_prefill),
        ],
    }
    return [found for work in AMPLE if work in works for found in of_work[work]]


def warm_up(server: Server, works: Sequence[str]) -> None:
    """Run loads of these works unmeasured: they compile what depends on the number of tokens.

    How a load is cut into batches changes the numbers of tokens, so conversations run once for each measurement.
    """
    loads = [serve_load.decode(24, 4096, 8, seed=1), serve_load.prefill(1, 65_536, seed=2)]
    loads.append(serve_load.prefill(8, 8192, seed=3))
    if "multi_turn" in works:
        loads += [conversations(seed + 1000) for seed in REPEATS]
    for load in loads:
        serve_load.run(server.url, load)


def _decode(requests: int) -> OfSeed:
    return lambda seed: serve_load.decode(requests, CONTEXT, 256, seed)


def _published(requests: int) -> OfSeed:
    return lambda seed: serve_load.answers(requests, 8192, 1024, seed)


def conversations(seed: int) -> serve_load.Load:
    """Return a load of 32 conversations."""
    return serve_load.multi_turn(32, 4, prefixes=4, prefix=4096, user=256, new_tokens=64, seed=seed)


def _profiled(requests: int) -> Measure:
    return lambda server, repeat: _of_step(profile_decode(server.url, requests, CONTEXT))


def _profiled_prefill(server: Server, repeat: int) -> Measured:
    size, tokens = server.kv_memory()
    return _of_step(profile_prefill(server.url, 65_536)) | {KV_BYTES: size / tokens}


def _of_step(found: Profile) -> Measured:
    for name, launches, us in found.kernels[:PRINTED_KERNELS]:
        print(f"    {us:9.1f} us {launches:7.1f} x  {name[:120]}")
    for name, calls, us in found.host_calls[:PRINTED_HOST_CALLS]:
        print(f"    {us:9.1f} us {calls:7.1f} x  by the host: {name}")
    host = {"host_launches_per_step": found.host_launches} if found.host_launches else {}  # if the trace has them
    times = {"busy_us_per_step": found.busy_us, "span_us_per_step": found.span_us}
    return {"launches_per_step": found.launches, **times, **host}


def steady(server: Server, load: serve_load.Load, decoding: int | None = None) -> Measured:
    """Return the figures of the first run without a stall, or of the run with the shortest stall.

    If `decoding` requests decode at once, GPU_SHARE is among them where the server's log has it.
    """
    runs = []
    for _ in range(1 + MOST_RUNS):
        since = 0 if decoding is None else server.log_size()
        runs.append(serve_load.run(server.url, load))
        if decoding is not None and (share := server.gpu_share(decoding, since)) is not None:
            runs[-1][GPU_SHARE] = share
        if runs[-1][serve_load.SILENCE] < server.stall_s:
            break
        print(f"    a stall of {runs[-1][serve_load.SILENCE]:.1f} s: run again", flush=True)
    return min(runs, key=lambda run: run[serve_load.SILENCE])
