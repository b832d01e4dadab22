"""`SGLANG_DSV4_EXPERT_ROWS=exchange` over gloo: ranks with requests of their own answer with the bits of one process.

CPU only: the GPU's tests are in `test_data_parallel_gpu.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from serving import replayed_graphs
from serving.groups import LONG, Question, at_once, bits, group_flags, has_tiers, questions, some
from serving.server import TAILS, Server, account, flush, running_server, wait_for_files
from serving.speculation import ALGORITHMS

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers.row_exchange import VARIABLE

Answers = list[tuple[list[int], list[float]]]
EXCHANGE = {VARIABLE: "exchange"}
# Kinds of servers as in `serving.groups`, and whether decode, verify and draft steps are in (replayed) graphs.
SERVERS = [
    (2, "deterministic", "eager"),
    (2, "EAGLE", "graphs"),
    (2, "DSPARK", "graphs"),
    (4, "deterministic", "graphs"),
    (4, "EAGLE", "eager"),
    (4, "DSPARK", "graphs"),
    (2, "tiers-fp8", "graphs"),
]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Answers]]:
    """A function of a kind: its checkpoint, and the answers of a server of one rank. A checkpoint's experts have two
    blocks of channels, which four ranks can't share: none is sharded."""

    @functools.cache
    def answered(kind: str) -> tuple[Path, Answers]:
        folder = tmp_path_factory.mktemp(kind)
        write_checkpoint(folder / "model", ALGORITHMS[kind][0] if kind in ALGORITHMS else PRESETS["tiny"])
        env = TAILS | EXCHANGE | {FOLDER_VARIABLE: str(folder / "files")}
        with running_server(folder / "model", folder / "log", *group_flags(kind, 1, 1), env=env) as server:
            return folder / "model", [bits(question.ask(server, None)) for question in asked_of(kind)]

    return answered


def asked_of(kind: str) -> list[Question]:
    return [*questions(kind), LONG]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kind", "steps"), SERVERS)
def test_the_bits_of_one_rank_alone_and_busy(
    ranks: int, kind: str, steps: str, of_one: Callable[[str], tuple[Path, Answers]], tmp_path: Path
) -> None:
    """Alone, all other ranks are idle; at once, ranks prefill while others decode, and finish at different times."""
    model, wanted = of_one(kind)
    env = TAILS | EXCHANGE | {FOLDER_VARIABLE: str(tmp_path / "files")}
    flags = (*group_flags(kind, ranks, ranks), "--ep-size", str(ranks))
    if steps == "graphs":
        env |= replayed_graphs.install(tmp_path / "graphs")
        flags += ("--cuda-graph-bs-decode", "2", "4", "16")
    with running_server(model, tmp_path / "log", *flags, env=env) as server:
        asked = asked_of(kind)
        for group in range(ranks):
            assert [bits(question.ask(server, group)) for question in asked] == wanted, group
        flush(server)
        each = [(i, group) for i in range(len(asked)) for group in range(ranks)]
        each += each[::-1]
        assert [bits(answer) for answer in at_once(server, [(asked[i], g) for i, g in each])] == [
            wanted[i] for i, _ in each
        ]
        if has_tiers(kind):
            assert_hits(server, ranks, wanted[-1], tmp_path / "files")
        assert server.log.count(f"experts' rows: exchanged between {ranks} ranks") == 1
        update = requests.post(f"{server.url}/update_weights_from_disk", json={"model_path": str(model)}, timeout=120)
        assert update.status_code == 200, update.text  # the shared expert is whole, in memory and in the update
        assert bits(asked[0].ask(server, ranks - 1)) == wanted[0]
        if steps == "graphs":
            assert server.log.count("replayed graphs: DecodeCudaGraphRunner") == ranks, "on every rank"


def assert_hits(server: Server, ranks: int, wanted: tuple[list[int], list[float]], files: Path) -> None:
    """The last rank finds the long question in its host memory, and every rank in files, with the bits of one rank."""
    for seed in range(60, 68):
        Question(tuple(some(seed, 900)), 2).ask(server, ranks - 1)
    hit = LONG.ask(server, ranks - 1)
    assert (bits(hit), account(hit)["pages_from"]) == (wanted, {"host": 1024})
    wait_for_files(files)
    flush(server)
    for rank in range(ranks):
        hit = LONG.ask(server, rank)
        assert (bits(hit), account(hit)["pages_from"]) == (wanted, {"storage": 1024}), rank


@pytest.mark.slow
def test_another_order_of_the_sum_is_noticed(of_one: Callable[[str], tuple[Path, Answers]], tmp_path: Path) -> None:
    """The gather adds a part a rank: the same answers would mean that this test cannot tell orders apart."""
    model, wanted = of_one("deterministic")
    flags = (*group_flags("deterministic", 2, 2), "--ep-size", "2")
    with running_server(model, tmp_path / "log", *flags, env=TAILS) as server:
        assert [bits(question.ask(server, 0)) for question in asked_of("deterministic")] != wanted
