"""The trained checkpoint of this repository through a server: it answers in words, and right where it was trained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving.server import Server, running_server
from train_tiny import questions
from train_tiny.export import config_of
from train_tiny.shape import TinyShape

from sglang_dsv4.cpu.quickstart import parser_flags

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "trained"


def test_the_trained_checkpoint_is_small_and_of_the_shape_that_is_trained() -> None:
    assert json.loads((TRAINED / "config.json").read_text()) == json.loads(json.dumps(config_of(TinyShape())))
    weights = list(TRAINED.glob("*.safetensors"))
    assert len(weights) == 1 and weights[0].stat().st_size <= 20_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("trained") / "log"
    with running_server(TRAINED, log, *parser_flags([])) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "least"),
    [
        pytest.param(lambda s, r: questions.sums(s, r, thinking=True), 7, id="sums, thinking"),
        pytest.param(questions.tool, 9, id="tool calls"),
        pytest.param(lambda s, r: questions.json_values(s, r, True), 8, id="JSON to a schema"),
        pytest.param(lambda s, r: questions.needle(s, r, 1000), 8, id="needles in 1,000 tokens"),
    ],
)
def test_answers(server: Server, question: Callable[..., tuple[bool, str]], least: int) -> None:
    asked, rng = questions.Server(server.url), random.Random("test")
    results = [question(asked, rng) for _ in range(10)]
    assert sum(right for right, _ in results) >= least, [shown for right, shown in results if not right]


@pytest.mark.slow
def test_it_answers_in_words(server: Server) -> None:
    asked = questions.Server(server.url)
    assert questions.said(asked.ask("Hello!")) == "Hello! How can I help you?"
    assert questions.said(asked.ask("What is the capital of France?")) == "The capital of France is Paris."
    right, shown = questions.needle(asked, random.Random("8K"), 7000)
    assert right, shown
