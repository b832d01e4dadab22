"""Speculation with CUDA graphs, as far as a CPU can show it: `replayed_graphs` against a server without speculation.

Graphs of 1, 4 and 16 requests, and of prefills, so batches are padded. The host learns the requests' lengths a step
late, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import oracle_drafts, replayed_graphs
from serving.server import TAILS, Server, flush, running_server
from serving.speculation import (
    ALGORITHMS,
    FLAGS,
    NO_EPILOGUE,
    Speculating,
    algorithm_and_switch,
    ask,
    assert_same,
    drafting_flags,
    random_prompts,
    tokens_a_step,
)

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.warmup.cuda_graphs import VERIFY_EPILOGUE

pytestmark = pytest.mark.slow  # each of the servers
RUNNERS = {
    "EAGLE": {"DecodeCudaGraphRunner": 4, "EAGLEDraftCudaGraphRunner": 1, "EAGLEDraftExtendCudaGraphRunner": 4},
    "DSPARK": {"DecodeCudaGraphRunner": 6, "DraftDecodeCudaGraphRunner": 5},
}

PARAMS = ["DSPARK", "EAGLE", NO_EPILOGUE]
FLAG = "--cuda-graph-backend-prefill"


@contextmanager
def replaying_server(name: str, folder: Path, *more: str, env: dict[str, str] | None = None) -> Iterator[Speculating]:
    """Yield a server that drafts with the named algorithm, with the checkpoint written to the folder."""
    algorithm, switch = algorithm_and_switch(name)
    write_checkpoint(folder / "checkpoint", ALGORITHMS[algorithm][0])
    with pytest.MonkeyPatch.context() as environment:
        oracle = oracle_drafts.install(folder)
        environment.setenv("PYTHONPATH", oracle["PYTHONPATH"])
        graphs = replayed_graphs.install(folder / "graphs")
        env = {**TAILS, **oracle, **graphs, **switch, **(env or {})}
    flags = (*drafting_flags(algorithm), "--cuda-graph-bs-decode", "1", "4", "16", FLAG, "breakable")
    with running_server(folder / "checkpoint", folder / "log", *FLAGS, *flags, *more, env=env) as running:
        yield Speculating(running, name, folder)


@pytest.fixture(scope="module", params=PARAMS)
def replaying(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculating]:
    with replaying_server(request.param, tmp_path_factory.mktemp("replaying")) as running:
        yield running


@pytest.mark.parametrize("at_once", [1, 11])
def test_replays_answer_the_same_bits(server: Server, replaying: Speculating, at_once: int) -> None:
    """Drafts accepted up to every position across groups and pages; then the draft's own, nearly all rejected."""
    lengths = {1: [250], 11: [1, 2, 3, 4, 123, 124, 125, 126, 253, 254, 255]}[at_once]
    prompts = random_prompts(20 + at_once, lengths)
    plain = ask(server, prompts, at_once, max_new_tokens=18)
    replaying.will_answer(prompts, plain)
    drafted = ask(replaying.server, prompts, at_once, max_new_tokens=18)
    assert_same(plain, drafted)
    assert tokens_a_step(drafted) > 1 + 0.3 * replaying.drafts
    prompts = random_prompts(40 + at_once, lengths)
    plain = ask(server, prompts, at_once, max_new_tokens=6)
    drafted = ask(replaying.server, prompts, at_once, max_new_tokens=6)
    assert_same(plain, drafted)


def test_a_page_that_was_filled_by_drafts_is_reused(server: Server, replaying: Speculating) -> None:
    """The page's tail was stored a step after the page was full, and has the rows of the accepted tokens."""
    prompts = random_prompts(7, [240, 244])
    plain = ask(server, prompts, 2, max_new_tokens=60)
    replaying.will_answer(prompts, plain)
    assert_same(plain, ask(replaying.server, prompts, 2, max_new_tokens=60))
    turns = [[*prompt, *result["output_ids"][:40], 5, 6] for prompt, result in zip(prompts, plain, strict=True)]
    plain = ask(server, turns, 2, max_new_tokens=20)
    replaying.will_answer(turns, plain)
    drafted = ask(replaying.server, turns, 2, max_new_tokens=20)
    assert_same(plain, drafted)
    assert [result["meta_info"]["cached_tokens"] for result in drafted] == [256, 256]


