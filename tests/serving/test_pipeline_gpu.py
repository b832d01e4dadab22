"""Pipeline stages on GPUs, over NCCL: the bits of one GPU, in CUDA graphs and without, alone and busy, after hits.

A small checkpoint of random weights with the released attention, on two GPUs; with four also stages of two ranks. Under
`--enable-deterministic-inference` a stage's streams, sent complete, are those that a boundary would read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving.groups import Question, at_once, bits, some
from serving.server import flush, running_server, wait_for_files
from serving.small_release import SHAPE

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs with SGLang on them"),
]
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "32", "--context-length", "8192")
FLAGS += ("--mem-fraction-static", "0.8", "--random-seed", "1", "--enable-deterministic-inference")
FLAGS += ("--cuda-graph-bs-decode", "2", "4", "16", "--chunked-prefill-size", "1024")
FILES = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file")
FILES += ("--hicache-storage-prefetch-policy", "wait_complete")
QUESTIONS = (
    Question(tuple(some(1, 3)), 40),
    Question(tuple(some(2, 700)), 9),
    Question(tuple(some(3, 1300)), 20),
    Question(tuple(some(4, 131)), 32, {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 3}),
    Question(tuple(some(5, 2100)), 3),
)
EAGER = ("--cuda-graph-backend-decode", "disabled")


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.skipif(GPUS < 4, reason="needs four NVIDIA GPUs"))]
)
def test_two_stages_have_the_bits_of_one(ranks: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", replace(SHAPE, compress_ratios=(0, 4, 128, 4), num_hash_layers=3))
    of_stage = ("--tp-size", str(ranks), "--ep-size", str(ranks), *FLAGS)
    with running_server(tmp_path / "model", tmp_path / "one", *of_stage) as server:
        expected = [bits(question.ask(server, None)) for question in QUESTIONS]
    for name, graphs in (("graphs", ()), ("eager", EAGER)):
        env = {FOLDER_VARIABLE: str(tmp_path / name / "files")}
        flags = (*of_stage, *FILES, *graphs, "--pp-size", "2")
        (tmp_path / name).mkdir()
        with running_server(tmp_path / "model", tmp_path / name / "log", *flags, env=env) as server:
            assert [bits(question.ask(server, None)) for question in QUESTIONS] == expected, "alone"
            flush(server)
            order = list(range(len(QUESTIONS))) * 4
            busy = at_once(server, [(QUESTIONS[i], None) for i in order])
            assert [bits(answer) for answer in busy] == [expected[i] for i in order], "at once"
            wait_for_files(tmp_path / name / "files")
            flush(server)
            again = QUESTIONS[4].ask(server, None)
            assert bits(again) == expected[4] and again["meta_info"]["cached_tokens"] == 2048, "from files"
            assert server.is_alive()
            assert bool(re.search("capture.*cuda graph", server.log, re.IGNORECASE)) == (name == "graphs")
