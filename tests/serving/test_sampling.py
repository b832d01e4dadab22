"""SGLang's sampler on a CPU: each option does to the distribution what it says."""

from __future__ import annotations

from typing import Any

import pytest
from serving.server import Server, output_logprobs

PROMPT = [0, *range(40, 90)]


def tokens(server: Server, **sampling_params: Any) -> list[int]:
    return server.generate(PROMPT, **sampling_params)["output_ids"]


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}],
    ids=["top_k=1", "top_p=1e-6", "min_p=1", "temperature=0.001"],
)
def test_limits_that_leave_one_token_are_greedy(server: Server, options: dict[str, float]) -> None:
    assert tokens(server, **{"temperature": 1.0, **options}) == tokens(server)


def test_temperature_draws_different_answers(server: Server) -> None:
    drawn = {tuple(tokens(server, temperature=1.5)) for _ in range(4)}
    assert len(drawn) > 1


def test_top_k_never_leaves_the_k_likeliest(server: Server) -> None:
    response = server.chat(
        "k", max_tokens=24, temperature=2.0, logprobs=True, top_logprobs=4, extra_body={"top_k": 4, "ignore_eos": True}
    )
    for entry in response.choices[0].logprobs.content:
        assert entry.logprob >= min(top.logprob for top in entry.top_logprobs) - 1e-4


def test_frequency_penalty_forbids_repetition(server: Server) -> None:
    """A logit falls by 2 for each time its token was said: without it a greedy random model repeats itself."""
    free = tokens(server, max_new_tokens=96)
    penalised = tokens(server, max_new_tokens=96, frequency_penalty=2.0)
    assert len(set(penalised)) > len(set(free))


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"repetition_penalty": 2.0}], ids=lambda p: next(iter(p))
)
def test_penalties_change_the_answer(server: Server, penalty: dict[str, float]) -> None:
    assert tokens(server, max_new_tokens=64, **penalty) != tokens(server, max_new_tokens=64)


def test_logit_bias_forces_a_token(server: Server) -> None:
    response = server.chat("bias", max_tokens=5, logit_bias={"50": 100}, extra_body={"ignore_eos": True})
    assert len(set(response.choices[0].message.content)) == 1


def test_stop_token_ends_the_answer(server: Server) -> None:
    free = tokens(server)
    stopped = server.generate(PROMPT, stop_token_ids=[free[5]], ignore_eos=False)
    assert stopped["output_ids"] == free[: free.index(free[5]) + 1]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"


def test_log_probabilities_do_not_depend_on_sampling_of_others(server: Server) -> None:
    assert output_logprobs(server.generate(PROMPT)) == output_logprobs(server.generate(PROMPT))
