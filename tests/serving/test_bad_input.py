"""Invalid requests get a 4xx with a reason, and the server goes on."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from serving.server import POOL_TOKENS, VOCAB_SIZE, Server

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "tiny", "messages": USER, "max_tokens": 4, **fields}


def generate(input_ids: list[int], **sampling_params: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": input_ids, "sampling_params": {"max_new_tokens": 4, **sampling_params}}


CASES = {
    "prompt-longer-than-the-pool": (*generate([5] * (POOL_TOKENS + 1)), "token"),
    "prompt-longer-than-the-context": (*generate([5] * 16385), "16384"),
    "chat-longer-than-the-pool": (*chat(messages=[{"role": "user", "content": "x" * 20000}]), "token"),
    "prompt-that-fits-only-without-a-page-to-spare": (*generate([5] * (POOL_TOKENS - 8)), "token"),
    "unknown-token-id": (*generate([5, VOCAB_SIZE]), str(VOCAB_SIZE)),
    "far-too-large-token-id": (*generate([2**31 - 1]), "vocab"),
    "negative-token-id": (*generate([-1]), "-1"),
    # These ended the server: an empty prompt's embedding has no last row, and the penaliser and topk index with the
    # values.
    "no-text": ("/generate", {"text": "", "sampling_params": {"max_new_tokens": 4}}, "empty"),
    "no-prompt": ("/v1/completions", {"model": "tiny", "prompt": "", "max_tokens": 4}, "empty"),
    "unknown-stop-token-id": (*generate([5], min_new_tokens=2, stop_token_ids=[VOCAB_SIZE + 1]), str(VOCAB_SIZE + 1)),
    "more-top-logprobs-than-tokens": (
        "/generate",
        {**generate([5])[1], "return_logprob": True, "top_logprobs_num": VOCAB_SIZE + 1},
        "top_logprobs_num",
    ),
    "no-tokens": (*generate([]), "empty"),
    "negative-temperature": (*chat(temperature=-0.1), "temperature"),
    "top_p-above-one": (*chat(top_p=1.5), "top_p"),
    "top_p-zero": (*chat(top_p=0.0), "top_p"),
    "min_p-above-one": (*chat(min_p=1.5), "min_p"),
    "top_k-below-minus-one": (*generate([5], top_k=-2), "top_k"),
    "frequency-penalty-out-of-range": (*chat(frequency_penalty=3), "frequency_penalty"),
    "bias-of-an-unknown-token": (*chat(logit_bias={str(VOCAB_SIZE): 1.0}), "logit_bias"),
    "negative-max-tokens": (*chat(max_tokens=-1), "max"),
    "temperature-not-a-number": (*chat(temperature="warm"), "temperature"),
    "messages-missing": ("/v1/chat/completions", {"model": "tiny"}, "messages"),
    "messages-empty": (*chat(messages=[]), "messages"),
    "unknown-role": (*chat(messages=[{"role": "wizard", "content": "hi"}]), "role"),
    "schema-not-a-schema": (
        *chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
        "schema",
    ),
    "unknown-path": ("/v1/nothing", {}, "not found"),
}


@pytest.mark.parametrize(("path", "body", "reason"), CASES.values(), ids=CASES)
def test_bad_request_is_refused_with_a_reason(server: Server, path: str, body: dict[str, Any], reason: str) -> None:
    response = requests.post(server.url + path, json=body, timeout=120)
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    assert reason.lower() in response.text.lower()
    assert server.is_alive()


@pytest.mark.parametrize(
    "body", [b"{", b"", b'{"model": "tiny", "messages": ', b"\xff\xfe"], ids=["brace", "empty", "cut", "bytes"]
)
def test_malformed_json_is_refused(server: Server, body: bytes) -> None:
    response = requests.post(
        server.url + "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}, timeout=300
    )
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    assert server.is_alive()
