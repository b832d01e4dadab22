"""Servers of the trained checkpoint compute its distributions: in every configuration, at every length, with drafts.

`tests/sglang_dsv4/models/test_trained_quality.py` plants faults, which the same figures notice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lib import quality_figures as figures
from lib.quality_configurations import DSPARK, EAGLE, EVERY_PAGE, ON_A_CPU, POOL, Configuration
from lib.quality_measuring import FP32_BOUND, Table, forked, inputs, problems
from model.compare import TOLERANCE
from model.trained import TRAINED, Trained, by_dspark, by_mtp, verify_steps
from serving.server import SLEEP_ON_IDLE, Server, account, running_server
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny import tasks, variants, words
from train_tiny.chat import ASSISTANT, BOS, USER

IN_FP32 = ("--dtype", "float32", SLEEP_ON_IDLE, *POOL)
NO_QUANTISERS = {"SGLANG_DSV4_QAT": "off"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(TRAINED, tmp_path_factory.mktemp("quality"), forked, inputs(TRAINED))


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ON_A_CPU, ids=lambda one: one.name)
def test_every_configuration_is_within_its_bounds(table: Table, configuration: Configuration) -> None:
    if table.first is None:
        table.first = table.asked(ON_A_CPU[0])
    assert not problems(table.measure(configuration))


@pytest.mark.slow
def test_the_reference_of_the_table_is_this_one(table: Table) -> None:
    """Fp32 on another CPU adds in another order."""
    rows = json.loads((TRAINED.parent / "benchmarks/results/quality_cpu.json").read_text())["rows"]
    found = table.of_reference()
    for kind in ("text", "chat"):
        assert rows[0][kind] == pytest.approx(found[kind], rel=1e-4)


# -- needles -----------------------------------------------------------------------------------------------------------

EVERY_RESIDUE = range(960, 1088)
"""Prompt lengths: each residue modulo 128 (HCA's groups), 32 times each residue modulo 4 (CSA's), around four pages."""
AROUND = [boundary + i for boundary in (256, 512, 2048, 4096, 8192) for i in range(-4, 4)]
ANSWER_TOKENS = 16


class Needle(NamedTuple):
    """A question for a line of the prompt: [tokens] int64, and the number that the line has."""

    tokens: Tensor
    number: str


def needle(tokenizer: Tokenizer, length: int) -> Needle:
    """Return a prompt of exactly `length` tokens in the format of a chat."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    rng = random.Random(f"needle {length}")
    of, number = rng.choice(words.NAMES), tasks.digits(rng, 5)
    line = ids(f"\nThe secret number of {of} is {number}.\n")
    head, tail = ids(BOS + USER), ids(f"\n\nWhat is the secret number of {of}?{ASSISTANT}</think>")
    hay = ids("\n".join(path.read_text() for path in sorted(figures.DOCUMENTS.glob("*.md"))))
    begin, count = rng.randrange(len(hay) // 2), length - len(head) - len(line) - len(tail)
    at = begin + rng.randrange(count + 1)
    return Needle(torch.tensor([*head, *hay[begin:at], *line, *hay[at : begin + count], *tail]), number)


class Answered(NamedTuple):
    """A served answer: tokens with the prompt's before them, the prompt's length, scores of the answer, its text."""

    tokens: Tensor
    start: int
    scores: figures.Scores
    text: str


def asked(server: Server, tokenizer: Tokenizer, one: Needle) -> Answered:
    result = figures.generate(server.url, one.tokens.tolist(), ANSWER_TOKENS)
    output, info = result["output_ids"], result["meta_info"]
    scores = figures.scores_from(info["output_token_logprobs"], info["output_top_logprobs"])
    text = tokenizer.decode(output).split(".")[0]
    return Answered(torch.cat([one.tokens, torch.tensor(output)]), len(one.tokens), scores, text)


def lost(exact: Tensor, answered: Answered) -> float:
    """Return the largest difference between the reference's likeliest token and the one that was answered, in nats."""
    chosen = exact[:-1].gather(1, answered.tokens[answered.start :, None])[:, 0]
    return float((exact[:-1].amax(1) - chosen).max())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TRAINED / "tokenizer.json"))


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fp32") / "log"
    with running_server(TRAINED, log, *IN_FP32, env=NO_QUANTISERS) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [pytest.param(EVERY_RESIDUE, id="modulo-128"), pytest.param(AROUND, id="around-boundaries")]
)
def test_needles_are_answered_as_by_the_reference(in_fp32: Server, tokenizer: Tokenizer, lengths: list[int]) -> None:
    """In fp32 without quantisers two log-probabilities may be off by `TOLERANCE` each: another token than the
    reference's is answered only where the reference's two are that close.

    The trained model answers at least 95 % of them right.
    """
    reference, right = Trained(quantises=False), 0
    for length in lengths:
        one = needle(tokenizer, length)
        assert len(one.tokens) == length
        answered = asked(in_fp32, tokenizer, one)
        exact = reference.logprobs(answered.tokens, answered.start - 1)
        found = figures.row("", [exact], [answered.scores])
        assert lost(exact, answered) <= 2 * TOLERANCE and found.kl <= FP32_BOUND, (length, answered.text, found)
        right += one.number in answered.text
    assert right >= 0.95 * len(lengths), f"{right} of {len(lengths)} are right"


