"""SGLang's sampler on a CPU: each option changes the distribution as documented."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from selection.marks import with_slow_marks
from serving.server import Server, output_logprobs

from sglang_dsv4.requests.sampling import penalties, sampler
from sglang_dsv4.seam import live

PROMPT = [0, *range(40, 90)]
LIMITS = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"frequency_penalty": 1.0}]
LIMIT_IDS = ["none", "top_k", "top_p", "min_p", "frequency_penalty"]


def tokens(server: Server, **sampling_params: Any) -> list[int]:
    return server.generate(PROMPT, **sampling_params)["output_ids"]


@pytest.mark.parametrize(
    "options",
    # The two likeliest tokens of a random model may be so close that 1e-3 draws the other one now and then.
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-5}],
    ids=["top_k=1", "top_p=1e-6", "min_p=1", "temperature=0.00001"],
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


@pytest.mark.slow
def test_frequency_penalty_forbids_repetition(server: Server) -> None:
    """A logit falls by 2 each time its token is generated: without it a greedy random model repeats itself."""
    free = tokens(server, max_new_tokens=96)
    penalised = tokens(server, max_new_tokens=96, frequency_penalty=2.0)
    assert len(set(penalised)) > len(set(free))


@pytest.mark.parametrize(
    "penalty",
    with_slow_marks([{"presence_penalty": 2.0}, {"repetition_penalty": 2.0}], quick=[{"repetition_penalty": 2.0}]),
    ids=lambda p: next(iter(p)),
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


@pytest.mark.parametrize("options", LIMITS, ids=LIMIT_IDS)
def test_a_seed_decides_the_answer(server: Server, options: dict[str, float]) -> None:
    """SGLang alone ignores seeds without --enable-deterministic-inference, which this server does not have."""
    drawn = [tuple(tokens(server, temperature=1.5, sampling_seed=seed, **options)) for seed in (1, 1, 2, -5)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


@pytest.mark.slow
def test_a_seed_decides_beside_every_other_kind_of_request(server: Server) -> None:
    """Seeded requests join a running batch of unseeded ones and outlive others: batches merge and are filtered."""
    alone = [tokens(server, temperature=1.5, sampling_seed=1, **options) for options in LIMITS]
    others = [{"temperature": 0.0}, *({"temperature": 1.5, **options} for options in LIMITS)]
    with ThreadPoolExecutor(16) as pool:
        beside = [pool.submit(tokens, server, max_new_tokens=8 * n, **o) for n, o in enumerate(others, 1)]
        seeded = [pool.submit(tokens, server, temperature=1.5, sampling_seed=1, **options) for options in LIMITS]
        assert [future.result() for future in seeded] == alone
        assert beside[0].result() == tokens(server, max_new_tokens=8)  # the greedy request
    assert server.is_alive()


GREEDY = [
    {},
    {"top_k": 1, "temperature": 1.5},
    {"frequency_penalty": 1.0},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 12, "frequency_penalty": 0.5, "ignore_eos": False},
]


@pytest.mark.slow
def test_greedy_requests_have_the_same_bits_beside_requests_that_sample(server: Server) -> None:
    """SGLang took log(softmax) for log_softmax, divided by a temperature, and counted tokens late, twice or never.

    The other requests have many lengths and join while the compared ones decode, so that batches merge and shrink.
    """

    def answer(options: dict[str, Any]) -> tuple[list[int], list[float]]:
        result = server.generate(PROMPT, **{"max_new_tokens": 40, **options})
        return result["output_ids"], output_logprobs(result)

    alone = [answer(options) for options in GREEDY]
    with ThreadPoolExecutor(12) as pool:
        judged = [pool.submit(answer, options) for options in GREEDY]
        others = [
            pool.submit(tokens, server, max_new_tokens=3 + 5 * n, temperature=1.5, **LIMITS[n % len(LIMITS)])
            for n in range(10)
        ]
        beside = [future.result() for future in judged]
        for other in others:
            other.result()
    for options, one, two in zip(GREEDY, alone, beside, strict=True):
        assert one == two, options


def test_a_penalty_counts_each_token_of_the_answer_once(server: Server) -> None:
    """The same greedy choices, step by step, with the penalty as a bias of the next token's logits.

    The penalty was one token late, and began with the last token of the prompt.
    """
    answer = server.generate(PROMPT, max_new_tokens=12, frequency_penalty=2.0)
    said, logprobs = answer["output_ids"], output_logprobs(answer)
    assert len(set(said)) > 2
    for step, (token, logprob) in enumerate(zip(said, logprobs, strict=True)):
        bias = {str(earlier): -2.0 * said[:step].count(earlier) for earlier in said[:step]}
        one = server.generate([*PROMPT, *said[:step]], max_new_tokens=1, **({"logit_bias": bias} if bias else {}))
        assert (one["output_ids"], output_logprobs(one)) == ([token], [logprob]), step


def test_penalties_of_a_retracted_request_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request returns in a new batch, whose penalisers SGLang makes with no counts."""
    from sglang.srt.sampling import penaltylib

    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
    }
    none = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    none["stop_token_ids"] = {15}
    answers = [([], {}), ([3, 5, 3, 3], {"frequency_penalty": 0.3}), ([7], {}), ([2, 2], {"presence_penalty": 0.7})]
    answers += [([9, 4, 4], {"repetition_penalty": 1.3, "frequency_penalty": 0.1})]
    answers += [([], {"min_new_tokens": 1}), ([6], {"min_new_tokens": 1}), ([6], {"min_new_tokens": 2})]
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    reqs = [
        SimpleNamespace(
            output_ids=ids, eos_token_ids=None, tokenizer=tokenizer, sampling_params=SimpleNamespace(**none | p)
        )
        for ids, p in answers
    ]
    batch = penalties.Rows(reqs, "cpu")  # type: ignore[arg-type]
    info = SimpleNamespace(
        device="cpu", penalizer_orchestrator=penaltylib.BatchedPenalizerOrchestrator(16, batch, kinds)
    )
    monkeypatch.setattr(live, "_live", object())
    penalties.complete(None, info, batch, 16)  # type: ignore[arg-type]
    assert info.penalizer_orchestrator.batch is batch

    logits = torch.full((len(reqs), 16), 2.0)
    info.penalizer_orchestrator.accumulate_additive_penalties(logits)
    logits /= info.penalizer_orchestrator.accumulate_scaling_penalties()
    for row, (ids, p) in enumerate(answers):
        expected = torch.full((16,), 2.0)
        for token in set(ids):
            expected[token] -= p.get("frequency_penalty", 0.0) * ids.count(token) + p.get("presence_penalty", 0.0)
            expected[token] /= p.get("repetition_penalty", 1.0)
        if len(ids) < p.get("min_new_tokens", 0):
            expected[15] = -torch.inf
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_sampled_token_is_counted_with_and_without_overlap(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Without overlap SGLang gives a forward the batch's own sampling parameters, and no copy: nothing was counted."""
    from sglang.srt.sampling import penaltylib

    parameters = SimpleNamespace(frequency_penalty=0.5)
    batch = penalties.Rows([SimpleNamespace(sampling_params=parameters)], "cpu")  # type: ignore[arg-type]
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(16, batch, {penaltylib.BatchedFrequencyPenalizer})
    info = SimpleNamespace(penalizer_orchestrator=orchestrator, temperatures=torch.ones(1))
    monkeypatch.setattr(live, "_live", object())
    of_forward = SimpleNamespace(penalizer_orchestrator=None) if overlap else info
    if overlap:
        penalties.remember_source(of_forward, info)  # type: ignore[arg-type]
    for _ in range(2):
        forward = SimpleNamespace(sampling_info=of_forward)
        penalties.count_sampled(torch.tensor([3]), None, None, forward)  # type: ignore[arg-type]
    logits = torch.zeros(1, 16)
    orchestrator.accumulate_additive_penalties(logits)
    assert logits[0, 3] == -1.0 and logits.count_nonzero() == 1


def test_a_thinking_budget_follows_its_request_through_merges_and_filters() -> None:
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

    start, end = 3, 4

    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"<think>": start, "</think>": end}

    tokenizer = Tokenizer()

    def batch(*requests: tuple[list[int], int | None]) -> tuple[penalties.Rows, BatchedPenalizerOrchestrator]:
        reqs = [
            SimpleNamespace(
                origin_input_ids=prompt,
                tokenizer=tokenizer,
                sampling_params=SimpleNamespace(custom_params=None if n is None else {"thinking_budget": n}),
            )
            for prompt, n in requests
        ]
        rows = penalties.Rows(reqs, "cpu")  # type: ignore[arg-type]
        return rows, BatchedPenalizerOrchestrator(8, rows, {penalties.BatchedThinkingBudget})

    def forced(orchestrator: BatchedPenalizerOrchestrator) -> list[bool]:
        logits = torch.zeros(len(orchestrator.reqs()), 8)
        orchestrator.accumulate_additive_penalties(logits)
        only_end = torch.full((8,), -torch.inf).index_fill(0, torch.tensor([end]), 0.0)
        assert all(torch.equal(row, only_end) or not row.any() for row in logits)
        return [bool((row == -torch.inf).any()) for row in logits]

    # Two tokens left; no budget; a block that the prompt has closed; a token of the block in the prompt already.
    first, one = batch(([1, start], 2), ([1, start], None), ([start, 5, end, 6], 0))
    second, other = batch(([start, 5], 2))
    one.merge(other)
    first.reqs += second.reqs
    assert forced(one) == [False] * 4
    one.cumulate_output_tokens(torch.tensor([5, 5, 5, 5]))
    assert forced(one) == [False, False, False, True]
    first.reqs = [first.reqs[0], first.reqs[3]]
    one.filter(torch.tensor([0, 3]))
    one.cumulate_output_tokens(torch.tensor([5, end]))
    assert forced(one) == [True, False]
    one.cumulate_output_tokens(torch.tensor([end, 5]))
    assert forced(one) == [False, False]


