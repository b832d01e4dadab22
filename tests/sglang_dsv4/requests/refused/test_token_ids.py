"""Requests with token ids or seeds that can't be served get a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.requests.refused import token_ids
from sglang_dsv4.seam import live


def request_of(ids: list[int], stop: set[int] | None = None, top_logprobs: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=ids,
        input_embeds=None,
        vocab_size=1024,
        sampling_params=SimpleNamespace(
            stop_token_ids=stop, sampling_seed=None, top_k=50, min_p=0.0, n=1, stop_regex_strs=[]
        ),
        logprob=SimpleNamespace(top_logprobs_num=top_logprobs, token_ids_logprob=None),
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a server that answers alone."""
    monkeypatch.setattr(token_ids, "transfers", lambda: False)


def test_what_does_not_travel_with_the_first_token_gets_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """More top log-probabilities than SGLang's buffers hold ended the prefill server; those of chosen tokens were left
    out for the first token; the answers of one request shared a transfer."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    assert MetadataBuffers(1, 16, torch.float32, 1).output_top_logprobs_val.shape == (1, 128)
    monkeypatch.setattr(live, "_live", object())
    many, few, chosen = request_of([5], top_logprobs=129), request_of([5], top_logprobs=128), request_of([5])
    chosen.logprob.token_ids_logprob = [1, 2]
    several = request_of([5])
    several.sampling_params.n = 2
    assert [token_ids.refuse_unknown_token_ids(None, one) for one in (many, few, chosen, several)] == [None] * 4  # type: ignore[arg-type]
    monkeypatch.setattr(token_ids, "transfers", lambda: True)
    reasons = [token_ids.refuse_unknown_token_ids(None, one) for one in (many, few, chosen, several)]  # type: ignore[arg-type]
    assert reasons[1] is None
    assert "top_logprobs_num is 129; with --disaggregation-mode it is at most 128" in reasons[0]
    assert "token_ids_logprob is not supported with --disaggregation-mode" in reasons[2]
    assert many.logprob.top_logprobs_num == 128
    assert "n is 2; with --disaggregation-mode it is 1" in reasons[3]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (request_of([3, 1024]), "Token id 1024 "),
        (request_of([-1, 3]), "Token id -1 "),
        (request_of([3], stop={7, 5000}), "Stop token id 5000 "),
        (request_of([], stop={-7}), "Stop token id -7 "),
        (request_of([3], top_logprobs=1025), "top_logprobs_num is 1025"),
        (request_of([]), "The prompt is empty"),
    ],
    ids=["too-large", "negative", "stop", "negative-stop", "top-logprobs", "empty"],
)
def test_unknown_token_ids_get_a_reason(request_: SimpleNamespace, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_ids.refuse_unknown_token_ids(None, request_) is None  # type: ignore[arg-type]  # another model
    monkeypatch.setattr(live, "_live", object())
    sent, before = request_.sampling_params, dict(vars(request_.sampling_params))
    reason = token_ids.refuse_unknown_token_ids(None, request_)  # type: ignore[arg-type]
    assert reason is not None and named in reason
    assert vars(sent) == before, "the next stage of a pipeline gets them after this, and must refuse the request, too"
    # SGLang computes one token of a refused request, with its sampling parameters.
    assert request_.sampling_params.stop_token_ids is None and request_.logprob.top_logprobs_num == 0
    assert token_ids.refuse_unknown_token_ids("too long", request_) == "too long"  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_search_by_the_clock_is_refused_with_stages(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_live", object())
    monkeypatch.setattr(token_ids, "is_divided", lambda: stages > 1)
    request = request_of([3])
    request.sampling_params.stop_regex_strs = ["a+"]
    reason = token_ids.refuse_unknown_token_ids(None, request)  # type: ignore[arg-type]
    assert reason is None if stages == 1 else "stop_regex is not supported with --pp-size" in reason
    assert request.sampling_params.stop_regex_strs == (["a+"] if stages == 1 else []), "SGLang computes one token"


@pytest.mark.parametrize(
    ("setup", "named"),
    [(("flashinfer", None), "--sampling-backend pytorch"), (("pytorch", "EAGLE"), "--speculative-algorithm")],
    ids=["flashinfer", "speculation"],
)
def test_a_seed_that_cannot_be_honoured_gets_a_reason(
    setup: tuple[str, str | None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flashinfer's sampler asserts that there are no seeds."""
    monkeypatch.setattr(live, "_live", object())
    monkeypatch.setattr(token_ids, "sampling_setup", lambda: setup)
    greedy, seeded = request_of([5]), request_of([5])
    greedy.sampling_params.sampling_seed = seeded.sampling_params.sampling_seed = 7
    greedy.sampling_params.top_k = 1  # it draws nothing, so its seed is not used
    assert token_ids.refuse_unknown_token_ids(None, greedy) is None  # type: ignore[arg-type]
    assert named in (token_ids.refuse_unknown_token_ids(None, seeded) or "")  # type: ignore[arg-type]
    assert seeded.sampling_params.sampling_seed is None
    seeded.sampling_params.sampling_seed = 7
    monkeypatch.setattr(token_ids, "sampling_setup", lambda: ("pytorch", None))
    assert token_ids.refuse_unknown_token_ids(None, seeded) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[0, 1023], [5]], ids=["whole-range", "one"])
def test_known_token_ids_pass(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_live", object())
    request = request_of(ids, stop={0, 1023}, top_logprobs=1024)
    assert token_ids.refuse_unknown_token_ids(None, request) is None  # type: ignore[arg-type]
    assert request.sampling_params.stop_token_ids == {0, 1023} and request.logprob.top_logprobs_num == 1024
