"""Every number of the sampling parameters at the limits of its type and beyond, alone and with other requests.

A value that a batch's tensors cannot hold ended the server: they are made in the scheduler, of all requests at once.
Now it is a 400 that names the parameter, and the other requests have the bits that they have alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import requests
from serving.server import Server, output_logprobs

TIMEOUT_S = 600
BESIDE = [0, *range(500, 520)]

REFUSED: dict[str, tuple[str, Any]] = {
    "top_k-beyond-int32": ("top_k", 2**31),
    "top_k-beyond-int64": ("top_k", 2**63),
    "top_k-huge": ("top_k", 10**30),
    "min_new_tokens-beyond-int32": ("min_new_tokens", 2**31),
    "max_new_tokens-beyond-int32": ("max_new_tokens", 2**31),
    "temperature-beyond-fp32": ("temperature", 1e39),
    "repetition_penalty-beyond-fp32": ("repetition_penalty", 1e39),
    "repetition_penalty-subnormal": ("repetition_penalty", 1e-46),
    "repetition_penalty-divides-beyond-fp32": ("repetition_penalty", 1e-37),
    "bias-beyond-fp32": ("logit_bias", {"5": 1e39}),
    "bias-that-a-temperature-divides-beyond-fp32": ("logit_bias", {"5": 3e38}),
    "bias-a-text": ("logit_bias", {"5": "x"}),
    "min_p-a-text": ("min_p", "x"),
    "frequency_penalty-beyond-fp32": ("frequency_penalty", 1e39),
    "presence_penalty-beyond-fp32": ("presence_penalty", -1e39),
    "stop_token-beyond-int32": ("stop_token_ids", [2**31]),
    "stop_token-beyond-int64": ("stop_token_ids", [2**63]),
    "stop_token-negative": ("stop_token_ids", [-(2**31) - 1]),
}
SGLANGS = ("invalid type: ", "Requested token count exceeds")
"""SGLang's reasons, which come before ours and name no field."""
IN_CHAT = ("top_k", "temperature", "repetition_penalty", "logit_bias", "min_p", "frequency_penalty", "stop_token_ids")
TAKEN: dict[str, dict[str, Any]] = {
    "top_k-the-largest": {"top_k": 2**31 - 1, "temperature": 1.0},
    "temperature-the-largest": {"temperature": 3e38},
    "temperature-the-least": {"temperature": 2.0**-126},
    "top_p-the-least": {"top_p": 1e-40, "temperature": 1.0},
    "min_p-one": {"min_p": 1.0, "temperature": 1.0},
    "bias-the-largest": {"logit_bias": {"5": 1e20}, "temperature": 1e-6},
    "bias-the-least": {"logit_bias": {"5": -1e20}},
    "biases-and-penalties-the-largest": {
        "logit_bias": {"5": 1e20, "6": -1e20},
        "temperature": 1e-6,
        "repetition_penalty": 1e-6,
    },
    "penalties": {"frequency_penalty": 2.0, "presence_penalty": -2.0, "repetition_penalty": 2.0},
    "temperature-below-fp32": {"temperature": 1e-46},  # greedy, as all below 1e-6
    "seed-the-largest": {"sampling_seed": 2**31 - 1, "temperature": 1.0},
}


def known(server: Server) -> tuple[list[int], list[float]]:
    result = server.generate(BESIDE, max_new_tokens=6)
    return result["output_ids"], output_logprobs(result)


def answer_beside(server: Server, parameters: dict[str, Any]) -> tuple[int, tuple[list[int], list[float]] | None]:
    """Return the status of a call with two prompts, and the answer to the first one, whose parameters are plain."""
    plain = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": [BESIDE, [0, 5, 6]],
        "sampling_params": [plain, {"max_new_tokens": 3, **parameters}],
        "return_logprob": True,
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S)
    if response.status_code != 200:
        return response.status_code, None
    first = response.json()[0]
    return 200, (first["output_ids"], output_logprobs(first))


@pytest.mark.parametrize(("name", "value"), REFUSED.values(), ids=REFUSED)
def test_beyond_its_limit_it_is_refused_by_name(server: Server, name: str, value: object) -> None:
    before = known(server)
    body = {"input_ids": [0, 5, 6], "sampling_params": {"max_new_tokens": 3, name: value}}
    alone = requests.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S)
    assert alone.status_code == 400, (alone.status_code, alone.text)
    named = name.removesuffix("_ids").replace("_", " ") in alone.text.lower().replace("_", " ")
    assert named or any(reason in alone.text for reason in SGLANGS), alone.text
    if name in IN_CHAT:
        messages = [{"role": "user", "content": "hi"}]
        chat = {"model": "tiny", "messages": messages, "max_tokens": 3, name: value}
        response = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=TIMEOUT_S)
        assert response.status_code == 400, (response.status_code, response.text)
    assert answer_beside(server, {name: value})[0] == 400
    assert known(server) == before


@pytest.mark.parametrize("parameters", TAKEN.values(), ids=TAKEN)
def test_at_its_limit_it_is_taken(server: Server, parameters: dict[str, Any]) -> None:
    before = known(server)
    status, beside = answer_beside(server, parameters)
    assert status == 200 and beside == before
    assert known(server) == before