def test_a_greedy_row_takes_its_largest_logit_where_probabilities_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp rounds its two largest logits to 1; a list of equal probabilities is sorted in any order."""
    monkeypatch.setattr(live, "_live", object())
    logits = torch.tensor([[0.0, 1e-9, 2e-9, 0.0], [1.0, 0.0, 0.0, 0.0]])
    info = SimpleNamespace(is_any_greedy=True, is_all_greedy=False, top_ks=torch.tensor([1, 4]))
    sampler.note_greedy_tokens(logits, None, logits, info)  # type: ignore[arg-type]
    probs = logits.softmax(-1)
    assert probs[0].unique().numel() == 1
    drawn = (torch.tensor([0, 3], dtype=torch.int32), None)
    tokens, mask = sampler.take_greedy_tokens(drawn, None, probs, info)  # type: ignore[arg-type, misc]
    assert (tokens.tolist(), tokens.dtype, mask) == ([2, 3], torch.int32, None)


def test_unseeded_requests_beside_a_seeded_one_differ(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        seeded = pool.submit(tokens, server, temperature=1.5, sampling_seed=1, max_new_tokens=64)
        drawn = {tuple(f.result()) for f in [pool.submit(tokens, server, temperature=1.5) for _ in range(4)]}
        seeded.result()
    assert len(drawn) == 4


def test_the_chat_api_takes_a_seed(server: Server) -> None:
    answers = [server.chat("seed", temperature=1.5, seed=seed).choices[0].message.content for seed in (3, 3, 4)]
    assert answers[0] == answers[1] != answers[2]


def test_seeded_draws_follow_the_distribution() -> None:
    """Each count is binomial: 5 standard deviations, over 20 tokens, are exceeded by chance once in 10^5 runs."""
    draws = 20_000
    probs = torch.softmax(torch.randn(20, generator=torch.Generator().manual_seed(0)), 0)
    for seeds, positions in (
        (torch.arange(draws), torch.full((draws,), 7)),
        (torch.full((draws,), -3), torch.arange(draws)),
        (torch.arange(draws) - 2**63, torch.full((draws,), 7)),
    ):
        drawn = sampler.draw(torch.multinomial, probs.log().expand(draws, -1), seeds, positions)
        counts = drawn.flatten().bincount(minlength=20)
        assert ((counts - draws * probs).abs() <= 5 * (draws * probs * (1 - probs)).sqrt()).all()


@pytest.fixture
def first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the draw, which needs SGLang's Triton kernel outside a server, by the likeliest remaining token."""
    monkeypatch.setattr(sampler, "draw_by_seed", lambda logprobs, seed, positions: logprobs.argmax(1, keepdim=True))


