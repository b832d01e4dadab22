"""Random requests and the answers that one server gives to them, for servers that must answer the same."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy
import requests
from serving.server import Server

LENGTHS = (1, 2, 5, 40, *(end + by for end in (128, 256, 512, 768) for by in (-1, 0, 1)), 300, 900, 1030)
TIMEOUT_S = 400


class Case(NamedTuple):
    """A prompt and how it is sampled."""

    prompt: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]

    def body(self, rid: str, stream: bool) -> dict[str, Any]:
        sampling = {"temperature": 0, "ignore_eos": True, **dict(self.sampling)}
        body = {"input_ids": list(self.prompt), "sampling_params": sampling, "return_logprob": True}
        return {**body, "rid": rid, "stream": stream}


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    reason: str  # why it has ended: length, stop, abort

    def begins(self, whole: Answer) -> bool:
        count = len(self.tokens)
        return self.tokens == whole.tokens[:count] and self.logprobs == whole.logprobs[: len(self.logprobs)]


def answer_of(result: dict[str, Any]) -> Answer:
    meta = result["meta_info"]
    # The router reads and writes numbers with an error in the last bit of 64; a server's have 32.
    logprobs = [float(numpy.float32(entry[0])) for entry in meta.get("output_token_logprobs") or ()]
    return Answer(result["output_ids"], logprobs, (meta["finish_reason"] or {"type": "none"})["type"])


def drawn(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 990) for _ in range(count))


def drawn_sampling(rng: random.Random, drafts: bool) -> tuple[tuple[str, Any], ...]:
    """Draw parameters that one server and two answer alike: with drafts, a seed is refused."""
    tokens = ("max_new_tokens", rng.choice((1, 2, 4, 8, 16)))
    kind = rng.random()
    if kind < 0.6 or (drafts and kind < 0.8):
        return (tokens,)
    if kind < 0.8:
        return (tokens, ("temperature", 0.8), ("sampling_seed", rng.randrange(1000)))
    if kind < 0.9:
        return (tokens, ("frequency_penalty", 0.5), ("repetition_penalty", 1.1))
    return (tokens, ("presence_penalty", 1.5))


def ask(url: str, case: Case, rid: str) -> Answer:
    response = requests.post(f"{url}/generate", json=case.body(rid, False), timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return answer_of(response.json())


def answered_cases(
    one: Server, rng: random.Random, singles: int, conversations: int, drafts: bool
) -> dict[Case, Answer]:
    """Return cases with the answers of one server: single prompts, and conversations of three turns, some of which stop
    at a token that the answer has at a place from the first to the last."""

    def answered(case: Case) -> Answer:
        return ask(one.url, case, f"one-{random.random()}")

    def single(seed: int) -> list[tuple[Case, Answer]]:
        own = random.Random(seed)
        case = Case(drawn(own, own.choice(LENGTHS)), drawn_sampling(own, drafts))
        found = [(case, answered(case))]
        if own.random() < 0.2:
            case = case._replace(sampling=(*case.sampling, ("stop_token_ids", (own.choice(found[0][1].tokens),))))
            found.append((case, answered(case)))
        return found

    def conversation(seed: int) -> list[tuple[Case, Answer]]:
        own, found = random.Random(seed), []
        prompt = drawn(own, own.choice((200, 300, 500)))
        for _ in range(3):
            case = Case(prompt, (("max_new_tokens", own.choice((20, 40, 80))),))
            found.append((case, answered(case)))
            prompt = (*prompt, *found[-1][1].tokens, *drawn(own, own.choice((5, 60, 150))))
        return found

    works = [single] * singles + [conversation] * conversations
    rng.shuffle(works)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda work, seed: work(seed), works, range(len(works))))
    return dict(itertools.chain(*found))
