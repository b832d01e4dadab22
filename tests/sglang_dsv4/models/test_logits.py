"""End to end in fp32 without quantisation: logits equal transformers' at every position without a close decision.

Requests run through SGLang's ModelRunner with our plugin (see harness.py), alone and in mixed batches, with prefill
chunks of 1 to 256 tokens (most below the page size of 256) and token-by-token decode after them.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from model.compare import MARGIN, assert_equal_logits
from model.served import Served
from selection.marks import with_slow_marks

SHORT = tuple(range(1, 10))
EDGES = (127, 128, 129, 130, 255, 256, 257)  # around the end of the window, of an HCA group, of a page
LONG = (511, 512, 513, 1030)
DECODED = 5  # tokens decoded after each prompt, enough to close a CSA group


@pytest.fixture(scope="module", params=["flash-like", pytest.param("pro-like", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    return serve(request.param)


BOTH_SCHEDULES = pytest.mark.parametrize("served", ["flash-like", "pro-like"], indirect=True, scope="module")
"""For the quick tests of a pro-like schedule; its other tests are slow."""


def test_few_positions_are_excluded(served: Served) -> None:
    margins = torch.cat([run.margins for run in served.expected])
    print(f"{int((margins <= MARGIN).sum())} of {len(margins)} positions excluded; smallest margin {margins.min():.1e}")
    assert (margins <= MARGIN).sum() <= 0.002 * len(margins)


@pytest.mark.parametrize("chunk_tokens", with_slow_marks([1, 3, 32, 64, 256], quick=[32, 64, 256]))
@pytest.mark.parametrize("lengths", [SHORT[:5], SHORT[5:], EDGES], ids=["1-5", "6-9", "127-257"])
def test_prompts_together(served: Served, lengths: Sequence[int], chunk_tokens: int | None) -> None:
    """Several prompts in one batch, which end their prefill, decode and finish at different steps."""
    check_together(served, lengths, chunk_tokens)


@pytest.mark.parametrize(
    "chunk_tokens", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 32, 64, 256]
)
def test_long_prompts_together(served: Served, chunk_tokens: int | None) -> None:
    check_together(served, LONG, chunk_tokens)


def check_together(served: Served, lengths: Sequence[int], chunk_tokens: int | None) -> None:
    # Each length has a sequence of its own if the corpus has one that is long enough, so that requests differ.
    order = sorted(range(len(served.corpus)), key=lambda i: -len(served.corpus[i]))
    chosen = [[i for i in order if len(served.corpus[i]) >= n + DECODED] for n in lengths]
    chosen = [fits[k % len(fits)] for k, fits in enumerate(chosen)]
    prompts = [served.corpus[i][: n + DECODED] for i, n in zip(chosen, lengths, strict=True)]
    served.harness.shuffle_free_pages(seed=chunk_tokens)
    logits = served.harness.run_many(prompts, chunk_tokens, decode_from=lengths)
    for i, n, actual in zip(chosen, lengths, logits, strict=True):
        assert_equal_logits(actual, served.expected[i], f"prompt of {n} in chunks of {chunk_tokens}")


@pytest.mark.parametrize("chunk_tokens", [64, None], ids=["chunks-of-64", "whole"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 127, 128, 129, 256, 513])
def test_prompt_alone(served: Served, length: int, chunk_tokens: int | None) -> None:
    prompt = served.corpus[0][: length + DECODED]
    actual = served.harness.run(prompt, chunk_tokens, decode_from=length)
    assert_equal_logits(actual, served.expected[0], f"prompt of {length} alone")


@BOTH_SCHEDULES
@pytest.mark.parametrize("start", [1, 120, 250])
def test_token_by_token_decode(served: Served, start: int) -> None:
    """Decode starts after the first tokens and passes the ends of the window, of a page and of both kinds of groups."""
    sequence = 3
    tokens = served.corpus[sequence][: start + 24]
    assert_equal_logits(
        served.harness.run(tokens, decode_from=start), served.expected[sequence], f"decode from {start}"
    )


@pytest.mark.slow
def test_a_whole_sequence_by_decode(served: Served) -> None:
    tokens = served.corpus[0]
    assert_equal_logits(served.harness.run(tokens, decode_from=1), served.expected[0], "decode from 1")


@BOTH_SCHEDULES
@pytest.mark.parametrize("requests", [1, 2, 7])
def test_requests_that_come_and_go(served: Served, requests: int) -> None:
    """Requests join at different steps, with odd chunk sizes, and decode while others prefill."""
    lengths = [300, 140, 260, 140, 33, 130, 5][:requests]
    order = [3, 5, 4, 6, 1, 2, 0][:requests]
    prompts = [served.corpus[i][:n] for i, n in zip(order, lengths, strict=True)]
    decode_from = [max(1, n - 12 - i) for i, n in enumerate(lengths)]
    joins = [0, 2, 1, 5, 3, 9, 7][:requests]
    logits = served.harness.run_many(prompts, 37, decode_from, joins)
    for i, actual in zip(order, logits, strict=True):
        assert_equal_logits(actual, served.expected[i], f"{requests} requests, sequence {i}")
