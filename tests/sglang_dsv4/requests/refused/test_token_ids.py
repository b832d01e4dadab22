"""Requests with token ids or seeds that can't be served get a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dsv4.requests.refused import token_ids
from sglang_dsv4.seam import live


def request_of(ids: list[int], stop: set[int] | None = None, top_logprobs: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=ids,
        input_embeds=None,
        vocab_size=1024,
        sampling_params=SimpleNamespace(
            stop_token_ids=stop, sampling_seed=None, top_k=50, min_p=0.0, stop_regex_strs=[]
        ),
        logprob=SimpleNamespace(top_logprobs_num=top_logprobs),
    )


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
    reason = token_ids.refuse_unknown_token_ids(None, request_)  # type: ignore[arg-type]
    assert reason is not None and named in reason
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
