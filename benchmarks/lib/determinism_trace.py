"""Checks over HTTP that a running server is deterministic: a request's answer has the same bits whatever else the
server does.

The comparison covers every output token, its log-probability and the five likeliest tokens with theirs (JSON keeps all
bits of an fp32). The reference is the request alone, from an empty cache.

    cold          alone and cold, again
    hit           after itself; its tail restored from the device, and from the host after other requests evicted it
    split         after two other requests that share a part of its prefix
    evicted       after as many other tokens as the pool holds
    continued     its own first output tokens as part of the prompt, cold and after itself: a prefill computes the bits
                  that decode computes
    batch         with requests of other lengths, several at once, in chunks that depend on the batch
    trace         random requests over a tree of prefixes, greedy and sampled with a seed, several at a time; some
                  clients disconnect in mid-stream, and the cache is flushed now and then

`determinism_gpu.py` starts the servers; tests run this on a CPU server, and on one with planted faults.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.http_client import HttpClient, new_session, require_ok

TOP = 5
SHOWN = 20
"""Number of mismatches that a report describes."""
PAGE = 256


@dataclass(frozen=True)
class Request:
    """One request of a client."""

    prompt: tuple[int, ...]
    new_tokens: int
    seed: int | None = None
    """None for greedy sampling."""
    limits: tuple[tuple[str, float], ...] = ()
    """temperature, top_p and top_k of a sampled request."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body of a POST to /generate."""
        sampling: dict[str, Any] = {"max_new_tokens": self.new_tokens, "ignore_eos": True, "temperature": 0.0}
        if self.seed is not None:
            sampling |= {**dict(self.limits), "sampling_seed": self.seed}
        return {
            "input_ids": list(self.prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": TOP,
        }


@dataclass(frozen=True)
class Answer:
    """The part of an answer that must be equal, and how many tokens of the prompt were cached."""

    tokens: tuple[tuple[int, float, tuple[tuple[float, int], ...]], ...]  # id, log-probability, the likeliest tokens
    hit_tokens: int = 0
    tier: str | None = None

    @classmethod
    def of(cls, result: dict[str, Any]) -> Answer:
        """Return the answer in a /generate result."""
        meta = result["meta_info"]
        tops = meta["output_top_logprobs"]
        tokens = tuple(
            (token, logprob, tuple((value, other) for value, other, *_ in top))
            for (logprob, token, *_), top in zip(meta["output_token_logprobs"], tops, strict=True)
        )
        report = (meta.get("prefix_cache") or [{}])[0]
        return cls(tokens, int(meta.get("cached_tokens") or 0), report.get("tail_from"))

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the output tokens."""
        return tuple(token for token, _, _ in self.tokens)


@dataclass
class Findings:
    """Counts of comparisons and of mismatches."""

    compared: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """How often each intended event happened: hits by tier, disconnects, flushes."""

    def compare(self, kind: str, request: Request, expected: Answer, got: Answer) -> None:
        """Count a comparison; keep the first mismatches."""
        self.compared[kind] += 1
        if got.hit_tokens:
            self.seen[f"hit {got.tier or 'unknown'}"] += 1
        if expected.tokens == got.tokens:
            return
        self.mismatches[kind] += 1
        if len(self.first) < SHOWN:
            pairs = zip(expected.tokens, got.tokens, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected.tokens), len(got.tokens)))
            shown = {name: a.tokens[place : place + 1] for name, a in (("expected", expected), ("got", got))}
            of = {"kind": kind, "prompt_tokens": len(request.prompt), "seed": request.seed, "hit": got.hit_tokens}
            self.first.append({**of, "output_token": place, **shown})

    def named(self, work: str) -> Findings:
        """Return a copy whose kinds have the name of a work in front."""
        compared, mismatches = (
            Counter({f"{work} {kind}": n for kind, n in counts.items()}) for counts in (self.compared, self.mismatches)
        )
        return Findings(compared, mismatches, [{**m, "kind": f"{work} {m['kind']}"} for m in self.first], self.seen)

    def add(self, other: Findings) -> None:
        """Add the counts of another server."""
        for name in ("compared", "mismatches", "seen"):
            getattr(self, name).update(getattr(other, name))
        self.first = (self.first + other.first)[:SHOWN]

    @classmethod
    def from_json(cls, result: dict[str, Any]) -> Findings:
        """Return what `as_json` wrote."""
        compared, mismatches = ({kind: n[i] for kind, n in result["by_kind"].items()} for i in range(2))
        return cls(Counter(compared), Counter(mismatches), list(result["first_mismatches"]), Counter(result["seen"]))

    def as_json(self) -> dict[str, Any]:
        """Return the counts for a file."""
        return {
            "compared": self.compared.total(),
            "mismatches": self.mismatches.total(),
            "by_kind": {kind: [count, self.mismatches[kind]] for kind, count in sorted(self.compared.items())},
            "first_mismatches": self.first,
            "seen": dict(sorted(self.seen.items())),
        }


@dataclass(frozen=True)
class Sizes:
    """How many requests a server is asked, and how long they are."""

    lengths: tuple[int, ...]
    """Lengths of the sweep's prompts."""
    new_tokens: int
    batches: tuple[int, ...]
    """Numbers of requests at once."""
    pool_tokens: int
    """Tokens that the server's pool holds."""
    displaced: int
    """Number of short prompts whose tails fill all device slots."""
    requests: int
    """Number of requests of the trace; the number of different requests is `repeats` times smaller."""
    at_once: int
    longest: int
    """Longest prompt of the trace."""
    repeats: int = 5
    """How often each request of the trace is asked, in the mean."""
    first_id: int = 10
    last_id: int = 1000
    sampled: bool = True
    """Whether some requests of the trace are sampled with seeds."""
    seed: int = 0


class Client(HttpClient):
    """Sends requests of a trace, and reads their answers."""

    async def ask(self, request: Request) -> Answer:
        """Return the answer of one request.

        Raises:
            RuntimeError: the server answered with an error; its text.
        """
        async with self.session.post(f"{self.url}/generate", json=request.body()) as response:
            await require_ok(response)
            return Answer.of(await response.json())

    async def leave(self, request: Request, events: int) -> None:
        """Send a request and disconnect after `events` events of its stream."""
        async with self.session.post(f"{self.url}/generate", json=request.body() | {"stream": True}) as response:
            async for line in response.content:
                events -= line.startswith(b"data:")
                if events <= 0:
                    response.close()
                    return


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """Yield a client of the server at `url`."""
    async with new_session() as session:
        yield Client(session, url)


References = dict[Request, Answer]


def write_references(known: References, file: Path) -> None:
    """Write references to a file for `read_references`."""
    file.write_text(json.dumps([[asdict(request), answer.tokens] for request, answer in known.items()]))


def read_references(file: Path) -> References:
    """Return the references that `write_references` wrote, bitwise equal."""

    def tuples(x: object) -> Any:  # noqa: ANN401 - only lists are changed
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    return {
        Request(**{name: tuples(value) for name, value in request.items()}): Answer(tuples(tokens))
        for request, tokens in json.loads(file.read_text())
    }


async def cold(client: Client, request: Request, known: References) -> Answer:
    """Return the request's reference: from `known`, or computed alone and cold now."""
    if request not in known:
        await client.flush()
        known[request] = await client.ask(request)
    return known[request]


async def sweep(client: Client, sizes: Sizes, known: References) -> Findings:
    """Run all comparisons except the trace's, on one prompt of each length."""
    found, rng = Findings(), random.Random(sizes.seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(sizes.first_id, sizes.last_id) for _ in range(count))

    sweep = [Request(some(length), sizes.new_tokens) for length in sizes.lengths]
    references = {request: await cold(client, request, known) for request in sweep}

    async def check(kind: str, request: Request) -> None:
        found.compare(kind, request, references[request], await client.ask(request))

    for request in sweep:
        await client.flush()
        await check("cold", request)
        await check("hit", request)
        if len(request.prompt) > 2 * PAGE:
            await client.flush()
            cut = len(request.prompt) * 2 // 3
            for _ in range(2):
                await client.ask(Request(request.prompt[:cut] + some(PAGE), 2))
            await check("split", request)
        ids, cut = references[request].ids, sizes.new_tokens // 2
        rest = Request(request.prompt + ids[:cut], sizes.new_tokens - cut)
        expected = Answer(references[request].tokens[cut:])
        for again in (False, True):
            await client.flush()
            if again:
                await client.ask(request)
            found.compare("continued", rest, expected, await client.ask(rest))
    await client.flush()
    for request in sweep:
        await client.ask(request)
    for _ in range(sizes.displaced):
        await client.ask(Request(some(PAGE + 8), 1))
    for request in sweep:
        await check("hit", request)
    longest = max(sizes.lengths)
    for _ in range(-(-sizes.pool_tokens // longest)):
        await client.ask(Request(some(longest), 1))
    for request in sweep:
        await check("evicted", request)
    for size in sizes.batches:
        await client.flush()
        asked = [rng.choice(sweep) for _ in range(size)]
        lengths = [rng.randrange(1, sizes.longest) for _ in asked[::2]]
        beside = [Request(some(length), rng.randrange(1, 2 * sizes.new_tokens)) for length in lengths]
        answers = await asyncio.gather(*(client.ask(request) for request in (*asked, *beside)))
        for request, answer in zip(asked, answers[: len(asked)], strict=True):
            found.compare("batch", request, references[request], answer)
    return found


def requests_of_a_trace(sizes: Sizes) -> list[Request]:
    """Return different requests whose prompts are paths in a tree: they share prefixes and diverge at any position.

    With `sizes.sampled` off, the sampled requests are left out and the others stay the same, so that references of a
    server that answers both kinds apply.
    """
    rng, made = random.Random(sizes.seed + 1), []

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(sizes.first_id, sizes.last_id) for _ in range(count))

    for _ in range(max(1, sizes.requests // sizes.repeats)):
        begin: tuple[int, ...] = ()
        if made and rng.random() < 0.75:
            other = rng.choice(made).prompt
            begin = other[: rng.randrange(len(other) + 1)]
        own = some(1 + int(rng.random() ** 2 * (sizes.longest - 1)))
        prompt = (begin + own)[: sizes.longest]
        limits: tuple[tuple[str, float], ...] = ()
        if rng.random() < 0.4:
            limits = (("temperature", rng.choice([0.7, 1.5])), ("top_p", rng.choice([0.9, 1.0])))
            limits += (("top_k", rng.choice([5, 50, 1_000_000])),)
        made.append(Request(prompt, rng.randrange(1, 33), rng.randrange(2**31) if limits else None, limits))
    return [request for request in made if sizes.sampled or not request.limits]


async def trace(client: Client, sizes: Sizes, known: References) -> Findings:
    """Run the random trace in ten waves; the cache is flushed before every other wave."""
    found, rng, different = Findings(), random.Random(sizes.seed + 2), requests_of_a_trace(sizes)
    references = {request: await cold(client, request, known) for request in different}
    free = asyncio.Semaphore(sizes.at_once)

    async def one(request: Request, leaves_after: int | None) -> None:
        async with free:
            if leaves_after is not None:
                found.seen["left"] += 1
                await client.leave(request, leaves_after)
            else:
                found.compare("trace", request, references[request], await client.ask(request))

    for wave in range(10):
        if wave % 2 == 0:
            await client.flush()
            found.seen["flushed"] += 1
        asked = [rng.choice(different) for _ in range(-(-sizes.requests // 10))]
        leaves = [rng.randrange(1, 8) if rng.random() < 0.08 else None for _ in asked]
        await asyncio.gather(*(one(request, leaving) for request, leaving in zip(asked, leaves, strict=True)))
    return found


def prove(url: str, sizes: Sizes, known: References | None = None) -> Findings:
    """Run sweep and trace on the server at `url`. References are read from `known` and added to it."""

    async def main() -> Findings:
        async with connected(url) as client:
            references = {} if known is None else known
            found = await sweep(client, sizes, references)
            found.add(await trace(client, sizes, references))
            await client.flush()
            return found

    return asyncio.run(main())


def describe(found: Findings) -> Sequence[str]:
    """Return a report as lines of text."""
    result = found.as_json()
    lines = [f"{kind:12}{compared:7} compared{bad:6} not alike" for kind, (compared, bad) in result["by_kind"].items()]
    lines += [json.dumps(mismatch) for mismatch in found.first[:3]]
    return [*lines, "seen: " + ", ".join(f"{what} {count}" for what, count in result["seen"].items())]
