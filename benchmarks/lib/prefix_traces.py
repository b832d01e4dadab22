"""Request traces of the prefix simulation, replayed on an engine and on an unbounded cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lib.prefix_replay import PAGE, ReplayEngine, Running


class Bound:
    """An unbounded cache that reuses whole pages: the upper bound of any policy."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def _chain(self, tokens: Sequence[int], pages: int) -> list[int]:
        chain, digest = [], 0
        for page in range(pages):
            digest = hash((digest, tuple(tokens[page * PAGE : (page + 1) * PAGE])))
            chain.append(digest)
        return chain

    def hit(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens that it would reuse."""
        pages = 0
        for digest in self._chain(prompt, (len(prompt) - 1) // PAGE):
            if digest not in self._seen:
                break
            pages += 1
        return pages * PAGE

    def keep(self, tokens: Sequence[int]) -> None:
        """Add computed tokens to the cache."""
        self._seen.update(self._chain(tokens, len(tokens) // PAGE))


class Trace:
    """Replays a scenario on one engine and records the bound's hits next to the engine's."""

    def __init__(self, engine: ReplayEngine, seed: int) -> None:
        self.engine, self.rng, self.bound = engine, random.Random(seed), Bound()
        self.measuring = True
        self.hits: list[int] = []
        self.bounds: list[int] = []
        self.prompts: list[int] = []

    def tokens(self, count: int) -> list[int]:
        """Return fresh random tokens."""
        return [self.rng.randrange(1 << 17) for _ in range(count)]

    def start(self, prompt: list[int]) -> Running:
        """Prefill a request."""
        running = self.engine.start(prompt)
        if self.measuring:
            self.hits.append(running.hit_tokens)
            self.bounds.append(self.bound.hit(prompt))
            self.prompts.append(len(prompt))
        self.bound.keep(prompt)
        return running

    def finish(self, running: Running, output_tokens: int) -> list[int]:
        """Decode and finish a request; return the whole conversation."""
        self.engine.decode(running, self.tokens(output_tokens))
        self.engine.finish(running)
        whole = [*running.req.origin_input_ids, *running.req.output_ids]
        self.bound.keep(whole[:-1])
        return whole

    def run(self, prompt: list[int], output_tokens: int) -> list[int]:
        """Run one request alone."""
        return self.finish(self.start(prompt), output_tokens)


def retention(trace: Trace, small: bool, batches: int = 2) -> None:
    """32 distinct prefixes of 4K tokens, 16 at a time, each with its own question; measured in the second pass."""
    batch = 4 if small else 16
    prefixes = [trace.tokens(4096) for _ in range(batches * batch)]
    for second in (False, True):
        trace.measuring = second
        for first in range(0, len(prefixes), batch):
            running = [trace.start(p + trace.tokens(200)) for p in prefixes[first : first + batch]]
            for request in running:
                trace.finish(request, 64)


def retention_of_one_batch(trace: Trace, small: bool) -> None:
    """`retention` with 16 prefixes: half the load."""
    retention(trace, small, batches=1)


def alternation(trace: Trace, small: bool) -> None:
    """Two long sessions that alternate; measured from the second visit of each."""
    length = 8_000 if small else 56_000
    sessions = [trace.tokens(length), trace.tokens(length)]
    for visit in range(3 if small else 6):
        trace.measuring = visit > 0
        sessions = [trace.run(s + trace.tokens(300), 200) for s in sessions]


def agent_loop(trace: Trace, small: bool) -> None:
    """Four interleaved agents with 30 turns each: a turn appends 50-800 tokens to the whole history."""
    histories = [trace.tokens(1500) for _ in range(4)]
    for _turn in range(5 if small else 30):
        for i in range(4):
            prompt = histories[i] + trace.tokens(trace.rng.randint(50, 800))
            histories[i] = trace.run(prompt, trace.rng.randint(20, 300))


def volatile_tail(trace: Trace, small: bool) -> None:
    """A 6,000-token prefix whose last 0, 200, 700 or 1,500 tokens differ in each request, ten requests each."""
    for changed in (0, 200, 700, 1500):
        prefix = trace.tokens(6000)
        for _ in range(3 if small else 10):
            kept = len(prefix) - changed
            trace.run(prefix[:kept] + trace.tokens(changed) + trace.tokens(60), 40)


def churn(trace: Trace, small: bool) -> None:
    """48 agents, of which a random one makes a turn: their histories exceed either cache."""
    agents = 12 if small else 48
    histories = [trace.tokens(trace.rng.randint(1000, 6000)) for _ in range(agents)]
    for _ in range(60 if small else 500):
        i = min(agents - 1, int(trace.rng.expovariate(6.0 / agents)))
        prompt = histories[i] + trace.tokens(trace.rng.randint(50, 800))
        histories[i] = trace.run(prompt, trace.rng.randint(20, 300))[:24_000]


SCENARIOS: dict[str, Callable[[Trace, bool], None]] = {
    "retention": retention,
    "retention / 2": retention_of_one_batch,
    "alternation": alternation,
    "agent loop": agent_loop,
    "volatile tail": volatile_tail,
    "churn": churn,
}
