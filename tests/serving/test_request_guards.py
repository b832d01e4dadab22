"""Requests that ended the server, got a 500 or were served as other requests: now a 400 each.

One test a row of the table in `requests.refused.guards`. A request after them gets the same bits as before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from serving.server import SLEEP_ON_IDLE, Server, output_logprobs, running_server

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

TIMEOUT_S = 600
KNOWN = [0, *range(300, 340)]
HIDDEN = PRESETS["tiny"].hidden_size


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, **fields}


def sampled(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return generate(sampling_params={"max_new_tokens": 3, **parameters})


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}]
    return "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 4, **fields}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


ENDLESS = {"$ref": "#"}
CASES = {
    "parameters-for-one-of-two-prompts": (
        *generate(input_ids=[[5], [6]], sampling_params=[{"max_new_tokens": 2}]),
        "1 entries for 2 prompts",
    ),
    "millions-of-answers": (*sampled(n=2**31), "n must be a whole number from 1 to 1024"),
    "millions-of-answers-in-chat": (*chat(n=10**7), "n must be a whole number from 1 to 1024"),
    "no-answer": (*sampled(n=0), "n must be a whole number"),
    "a-list-of-parameters-for-one-prompt": (*generate(sampling_params=[{"max_new_tokens": 2}]), "one prompt"),
    "embeddings-of-nothing": ("/generate", {"input_embeds": [], "sampling_params": {}}, "input_embeds is empty"),
    "an-image": (*generate(image_data="x.png"), "takes text only"),
    "audio-of-one-of-two": (*generate(input_ids=[[5], [6]], audio_data=[None, "x.wav"]), "takes text only"),
    "video": (*generate(video_data=["x.mp4"]), "takes text only"),
    "a-stop-that-is-no-regex": (*sampled(stop_regex="("), "not a regular expression"),
    "a-stop-that-is-searched-without-an-end": (
        # (?!) matches nowhere, whatever the sampled answer says
        *sampled(stop_regex="(?:.|\\s)*" * 12 + "(?!)", max_new_tokens=100, ignore_eos=True),
        "took longer than 0.1 s",
    ),
    "a-stop-in-chat-that-is-none": (*chat(stop_regex=["a", "["]), "not a regular expression"),
    "a-schema-of-itself": (*sampled(json_schema=json.dumps(ENDLESS)), "no text fulfils"),
    "a-schema-of-itself-in-chat": (*chat(response_format=format_of(ENDLESS)), "no text fulfils"),
    "a-grammar-of-itself": (*sampled(ebnf="root ::= root"), "no text fulfils"),
    "a-schema-and-a-least-length": (
        *sampled(json_schema='{"type": "null"}', min_new_tokens=30, max_new_tokens=40),
        "min_new_tokens is 30 with json_schema",
    ),
    "embeddings-by-position": (*generate(positional_embed_overrides=["x"]), "positional_embed_overrides"),
    "profile-of-minus-one-steps": ("/start_profile", {"num_steps": -1}, "num_steps must be at least 1"),
    "end-of-no-profile": ("/stop_profile", {}, "not in progress"),
    "record-of-experts": ("/start_expert_distribution_record", {}, "expert_distribution_recorder_mode"),
    "end-of-no-record": ("/stop_expert_distribution_record", {}, "expert_distribution_recorder_mode"),
    "no-record-to-dump": ("/dump_expert_distribution_record", {}, "expert_distribution_recorder_mode"),
    "a-parser-that-is-none": ("/parse_function_call", {"text": "x", "tools": [], "tool_call_parser": "no"}, "no"),
    "a-reasoning-parser-that-is-none": ("/separate_reasoning", {"text": "x", "reasoning_parser": "no"}, "no"),
    "negative-token-to-decode": ("/detokenize", {"tokens": [5, -5]}, "-5 is no token id"),
    "far-token-to-decode": ("/detokenize", {"tokens": [[5], [10**12]]}, "1000000000000 is no token id"),
}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields}


BOTH = [[5], [6]]
LOGPROBS = {"return_logprob": True}
FIELDS = {
    "a-list-of-counts": (*generate(**LOGPROBS, top_logprobs_num=[1]), "top_logprobs_num is a list, and there is one"),
    "a-list-of-starts": (*generate(**LOGPROBS, logprob_start_len=[0]), "logprob_start_len is a list, and there is one"),
    "a-list-of-ids": (*generate(rid=["a"]), "rid is a list, and there is one prompt"),
    "a-list-of-ids-in-chat": (*chat(rid=["a"]), "rid is a list, and there is one prompt"),
    "a-list-of-keys-in-a-stream": (*chat(extra_key=["a"], stream=True), "extra_key is a list, and there is one"),
    "a-count-of-one-of-two": (
        *generate(input_ids=BOTH, **LOGPROBS, top_logprobs_num=[1]),
        "has 1 entries for 2 prompts",
    ),
    "an-id-of-one-of-two": (*completion(prompt=["a", "b"], rid=["a"]), "rid has 1 entries for 2 prompts"),
    "embeddings-for-no-position": (*generate(positional_embed_overrides=[]), "positional_embed_overrides is a list"),
    "labels-of-no-metric": (*generate(custom_labels={"who": "me"}), "custom_labels has 'who'"),
    "an-unknown-name-for-vertex": (
        *("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"who": 1}}),
        "unexpected keyword argument 'who'",
    ),
    "a-token-that-is-none": (*generate(input_ids=[5, -5], stream=True), "Token id -5 is not in the vocabulary"),
    "a-token-that-is-none-in-chat": (*chat(input_ids=[5, -5], stream=True), "Token id -5 is not in the vocabulary"),
    "a-token-that-is-none-in-a-text": (*completion(prompt=[5, -5], stream=True), "Token id -5 is not in the"),
    "a-grammar-that-is-none": (*generate(sampling_params={"regex": "("}, stream=True), "Failed to compile regex"),
    "a-format-by-name": (*chat(response_format="json_object"), "response_format can't be read, got 'json_object'"),
    "the-best-of-two-for-three": (*completion(best_of=2, n=3), "best_of is 2 and n is 3"),
    "the-best-of-none": (*completion(best_of=0), "best_of is 0"),
    "an-effort-that-is-none": (
        *chat(chat_template_kwargs={"reasoning_effort": "ultra"}),
        "reasoning_effort must be one",
    ),
    "a-long-expression": (*sampled(regex="[a-z]x" * 50_000), "regex has 300,000 characters"),
    "a-profile-nowhere": ("/start_profile", {"num_steps": 1, "output_dir": "/proc/nope"}, "no file can be made in"),
    "years-of-sleep": ("/slow_down", {"forward_sleep_time": 1e9}, "forward_sleep_time must be at most 60 seconds"),
    "a-log-level-that-is-none": ("/configure_logging", {"log_requests_level": 9}, "log_requests_level must be from 0"),
}


def known_answer(server: Server) -> tuple[list[int], list[float]]:
    result = server.generate(KNOWN, max_new_tokens=8)
    return result["output_ids"], output_logprobs(result)


@pytest.mark.parametrize(("path", "body", "reason"), CASES.values(), ids=CASES)
def test_it_is_refused_with_a_reason(server: Server, path: str, body: dict[str, Any], reason: str) -> None:
    before = known_answer(server)
    response = requests.post(server.url + path, json=body, timeout=TIMEOUT_S)
    assert response.status_code == 400, (response.status_code, response.text)
    assert reason in response.text
    assert known_answer(server) == before


@pytest.fixture(scope="module")
def same_answers(server: Server) -> Iterator[None]:
    before = known_answer(server)
    yield
    assert known_answer(server) == before


@pytest.mark.parametrize(("path", "body", "reason"), FIELDS.values(), ids=FIELDS)
def test_a_field_is_refused_with_a_reason(
    server: Server, same_answers: None, path: str, body: dict[str, Any], reason: str
) -> None:
    """Lists of counts, labels, overrides, and the forward after a bad profile each ended the server."""
    response = requests.post(server.url + path, json=body, timeout=TIMEOUT_S)
    assert response.status_code == 400, (response.status_code, response.text)
    assert reason in response.json().get("error", response.json())["message"]


def test_a_section_that_is_none_is_refused(server: Server) -> None:
    response = requests.get(f"{server.url}/v1/loads?include=no", timeout=TIMEOUT_S)
    assert response.status_code == 400 and "Invalid include sections" in response.text


def test_scores_are_computed(server: Server) -> None:
    """/v1/score asks for log-probabilities and no token: it ended the server, because a hook of ours accepted no
    keywords."""
    body = {"query": "x", "items": ["a", "b"], "label_token_ids": [5, 6], "model": "tiny"}
    response = requests.post(f"{server.url}/v1/score", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    assert all(0 < p < 1 for scores in response.json()["scores"] for p in scores)
    assert server.is_alive()


def test_a_profile_is_made(server: Server, tmp_path: Path) -> None:
    """On a CPU SGLang asks the platform what to record."""
    body = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    assert requests.post(f"{server.url}/start_profile", json=body, timeout=TIMEOUT_S).status_code == 200
    assert server.is_alive()
    assert requests.post(f"{server.url}/stop_profile", timeout=TIMEOUT_S).status_code == 200
    assert server.is_alive() and list(tmp_path.rglob("*.json*"))


# ---- a server without prefix reuse, which accepts embeddings and new weights


PLAIN = pytest.mark.slow  # a server of their own


@pytest.fixture(scope="module")
def plain_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-total-tokens", "2048", "--max-running-requests", "4", "--disable-radix-cache", SLEEP_ON_IDLE)
    with running_server(checkpoint, tmp_path_factory.mktemp("plain") / "log", *flags) as running:
        yield running


EMBEDDINGS = {
    "too-narrow": [[0.1] * 7] * 3,
    "ragged": [[0.1] * HIDDEN, [0.1] * 3],
    "overflowing": [[1e39] * HIDDEN] * 3,
    "of-which-one-overflows": [[0.1] * HIDDEN, [0.1] * (HIDDEN - 1) + [1e30]],
}


@PLAIN
@pytest.mark.parametrize("embeddings", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_embeddings_that_can_not_be_computed_with(plain_server: Server, embeddings: list[list[float]]) -> None:
    before = known_answer(plain_server)
    for temperature in (0, 1):
        parameters = {"max_new_tokens": 2, "temperature": temperature}
        body = {"input_embeds": embeddings, "sampling_params": parameters}
        response = requests.post(f"{plain_server.url}/generate", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 400, response.text
        assert f"input_embeds must be [tokens][{HIDDEN}]" in response.text
    assert known_answer(plain_server) == before


@PLAIN
def test_embeddings_are_taken(plain_server: Server) -> None:
    body = {"input_embeds": [[0.1] * HIDDEN] * 3, "sampling_params": {"max_new_tokens": 2}}
    response = requests.post(f"{plain_server.url}/generate", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200 and len(response.json()["output_ids"]) == 2


@PLAIN
def test_weights_that_do_not_fit_leave_those_of_before(plain_server: Server, tmp_path: Path) -> None:
    """SGLang writes the weights that fit and then rolls back to the same files; that ended the server.

    `test_weight_updates` has files of the same config.
    """
    write_checkpoint(tmp_path, PRESETS["pro-0813"])
    before = known_answer(plain_server)
    body = {"model_path": str(tmp_path)}
    response = requests.post(f"{plain_server.url}/update_weights_from_disk", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 400 and "The old weights stay" in response.json()["message"], response.text
    assert known_answer(plain_server) == before
    missing = requests.post(
        f"{plain_server.url}/update_weights_from_disk", json={"model_path": str(tmp_path / "no")}, timeout=TIMEOUT_S
    )
    assert missing.status_code == 400
    assert known_answer(plain_server) == before
