"""Hit rates of agent programs' sessions without a GPU: rendered prompts through both policies at equal device memory.

    python benchmarks/agents_simulation.py --out benchmarks/results/agents_simulation.json [--sessions 16] [--turns 14]

The requests of `agents.py` (`lib/agent_sessions.py`) become token ids as either server renders them: ours leaves a late
system message at its place, SGLang's renderer moves it to the front. The ids pass through the caches of
`prefix_simulation.py`, our tails and SGLang 0.5.23's policy for DeepSeek-V4, with V4-Flash's row sizes; no model runs.
Requests come one at a time, one of each session in every round. A row has, for a style of reminders, a kind of request
and a server, the prompts' tokens, those that the policy reused, and those that an unbounded cache of whole pages would.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.agent_sessions import ALL, NEW_TOKENS, SEED, STYLES, Load, Request
from lib.chat_adapter import chat_adapter
from lib.policy_memory import Budget
from lib.prefix_replay import ReplayEngine, paged_engine, tail_engine
from lib.prefix_traces import Bound
from lib.servers import CONTENDERS
from lib.versions import versions

VOCAB_SIZE, CONTEXT_TOKENS = 1024, 1 << 16
SGLANG_TOKENS = 163_840
"""Tokens of SGLang's pool, whose bytes both policies get."""

Counts = dict[str, int]
Render = Callable[[Request], list[int]]


def renderers() -> dict[str, Render]:
    """Return the functions that make a request's token ids, by server."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from transformers import AutoTokenizer

    from sglang_dsv4.cpu.random_tokenizer import write_tokenizer
    from sglang_dsv4.requests.chat import late_system

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCAB_SIZE, CONTEXT_TOKENS)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    adapter = chat_adapter(tokenizer)
    hooked = type(adapter).encode_messages
    original = getattr(hooked, "__wrapped__", hooked)  # where a plugin is loaded in this process

    def arguments(request: Request) -> dict[str, Any]:
        sent = ChatCompletionRequest(model="default", messages=request.messages, tools=list(request.tools))
        return {
            "messages": [],
            "request": sent,
            "tools": [tool.model_dump() for tool in sent.tools],
            "thinking": False,
            "image_data": [],
        }

    return {
        "builtin": lambda request: original(adapter, **arguments(request)),
        "ours": lambda request: late_system.encode(original, adapter, **arguments(request)),
    }


def engines(budget: Budget, chunk_tokens: int) -> dict[str, Callable[[], ReplayEngine]]:
    """Return the functions that make an empty cache with its pools, by server."""
    how = {"context_tokens": CONTEXT_TOKENS, "chunk_tokens": chunk_tokens}
    return {
        "builtin": lambda: paged_engine(budget.sglang_tokens, budget.sglang_swa_tokens, **how),
        "ours": lambda: tail_engine(budget.tokens, budget.tails, **how),
    }


def replay(sessions: list[Iterator[Request]], render: Render, engine: ReplayEngine) -> dict[str, Counts]:
    """Return the counts of tokens by kind of request."""
    found: dict[str, Counts] = defaultdict(lambda: dict.fromkeys(("requests", "prompt", "hit", "bound"), 0))
    bound = Bound()
    while sessions:
        requests = [next(session, None) for session in sessions]
        for request in filter(None, requests):
            prompt = render(request)
            counts = 1, len(prompt), engine.run(prompt, [0] * NEW_TOKENS).hit_tokens, bound.hit(prompt)
            bound.keep(prompt)
            for kind in (request.kind, ALL):
                for name, count in zip(found[kind], counts, strict=True):
                    found[kind][name] += count
        sessions = [session for session, request in zip(sessions, requests, strict=True) if request is not None]
    return dict(found)


def simulate(load: Load, budget: Budget, chunk_tokens: int) -> list[dict[str, Any]]:
    """Return the rows of all styles and servers; print the hit rates."""
    rows, render, make = [], renderers(), engines(budget, chunk_tokens)
    for style in STYLES:
        for name in CONTENDERS:
            for kind, counts in replay(load.requests(style, SEED), render[name], make[name]()).items():
                rows.append({"style": style, "server": name, "kind": kind, **counts})
                shares = f"{counts['hit'] / counts['prompt']:7.1%} of {counts['bound'] / counts['prompt']:7.1%}"
                print(f"{style:7} {name:8} {kind:9} {counts['requests']:5} requests  {shares}", flush=True)
    return rows


def main() -> int:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=14)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the lengths of all texts")
    parser.add_argument("--tokens", type=int, default=SGLANG_TOKENS, help="of SGLang's pool")
    parser.add_argument("--chunk-tokens", type=int, default=8192, help="at most half of a tenth of --tokens")
    arguments = parser.parse_args()
    budget = Budget.of(arguments.tokens)
    load = Load(arguments.sessions, arguments.turns, at_once=1, scale=arguments.scale)
    rows = simulate(load, budget, arguments.chunk_tokens)
    result = {"versions": versions(), "load": asdict(load), "budget": asdict(budget), "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
