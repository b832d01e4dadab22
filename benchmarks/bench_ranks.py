"""Prefix hits of conversations over two caches: the rank of a request chosen by us, by SGLang, or by a router.

    python benchmarks/bench_ranks.py --model trained --out benchmarks/results/ranks_cpu.json [--requests 4]
        [--shared 256 1024] [--conversations 8] [--turns 4] [--seeds 1 2]
        [--contenders one prefix in_turn router router_of_ranks]

No GPU is needed: the figures are of the choice, and not of the machine. Contenders, with equal caches in sum:

    one               one server with twice the cache: the most that two can reach
    prefix            `--dp-size 2`, each request to the rank that `sglang_dsv4.prefix.rank_choice` chooses
    in_turn           the same server, each request to the next rank, as SGLang chooses by default
    router            two servers behind `sglang-router --policy cache_aware`
    router_of_ranks   the router with --dp-aware in front of the server of `prefix`: it chooses the rank

The router needs `pip install --no-deps sglang-router==0.3.2`. All conversations begin with the same --shared tokens
and have their turns in a random order, --requests at once; the caches hold half of the conversations' own tokens in the
end, and the shared ones. Rows: `hit_rate` (cached tokens over prompt tokens), `busier` (share of the requests that the
busier cache got, 0.5 at best), `one_rank` (share of the conversations that stayed on one), mean over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lib.http_client import HttpClient, new_session, require_ok
from lib.servers import Server, running
from lib.versions import versions

ONE, PREFIX, IN_TURN, ROUTER, ROUTER_OF_RANKS = "one", "prefix", "in_turn", "router", "router_of_ranks"
CONTENDERS = (ONE, PREFIX, IN_TURN, ROUTER, ROUTER_OF_RANKS)
TURN_TOKENS, NEW_TOKENS, LAST_ID = 600, 6, 900
PAGE_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """Conversations with a common beginning."""

    conversations: int
    turns: int
    requests: int  # at once
    shared: int  # tokens
    seed: int

    @property
    def pages(self) -> int:
        """Pages of one of two caches: each holds the shared tokens, both together half of the others in the end."""
        tokens = self.conversations * self.turns * (TURN_TOKENS + NEW_TOKENS)
        return (self.shared + tokens // 4) // PAGE_TOKENS


@dataclass(frozen=True)
class Turn:
    """One request of a conversation, answered."""

    conversation: int
    prompt_tokens: int
    cached_tokens: int
    place: str  # server and rank


async def converse(load: Load, url: str, rank_of: Callable[[int], int | None]) -> list[Turn]:
    """Hold the conversations; `rank_of` gives the rank of the request with a number, None to leave it open."""
    rng, number = random.Random(load.seed), 0
    ids = lambda count: [rng.randrange(10, LAST_ID) for _ in range(count)]  # noqa: E731
    shared, turns = ids(load.shared), []
    histories = [list(shared) for _ in range(load.conversations)]
    order = [i for i in range(load.conversations) for _ in range(load.turns)]
    rng.shuffle(order)
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    async with new_session() as session:

        async def turn(i: int, rank: int | None) -> None:
            body = {"input_ids": histories[i], "sampling_params": sampling}
            body |= {} if rank is None else {"routed_dp_rank": rank}
            async with session.post(f"{url}/generate", json=body) as response:
                await require_ok(response)
                answer = await response.json()
            meta = answer["meta_info"]
            place = f"{meta['weight_version']} {meta.get('dp_rank') or 0}"
            turns.append(Turn(i, len(histories[i]), meta["cached_tokens"], place))
            histories[i] += answer["output_ids"]

        while order:
            now = []
            while order and len(now) < load.requests and order[-1] not in now:  # one turn of a conversation at a time
                now.append(order.pop())
            for i in now:
                histories[i] += ids(TURN_TOKENS)
            await asyncio.gather(*(turn(i, rank_of(number + place)) for place, i in enumerate(now)))
            number += len(now)
    return turns


def figures_of(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the figures of one run, see the module."""
    prompted = sum(turn.prompt_tokens for turn in turns)
    places = [turn.place for turn in turns]
    of_conversation: dict[int, set[str]] = {}
    for turn in turns:
        of_conversation.setdefault(turn.conversation, set()).add(turn.place)
    return {
        "hit_rate": sum(turn.cached_tokens for turn in turns) / prompted,
        "busier": max(places.count(place) for place in set(places)) / len(places),
        "one_rank": sum(len(found) == 1 for found in of_conversation.values()) / len(of_conversation),
    }


