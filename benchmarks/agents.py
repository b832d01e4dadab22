"""Prefix hits of agent programs: sessions of several programs on the chat route, ours and SGLang's built-in.

    python benchmarks/agents.py --models FOLDER --out benchmarks/results/agents_h200.json [--kv-gib 0.125] \\
        [--sessions 16] [--turns 14] [--styles system user] [--contenders builtin ours] [--resume] \\
        [--builtin-flags "--moe-runner-backend marlin"] [-- further server flags]

FOLDER holds `april`, six layers of V4-Flash (config and tokenizer are written there if they are missing);
weights are --load-format dummy. The servers get the same bytes of KV memory, --kv-gib, less than all sessions need. In
each round every session sends its next request, --at-once at a time; `lib/agent_sessions.py` lists the kinds
of requests. All answers of the conversations are given, so both servers get the same requests. Two styles, each
from an empty cache after an unmeasured run of other sessions:

    system   a request ends with a reminder of role system, which the built-in renders at the front
    user     the reminder is a text of the user's turn: equal prompts on both servers

Rows: for each style and kind of request, and for all kinds together, `hit_rate` (cached tokens over prompt tokens),
`ttft_p50` and `ttft_p99` in ms, and `requests`; for all kinds also `tok_s`, prompt tokens a second. --resume adds to
what --out holds: the servers can be measured by several commands. The built-in starts once more than ours, to learn how
many tokens have these bytes; --max-total-tokens among its own flags saves that start. A CPU serves ours only:

    python benchmarks/agents.py --models FOLDER --tiny --contenders ours --kv-gib 0 --sessions 4 --turns 8 \\
        --scale 0.02 --out FILE -- --max-total-tokens 8192
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from lib.agent_sessions import ALL, KINDS, NEW_TOKENS, SEED, STYLES, Load, Request
from lib.equal_memory import builtin_tokens, tokens_that_fit
from lib.http_client import HttpClient, new_session, require_ok
from lib.model_shapes import write_models
from lib.servers import CONTENDERS, Server, running
from lib.versions import versions

LIMIT = "--max-total-tokens"
WARM_UP_SEED = 1071
WARM_UP_SESSIONS = 3
DUMMY_FLAGS = (
    *("--load-format", "dummy", "--mem-fraction-static", "0.7", "--random-seed", "1"),
    *("--context-length", "66560", "--chunked-prefill-size", "8192", "--enable-cache-report", "--sleep-on-idle"),
    *("--max-running-requests", "16", "--cuda-graph-bs-decode", "1", "2", "4", "8", "16"),
)
TINY_FLAGS = ("--chunked-prefill-size", "512", "--max-running-requests", "8", "--enable-cache-report")


@dataclass(frozen=True)
class Reply:
    """One request as the client saw it."""

    kind: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


async def ask(session: aiohttp.ClientSession, url: str, request: Request) -> Reply:
    """Send one request and wait for its end.

    Raises:
        RuntimeError: the server answered with an error, or does not report its cached tokens.
    """
    body = {
        "model": "default",
        "messages": request.messages,
        "tools": request.tools,
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first, usage = time.perf_counter(), None, None
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        await require_ok(response)
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip()
            if not event or event == b"[DONE]":
                continue
            first = time.perf_counter() if first is None else first
            usage = json.loads(event).get("usage") or usage
    if first is None or usage is None or usage.get("prompt_tokens_details") is None:
        raise RuntimeError(f"usage without cached tokens: {usage}; start the server with --enable-cache-report")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(request.kind, usage["prompt_tokens"], cached, first - sent)


def run(url: str, sessions: Sequence[Iterator[Request]], at_once: int) -> tuple[list[Reply], float]:
    """Run sessions from an empty cache, a request of each in every round; return the replies and the seconds."""

    async def main() -> tuple[list[Reply], float]:
        async with new_session() as session:
            await HttpClient(session, url).flush()
            begin, replies, left = time.perf_counter(), [], list(sessions)
            free = asyncio.Semaphore(at_once)

            async def next_of(requests: Iterator[Request]) -> Reply | None:
                async with free:
                    request = next(requests, None)
                    return None if request is None else await ask(session, url, request)

            while left:
                found = await asyncio.gather(*(next_of(requests) for requests in left))
                replies += [reply for reply in found if reply is not None]
                left = [requests for requests, reply in zip(left, found, strict=True) if reply is not None]
            return replies, time.perf_counter() - begin

    return asyncio.run(main())


Figures = dict[tuple[str, str], float]
"""Values by kind of request and metric."""


def figures_of(replies: Sequence[Reply], seconds: float) -> Figures:
    """Return the figures of a run."""
    found: Figures = {}
    for kind in (*KINDS, ALL):
        of_kind = [reply for reply in replies if kind in (ALL, reply.kind)]
        if not of_kind:
            continue
        prompts = sum(reply.prompt_tokens for reply in of_kind)
        times = sorted(1e3 * reply.ttft_s for reply in of_kind)
        found[kind, "requests"] = len(of_kind)
        found[kind, "prompt_tokens"] = prompts
        found[kind, "hit_rate"] = sum(reply.cached_tokens for reply in of_kind) / prompts
        found[kind, "ttft_p50"] = statistics.median(times)
        found[kind, "ttft_p99"] = times[min(len(times) - 1, int(0.99 * len(times)))]
    found[ALL, "tok_s"] = found[ALL, "prompt_tokens"] / seconds
    return found


def measure(server: Server, load: Load, style: str) -> Figures:
    """Run other sessions, which compile what is missing, and then the measured ones; print their figures."""
    run(server.url, load.requests(style, WARM_UP_SEED, min(WARM_UP_SESSIONS, load.sessions)), load.at_once)
    found = figures_of(*run(server.url, load.requests(style, SEED), load.at_once))
    for kind in (*KINDS, ALL):
        shown = "  ".join(f"{metric} {value:,.4g}" for (of, metric), value in found.items() if of == kind)
        print(f"  {server.contender:8} {style:7} {kind:9} {shown}", flush=True)
    return found


class Results:
    """The rows measured so far, as they are written."""

    def __init__(self, before: dict[str, Any], about: dict[str, Any]) -> None:
        self.rows: dict[tuple[str, str, str], dict[str, float]] = {}
        for row in before.get("rows", []):
            key = row["style"], row["kind"], row["metric"]
            self.rows[key] = {name: row[name] for name in CONTENDERS if row[name] is not None}
        self.memory: dict[str, dict[str, float]] = before.get("memory", {})
        self.about = {**before.get("about", {}), **about}

    def has(self, contender: str, style: str) -> bool:
        """Whether a server was measured in a style."""
        return any(key[0] == style and contender in row for key, row in self.rows.items())

    def note(self, contender: str, style: str, figures: Figures) -> None:
        """Add a server's figures."""
        for (kind, metric), value in figures.items():
            self.rows.setdefault((style, kind, metric), {})[contender] = value

    def as_json(self) -> dict[str, Any]:
        """Return the result for the file; a row has null for a server that has not been measured."""
        rows = [
            {"style": style, "kind": kind, "metric": metric, **{name: row.get(name) for name in CONTENDERS}}
            for (style, kind, metric), row in self.rows.items()
        ]
        return {"about": self.about, "memory": self.memory, "rows": rows}