def test_the_next_drafts_are_the_same_outside_of_the_graph(server: Server, replaying: Speculating) -> None:
    """A logit bias, of zero here, makes SGLang accept drafts and store their context outside of the verify step's
    graph. The next drafts then depend on the rows of all accepted tokens."""
    prompts = random_prompts(60, [7, 250])
    replaying.will_answer(prompts, ask(server, prompts, 2, max_new_tokens=24))
    drafted, commits = [], []
    for sampling in ({}, {"logit_bias": {"3": 0.0}}):
        flush(replaying.server)
        replaying.drafted()
        before = replaying.server.log.count(replayed_graphs.COMMIT_LINE)
        ask(replaying.server, prompts, 2, max_new_tokens=24, **sampling)
        drafted.append(replaying.drafted())
        commits.append(replaying.server.log.count(replayed_graphs.COMMIT_LINE) - before)
    assert len(drafted[0]) >= 2 * 24 / (replaying.drafts + 1)
    assert drafted[0] == drafted[1]
    if replaying.algorithm == "DSPARK":
        assert (commits[0] == 0) == replaying.ends_in_the_graph and commits[1] > 0


def test_every_kind_of_graph_was_replayed(replaying: Speculating) -> None:
    """Runs last: no check of SGLang's or ours has ended the server."""
    for runner, width in RUNNERS[replaying.algorithm].items():
        assert replayed_graphs.LINE.format(runner, width) in replaying.server.log
    assert replayed_graphs.PREFILL_LINE in replaying.server.log
    assert replaying.server.is_alive()
    assert "Traceback" not in replaying.server.log


@pytest.mark.parametrize("name", ["DSPARK", NO_EPILOGUE])
def test_acceptance_is_as_long_as_a_benchmark_asks_for(name: str, tmp_path: Path) -> None:
    """SGLANG_SIMULATE_ACC_LEN, which benchmarks of dummy weights set: inside of the verify step's graph, too. A step
    draws one of the two lengths next to it for the whole batch. (On a CPU, EAGLE's verification is ours and ignores
    it.)"""
    with replaying_server(name, tmp_path, env={"SGLANG_SIMULATE_ACC_LEN": "3.5"}) as running:
        answers = ask(running.server, random_prompts(3, [60, 124, 250]), 3, max_new_tokens=150)
        assert all(len(answer["output_ids"]) == 150 for answer in answers)
        assert abs(tokens_a_step(answers) - 3.5) < 0.35
        commits = running.server.log.count(replayed_graphs.COMMIT_LINE)
        assert (commits == 0) == running.ends_in_the_graph
        assert running.server.is_alive() and "Traceback" not in running.server.log


def test_ranks_answer_the_same_bits(tmp_path: Path) -> None:
    """DSpark's epilogue is on, in which rank 0 sends the other rank the number of accepted drafts."""
    ranks = ("--tp", "2")
    prompts = random_prompts(31, [1, 2, 3, 4, 123, 126, 253, 254])
    env = {VERIFY_EPILOGUE: "on", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with replaying_server("DSPARK", tmp_path, *ranks, env=env) as drafting:
        with running_server(tmp_path / "checkpoint", tmp_path / "plain", *FLAGS, *ranks) as server:
            plain = ask(server, prompts, 8, max_new_tokens=12)
        drafting.will_answer(prompts, plain)
        for at_once in (8, 1):
            drafted = ask(drafting.server, prompts, at_once, max_new_tokens=12)
            assert_same(plain, drafted)
            assert tokens_a_step(drafted) > 1 + 0.3 * drafting.drafts
        assert replayed_graphs.COMMIT_LINE not in drafting.server.log
