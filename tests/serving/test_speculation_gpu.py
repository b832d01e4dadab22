"""The first tests of speculation on a GPU: servers with CUDA graphs of verify and draft steps, and without.

A small checkpoint of random weights with the released attention. Proposals come from an oracle (`oracle_drafts`), so
that blocks are accepted up to every position. Requests run one at a time with graphs of their own size, so that a
server without graphs launches the same kernels: every token has to be the same. In batches the products' last bits
depend on the batch, except under --enable-deterministic-inference: with it every answer has to be that of a server
without speculation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving import oracle_drafts
from serving.server import running_server
from serving.speculation import (
    ALGORITHMS,
    NO_EPILOGUE,
    Speculating,
    algorithm_and_switch,
    ask,
    drafting_flags,
    random_prompts,
    tokens_a_step,
)

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.warmup.cuda_graphs import VERIFY_EPILOGUE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with SGLang on it"),
]
# As few layers as SGLang allows for a DSpark target, with the least widths that the kernels support, because weights
# are drawn and encoded on the host.
SMALL = replace(PRESETS["flash"], compress_ratios=(0, 4, 128, 4), num_hash_layers=1, hidden_size=1024, q_lora_rank=512)
SHAPES = {
    "EAGLE": SMALL,
    "DSPARK": replace(SMALL, dspark_markov_rank=256, dspark_target_layer_ids=(1, 2, 3)),
}
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "20", "--chunked-prefill-size", "512")
FLAGS += ("--context-length", "8192", "--mem-fraction-static", "0.9", "--random-seed", "1")
GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "16")
DETERMINISTIC = "--enable-deterministic-inference"
SHORT = [1, 3, 126, 127, 128, 150, 165]
"""Lengths of prefills in which no runner of SGLang's orders tokens by atomics; the answers end after a page's end."""
LENGTHS = [1, 3, 126, 127, 128, 250, 253, 255, 256, 511, 600, 770]
PENALTIES = {"frequency_penalty": 1.1, "presence_penalty": 0.3, "repetition_penalty": 1.3, "min_new_tokens": 20}
GRAPH_LINES = {"EAGLE": ("target verify", "draft decode", "extend step"), "DSPARK": ("target verify", "draft verify")}
EPILOGUE_LINE = "draft acceptance is captured in the graphs of verify steps"


@pytest.fixture(scope="module", params=[*SHAPES, NO_EPILOGUE])
def algorithm(request: pytest.FixtureRequest) -> Iterator[str]:
    algorithm, switch = algorithm_and_switch(request.param)
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(VERIFY_EPILOGUE, raising=False)
        for name, value in switch.items():
            environment.setenv(name, value)
        yield algorithm


@pytest.fixture(scope="module")
def checkpoint(algorithm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"speculation_{algorithm}")
    write_checkpoint(folder / "checkpoint", SHAPES[algorithm])
    return folder / "checkpoint"


@contextmanager
def serving(checkpoint: Path, name: str, algorithm: str | None, *flags: str) -> Iterator[Speculating]:
    folder = checkpoint.parent / name
    folder.mkdir()
    env = oracle_drafts.install(folder)
    if algorithm is not None:
        flags += drafting_flags(algorithm)
    with running_server(checkpoint, folder / "log", *FLAGS, *flags, env=env) as running:
        assert (EPILOGUE_LINE in running.log) == (algorithm == "DSPARK" and VERIFY_EPILOGUE not in os.environ)
        yield Speculating(running, algorithm or "", folder)


def tokens(results: list[dict]) -> list[list[int]]:
    return [result["output_ids"] for result in results]


def test_replays_are_what_was_recorded(checkpoint: Path, algorithm: str) -> None:
    """One request at a time. The second server's oracle drafts the answers of the first, which has no graphs."""
    prompts = random_prompts(1, SHORT)
    with serving(checkpoint, "eager", algorithm, "--disable-cuda-graph") as eager:
        refused = ask(eager.server, prompts, 1, max_new_tokens=100)
        eager.will_answer(prompts, refused)
        accepted = ask(eager.server, prompts, 1, max_new_tokens=100)
        penalised = ask(eager.server, prompts[:2], 1, max_new_tokens=60, **PENALTIES)
    with serving(checkpoint, "graphs", algorithm, *GRAPHS) as graphs:
        assert tokens(ask(graphs.server, prompts, 1, max_new_tokens=100)) == tokens(refused)
        graphs.will_answer(prompts, refused)
        again = ask(graphs.server, prompts, 1, max_new_tokens=100)
        assert tokens(ask(graphs.server, prompts[:2], 1, max_new_tokens=60, **PENALTIES)) == tokens(penalised)
        log = graphs.server.log
    assert tokens(again) == tokens(accepted)
    assert tokens_a_step(again) > 1 + 0.25 * ALGORITHMS[algorithm][1]
    for what in GRAPH_LINES[algorithm]:
        assert what in log, f"no graph of the {what} was recorded"


def test_answers_are_those_without_speculation(checkpoint: Path, algorithm: str) -> None:
    """The deterministic flag is on; batches are padded, and some requests reuse prefixes."""
    prompts = random_prompts(2, LENGTHS)
    turns: list[list[int]] = []
    with serving(checkpoint, "plain", None, DETERMINISTIC, *GRAPHS) as plain:
        first = ask(plain.server, prompts, 12, max_new_tokens=40)
        turns = [[*prompt, *ids[:30], 5, 6] for prompt, ids in zip(prompts, tokens(first), strict=True)]
        second = ask(plain.server, turns, 12, max_new_tokens=24)
    with serving(checkpoint, "drafted", algorithm, DETERMINISTIC, *GRAPHS) as drafted:
        for asked, expected, new_tokens in ((prompts, first, 40), (turns, second, 24)):
            assert tokens(ask(drafted.server, asked, 3, max_new_tokens=new_tokens)) == tokens(
                expected
            )  # with the draft's own proposals
            drafted.will_answer(asked, expected)
            found = ask(drafted.server, asked, 12, max_new_tokens=new_tokens)
            assert tokens(found) == tokens(expected)
            assert tokens_a_step(found) > 1 + 0.25 * ALGORITHMS[algorithm][1]
        assert sum(result["meta_info"]["cached_tokens"] for result in found) > 0
