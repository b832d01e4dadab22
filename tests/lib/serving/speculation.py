"""Servers that draft: their flags, an oracle for their proposals, and comparison of their answers."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving import oracle_drafts
from serving.server import (
    MAX_RUNNING,
    POOL_TOKENS,
    SLEEP_ON_IDLE,
    Server,
    output_logprobs,
)

from sglang_dsv4.cpu.random_checkpoint import PRESETS
from sglang_dsv4.warmup.cuda_graphs import VERIFY_EPILOGUE

# Requests are admitted as if they answered with a token or two, so that the pool runs out while they decode.
OPTIMISTIC = ("--schedule-conservativeness", "0.01")
FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING), SLEEP_ON_IDLE)
FLAGS += ("--chunked-prefill-size", "512", "--constrained-json-disable-any-whitespace", *OPTIMISTIC)
FLAGS += ("--enable-custom-logit-processor",)
HOST_TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
HOST_TIERS += ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
# Both have the same target: random weights of the draft are drawn after those of the target, from the same seed.
ALGORITHMS = {
    "EAGLE": (PRESETS["tiny"], 3, ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1")),
    "DSPARK": (replace(PRESETS["tiny"], dspark_markov_rank=32, dspark_target_layer_ids=(1, 2, 3)), 5, ()),
}
NO_EPILOGUE = "DSPARK, acceptance outside of the graph"
"""A name used like an algorithm's: DSPARK whose draft acceptance the host launches after a verify step."""


def algorithm_and_switch(name: str) -> tuple[str, dict[str, str]]:
    """Return SGLang's name of an algorithm or of `NO_EPILOGUE`, and the environment of its server."""
    return name.partition(",")[0], {VERIFY_EPILOGUE: "off"} if name == NO_EPILOGUE else {}


def drafting_flags(algorithm: str) -> tuple[str, ...]:
    """Return the flags of a server that drafts with the algorithm."""
    _, drafts, flags = ALGORITHMS[algorithm]
    return (*flags, "--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", str(drafts + 1))


class Speculating:
    """A server that drafts, and the answers that its oracle knows, in a file of the folder that it was installed to."""

    def __init__(self, server: Server, name: str, folder: Path) -> None:
        self.server, self.algorithm, self.prefixes = server, algorithm_and_switch(name)[0], folder / "prefixes"
        self.ends_in_the_graph = name == "DSPARK"
        self._file = folder / oracle_drafts.ANSWERS
        self._answers: dict[str, list[int]] = {}

    @property
    def drafts(self) -> int:
        """Tokens that are drafted in a step."""
        return ALGORITHMS[self.algorithm][1]

    def will_answer(self, prompts: list[list[int]], results: list[dict[str, Any]]) -> None:
        """Make the oracle draft these answers."""
        for prompt, result in zip(prompts, results, strict=True):
            self._answers[" ".join(map(str, prompt))] = result["output_ids"]
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps(self._answers))
        written.rename(self._file)

    def drafted(self) -> list[list[Any]]:
        """Return the draft's own proposals since the last call for requests that the oracle knows, by prompt and
        position."""
        file = self._file.with_name(oracle_drafts.DRAFTED)
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(json.loads(line) for line in lines)


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 1000) for _ in range(n)] for n in lengths]


def ask(server: Server, prompts: list[list[int]], at_once: int, **sampling_params: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, **sampling_params), prompts))


def assert_same(plain: list[dict[str, Any]], drafted: list[dict[str, Any]]) -> None:
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        assert other["output_ids"] == one["output_ids"], f"request {number}"
        assert output_logprobs(other) == output_logprobs(one), f"request {number}"
        assert other["meta_info"]["finish_reason"] == one["meta_info"]["finish_reason"], f"request {number}"


def tokens_a_step(results: list[dict[str, Any]]) -> float:
    steps = sum(result["meta_info"]["spec_verify_ct"] for result in results)
    return sum(len(result["output_ids"]) - 1 for result in results) / steps
