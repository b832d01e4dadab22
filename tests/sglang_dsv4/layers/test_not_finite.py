"""Logits that are not finite: their rows are marked, other rows keep their bits, and the search names the layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from model.served import Served

from sglang_dsv4.layers import finite
from sglang_dsv4.layers.logits import LARGEST_LOGIT, NOT_FINITE, mark_rows_not_finite

INF, NAN = float("inf"), float("nan")
WRONG = (NAN, INF, -INF, 2 * LARGEST_LOGIT, -3e38)


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 4099])
def test_rows_with_one_wrong_logit_are_marked(vocabulary: int) -> None:
    """One wrong value at the first, a middle and the last place of a row; the rows between them keep their bits."""
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0)) * 30
    logits[1, 0], logits[3, 0] = LARGEST_LOGIT, -LARGEST_LOGIT  # the largest that are right
    expected = logits.clone()
    for number, value in enumerate(WRONG * 3):
        row, place = 2 * number + 2, (0, vocabulary // 2, vocabulary - 1)[number // len(WRONG)]
        logits[row, place] = value
        expected[row] = NOT_FINITE
    mark_rows_not_finite(logits)
    assert torch.equal(logits, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_marks_the_same_rows() -> None:
    logits = torch.randn(len(WRONG) * 2, 129_280, device="cuda")
    expected = logits.clone()
    for row, value in enumerate(WRONG):
        logits[2 * row, 1000 * row + 129_000 * (row % 2)] = value
        expected[2 * row] = NOT_FINITE
    mark_rows_not_finite(logits)
    assert torch.equal(logits, expected)


@pytest.fixture
def broken_token(serve: Callable[..., Served]) -> Callable[[], tuple[Served, int]]:
    """A served model and a token whose embedding is finite and so large that the first sublayers overflow."""
    served = serve("flash-like")
    token = 7
    embedding = served.harness.model.model.embed.weight
    before = embedding[token].clone()
    with torch.no_grad():
        embedding[token] = 3e38
        yield served, token
        embedding[token] = before


def test_one_request_of_a_batch_is_marked(broken_token: tuple[Served, int]) -> None:
    served, token = broken_token
    prompts = [sequence[:n].clone() for sequence, n in zip(served.corpus, (30, 200, 40), strict=False)]
    for prompt in prompts:
        prompt[prompt == token] = token + 1
    alone = served.harness.run_many(prompts, decode_from=[25, 196, 38])
    broken = prompts[1].clone()
    broken[150] = token
    logits = served.harness.run_many([prompts[0], broken, prompts[2]], decode_from=[25, 196, 38])
    assert torch.equal(logits[0], alone[0]) and torch.equal(logits[2], alone[2])
    assert torch.equal(logits[1][:150], alone[1][:150])
    assert (logits[1][150:] == NOT_FINITE).all()


def test_the_search_names_the_first_layer(broken_token: tuple[Served, int], caplog: pytest.LogCaptureFixture) -> None:
    served, token = broken_token
    harness = served.harness
    end = finite.install(harness.model, SimpleNamespace(forward_pass_id=17))  # type: ignore[arg-type]
    try:
        prompt = served.corpus[0][:20].clone()
        prompt[prompt == token] = token + 1
        with caplog.at_level(logging.ERROR):
            harness.run(prompt)
            assert not caplog.records
            prompt[13] = token
            harness.run(prompt)
    finally:
        end()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not finite first in layer 0, attention, forward 17: tokens 13 at position 13" in line
    harness.run(prompt)
    assert len(caplog.records) == 1  # the search is removed completely


def test_the_plugin_installs_the_search(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = []
    monkeypatch.setenv(finite.VARIABLE, "on")
    monkeypatch.setattr(finite, "install", lambda model, runner: installed.append(model))
    served = serve("flash-like", server_args={"random_seed": 8})  # a model that no other test has built
    assert installed == [served.harness.model]
    monkeypatch.setenv(finite.VARIABLE, "sometimes")
    with pytest.raises(ValueError, match=finite.VARIABLE):
        finite.is_on()
