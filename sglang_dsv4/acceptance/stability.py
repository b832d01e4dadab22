"""Item `stability`: hours of mixed requests at a time, some of them abandoned, and a probe that must not change."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_dsv4.acceptance.calls import TOOLS, fault
from sglang_dsv4.acceptance.client import Answer, Refused, Server, Unreachable
from sglang_dsv4.acceptance.plan import Plan
from sglang_dsv4.acceptance.report import Result, green, not_judged, red
from sglang_dsv4.acceptance.sameness import difference, filler
from sglang_dsv4.acceptance.served import Served

NAME = "stability"
PROBE_S = 30
"""Seconds between two probes."""
DRAIN_S = 60
"""Seconds in which no request may be running any more after the last one."""
BUSY = (429, 503)
"""Statuses by which a server turns requests away under load."""
PROBE = {"max_tokens": 16, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
RUNNING = re.compile(r"^sglang:num_(?:running|queue)_reqs(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)


@dataclass
class Log:
    """Requests done and faults seen by the threads of the load."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def _whole(server: Server, draw: random.Random) -> str:
    server.chat(f"{filler(draw.randrange(1, 60), draw)} Go on.", max_tokens=draw.randrange(1, 64))
    return ""


def _long(server: Server, draw: random.Random) -> str:
    server.stream(f"{filler(draw.randrange(500, 2500), draw)} Go on.", max_tokens=8)
    return ""


def _conversation(server: Server, draw: random.Random) -> str:
    turns = [{"role": "user", "content": f"{filler(draw.randrange(20, 400), draw)} Go on."}]
    for _ in range(3):
        answer = server.chat(turns, max_tokens=16)
        turns += [{"role": "assistant", "content": answer.text or "."}, {"role": "user", "content": "And then?"}]
    return ""


def _calls(server: Server, draw: random.Random) -> str:
    send = draw.choice((server.chat, server.stream))
    return fault(send(f"Search for {filler(2, draw)}.", tools=list(TOOLS), max_tokens=64))


def _abandoned(server: Server, draw: random.Random) -> str:
    chunks = server.pieces(f"{filler(draw.randrange(1, 1500), draw)} Go on.", max_tokens=512, ignore_eos=True)
    for _, _ in zip(chunks, range(draw.randrange(1, 12)), strict=False):
        pass
    chunks.close()
    return ""


KINDS: dict[str, Callable[[Server, random.Random], str]] = {
    "short": _whole,
    "long": _long,
    "conversation": _conversation,
    "tools": _calls,
    "abandoned": _abandoned,
}


def _work(server: Server, log: Log, draw: random.Random, until: float) -> None:
    """Send requests of random kinds until a time; a fault is written down and followed by the next request."""
    while time.monotonic() < until:
        kind = draw.choice(list(KINDS))
        try:
            text = KINDS[kind](server, draw)
        except Refused as error:
            with log.lock:
                if error.status in BUSY:
                    log.busy += 1
                else:
                    log.faults.append(f"{kind}: {error}")
            time.sleep(1)
            continue
        except Unreachable as error:
            with log.lock:
                log.faults.append(f"{kind}: {error}")
            time.sleep(5)
            continue
        with log.lock:
            log.done[kind] += 1
            if text:
                log.faults.append(f"{kind}: {text}")


def check(server: Server, served: Served, plan: Plan) -> list[Result]:
    """The item: red if a request fails, if the probe's answer changes although its bits are promised, or if requests
    are still running a minute after the end."""
    if not plan.hours:
        return [not_judged(NAME, "not asked for (--hours)")]
    probe = f"{filler(300, random.Random(plan.seed))} Go on."
    first = server.chat(probe, **PROBE)
    log, until = Log(), time.monotonic() + plan.hours * 3600
    threads = [
        threading.Thread(target=_work, args=(server, log, random.Random(f"{plan.seed} {i}"), until), daemon=True)
        for i in range(server.concurrency)
    ]
    for thread in threads:
        thread.start()
    changed, times = _probe(server, probe, first, until)
    for thread in threads:
        thread.join(server.timeout_s)
    hanging = sum(thread.is_alive() for thread in threads)
    faults = log.faults + (
        [f"{hanging} requests had no answer {server.timeout_s:.0f} s after the end"] if hanging else []
    )
    faults += _left(server)
    if served.promise is not None:
        faults += changed
    made = ", ".join(f"{count} {kind}" for kind, count in sorted(log.done.items()))
    summary = f"{plan.hours:g} hours, {server.concurrency} at a time: {made or 'no request done'}"
    notes = [f"{log.busy} requests were turned away ({' or '.join(map(str, BUSY))})"] if log.busy else []
    if served.promise is None and changed:
        notes.append(f"the probe's answer changed {len(changed)} times, as it may: its bits are not promised")
    if len(times) >= 4:
        half = len(times) // 2
        early, late = (statistics.median(part) for part in (times[:half], times[half:]))
        notes.append(f"the probe took {early:.2f} s in the first half, {late:.2f} s in the second (medians)")
    figures = {"requests": dict(log.done), "faults": len(faults), "busy": log.busy, "probes": len(times)}
    return [(red if faults or not log.done else green)(NAME, summary, faults + notes, **figures)]


def _probe(server: Server, text: str, first: Answer, until: float) -> tuple[list[str], list[float]]:
    """Ask the probe until a time, at least once; return (the changes of its answer, seconds that each one took)."""
    changed, times = [], []
    while True:
        begin = time.monotonic()
        try:
            found = difference(f"probe {len(times)}", first, server.chat(text, **PROBE))
            times.append(time.monotonic() - begin)
            if found is not None:
                changed.append(f"{found.where}: {found.text}")
        except (Refused, Unreachable) as error:
            changed.append(f"probe: {error}")
        left = until - time.monotonic()
        if left <= 0:
            return changed, times
        time.sleep(min(left, PROBE_S))


def _left(server: Server) -> list[str]:
    """The fault that requests run on after the end, by the server's metrics; empty if it has none."""
    deadline = time.monotonic() + DRAIN_S
    while True:
        try:
            text = server.text("/metrics")
        except Refused:
            return []
        except Unreachable as error:
            return [str(error)]
        running = sum(float(value) for value in RUNNING.findall(text))
        if not running:
            return []
        if time.monotonic() > deadline:
            return [f"{running:g} requests are running or queued {DRAIN_S} s after the end, by /metrics"]
        time.sleep(1)
