"""Sessions of agent programs against a server's chat route: hits and times of each kind of request."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from lib import agent_sessions, serve_load
from lib.agent_sessions import KINDS, Request

ALL = "all"
PROGRAMS = 2
NEW_TOKENS = 16


@dataclass(frozen=True)
class Reply:
    """One request as the client saw it."""

    kind: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True)
class Load:
    """The sessions of a run."""

    sessions: int
    turns: int
    at_once: int
    scale: float = 1.0

    def requests(self, style: str, seed: int, sessions: int | None = None) -> list[Iterator[Request]]:
        """Return each session's requests; the programs have the same number of sessions."""
        programs = [agent_sessions.program(i, seed, self.scale) for i in range(PROGRAMS)]
        return [
            agent_sessions.session(programs[i % PROGRAMS], i, seed, self.turns, style, self.scale)
            for i in range(self.sessions if sessions is None else sessions)
        ]


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
        if response.status != 200:
            raise RuntimeError(f"the chat route answered {response.status}: {(await response.text())[:500]}")
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
        timeout, connector = aiohttp.ClientTimeout(total=serve_load.TIMEOUT_S), serve_load.connections()
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**22) as session:
            await serve_load.Client(session, url).flush()
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
"""By kind of request and metric."""


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
