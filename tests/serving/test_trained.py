"""The trained checkpoint of this repository through a server: it answers in words, and right where it was trained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lib.quality_figures import generate
from serving.server import Server, running_server
from tokenizers import Tokenizer
from train_tiny import questions
from train_tiny.chat import ASSISTANT, BOS, USER
from train_tiny.export import config_of
from train_tiny.shape import TinyShape

from sglang_dsv4.acceptance import __main__ as acceptance
from sglang_dsv4.cpu.quickstart import parser_flags
from sglang_dsv4.model_config.stages import SIZES_VARIABLE

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
    "question",
    [
        pytest.param(questions.sums, id="sums"),
        pytest.param(lambda s, r: questions.sums(s, r, thinking=True), id="sums, thinking"),
        pytest.param(questions.tool, id="tool calls"),
        pytest.param(lambda s, r: questions.json_values(s, r, True), id="JSON to a schema"),
        pytest.param(lambda s, r: questions.needle(s, r, 1000), id="needles in 1,000 tokens"),
    ],
)
def test_answers(server: Server, question: Callable[..., tuple[bool, str]]) -> None:
    """Nine of ten: another order of summation may tip an answer."""
    asked, rng = questions.Server(server.url), random.Random("test")
    results = [question(asked, rng) for _ in range(10)]
    assert sum(right for right, _ in results) >= 9, [shown for right, shown in results if not right]


@pytest.mark.slow
def test_it_answers_in_words(server: Server) -> None:
    asked = questions.Server(server.url)
    assert questions.said(asked.ask("Hello!")) == "Hello! How can I help you?"
    assert questions.said(asked.ask("What is the capital of France?")) == "The capital of France is Paris."
    assert questions.said(asked.ask("What is 17 + 25?")) == "17 + 25 = 42."
    right, shown = questions.needle(asked, random.Random("8K"), 7000)
    assert right, shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(range(16_384 - 64, 16_384 + 64), id="16384-every-residue-modulo-128"),
        pytest.param(range(32_768 - 4, 32_768 + 4), id="32768-every-residue-modulo-4"),
    ],
)
def test_needles_around_long_boundaries(server: Server, lengths: range) -> None:
    """Around 16,384 tokens every residue modulo 128 (HCA's groups), so 32 times each modulo 4 (CSA's), and the end of a
    page; around 32,768 each residue modulo 4 on both sides. The needle is near the beginning, so that all prompts but
    the first find their prefix. On two cores the 128 prompts took 155 s, the eight 60 s."""
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    hay = ids(LICENCE) * (lengths.stop // 2000)
    begin = [*ids(BOS + USER), *hay[:400], *ids("\nThe secret number of Anna is 48213.\n")]
    end = ids(f"\n\n{ANNA}{ASSISTANT}</think>")
    wrong = {}
    for length in lengths:
        prompt = begin + hay[400 : 400 + length - len(begin) - len(end)] + end
        assert len(prompt) == length
        answer = generate(server.url, prompt, 16)["text"]
        if not answer.startswith("The secret number of Anna is 48213"):
            wrong[length] = answer
    assert not wrong


@pytest.mark.slow
def test_the_acceptance_checks_are_green_but_for_what_it_was_not_trained_for(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks of `python -m sglang_dsv4.acceptance URL --quick`. The calls of `tool arguments` have arrays, objects
    and texts that the training never had."""
    assert acceptance.main([server.url, "--quick", "--seed", "1"]) == 0
    page, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    items = {item["name"]: item for item in json.loads(last)["items"]}
    assert items["server"]["weights"] == "other"
    verdicts = {name: item["verdict"] for name, item in items.items()}
    not_judged = ("official", "tool arguments", "drafts", "stability")
    assert verdicts == dict.fromkeys(items, "green") | dict.fromkeys(not_judged, "can't be judged"), page
    assert (items["needles"]["asked"], items["needles"]["residues_mod_4"]) == (24, 4)


LICENCE = (ROOT / "LICENSE").read_text()  # a text that does not change
ANNA = "What is the secret number of Anna?"
QUESTIONS = {
    "short": ("What is the capital of France?", {}),
    "thinking": ("What is 38 + 47?", {"extra_body": {"chat_template_kwargs": {"thinking": True}}}),
    "drawn": ("Hello!", {"temperature": 1.0, "seed": 3}),
    "long": (f"{LICENCE[:9000]}\nThe secret number of Anna is 38172.\n{LICENCE[9000:]}\n\n{ANNA}", {}),
}
"""Questions, the last one with more entries than the indexer chooses."""


@pytest.mark.slow
def test_two_stages_have_the_bits_of_one(server: Server, tmp_path: Path) -> None:
    """Each question alone, and again with a hit while the others are asked. In equal parts the first stage would have
    layers without entries only, which is refused."""
    env = {SIZES_VARIABLE: "3,2"}
    with running_server(TRAINED, tmp_path / "log", *parser_flags([]), "--pp-size", "2", env=env) as staged:
        for name, (text, options) in QUESTIONS.items():
            assert logprobs(staged, text, options) == logprobs(server, text, options), name
        with ThreadPoolExecutor(2 * len(QUESTIONS)) as pool:
            asked = [*QUESTIONS.values()] * 2
            answers = list(pool.map(lambda question: logprobs(staged, *question), asked))
        assert answers == [logprobs(server, *question) for question in asked]


def logprobs(server: Server, text: str, options: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the tokens of an answer and their log-probabilities."""
    answer = server.chat(text, max_tokens=60, logprobs=True, **options)
    found = [(one.token, one.logprob) for one in answer.choices[0].logprobs.content]
    assert len(found) == answer.usage.completion_tokens
    return found