def left_of(probs: torch.Tensor, *limits: Any) -> torch.Tensor:
    """Return the tokens that `sample_with_seeds` keeps of a distribution [B, V]."""
    seeds = torch.arange(len(probs))
    results = sampler.sample_with_seeds(None, probs.clone(), *limits, seeds, seeds, return_filtered_probs=True)
    _, left, ids, weight = results
    assert torch.equal(weight, left[:, 0])
    return torch.zeros_like(probs).scatter_(1, ids.long(), left)


@pytest.mark.usefixtures("first_column")
def test_the_limits_leave_what_they_leave_without_seeds() -> None:
    """Compared with SGLang's function, which applies min_p last, and not together with seeds."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as limited

    g = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(64, 40, generator=g), 1)
    top_ks = torch.randint(1, 40, (64,), generator=g)
    top_ps, min_ps = torch.rand(2, 64, generator=g) * torch.tensor([[1.0], [0.2]])
    top_ps[::7] = 1.0
    limits = (top_ks, top_ps, min_ps, True)
    _, expected, order, _ = limited(probs.clone(), *limits, None, None, return_filtered_probs=True)
    assert torch.equal(left_of(probs, *limits), torch.zeros_like(probs).scatter_(1, order.long(), expected))


@pytest.mark.usefixtures("first_column")
def test_equal_probabilities_are_taken_by_id_and_sums_are_exact() -> None:
    """Probabilities of an eighth each: top_k keeps the first ids; top_p those up to the sum, which is exact in any
    order."""
    probs = torch.full((3, 8), 0.125)
    everything = torch.full((3,), 8)
    some = left_of(probs, torch.tensor([3, 8, 1]), torch.ones(3), torch.zeros(3), False)
    assert [row.nonzero().flatten().tolist() for row in some] == [[0, 1, 2], list(range(8)), [0]]
    some = left_of(probs, everything, torch.tensor([0.25, 0.2499, 0.0]), torch.zeros(3), False)
    assert [row.nonzero().flatten().tolist() for row in some] == [[0, 1, 2], [0, 1], [0]]


@pytest.mark.usefixtures("first_column")
def test_where_top_p_cuts_does_not_depend_on_the_order_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's cumulative sum may add in another order in another batch: here it adds in reverse order."""
    probs = torch.softmax(torch.randn(200, 1000, generator=torch.Generator().manual_seed(1)), 1)
    limits = (torch.full((200,), 1000), torch.linspace(0.5, 0.99, 200), torch.zeros(200), False)
    expected = left_of(probs, *limits)
    plain = torch.Tensor.cumsum

    def from_the_end(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.sum(dim, keepdim=True) - plain(x.flip(dim), dim).flip(dim) + x

    assert not torch.equal(from_the_end(probs, -1), plain(probs, -1))
    monkeypatch.setattr(torch.Tensor, "cumsum", from_the_end)
    assert torch.equal(left_of(probs, *limits), expected)
