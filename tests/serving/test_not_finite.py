"""A request whose logits are not finite ends with a reason; other requests of its batch do not notice.

Forbidden tokens are tried on the session's server. A model that computes NaN needs a server of its own (slow): the
embedding of one token is so large that the first sublayer overflows, and every value of the checkpoint is finite.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from model.checkpoint_tensors import changed_tensor
from serving.server import SLEEP_ON_IDLE, Server, output_logprobs, running_server
from serving.speculation import ALGORITHMS, drafting_flags

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers import finite
from sglang_dsv4.requests import not_finite

TIMEOUT_S = 300
KNOWN = [0, *range(300, 340)]
BROKEN = 1000  # the token
ALL = list(range(1024))
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def post(server: Server, input_ids: list[int], **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/generate", json={"input_ids": input_ids, **body}, timeout=TIMEOUT_S)


def known(server: Server) -> tuple[list[int], list[float]]:
    result = server.generate(KNOWN, max_new_tokens=24)
    return result["output_ids"], output_logprobs(result)


def ended(server: Server, cause: str) -> float:
    """Return the metric's count of requests."""
    text = requests.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
    lines = [line for line in text.splitlines() if line.startswith("sglang_dsv4:not_finite_requests_total")]
    (line,) = [line for line in lines if f'cause="{cause}"' in line]
    return float(line.split()[-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_request_that_forbids_every_token_gets_a_reason(server: Server, temperature: float) -> None:
    """A processor, or stop tokens with `min_new_tokens`, forbid every token. A sampled request ended the server."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    before, count = known(server), ended(server, "adjusted")
    forbid = {
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "sampling_params": {**GREEDY, "temperature": temperature, "custom_params": {"token_ids": ALL}},
    }
    stops = {"sampling_params": {**GREEDY, "temperature": temperature, "stop_token_ids": ALL, "min_new_tokens": 3}}
    with ThreadPoolExecutor(3) as pool:
        beside = pool.submit(known, server)
        for response in pool.map(lambda body: post(server, [0, 5, 6], **body), (forbid, stops)):
            assert response.status_code == 400 and "no token can be drawn" in response.text, response.text
        assert beside.result() == before
    assert known(server) == before
    assert ended(server, "adjusted") == count + 2


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_row_without_tokens_is_marked_with_and_without_overlap(overlap: bool) -> None:
    """Without overlap and drafts SGLang keeps penalties in the penalisers only: such rows were sampled from."""
    info = SimpleNamespace(
        acc_additive_penalties=torch.zeros(2, 4) if overlap else None,
        acc_scaling_penalties=None,
        logit_bias=None,
        grammars=None,
        has_custom_logit_processor=False,
        penalizer_orchestrator=None if overlap else SimpleNamespace(is_required=True),
    )
    logits = torch.tensor([[-torch.inf] * 4, [-torch.inf, 0.0, -torch.inf, 1.0]])
    not_finite.mark_adjusted_rows(logits, info)  # type: ignore[arg-type]
    assert info.unusable.tolist() == [True, False]
    assert logits[0].tolist() == [0.0] * 4


SERVERS = {"plain": (PRESETS["tiny"], ()), **{name: (ALGORITHMS[name][0], drafting_flags(name)) for name in ALGORITHMS}}


@pytest.fixture(scope="module", params=SERVERS)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("broken")
    preset, flags = SERVERS[request.param]
    write_checkpoint(folder / "checkpoint", preset)
    with changed_tensor(folder / "checkpoint", "embed.weight") as embedding:
        embedding[BROKEN] = 3e38
    flags = (*flags, "--max-total-tokens", "4096", "--max-running-requests", "8", "--enable-metrics", SLEEP_ON_IDLE)
    env = {finite.VARIABLE: "on"}
    with running_server(folder / "checkpoint", folder / "log", *flags, env=env) as running:
        yield running


@pytest.mark.slow
def test_only_the_request_with_the_broken_token_ends(server: Server, broken: Server) -> None:
    """NaN appears in a prefill, or in a decode or verify step after a forced token; greedy, drawn, streamed or not."""
    expected, count = known(server), ended(broken, "model")
    force = {"logit_bias": {str(BROKEN): 1e4}}  # the first token is the broken one: the second has no logits
    with ThreadPoolExecutor(6) as pool:
        beside = pool.submit(known, broken)
        bodies = [
            ([5, BROKEN, 6], {"sampling_params": GREEDY}),
            ([5, BROKEN], {"sampling_params": {**GREEDY, "temperature": 1.0}}),
            ([5, 6], {"sampling_params": {**GREEDY, **force}}),
            ([5, 6], {"sampling_params": {**GREEDY, **force, "temperature": 0.7}}),
        ]
        for response in pool.map(lambda body: post(broken, body[0], **body[1]), bodies):
            assert response.status_code == 500 and "logits are not finite" in response.text, response.text
        assert beside.result() == expected
    streamed = post(broken, [5, 6], sampling_params={**GREEDY, **force}, stream=True)
    lines = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"] == [BROKEN]
    assert known(broken) == expected
    assert ended(broken, "model") == count + 5
    assert "not finite first in layer 0, attention" in broken.log
