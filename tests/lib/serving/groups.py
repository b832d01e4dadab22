"""Servers with attention data parallelism: their flags, and requests to one group of ranks."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import Any

import requests
from serving.server import SLEEP_ON_IDLE, VOCAB_SIZE, Server, output_logprobs
from serving.speculation import ALGORITHMS, HOST_TIERS, drafting_flags

from sglang_dsv4.cpu.random_checkpoint import PRESETS, Shape

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "16", SLEEP_ON_IDLE, "--enable-metrics")
DETERMINISTIC = ("--enable-deterministic-inference",)
KINDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "deterministic": DETERMINISTIC,
    "EAGLE": (*drafting_flags("EAGLE"), *DETERMINISTIC),
    "DSPARK": (*drafting_flags("DSPARK"), *DETERMINISTIC),
    "tiers": (*HOST_TIERS, *DETERMINISTIC),
    "tiers-fp8": ("--kv-cache-dtype", "fp8_e4m3", *HOST_TIERS, *DETERMINISTIC),
    "tiers-EAGLE": (*drafting_flags("EAGLE"), *HOST_TIERS, *DETERMINISTIC),
    "tiers-DSPARK": (*drafting_flags("DSPARK"), *HOST_TIERS, *DETERMINISTIC),
    "crowded": ("--enable-mixed-chunk", *DETERMINISTIC),
    "crowded-EAGLE": (*drafting_flags("EAGLE"), *DETERMINISTIC),
}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}


def is_crowded(kind: str) -> bool:
    """Whether requests are retracted now and then; without drafts, decode steps also join prefills."""
    return kind.startswith("crowded")


def has_tiers(kind: str) -> bool:
    """Whether prefixes are stored in host memory and files, too."""
    return kind.startswith("tiers")


def environment(kind: str) -> dict[str, str]:
    """Return the environment of a server in addition to others."""
    return RETRACTING if is_crowded(kind) else {}


def algorithm(kind: str) -> str | None:
    """Return the algorithm by which a kind of server drafts."""
    name = kind.rpartition("-")[2]
    return name if name in ALGORITHMS else None


def shape_for(kind: str, ranks: int) -> Shape:
    """Return the checkpoint's shape: experts that `ranks` ranks can share, and the draft's kind."""
    drafting = algorithm(kind)
    shape = ALGORITHMS[drafting][0] if drafting else PRESETS["tiny"]
    return with_fields(shape, moe_intermediate_size=max(256, 128 * ranks))


def group_flags(kind: str, ranks: int, groups: int) -> tuple[str, ...]:
    """Return the flags of a server with `groups` groups of `ranks // groups` ranks; chunks of 256 tokens a group, or
    512 for a crowded one: a running request takes a token of a mixed chunk, of which whole pages are left."""
    chunk = ("--chunked-prefill-size", str((512 if is_crowded(kind) else 256) * groups))
    return ("--tp-size", str(ranks), "--attn-dp-size", str(groups), *chunk, *FLAGS, *KINDS[kind])


def some(seed: int, count: int) -> list[int]:
    """Return `count` random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB_SIZE - 30) for _ in range(count)]


@dataclass(frozen=True)
class Question:
    """A prompt with its sampling parameters."""

    tokens: tuple[int, ...]
    new: int
    parameters: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = True  # SGLang mixes no decode steps with prefills of requests that ask for log-probabilities

    def ask(self, server: Server, group: int | None) -> dict[str, Any]:
        """Return the answer of a group of ranks."""
        sampling = {"max_new_tokens": self.new, "temperature": 0, "ignore_eos": True, **self.parameters}
        body = {"input_ids": list(self.tokens), "sampling_params": sampling, "return_logprob": self.logprobs}
        response = requests.post(f"{server.url}/generate", json=body | {"routed_dp_rank": group}, timeout=300)
        assert response.status_code == 200, response.text
        result = response.json()
        assert group is None or result["meta_info"]["dp_rank"] == group
        return result


DRAWN = {"temperature": 0.8, "sampling_seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
LONG = Question(tuple(some(30, 1100)), 6)
QUESTIONS = (
    Question(tuple(some(1, 5)), 12),
    Question(tuple(some(2, 300)), 5),
    Question(tuple(some(3, 640)), 9, DRAWN),
    Question(tuple(some(4, 131)), 16, {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 3}),
)
"""Shorter and longer than a chunk; greedy and drawn."""


def questions(kind: str) -> list[Question]:
    """Return the questions for a kind of server: one that drafts has no seeds, so that its answers are greedy; a
    crowded one answers at length, since requests are retracted while no prompt is computed."""
    drawing = ("temperature", "top_p", "sampling_seed") if algorithm(kind) else ()
    more = 30 if is_crowded(kind) else 0
    return [
        with_fields(
            one,
            new=one.new + more,
            logprobs=kind != "crowded",
            parameters={name: value for name, value in one.parameters.items() if name not in drawing},
        )
        for one in QUESTIONS
    ]


def bits(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the tokens of an answer and their log-probabilities, where the question has asked for them."""
    has_logprobs = "output_token_logprobs" in result["meta_info"]
    return result["output_ids"], output_logprobs(result) if has_logprobs else []


def at_once(server: Server, asked: list[tuple[Question, int]]) -> list[dict[str, Any]]:
    """Return the answers to questions that are asked at the same time, each of a group."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: one[0].ask(server, one[1]), asked))
