"""Profiles of a running SGLang server by SGLang's own profiler: kernels, busy time and span of a step."""

from __future__ import annotations

import asyncio
import collections
import gzip
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from lib.http_client import require_ok
from lib.serve_load import FIRST_ID, LAST_ID, Client

STEPS = 8
CHUNKS = 6
TURN = 256
"""Tokens of a turn."""
TURN_STEPS = 3
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
ENQUEUES = ("Launch", "Memcpy", "Memset")
"""Parts of the names of host calls that enqueue GPU work. Each call costs the host some microseconds; a graph's replay
is one call."""
HOST_ROWS = 8
"""Rows of the table of host calls, waiting and launching included."""
TRACE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Profile:
    """GPU work of a step, the mean over several steps."""

    launches: float
    busy_us: float
    span_us: float
    kernels: tuple[tuple[str, float, float], ...]  # name, launches, microseconds (overlaps in each), the longest first
    host_launches: float = 0.0  # host calls that enqueue this work; a graph's replay is one
    host_calls: tuple[tuple[str, float, float], ...] = ()  # CUDA calls: name, calls, microseconds, the longest first


def profile_decode(url: str, requests: int, context: int) -> Profile:
    """Profile STEPS decode steps with `requests` requests of `context` tokens.

    Raises:
        RuntimeError: the server wrote no trace with GPU work.
    """
    return _read(decode_events(url, requests, context), STEPS)


def decode_events(url: str, requests: int, context: int) -> list[dict]:
    """Return the GPU's and the host's events of STEPS decode steps (draft and verify steps on a server that
    speculates).

    Raises:
        RuntimeError: the server wrote no trace with GPU work.
    """
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_decode_under_profile(url, requests, context, folder))
        return _trace(Path(folder))


def profile_prefill(url: str, length: int) -> Profile:
    """Profile CHUNKS chunks at the beginning of one prompt of `length` tokens. The server chooses the chunks.

    Raises:
        RuntimeError: the server wrote no trace with GPU work.
    """
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_prefill_under_profile(url, length, folder))
        return _read(_trace(Path(folder)), CHUNKS)


def profile_turn(url: str, requests: int, context: int, folder: Path | None = None) -> Profile:
    """Profile the forward of `requests` requests that add TURN tokens each to `context` cached tokens.

    Args:
        url: of the server.
        requests: number of requests at once.
        context: tokens of each request's prefix.
        folder: keeps a trace that also has the host's events.

    Raises:
        RuntimeError: the server wrote no trace with GPU work.
    """
    with tempfile.TemporaryDirectory() as temporary:
        where = temporary if folder is None else str(folder)
        asyncio.run(_turn_under_profile(url, requests, context, where, ["GPU"] if folder is None else ["CPU", "GPU"]))
        return _read(_trace(Path(where)), 1)


async def _turn_under_profile(url: str, requests: int, context: int, folder: str, activities: list[str]) -> None:
    rng = random.Random(requests)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), read_bufsize=2**22) as session:
        client = Client(session, url)
        prompts = [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(context)] for _ in range(requests)]
        for turn in range(2):  # the first turn, unmeasured, compiles
            await asyncio.gather(*(client.generate(prompt, 1) for prompt in prompts))
            prompts = [prompt + [rng.randrange(FIRST_ID, LAST_ID) for _ in range(TURN)] for prompt in prompts]
            if turn == 1:
                await _start(session, url, folder, TURN_STEPS, activities)
        await asyncio.gather(*(client.generate(prompt, 4) for prompt in prompts))


async def _decode_under_profile(url: str, requests: int, context: int, folder: str) -> None:
    rng = random.Random(requests)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**22) as session:
        client = Client(session, url)
        prompts = [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(context)] for _ in range(requests)]
        await asyncio.gather(*(client.generate(prompt, 1) for prompt in prompts))  # caches the prefixes
        begun, all_begun = itertools.count(1), asyncio.Event()

        def first_token() -> None:
            if next(begun) == requests:
                all_begun.set()

        # A prefix that the cache lost is computed again, which takes time. Answers are long enough that the profiler
        # starts before the first of them ends.
        new_tokens = 480 if requests > 4 else 2000
        decoding = asyncio.gather(*(client.generate(prompt, new_tokens, first_token) for prompt in prompts))
        await asyncio.wait({asyncio.ensure_future(all_begun.wait()), decoding}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.1)
        await _start(session, url, folder, STEPS)
        await decoding


async def _prefill_under_profile(url: str, length: int, folder: str) -> None:
    rng = random.Random(length)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), read_bufsize=2**22) as session:
        client = Client(session, url)
        await client.flush()
        await _start(session, url, folder, CHUNKS)
        await client.generate([rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)], 1)


async def _start(
    session: aiohttp.ClientSession, url: str, folder: str, steps: int, activities: Sequence[str] = ("GPU",)
) -> None:
    body = {"output_dir": folder, "num_steps": steps, "activities": list(activities)}
    async with session.post(f"{url}/start_profile", json=body) as response:
        await require_ok(response)


def _trace(folder: Path) -> list[dict]:
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while time.monotonic() < deadline:
        for path in sorted(folder.rglob("*.json*")):
            try:
                with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                    events = json.load(file)["traceEvents"]
            except (EOFError, json.JSONDecodeError, gzip.BadGzipFile):
                continue  # still being written
            found = [event for event in events if event.get("cat") in GPU_WORK + HOST_CALLS]
            if any(event["cat"] in GPU_WORK for event in found):
                return found
        time.sleep(0.5)
    raise RuntimeError(f"no trace with GPU work in {TRACE_TIMEOUT_S} s")


def _read(events: list[dict], steps: int) -> Profile:
    calls = [event for event in events if event["cat"] in HOST_CALLS]
    launches = sum(any(part in call["name"] for part in ENQUEUES) for call in calls) / steps
    work = gpu_work(events)
    begin, end = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    times = busy_us(work) / steps, (end - begin) / steps
    return Profile(len(work) / steps, *times, _by_name(work, steps), launches, _by_name(calls, steps))


def _by_name(events: Sequence[dict], steps: int) -> tuple[tuple[str, float, float], ...]:
    """Return (name, number, microseconds) a step, the longest first."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[event["name"]].append(event["dur"])
    return tuple(sorted(((n, len(t) / steps, sum(t) / steps) for n, t in times.items()), key=lambda row: -row[2]))


def gpu_work(events: Sequence[dict]) -> list[dict]:
    """Return the GPU's events of a trace, without the host calls that have the same correlation and come before."""
    return [event for event in events if event["cat"] in GPU_WORK]


def busy_us(events: Sequence[dict]) -> float:
    """Return the microseconds in which at least one of these events was on the GPU."""
    busy, until = 0.0, float("-inf")
    for begin, duration in sorted((event["ts"], event["dur"]) for event in events):
        busy += max(0.0, begin + duration - max(begin, until))
        until = max(until, begin + duration)
    return busy
