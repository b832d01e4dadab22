"""The acceptance checks against a stand-in: green if it answers right, red for each planted fault, else why not judged.

`tests/serving/test_acceptance.py` runs them against a server.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving.acceptance_stand_in import StandIn, serving

from sglang_dsv4.acceptance import __main__ as command
from sglang_dsv4.acceptance import calls, encoding, needles, official_vectors, plan, public_benchmarks, stability
from sglang_dsv4.acceptance.client import Server
from sglang_dsv4.acceptance.encoding_cases import CASES
from sglang_dsv4.acceptance.needles import Needle, judged
from sglang_dsv4.acceptance.report import Verdict
from sglang_dsv4.acceptance.served import Served, Weights
from sglang_dsv4.acceptance.structured import LONGEST, SCHEMAS, drawn, is_allowed

ROOT = Path(__file__).resolve().parents[3]
SMALL = dataclasses.replace(plan.QUICK, boundaries=range(7, 10), around=2, calls=8, documents=8, conversations=2)


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", SMALL)


def run(what: StandIn, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return (exit status, the JSON's items by name, the page)."""
    with serving(what):
        status = command.main([what.url, "--quick", "--seed", "1", *arguments])
    page, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    said = json.loads(last)
    assert said["status"] == status
    return status, {item["name"]: item for item in said["items"]}, page


def verdicts(items: dict[str, Any]) -> dict[str, str]:
    return {name: item["verdict"] for name, item in items.items()}


CALLS = ("tools", "tool arguments")
RIGHT = ("server", "encoding", "official", "needles", *CALLS, "tool results", "json", "json values", "hits", "batch")


def test_a_right_server_is_green(capsys: pytest.CaptureFixture[str]) -> None:
    status, items, page = run(StandIn(), capsys)
    open_items = {"drafts": "can't be judged", "stability": "can't be judged"}
    assert verdicts(items) == dict.fromkeys(RIGHT, "green") | open_items, page
    assert status == 0
    assert items["encoding"]["compared"] == {
        "/tokenize": 9,
        "the chat route, ids": 2,
        "the chat route, number of ids": 0,
    }
    assert items["needles"]["residues_mod_4"] == 4 and items["hits"]["compared"] == 4
    assert "GREEN           needles" in page and "sgl-eval run gpqa --base-url http://127.0.0.1:" in page


FAULTS = (
    ("3 mod 4", "needles", "3 mod 4"),
    ("encoding", "encoding", "one turn: /tokenize"),
    ("encoding of the chat route", "encoding", "one turn: the chat route"),
    ("official token", "official", "officially ' gamma'"),
    ("one token more", "official", "22 prompt tokens, officially 21"),
    ("call as text", CALLS, "'DSML' in the answer's text"),
    ("damaged call", CALLS, "(streamed): arguments that are no JSON object"),
    ("quotes not escaped", "tool arguments", "arguments that are no JSON object"),
    ("other arguments", CALLS, "expected "),
    ("result ignored", "tool results", "the answer is '0'"),
    ("invalid JSON", "json", "(whole): not JSON of its schema"),
    ("invalid JSON streamed", "json", "(streamed): not JSON of its schema"),
    ("JSON of another schema", "json", "not JSON of its schema"),
    ("endless JSON", "json", "(whole): cut at the token limit"),
    ("no grammar", "json", "(streamed): not JSON of its schema"),
    ("no end of stream", "json", "a stream ended without [DONE]"),
    ("other values", "json values", "expected {"),
    ("bits hit", "hits", "log-probabilities of equal tokens differ by up to 9.5e-07"),
    ("near hit", "hits", "then ' near', which was less likely by 0.25"),
    ("bits batch", "batch", "log-probabilities of equal tokens differ by up to 9.5e-07"),
)