@pytest.mark.slow
def test_needles_as_released_are_answered_as_roundings_allow(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In bf16 with quantisers, around four pages. Rounding moves the difference of two log-probabilities of the
    reference itself by up to so much; the server's may move twice as far."""
    exactly, rounded = Trained(quantises=True), Trained(quantises=True, dtype=torch.bfloat16)
    found, plain, references = [], [], []
    moved = 0.0
    with running_server(TRAINED, tmp_path / "log", SLEEP_ON_IDLE, *POOL) as server:
        for length in range(1008, 1040):
            answered = asked(server, tokenizer, needle(tokenizer, length))
            exact, other = (each.logprobs(answered.tokens, answered.start - 1) for each in (exactly, rounded))
            best = exact[:-1].topk(2)
            margin = best.values[:, 0] - best.values[:, 1]
            of_other = other[:-1].gather(1, best.indices)
            moved = max(moved, float((margin - of_other[:, 0] + of_other[:, 1]).abs().max()))
            references.append(exact)
            found.append(answered)
            plain.append(figures.scores_of(other, answered.tokens[answered.start - 1 :]))
    bound = figures.bound_of(figures.row("plain", references, plain))
    assert figures.row("", references, [one.scores for one in found]).kl <= bound
    worst = max(lost(exact, one) for exact, one in zip(references, found, strict=True))
    assert worst <= 2 * moved, (worst, moved)


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE", "DSPARK"])
def test_drafts_are_accepted_as_by_the_equations_also_after_a_hit(
    tokenizer: Tokenizer, tmp_path: Path, algorithm: str
) -> None:
    """In fp32 without quantisers: as many verify steps as the reference's draft needs for the same answers, cold and
    after a prefix was found on the device."""
    checkpoint, flags = TRAINED, EAGLE
    if algorithm == "DSPARK":
        checkpoint, flags = tmp_path / "with_draft", DSPARK
        variants.write("dspark", TRAINED, checkpoint)
    prompts = [needle(tokenizer, length).tokens for length in (601, 770, 1027)]
    texts = figures.windows(TRAINED, figures.FIXED_TEXT, 700, 2)
    with running_server(checkpoint, tmp_path / "log", *IN_FP32, *flags, env=NO_QUANTISERS | EVERY_PAGE) as server:
        for prompt in [*prompts, *texts]:
            cold, hit = (figures.generate(server.url, prompt.tolist(), 40) for _ in range(2))
            assert account(cold)["position"] == 0 and account(hit)["position"] >= 512
            assert hit["output_ids"] == cold["output_ids"]
            steps = [result["meta_info"]["spec_verify_ct"] for result in (cold, hit)]
            tokens = torch.cat([prompt, torch.tensor(cold["output_ids"])])
            propose = by_mtp(tokens, 3) if algorithm == "EAGLE" else by_dspark(tokens, checkpoint)
            expected = verify_steps(tokens, len(prompt), propose)
            assert steps == [expected, expected] and expected < 39