def compare(arguments: argparse.Namespace, results: Results) -> None:
    """Measure each server in each style, unless the results have it; the file is written after each style."""
    model = arguments.models / "april"
    load = Load(arguments.sessions, arguments.turns, arguments.at_once, arguments.scale)
    common = [*(TINY_FLAGS if arguments.tiny else DUMMY_FLAGS), *arguments.flags]
    for contender in arguments.contenders:
        styles = [style for style in arguments.styles if not results.has(contender, style)]
        if not styles:
            continue
        flags = [*common, *(shlex.split(arguments.builtin_flags) if contender == "builtin" else ())]
        if arguments.kv_gib and LIMIT not in flags:
            flags += [LIMIT, str(tokens_of(contender, model, flags, arguments, results.memory))]
        log = arguments.logs / f"agents_{contender}.log"
        with running(contender, model, flags, arguments.port, log, alone=True) as server:
            size, tokens = server.kv_memory()
            results.memory[contender] = {"kv_bytes": size, "kv_tokens": tokens}
            print(f"{contender}: {size / 2**20:,.1f} MiB of KV memory, {tokens:,} tokens", flush=True)
            for style in styles:
                results.note(contender, style, measure(server, load, style))
                arguments.out.write_text(json.dumps(results.as_json(), indent=1) + "\n")


def tokens_of(
    contender: str,
    model: Path,
    flags: Sequence[str],
    arguments: argparse.Namespace,
    memory: dict[str, dict[str, float]],
) -> int:
    """Return a server's --max-total-tokens for --kv-gib; ours gets the bytes that the built-in really had."""
    size = arguments.kv_gib * 2**30
    if contender == "builtin":
        return builtin_tokens(model, flags, size, arguments.port, arguments.logs)
    return tokens_that_fit(model, memory["builtin"]["kv_bytes"] if "builtin" in memory else size, flags)


def main() -> int:
    """Compare; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kv-gib", type=float, default=0.125, help="KV memory of each server; 0: what it chooses")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=14, help="requests of a session, without those of its sub-agents")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the lengths of all texts")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=STYLES)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--resume", action="store_true", help="add to what --out holds")
    parser.add_argument("--tiny", action="store_true", help="a small checkpoint with weights, which a CPU can serve")
    parser.add_argument("--port", type=int, default=30_150)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    parser.add_argument("--builtin-flags", default="", help="of the built-in alone: a MoE runner that it finds there")
    parser.add_argument("flags", nargs="*", help="of both servers, after --")
    arguments = parser.parse_args()
    import torch

    for folder in (arguments.logs, arguments.models):
        folder.mkdir(parents=True, exist_ok=True)
    write_models(arguments.models, arguments.tiny)
    about = {
        "gpu": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": versions(),
        "flags": [*(TINY_FLAGS if arguments.tiny else DUMMY_FLAGS), *arguments.flags],
        "builtin_flags": arguments.builtin_flags,
        "load": {name: getattr(arguments, name) for name in ("sessions", "turns", "at_once", "scale", "kv_gib")},
        "new_tokens": NEW_TOKENS,
    }
    before = json.loads(arguments.out.read_text()) if arguments.resume and arguments.out.exists() else {}
    results = Results(before, about)
    compare(arguments, results)
    print(json.dumps(results.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