@pytest.mark.parametrize(("fault", "item", "finding"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_planted_fault_is_red(
    fault: str, item: str | tuple[str, ...], finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    red = {item} if isinstance(item, str) else set(item)
    check = {"tool results": "tools", "tool arguments": "tools", "json values": "json"}.get(min(red), min(red))
    status, items, page = run(StandIn(fault), capsys, "--only", check)
    assert status == 1 and {name for name, found in verdicts(items).items() if found == "red"} == red, page
    for name in red:
        assert finding in "\n".join(items[name]["findings"])


def test_random_weights_are_told_from_a_faulty_release(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that answers no question: red with the released tokenizer, else its answers can't be judged."""
    _, items, _ = run(StandIn(weak=True), capsys, "--only", "drafts")
    assert items["server"]["verdict"] == "red" and items["server"]["weights"] == "flash-april"
    what = StandIn(weak=True, released=False, path="tiny")
    status, items, _ = run(what, capsys, "--only", "needles", "tools", "hits")
    assert (status, items["server"]["weights"]) == (0, "random")
    assert verdicts(items) == {
        "server": "green",
        "needles": "can't be judged",
        "tools": "can't be judged",
        "tool arguments": "can't be judged",
        "tool results": "can't be judged",
        "hits": "green",
    }
    assert items["needles"]["summary"] == "random weights"


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", {"tools": "green", "json": "green", "needles": "green"}),
        ("other arguments", {"tools": "can't be judged"}),
        ("call as text", {"tools": "can't be judged"}),
        ("damaged call", {"tools": "red"}),
        ("quotes not escaped", {"tools": "green", "tool arguments": "red"}),
        ("other values", {"json": "green", "json values": "can't be judged"}),
        ("endless JSON", {"json": "can't be judged", "json values": "can't be judged"}),
        ("no grammar", {"json": "red"}),
        ("invalid JSON streamed", {"json": "red"}),
        ("3 mod 4", {"needles": "can't be judged"}),  # of twelve needles three: chance does that
    ],
)
def test_trained_weights_that_are_no_release_may_be_wrong_themselves(
    fault: str, found: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server's fault is red with any weights; what a weak model may have done itself can't be judged."""
    checks = {name.removesuffix(" values").replace("tool arguments", "tools") for name in found}
    _, items, page = run(StandIn(fault, released=False, path="small"), capsys, "--only", *checks)
    assert items["server"]["weights"] == "other"
    assert {name: items[name]["verdict"] for name in found} == found, page


@pytest.mark.parametrize(
    ("fault", "released", "found"),
    [
        ("near", True, "can't be judged"),
        ("bits", True, "can't be judged"),
        ("clear", True, "red"),
        ("clear", False, "can't be judged"),
    ],
)
def test_without_a_promise_only_a_clear_difference_of_trained_weights_is_red(
    fault: str, released: bool, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = () if released else ("--weights", "random")
    _, items, _ = run(StandIn(f"{fault} hit", promise=False, released=released), capsys, "--only", "hits", *weights)
    assert items["hits"]["verdict"] == found
    assert "differ" in items["hits"]["summary"]


def test_hits_that_the_server_does_not_report_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Without cache_salt a continued conversation can't be cold; a repeated one was, the first time."""
    _, items, _ = run(StandIn("no salt"), capsys, "--only", "hits")
    assert items["hits"]["verdict"] == "green" and items["hits"]["compared"] == SMALL.conversations
    assert "`cache_salt` did not keep it out" in items["hits"]["findings"][0]


def test_the_full_plan_sends_every_conversation_to_the_chat_route() -> None:
    with serving(StandIn("encoding of the chat route")) as what:
        at = Server(what.url)
        at.model = what.path
        facts = Served(what.path, Weights.PRO_APRIL, "", None, None, None, "")
        (found,) = encoding.check(at, facts, plan.Plan())
    assert found.verdict is Verdict.RED and len(found.findings) == len(CASES)
    assert found.figures["compared"]["the chat route, ids"] == len(CASES)


def test_drafts_are_compared_with_a_server_without(capsys: pytest.CaptureFixture[str]) -> None:
    status, items, _ = run(StandIn(drafts="DSPARK"), capsys, "--only", "drafts")
    assert status == 3
    assert items["drafts"]["verdict"] == "can't be judged" and "--without-drafts" in items["drafts"]["summary"]
    for fault, found in (("", "green"), ("bits drafts", "red")):
        with serving(StandIn()) as plain:
            _, items, _ = run(
                StandIn(fault, drafts="DSPARK"), capsys, "--only", "drafts", "--without-drafts", plain.url
            )
        assert items["drafts"]["verdict"] == found


@pytest.mark.parametrize(
    ("fault", "found", "finding"),
    [
        ("", "green", "the probe took"),
        ("errors", "red", "/v1/chat/completions answered 500"),
        ("left running", "red", "1 requests are running or queued"),
    ],
)
def test_stability(
    fault: str, found: str, finding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stability, "DRAIN_S", 0)
    monkeypatch.setattr(stability, "PROBE_S", 0.02)
    hours = ("--hours", f"{0.2 / 3600}", "--concurrency", "2")
    _, items, page = run(StandIn(fault), capsys, "--only", "stability", *hours)
    assert items["stability"]["verdict"] == found, page
    assert finding in "\n".join(items["stability"]["findings"])


def test_no_more_requests_at_a_time_than_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    what = StandIn("slow batch")
    _, items, _ = run(what, capsys, "--only", "batch", "--concurrency", "2")
    assert (items["batch"]["verdict"], what.most_at_once) == ("green", 2)


# ---- what can't be checked


@pytest.mark.parametrize(
    ("what", "arguments", "said"),
    [
        (StandIn(), ("--model", "other"), "serves deepseek-ai/DeepSeek-V4-Flash, not other"),
        (StandIn(architecture="LlamaForCausalLM"), (), "these checks are for DeepSeek-V4"),
        (StandIn(architecture="DeepseekV41ForCausalLM"), (), "these checks are for DeepSeek-V4"),
        (StandIn(lacks=("/v1/models",)), (), "/v1/models answered 404"),
        (StandIn(lacks=("/v1/chat/completions",)), (), "/v1/chat/completions answered 404"),
    ],
    ids=["another name", "another model", "V4.1", "no models", "no chat"],
)
def test_a_server_that_cannot_be_checked_is_said(
    what: StandIn, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(what):
        assert command.main([what.url, "--quick", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"), [("127.0.0.1:1", "expected a URL such as http"), ("http://127.0.0.1:1", "no answer from http")]
)
def test_a_url_without_a_server_is_said(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([url]) == 2
    assert said in capsys.readouterr().err


def test_a_server_without_sglangs_routes_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """No /tokenize, /model_info and /server_info: the name says which release it is; the encoding needs a tokenizer."""
    what = StandIn(lacks=("/tokenize", "/model_info", "/server_info", "/metrics"), path="deepseek-ai/DeepSeek-V4-Flash")
    _, items, _ = run(what, capsys, "--only", "encoding", "needles", "--longest", "300")
    assert verdicts(items) == {"server": "green", "encoding": "can't be judged", "needles": "green"}
    assert items["server"]["promise"] is None and items["server"]["weights"] == "flash-april"


@pytest.mark.parametrize(
    ("path", "weights"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", "flash-april"),
        ("/models/DeepSeek-V4-Flash-0731/", "flash-0731"),
        ("deepseek-ai/DeepSeek-V4-Pro", "pro-april"),
        ("deepseek-ai/DeepSeek-V4-Pro-0813", "pro-0813"),
        ("deepseek-ai/DeepSeek-V4-Flash-Base", "other"),
        ("v4", "release"),
    ],
)
def test_the_name_says_which_release(path: str, weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, items, _ = run(StandIn(path=path), capsys, "--only", "drafts")
    assert items["server"]["weights"] == weights


def test_an_interrupt_ends_with_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(command.CHECKS, "needles", interrupt)
    status, items, _ = run(StandIn(), capsys)
    assert verdicts(items) == dict.fromkeys(RIGHT[:3], "green") | {"needles": "can't be judged"}
    assert status == 0 and "interrupted" in items["needles"]["summary"]


def test_a_server_that_goes_away_is_red(capsys: pytest.CaptureFixture[str]) -> None:
    """No request is begun after the first that got no answer."""
    what = StandIn("goes away")
    _, items, _ = run(what, capsys, "--only", "json", "--concurrency", "2")
    assert items["json"]["verdict"] == "red" and "no answer from" in items["json"]["summary"]
    assert what.asked <= 3 + 4


# ---- needles


def test_needles_have_every_residue() -> None:
    """The full plan: every residue modulo 128 twice, and each residue modulo 4 at every power of two."""
    found = needles.lengths(plan.Plan(), 1_048_512)
    dense = [length for begin, end in plan.ALL_LENGTHS for length in range(begin, end)]
    assert set(dense) <= set(found) and {length % 128 for length in dense} == set(range(128))
    for power in range(7, 20):
        beside = [length for length in found if abs(length - 2**power) <= 4]
        assert {length % 4 for length in beside} == {0, 1, 2, 3}, power
    assert max(found) == 1_048_512 and len(found) < 400
    assert max(needles.lengths(plan.QUICK, 10**6)) < 5000 and len(needles.lengths(plan.QUICK, 10**6)) == 24


def of_lengths(wrong_at: Any, weights: Weights, lengths: range = range(256, 384)) -> Verdict:
    found = [Needle(length, "1", "2" if wrong_at(length) else "1") for length in lengths]
    return judged(found, set(), {}, weights).verdict


def test_a_dependence_on_the_length_is_red_and_a_weak_model_is_not() -> None:
    draw = random.Random(0)
    for weights in (Weights.FLASH_APRIL, Weights.OTHER):
        assert of_lengths(lambda length: length % 4 == 3, weights) is Verdict.RED
        assert of_lengths(lambda length: length % 128 == 127, weights, range(256, 2048)) is Verdict.RED
        assert of_lengths(lambda length: False, weights) is Verdict.GREEN
    for share, verdict in ((0.05, Verdict.GREEN), (0.2, Verdict.NOT_JUDGED)):
        wrong = {length: draw.random() < share for length in range(256, 384)}
        assert of_lengths(wrong.get, Weights.OTHER) is verdict
        assert of_lengths(wrong.get, Weights.FLASH_APRIL) is Verdict.RED


def test_refusals_beyond_the_longest_answer_are_the_servers_limit() -> None:
    found = [Needle(length, "1", "1") for length in (100, 300)]
    assert judged(found, set(), {400: "too long"}, Weights.RELEASE).verdict is Verdict.GREEN
    assert judged(found, set(), {200: "too long"}, Weights.RELEASE).verdict is Verdict.RED


# ---- data


def test_the_long_prompts_are_those_that_were_captured() -> None:
    for vector in official_vectors.VECTORS:
        assert hashlib.sha256(vector.prompt.encode()).hexdigest() == vector.prompt_sha256, vector.name
    assert sum(len(vector.tokens) for vector in official_vectors.VECTORS) == 17
    assert "MIT License" in official_vectors.__doc__ and "antirez/ds4" in official_vectors.__doc__


def test_a_schema_allows_its_own_values_only() -> None:
    draw = random.Random(0)
    values = [drawn(schema, draw) for schema in SCHEMAS for _ in range(20)]
    for index, schema in enumerate(SCHEMAS):
        allowed = [is_allowed(value, schema) for value in values]
        assert allowed == [i // 20 == index for i in range(len(values))]
    assert not is_allowed({"city": "Rome", "days": True}, SCHEMAS[0])
    assert not is_allowed({"city": "Rome", "days": 100}, SCHEMAS[0])
    assert not is_allowed({"cities": ["Rome"]}, SCHEMAS[2])


def test_an_answer_has_as_many_characters_as_its_schema_allows() -> None:
    draw = random.Random(0)
    values = [drawn(schema, draw) for schema in SCHEMAS for _ in range(1000)]
    assert max(len(json.dumps(value, separators=(",", ":"))) for value in values) == LONGEST


def test_a_question_has_the_arguments_and_not_the_result() -> None:
    for index in range(400):
        plain, hard = calls.plain_task(index, 0), calls.hard_task(index, 0)
        assert all(str(value) in plain.question for value in plain.arguments.values())
        assert json.dumps(hard.arguments, ensure_ascii=False) in hard.question
        assert all(one.result not in one.question for one in (plain, hard))
        assert all(one.name in {tool["function"]["name"] for tool in one.tools} for one in (plain, hard))


def test_the_commands_are_shell() -> None:
    """Names are quoted, no placeholder is left, and a shell can parse the lines."""
    for benchmark in public_benchmarks.BENCHMARKS:
        lines = public_benchmarks.commands(benchmark, "http://h:1", "a model", Weights.PRO_APRIL)
        text = "\n".join(lines)
        assert "'a model'" in text and "{url}" not in text and "{tokens}" not in text
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_it_needs_nothing_but_python() -> None:
    """The checks run where neither torch nor SGLang is installed."""
    code = "import sglang_dsv4.acceptance.__main__"
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(ROOT)}, cwd="/")
    assert done.returncode == 0
