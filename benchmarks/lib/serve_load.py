"""Loads for a running SGLang server, sent as input ids to /generate: decode, prefill, answers of one length,
multi-turn, churn.

Prompts are random token ids, so a prefix is shared only where a load says so. Times are the client's: TTFT from the
request to its first token, ITL between tokens of a request (tokens that arrive together share the gap). Nothing here
depends on the server's code; `serve_ab.py` compares two servers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lib.http_client import HttpClient, new_session, require_ok

FIRST_ID, LAST_ID = 3, 129_000
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
SILENCE = "longest_silence_s"
"""Name of a figure that every load has, see `longest_silence`."""


@dataclass(frozen=True)
class Reply:
    """One request as the client saw it; times in seconds of one clock."""

    sent: float
    token_times: tuple[float, ...]  # arrival of each output token
    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    verify_steps: int = 0  # 0 without speculation

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]


class Client(HttpClient):
    """Streams /generate with greedy sampling."""

    async def generate(
        self,
        input_ids: Sequence[int],
        new_tokens: int,
        begun: Callable[[], object] | None = None,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> Reply:
        """Send one request and wait for its end; `begun` is called at its first token, `fields` are added to the body.

        Raises:
            RuntimeError: the server answered with an error; its text.
        """
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0.0}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True, **fields}
        sent, times, last = time.perf_counter(), [], b""
        async with self.session.post(f"{self.url}/generate", json=body) as response:
            await require_ok(response)
            async for line in response.content:
                # Tokens are only counted here: parsing every event would make the client the bottleneck of large
                # batches.
                found = COMPLETION_TOKENS.search(line)
                if found is not None:
                    now, last = time.perf_counter(), line
                    if begun is not None and not times:
                        begun()
                    begin, count = times[-1] if times else now, int(found[1]) - len(times)
                    times.extend(begin + (now - begin) * (i + 1) / count for i in range(count))
        if not times:
            raise RuntimeError(f"/generate ended without a token for a prompt of {len(input_ids)}")
        event = json.loads(last.decode().removeprefix("data:"))
        meta = event["meta_info"]
        ids = tuple(event["output_ids"])
        if len(ids) != len(times):
            raise RuntimeError(
                f"the last event has {len(ids)} of {len(times)} output ids: start the server without "
                "--incremental-streaming-output"
            )
        cached, steps = (int(meta.get(name) or 0) for name in ("cached_tokens", "spec_verify_ct"))
        return Reply(sent, tuple(times), len(input_ids), cached, ids, steps)


Load = Callable[[Client], Awaitable[dict[str, float]]]
"""Sends requests with a client and returns figures by name."""


def run(url: str, load: Load) -> dict[str, float]:
    """Run one load against a server, from an empty prefix cache."""

    async def main() -> dict[str, float]:
        async with new_session() as session:
            client = Client(session, url)
            await client.flush()
            return await load(client)

    return asyncio.run(main())


def longest_silence(replies: Sequence[Reply]) -> float:
    """Return the longest time in seconds without a token of any request while a request was waiting, such as a
    compilation in the server."""
    heard = sorted(moment for reply in replies for moment in (reply.sent, *reply.token_times))
    open_until = float("-inf")  # time of the last token of the requests sent so far
    silence, spans = 0.0, iter(sorted((reply.sent, reply.token_times[-1]) for reply in replies))
    next_span = next(spans, None)
    for earlier, later in itertools.pairwise(heard):
        while next_span is not None and next_span[0] <= earlier:
            open_until, next_span = max(open_until, next_span[1]), next(spans, None)
        if later <= open_until:
            silence = max(silence, later - earlier)
    return silence


def decode(requests: int, context: int, new_tokens: int, seed: int) -> Load:
    """Return a load of `requests` different prompts at once.

    tok_s counts the time in which all of them decode. tokens_a_step is a request's tokens a verify step, on a server
    that speculates.
    """

    async def load(client: Client) -> dict[str, float]:
        rng = random.Random(seed)
        prompts = [_ids(rng, context) for _ in range(requests)]
        replies = await asyncio.gather(*(client.generate(prompt, new_tokens) for prompt in prompts))
        begin = max(reply.token_times[0] for reply in replies)
        end = min(reply.token_times[-1] for reply in replies)
        if end <= begin:
            raise RuntimeError(f"{requests} requests never decoded at once: ask for more than {new_tokens} tokens each")
        steady = sum(begin < moment <= end for reply in replies for moment in reply.token_times)
        gaps = [b - a for reply in replies for a, b in itertools.pairwise(reply.token_times) if begin <= a and b <= end]
        figures = {"tok_s": steady / (end - begin), SILENCE: longest_silence(replies), **milliseconds("itl", gaps)}
        return figures | _tokens_a_step(replies)

    return load


def prefill(prompts: int, length: int, seed: int) -> Load:
    """Return a load of `prompts` different prompts at once, one new token each."""

    async def load(client: Client) -> dict[str, float]:
        rng = random.Random(seed)
        asked = [_ids(rng, length) for _ in range(prompts)]
        begin = time.perf_counter()
        replies = await asyncio.gather(*(client.generate(prompt, 1) for prompt in asked))
        seconds = max(reply.token_times[-1] for reply in replies) - begin
        return {
            "tok_s": prompts * length / seconds,
            SILENCE: longest_silence(replies),
            **milliseconds("ttft", [reply.ttft for reply in replies]),
        }

    return load


def answers(requests: int, prompt: int, new_tokens: int, seed: int) -> Load:
    """Return a load of `requests` different prompts at once, answered in full: the form in which others publish.

    tok_s counts prompts and answers from the first request to the last token, output_tok_s answers alone. tpot is a
    request's time a token after its first one.
    """

    async def load(client: Client) -> dict[str, float]:
        rng = random.Random(seed)
        asked = [_ids(rng, prompt) for _ in range(requests)]
        begin = time.perf_counter()
        replies = await asyncio.gather(*(client.generate(ids, new_tokens) for ids in asked))
        seconds = max(reply.token_times[-1] for reply in replies) - begin
        after_first = [(r.token_times[-1] - r.token_times[0]) / (new_tokens - 1) for r in replies]
        return {
            "tok_s": requests * (prompt + new_tokens) / seconds,
            "output_tok_s": requests * new_tokens / seconds,
            SILENCE: longest_silence(replies),
            **_tokens_a_step(replies),
            **milliseconds("ttft", [reply.ttft for reply in replies]),
            **milliseconds("tpot", after_first),
        }

    return load


def multi_turn(sessions: int, turns: int, prefixes: int, prefix: int, user: int, new_tokens: int, seed: int) -> Load:
    """Return a load of concurrent conversations. Conversations of one group begin with the same `prefix` tokens; every
    turn appends to the one before."""

    async def load(client: Client) -> dict[str, float]:
        rng = random.Random(seed)
        shared = [_ids(rng, prefix) for _ in range(prefixes)]
        users = [[_ids(rng, user) for _ in range(turns)] for _ in range(sessions)]

        async def conversation(index: int) -> list[Reply]:
            history, replies = list(shared[index % prefixes]), []
            for said in users[index]:
                history += said
                replies.append(await client.generate(history, new_tokens))
                history += replies[-1].output_ids
            return replies

        begin = time.perf_counter()
        replies = [r for found in await asyncio.gather(*map(conversation, range(sessions))) for r in found]
        return _served(replies, time.perf_counter() - begin)

    return load


def churn(sessions: int, rounds: int, prefix: int, user: int, new_tokens: int, at_once: int, seed: int) -> Load:
    """Return a load of returning agents: each session has its own prefix and makes a turn in every round, `at_once` at
    a time.

    The first round fills the cache and is not counted.
    """

    async def load(client: Client) -> dict[str, float]:
        rng = random.Random(seed)
        histories = [_ids(rng, prefix) for _ in range(sessions)]
        replies: list[Reply] = []
        begin = time.perf_counter()
        for round_number in range(rounds):
            if round_number == 1:
                replies, begin = [], time.perf_counter()
            users = [_ids(rng, user) for _ in range(sessions)]
            free = asyncio.Semaphore(at_once)

            async def turn(index: int, said: list[int], free: asyncio.Semaphore = free) -> Reply:
                async with free:
                    histories[index] += said
                    reply = await client.generate(histories[index], new_tokens)
                    histories[index] += reply.output_ids
                    return reply

            replies += await asyncio.gather(*(turn(i, said) for i, said in enumerate(users)))
        return _served(replies, time.perf_counter() - begin)

    return load


def _served(replies: Sequence[Reply], seconds: float) -> dict[str, float]:
    prompts, cached = (sum(getattr(r, name) for r in replies) for name in ("prompt_tokens", "cached_tokens"))
    return {
        "tok_s": sum(len(reply.token_times) for reply in replies) / seconds,
        "hit_rate": cached / prompts,
        "recomputed_tokens": prompts - cached,
        SILENCE: longest_silence(replies),
        **milliseconds("ttft", [reply.ttft for reply in replies]),
        **milliseconds("itl", [gap for reply in replies for gap in reply.gaps]),
    }


def _tokens_a_step(replies: Sequence[Reply]) -> dict[str, float]:
    steps = sum(reply.verify_steps for reply in replies)
    made = sum(len(reply.token_times) - 1 for reply in replies)  # prefill makes each request's first token
    return {"tokens_a_step": made / steps} if steps else {}


def milliseconds(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds, as `name`_p50 and `name`_p99; nothing of no times."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {f"{name}_p50": 1e3 * statistics.median(ordered), f"{name}_p99": 1e3 * p99}


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]
