"""Attention data parallelism on GPUs, over NCCL: in CUDA graphs and without, an idle group, busy groups, drafts.

A small checkpoint of random weights with the released attention, on two GPUs; with four also groups of two ranks. Under
`--enable-deterministic-inference` a request has the same bits alone and busy, on every group, in graphs and without.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving.groups import Question, at_once, bits, some
from serving.server import flush, running_server
from serving.small_release import SHAPE
from serving.speculation import drafting_flags

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers import row_exchange

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs with SGLang on them"),
]
FOUR = pytest.mark.skipif(GPUS < 4, reason="needs four NVIDIA GPUs")
TOPOLOGIES = [(2, 2), pytest.param(4, 2, marks=FOUR), pytest.param(4, 4, marks=FOUR)]
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "32", "--context-length", "8192")
FLAGS += ("--mem-fraction-static", "0.8", "--random-seed", "1", "--enable-deterministic-inference")
FLAGS += ("--cuda-graph-bs-decode", "2", "4", "16")
SHAPES = {
    "plain": SHAPE,
    "EAGLE": SHAPE,
    "DSPARK": replace(SHAPE, compress_ratios=(0, 4, 128, 4), dspark_markov_rank=256, dspark_target_layer_ids=(1, 2, 3)),
}
GREEDY = (
    Question(tuple(some(1, 3)), 40),
    Question(tuple(some(2, 700)), 9),
    Question(tuple(some(3, 1300)), 20),
    Question(tuple(some(5, 2100)), 3),
)
DRAWN = Question(tuple(some(4, 131)), 32, {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 3})
"""A GPU's server under the flag draws without drafts only."""
GRAPHS = {"graphs": (), "eager": ("--cuda-graph-backend-decode", "disabled")}


def flags(kind: str, ranks: int, groups: int) -> tuple[str, ...]:
    """Return a server's flags; experts are whole on their rank, so that their sizes need not be divided."""
    of_experts = ("--ep-size", str(ranks), "--chunked-prefill-size", str(1024 * groups))
    drafts = drafting_flags(kind) if kind != "plain" else ()
    return ("--tp-size", str(ranks), "--attn-dp-size", str(groups), *of_experts, *FLAGS, *drafts)


@pytest.mark.parametrize(("ranks", "groups"), TOPOLOGIES)
@pytest.mark.parametrize("kind", SHAPES)
def test_busy_is_alone_is_another_group_with_graphs_and_without(
    kind: str, ranks: int, groups: int, tmp_path: Path
) -> None:
    if kind == "DSPARK" and ranks != groups:
        pytest.skip("refused by name")
    write_checkpoint(tmp_path / "model", SHAPES[kind])
    questions, found = GREEDY if kind != "plain" else (*GREEDY, DRAWN), {}
    for name, graphs in GRAPHS.items():
        with running_server(tmp_path / "model", tmp_path / name, *flags(kind, ranks, groups), *graphs) as server:
            alone = [[bits(question.ask(server, group)) for group in range(groups)] for question in questions]
            assert all(answers == [answers[0]] * groups for answers in alone), "a group has other bits"
            flush(server)
            asked = [(i, group) for i in range(len(questions)) for group in range(groups)]
            asked = (asked + asked[::-1]) * 2  # up to 20 requests a group, in graphs of all sizes
            busy = at_once(server, [(questions[i], group) for i, group in asked])
            assert [bits(answer) for answer in busy] == [alone[i][group] for i, group in asked]
            assert server.is_alive()
            assert bool(re.search("capture.*cuda graph", server.log, re.IGNORECASE)) == (name == "graphs")
        found[name] = [answers[0] for answers in alone]
    assert found["graphs"] == found["eager"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize("kind", SHAPES)
def test_exchanged_rows_have_the_bits_of_one_gpu(kind: str, ranks: int, tmp_path: Path) -> None:
    """`SGLANG_DSV4_EXPERT_ROWS=exchange`: alone on each rank and busy, in graphs (messages of a fixed size) and without
    (of told sizes); in the busy turn ranks prefill while others decode."""
    write_checkpoint(tmp_path / "model", SHAPES[kind])
    questions = GREEDY if kind != "plain" else (*GREEDY, DRAWN)
    with running_server(tmp_path / "model", tmp_path / "one", *flags(kind, 1, 1)) as server:
        wanted = [bits(question.ask(server, None)) for question in questions]
    for name, graphs in GRAPHS.items():
        given = (*flags(kind, ranks, ranks), *graphs)
        env = {row_exchange.VARIABLE: "exchange"}
        with running_server(tmp_path / "model", tmp_path / name, *given, env=env) as server:
            for group in range(ranks):
                assert [bits(question.ask(server, group)) for question in questions] == wanted, (name, group)
            flush(server)
            asked = [(i, group) for i in range(len(questions)) for group in range(ranks)]
            asked = (asked + asked[::-1]) * 2
            busy = at_once(server, [(questions[i], group) for i, group in asked])
            assert [bits(answer) for answer in busy] == [wanted[i] for i, _ in asked], name
            assert bool(re.search("capture.*cuda graph", server.log, re.IGNORECASE)) == (name == "graphs")
