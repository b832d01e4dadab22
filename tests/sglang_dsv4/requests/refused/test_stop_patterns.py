"""Searches for `stop_regex`: SGLang's result, within a limit on their time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX, Req

from sglang_dsv4.requests.refused import stop_patterns

TEXT = "the answer is 42, and then 43.\n" + "a" * 60 + "!"
SLOW = r"(a|a)*[bc]"


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_patterns, "live_parts", lambda: object())


def request_of(*patterns: str) -> Req:
    """A request whose tokens are the characters of TEXT."""
    req = Req.__new__(Req)
    req.rid, req.finished_reason, req.finished_len, req.decoded_text = "r", None, None, ""
    req.output_ids = [ord(letter) for letter in TEXT]
    req.tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    req.sampling_params = SimpleNamespace(
        stop_strs=[], stop_regex_strs=[*patterns], stop_str_max_len=0, stop_regex_max_len=2**30
    )
    return req


@pytest.mark.parametrize("patterns", [[r"\d+,"], ["nothing"], ["nothing", r"43\.\n"], [r"a+!$"], [r"4[23](?=\.)"]])
@pytest.mark.parametrize("accepted", [1, 5, 90])
def test_the_result_is_sglangs(patterns: list[str], accepted: int) -> None:
    alone, timed = request_of(*patterns), request_of(*patterns)
    expected = alone._check_str_based_finish(accepted)
    assert stop_patterns.check_within_limit(Req._check_str_based_finish, timed, accepted) == expected
    assert timed.finished_len == alone.finished_len
    assert isinstance(timed.finished_reason, FINISHED_MATCHED_REGEX) == expected


@pytest.mark.parametrize("accepted", [1, 5])
@pytest.mark.parametrize("patterns", [[SLOW], ["nothing", SLOW], ["(?:.|\\s)*" * 9 + "[<>]"]])
def test_a_search_without_an_end_ends_the_request(patterns: list[str], accepted: int) -> None:
    req, begin = request_of(*patterns), time.monotonic()
    assert stop_patterns.check_within_limit(Req._check_str_based_finish, req, accepted)
    assert time.monotonic() - begin < 20 * stop_patterns.SECONDS
    assert isinstance(req.finished_reason, FINISH_ABORT) and req.finished_reason.status_code == 400
    assert repr(patterns[-1]) in req.finished_reason.message and f"{len(TEXT)} tokens" in req.finished_reason.message


def test_other_requests_and_other_code_use_pythons_module() -> None:
    called = []
    for req in (request_of(), request_of("x")):
        stop_patterns.check_within_limit(lambda _: called.append(schedule_batch.re), req)
    assert [module.__name__ for module in called] == ["re", "TimedExpressions"]
    assert schedule_batch.re.__name__ == "re"


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "(?P<a>b)(?P<a>c)", 5])
def test_no_expression(pattern: object) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        stop_patterns.check(pattern)
