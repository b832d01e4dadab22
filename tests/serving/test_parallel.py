"""Tensor parallelism over gloo: two ranks compute what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.server import output_logprobs, running_server

from sglang_dsv4.random_checkpoint import PRESETS, write_checkpoint

PROMPT = [0, *range(40, 340)]


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "released-format"])
def test_two_ranks_answer_as_one(quantised: bool, tmp_path: Path) -> None:
    """The ranks' partial sums are added in another order than one rank adds them.

    In fp32 that moves a log-probability by some 1e-6 (32 products of a random network, each 1e-7); 1e-3 is far below
    the distance of the likeliest two tokens. With quantised activations a random network turns 1e-6 into 0.1, so only
    the first token, which nothing was fed back into, is compared, and loosely.
    """
    write_checkpoint(tmp_path / "model", PRESETS["tiny"], quantised=quantised)
    results = []
    for ranks in (1, 2):
        with running_server(tmp_path / "model", tmp_path / f"log{ranks}", "--tp", str(ranks)) as server:
            results.append(server.generate(PROMPT, max_new_tokens=24))
            assert server.is_alive()
            assert server.log.count("is live on SGLang") == ranks
    one, two = results
    if quantised:
        assert output_logprobs(two)[0] == pytest.approx(output_logprobs(one)[0], abs=1.0)
    else:
        assert two["output_ids"] == one["output_ids"]
        assert output_logprobs(two) == pytest.approx(output_logprobs(one), abs=1e-3)