def measure(
    load: Load, url: str, servers: Sequence[Server], rank_of: Callable[[int], int | None] = lambda number: None
) -> dict[str, float]:
    """Return the figures of one load, sent to `url`, from empty caches of the servers behind it."""
    for server in servers:
        asyncio.run(_flush(server.url))
    return figures_of(asyncio.run(converse(load, url, rank_of)))


async def _flush(url: str) -> None:
    async with new_session() as session:
        await HttpClient(session, url).flush()


def flags(pages: int, replicas: int, name: str) -> list[str]:
    """Return the flags of a server whose replicas have caches of `pages` pages each; answers carry its name."""
    return [
        *("--dp-size", str(replicas), "--max-total-tokens", str(PAGE_TOKENS * (pages + 2))),
        *("--max-running-requests", "8", "--chunked-prefill-size", "512", "--sleep-on-idle"),
        *("--weight-version", name),
    ]


@contextlib.contextmanager
def routed(servers: Sequence[Server], port: int, log: Path, *more: str) -> Iterator[str]:
    """Start the router in front of servers; yield its URL.

    Raises:
        RuntimeError: it did not come up within a minute.
    """
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware", *more]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    command += ["--worker-urls", *(server.url for server in servers)]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not come up:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def compare(model: Path, loads: Sequence[Load], contenders: Sequence[str], port: int, logs: Path) -> list[dict]:
    """Return a row for each contender and load."""
    pages, rows = max(load.pages for load in loads), []

    def of(contender: str, run: Callable[[Load], dict[str, float]]) -> None:
        for load in loads:
            about = {"contender": contender, "requests": load.requests, "shared": load.shared, "seed": load.seed}
            rows.append({**about, **run(load)})
            print(rows[-1], flush=True)

    def started(name: str, pages: int, replicas: int, offset: int) -> contextlib.AbstractContextManager[Server]:
        return running("ours", model, flags(pages, replicas, name), port + offset, logs / f"{name}.log")

    if ONE in contenders:
        with started("one", 2 * pages, 1, 0) as server:
            of(ONE, lambda load: measure(load, server.url, [server]))
    if {PREFIX, IN_TURN, ROUTER_OF_RANKS} & set(contenders):
        with started("ranks", pages, 2, 10) as server:
            if PREFIX in contenders:
                of(PREFIX, lambda load: measure(load, server.url, [server]))
            if IN_TURN in contenders:
                of(IN_TURN, lambda load: measure(load, server.url, [server], lambda number: number % 2))
            if ROUTER_OF_RANKS in contenders:
                with routed([server], port + 20, logs / "router_of_ranks.log", "--dp-aware") as url:
                    of(ROUTER_OF_RANKS, lambda load: measure(load, url, [server]))
    if ROUTER in contenders:
        with started("first", pages, 1, 30) as first, started("second", pages, 1, 40) as second:
            with routed([first, second], port + 50, logs / "router.log") as url:
                of(ROUTER, lambda load: measure(load, url, [first, second]))
    return rows


def means(rows: Sequence[dict]) -> list[dict]:
    """Return rows with the mean over the seeds."""
    alike: dict[tuple, list[dict]] = {}
    for row in rows:
        alike.setdefault(tuple((name, row[name]) for name in ("contender", "requests", "shared")), []).append(row)
    names = ("hit_rate", "busier", "one_rank")
    return [
        {**dict(key), **{name: round(statistics.mean(row[name] for row in same), 4) for name in names}}
        for key, same in alike.items()
    ]


def main() -> int:
    """Compare; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--requests", type=int, nargs="+", default=[4], help="at once")
    parser.add_argument("--shared", type=int, nargs="+", default=[256, 1024], help="tokens that all begin with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--port", type=int, default=30_250)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    given = parser.parse_args()
    if {ROUTER, ROUTER_OF_RANKS} & set(given.contenders) and find_spec("sglang_router") is None:
        parser.error("the router is missing: pip install --no-deps sglang-router==0.3.2")
    ways = itertools.product(given.requests, given.shared, given.seeds)
    loads = [Load(given.conversations, given.turns, *way) for way in ways]
    rows = means(compare(given.model, loads, given.contenders, given.port, given.logs))
    for row in rows:
        print(
            f"{row['contender']:>16}, {row['requests']} at once, {row['shared']} shared: {row['hit_rate']:.3f} of the "
            f"tokens hit, {row['busier']:.2f} of the requests on one cache"
        )
    about = {"conversations": given.conversations, "turns": given.turns, "seeds": given.seeds}
    about |= {"pages": max(load.pages for load in loads), "turn_tokens": TURN_TOKENS, "versions": versions()}
    result = {"about": about, "rows": rows}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
