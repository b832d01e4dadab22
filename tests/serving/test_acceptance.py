"""The acceptance checks against a server of ours with random weights, and their prompts against DeepSeek's encoder.

`tests/sglang_dsv4/acceptance/test_acceptance.py` plants the faults.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from serving.server import Server
from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe
from transformers import AutoTokenizer

from sglang_dsv4.acceptance import __main__ as command
from sglang_dsv4.acceptance import client, encoding, plan
from sglang_dsv4.acceptance.encoding_cases import CASES, Case
from sglang_dsv4.acceptance.served import Served, Weights

FEW = dataclasses.replace(plan.QUICK, documents=1, conversations=1, batch=2, answer_tokens=4)
SEVERAL = dataclasses.replace(plan.Plan(), documents=12, conversations=6, batch=12, answer_tokens=16)
JUDGED = {"server", "encoding", "json", "hits", "batch"}


def verdicts(server: Server, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str], str]:
    status = command.main([server.url, "--weights", "random", *arguments])
    page, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    return status, {item["name"]: item["verdict"] for item in json.loads(last)["items"]}, page


def test_a_server_of_random_weights_is_green_where_it_can_be_judged(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", FEW)
    status, found, page = verdicts(server, capsys, "--quick")
    assert {name for name, verdict in found.items() if verdict == "green"} == JUDGED, page
    assert status == 0 and set(found.values()) == {"green", "can't be judged"}, page


@pytest.mark.slow
def test_more_requests_and_a_stability_run(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", SEVERAL)
    status, found, page = verdicts(server, capsys, "--quick", "--hours", "0.005")
    assert {name for name, verdict in found.items() if verdict == "green"} == JUDGED | {"stability"}, page
    assert status == 0, page


@pytest.mark.slow
def test_random_weights_are_found_out(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([server.url, "--quick", "--only", "needles"]) == 3
    items = json.loads(capsys.readouterr().out.rstrip().rsplit("\n", 1)[1])["items"]
    assert [(item["verdict"], item.get("weights")) for item in items] == [
        ("green", "random"),
        ("can't be judged", None),
    ]


def test_the_efforts_are_those_of_the_release(server: Server) -> None:
    """The server renders April's efforts, since its checkpoint has no DSpark draft: the later releases' are others."""
    at = client.Server(server.url)
    at.model = at.get("/v1/models")["data"][0]["id"]
    facts = Served(at.model, Weights.FLASH_APRIL, "", None, None, None, "")
    few = dataclasses.replace(FEW, encodings_by_chat=frozenset())
    (april,) = encoding.check(at, facts, few)
    assert april.verdict.value == "green" and april.figures["compared"]["/tokenize"] == len(CASES), april
    (later,) = encoding.check(at, dataclasses.replace(facts, weights=Weights.FLASH_0731), few)
    assert later.verdict.value == "red" and [text.split(":")[0] for text in later.findings] == [
        "effort high",
        "effort max",
    ]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_prompts_are_those_of_deepseeks_encoder(case: Case, checkpoint: Path) -> None:
    """deepseek-recipe renders the later releases' efforts; `test_effort.py` compares April's."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    recipe = DeepSeekRecipe.from_hf_tokenizer("dsv4", tokenizer)
    effort = {"reasoning_effort": case.effort or "low"} if case.thinking else {}
    ids = recipe.encode({"messages": case.messages, "thinking": case.thinking, **case.fields, **effort})
    assert ids == tokenizer.encode(case.later or case.prompt, add_special_tokens=False)
