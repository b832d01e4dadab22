"""Speculation through SGLang's server on a CPU: answers have the same tokens and log-probabilities as without it.

Proposals come from an oracle (`oracle_drafts`), so that blocks are accepted up to every position. The server without
speculation is the session's; the servers with it also keep prefixes in host memory and files.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from serving import oracle_drafts
from serving.server import (
    TAILS,
    Server,
    account,
    flush,
    running_server,
    wait_for_files,
)
from serving.speculation import (
    ALGORITHMS,
    FLAGS,
    HOST_TIERS,
    Speculating,
    ask,
    assert_same,
    drafting_flags,
    random_prompts,
    tokens_a_step,
)
from transformers import AutoTokenizer

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.requests.chat.thinking_budget import think_tokens

SLOW_EAGLE = pytest.param("EAGLE", marks=pytest.mark.slow)
"""Among the quick tests `test_replayed_graphs` and `test_draft_tails` have EAGLE."""


@pytest.fixture(scope="module", params=[SLOW_EAGLE, "DSPARK"])
def speculating(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculating]:
    folder = tmp_path_factory.mktemp("speculation")
    write_checkpoint(folder / "checkpoint", ALGORITHMS[request.param][0])
    env = {**TAILS, **oracle_drafts.install(folder), FOLDER_VARIABLE: str(folder / "prefixes")}
    flags = drafting_flags(request.param)
    with running_server(folder / "checkpoint", folder / "log", *FLAGS, *HOST_TIERS, *flags, env=env) as running:
        yield Speculating(running, request.param, folder)


# Every residue of a CSA group, and both sides of the ends of HCA's groups and of pages.
LENGTHS = {1: [1, 126, 251], 14: [2, 3, 4, 121, 123, 124, 125, 127, 249, 250, 252, 253, 254, 255]}


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 14])
def test_greedy_answers_are_the_same_bits(server: Server, speculating: Speculating, at_once: int) -> None:
    """Blocks cross groups and pages and are accepted up to every position; then again, nearly all rejected."""
    prompts = random_prompts(at_once, LENGTHS[at_once])
    plain = ask(server, prompts, 14, max_new_tokens=20)
    speculating.will_answer(prompts, plain)
    drafted = ask(speculating.server, prompts, at_once, max_new_tokens=20)
    assert_same(plain, drafted)
    assert tokens_a_step(drafted) > 1 + 0.3 * speculating.drafts  # half of them, except at the ends
    prompts = random_prompts(at_once + 1, LENGTHS[at_once])
    plain = ask(server, prompts, 14, max_new_tokens=10)
    drafted = ask(speculating.server, prompts, at_once, max_new_tokens=10)  # with the draft's own proposals
    assert_same(plain, drafted)
    assert tokens_a_step(drafted) < 1.2


@pytest.mark.slow
def test_hits_answer_the_same_bits(server: Server, speculating: Speculating) -> None:
    first = random_prompts(3, [600, 300])
    ask(speculating.server, first, 2, max_new_tokens=4)
    prompts = [
        [*prompt[:n], *tail]
        for prompt, n in zip((first[0], *first), (600, 530, 290), strict=True)
        for tail in ([5], [6, 7])
    ]
    plain = ask(server, prompts, 6, max_new_tokens=20)
    speculating.will_answer(prompts, plain)
    drafted = ask(speculating.server, prompts, 6, max_new_tokens=20)
    assert_same(plain, drafted)
    # EAGLE's keys are pairs of tokens: a stored prefix ends a token earlier.
    assert [result["meta_info"]["cached_tokens"] for result in drafted] == [512] * 4 + [256] * 2


@pytest.mark.slow
def test_prefixes_from_host_memory_and_files_answer_the_same_bits(server: Server, speculating: Speculating) -> None:
    """Prefixes of prefills, and of a conversation whose last page decoding filled: first other requests fill the pool,
    then it is flushed. `test_draft_tails` shows that the draft's own proposals are the same, too."""
    first, talk = random_prompts(10, [1100, 240])
    answers = ask(speculating.server, [first, talk], 2, max_new_tokens=40)
    prompts = [[*first, 5], [*first[:560], 6, 7], [*talk, *answers[1]["output_ids"][:30], 9]]
    plain = ask(server, prompts, 3, max_new_tokens=12)
    speculating.will_answer(prompts, plain)
    for tier in ("host", "storage"):
        if tier == "host":
            ask(speculating.server, random_prompts(12, [1100] * 6), 6, max_new_tokens=1)
        else:
            wait_for_files(speculating.prefixes)
            flush(speculating.server)
        drafted = ask(speculating.server, prompts, 1, max_new_tokens=12)
        assert_same(plain, drafted)
        accounts = [account(result) for result in drafted]
        assert [part["position"] for part in accounts] == [1024, 512, 256], tier
        assert accounts[0]["pages_from"] == {tier: 1024} and accounts[2]["pages_from"] == {tier: 256}, accounts


@pytest.mark.slow
def test_answers_end_inside_a_block(server: Server, speculating: Speculating) -> None:
    """An answer ends at a stop token, a stop string or the limit, at each position of a block."""
    prompts = random_prompts(4, [40] * 4)
    whole = ask(server, prompts, 4, max_new_tokens=14)
    speculating.will_answer(prompts, whole)
    for last in range(6, 7 + speculating.drafts):
        stops = [result["output_ids"][last] for result in whole]
        for options in ({"stop_token_ids": stops}, {"max_new_tokens": last}):
            options = {"max_new_tokens": 14, **options}
            assert_same(ask(server, prompts, 4, **options), ask(speculating.server, prompts, 4, **options))
    word = server.generate(prompts[0], max_new_tokens=12)["text"][-4:]
    for options in ({"stop": [word]}, {"stop_regex": re.escape(word)}):
        options = {"max_new_tokens": 14, **options}
        assert_same(ask(server, prompts[:1], 1, **options), ask(speculating.server, prompts[:1], 1, **options))


def test_grammars_are_kept(server: Server, speculating: Speculating) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    prompts = random_prompts(5, [30, 31, 32])
    options = {"json_schema": json.dumps(schema), "ignore_eos": False, "max_new_tokens": 60}
    plain = ask(server, prompts, 3, **options)
    speculating.will_answer(prompts, plain)
    drafted = ask(speculating.server, prompts, 3, **options)
    assert_same(plain, drafted)
    assert tokens_a_step(drafted) > 1.5


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 20, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_new_tokens": 5},
    ],
)
def test_seeded_answers_are_the_same_tokens(server: Server, speculating: Speculating, options: dict[str, Any]) -> None:
    if speculating.algorithm == "DSPARK":
        body = {"input_ids": [5], "sampling_params": {**options, "sampling_seed": 77}}
        response = requests.post(f"{speculating.server.url}/generate", json=body, timeout=300)
        assert response.status_code == 400 and "sampling_seed" in response.text
        return
    prompts = random_prompts(6, [20, 130, 254])
    options = {**options, "sampling_seed": 77, "max_new_tokens": 20}
    plain = ask(server, prompts, 3, **options)
    speculating.will_answer(prompts, plain)
    drafted = ask(speculating.server, prompts, 3, **options)
    assert [result["output_ids"] for result in drafted] == [result["output_ids"] for result in plain]
    assert tokens_a_step(drafted) > 1.5


@pytest.mark.slow
def test_draws_of_the_only_likely_token_are_greedy(server: Server, speculating: Speculating) -> None:
    """Sampled without a seed in a batch with a greedy request: acceptance and the next token are drawn from one likely
    token."""
    prompts = random_prompts(9, [21, 131, 253, 60])
    plain = ask(server, prompts, 4, max_new_tokens=20)
    speculating.will_answer(prompts, plain)
    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(speculating.server.generate, prompt, max_new_tokens=20, temperature=temperature)
            for prompt, temperature in zip(prompts, (1e-5, 1e-5, 1e-5, 0), strict=True)
        ]
        drawn = [future.result()["output_ids"] for future in running]
    assert drawn == [result["output_ids"] for result in plain]


FEW = {"logit_bias": {"30": 4.0, "77": 4.2, "500": 4.1, "612": 3.9}}
"""A bias that makes a random model repeat a few tokens, without which penalties would change nothing."""
OPTIONS: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 9, "ignore_eos": False, "logit_bias": {"1": 30.0}},
    "frequency_penalty": {"frequency_penalty": 1.7, **FEW},
    "presence_penalty": {"presence_penalty": 1.3, **FEW},
    "repetition_penalty": {"repetition_penalty": 1.4, **FEW},
    "logit_bias": FEW,
    "all-of-them": {
        **{"min_new_tokens": 7, "ignore_eos": False, "logit_bias": {"1": 3.0, **FEW["logit_bias"]}},
        **{"frequency_penalty": 0.3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    },
    "grammar": {"regex": "[a-f]{12,20}", "ignore_eos": False, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "forbidden-tokens": {
        **{"processor": "DisallowedTokensLogitsProcessor", "custom_params": {"token_ids": [5, 77, 500]}, **FEW},
    },
    "no-token-twice": {
        **{"processor": "DeepseekOCRNoRepeatNGramLogitProcessor", **FEW},
        "custom_params": {"ngram_size": 1, "window_size": 1000},
    },
    "thinking_budget": {"custom_params": {"thinking_budget": 6}},
}
"""Everything that changes a token's logits; "no-token-twice" reads the request's answer on the host."""
WITHOUT: dict[str, dict[str, Any]] = {
    "grammar": {"regex": "[a-f]{12,20}", "ignore_eos": False},
    **{name: {} for name in ("min_new_tokens", "logit_bias", "thinking_budget")},
}
"""Options whose answer differs from the one with OPTIONS; FEW if none is named."""


def answers(server: Server, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    """Return SGLang's answers to several prompts at once; `processor` is a class of SGLang's."""
    from sglang.srt.sampling import custom_logit_processor

    processor = options.pop("processor", None)
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True, **options},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    if processor is not None:
        body["custom_logit_processor"] = getattr(custom_logit_processor, processor).to_str()
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


QUICK_OPTIONS = ("all-of-them",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK_OPTIONS else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_options_have_the_bits_of_a_server_without_drafts(
    server: Server, speculating: Speculating, checkpoint: Path, name: str
) -> None:
    """Penalties were those of a block's first token or none, `min_tokens` was lost, and processors with EAGLE.

    The oracle's drafts are accepted up to every position of a block. Then the same, drawn at a temperature that leaves
    one token, next to a request that has no option.
    """
    options, budget = OPTIONS[name], name == "thinking_budget"
    prompts = random_prompts(31, [60, 61, 130])
    start, end = think_tokens(AutoTokenizer.from_pretrained(checkpoint))
    if budget:
        prompts = [[*prompt, start] for prompt in prompts]
    plain = answers(server, prompts, **options)
    free = answers(server, prompts, **WITHOUT.get(name, FEW))
    assert [one["output_ids"] for one in plain] != [one["output_ids"] for one in free], "the option changes nothing"
    speculating.will_answer(prompts, plain)
    drafted = answers(speculating.server, prompts, **options)
    assert_same(plain, drafted)
    tops = [[one["meta_info"]["output_top_logprobs"] for one in results] for results in (plain, drafted)]
    assert tops[0] == tops[1]
    assert tokens_a_step(drafted) > 1.4
    if name == "min_new_tokens":
        assert [len(one["output_ids"]) for one in drafted] == [10, 10, 10]
    if budget:
        assert all(one["output_ids"].index(end) == 6 for one in drafted)
    other = random_prompts(32, [40])
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, speculating.server, other, 1, max_new_tokens=30)
        drawn = answers(speculating.server, prompts, **options, temperature=1e-5)
        assert [one["output_ids"] for one in drawn] == [one["output_ids"] for one in plain]
        assert_same(ask(server, other, 1, max_new_tokens=30), beside.result())


def test_min_p_is_refused_where_it_would_be_ignored(speculating: Speculating) -> None:
    """DSpark's verification reads top_k and top_p only; EAGLE's tokens are drawn as without drafts on a CPU."""
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "min_p": 0.1}}
    response = requests.post(f"{speculating.server.url}/generate", json=body, timeout=300)
    assert response.status_code == (400 if speculating.algorithm == "DSPARK" else 200)
    assert ("min_p" in response.text) == (speculating.algorithm == "DSPARK")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"frequency_penalty": 1.5, "repetition_penalty": 1.2}], ids=["plain", "penalties"]
)
def test_retracted_and_aborted_requests_leave_no_trace(
    server: Server, speculating: Speculating, options: dict[str, float]
) -> None:
    """The pool runs out at page boundaries; other requests are aborted, and waiting requests get their slots."""
    prompts = random_prompts(7, [480, 490, 495, 500, 500, 3, 485, 499, 488, 501, 491, 492])
    plain = ask(server, prompts, 12, max_new_tokens=36, **options)
    speculating.will_answer(prompts, plain)
    doomed = random_prompts(8, [300, 200, 100, 90])

    def abort(index: int) -> None:
        sampling = {"max_new_tokens": 500, "temperature": 0}
        body = {"rid": f"doomed-{index}", "input_ids": doomed[index], "sampling_params": sampling}
        request = pool.submit(requests.post, f"{speculating.server.url}/generate", json=body, timeout=300)
        while not request.done():  # again, if the request was not known yet
            time.sleep(0.5)
            requests.post(f"{speculating.server.url}/abort_request", json={"rid": f"doomed-{index}"}, timeout=300)
        request.result()

    with ThreadPoolExecutor(20) as pool:
        running = [pool.submit(speculating.server.generate, prompt, max_new_tokens=36, **options) for prompt in prompts]
        for index in range(len(doomed)):
            abort(index)
        drafted = [future.result() for future in running]
    assert_same(plain, drafted)
    assert sum(result["meta_info"]["num_retractions"] for result in drafted) > 0


def test_the_server_lives(speculating: Speculating) -> None:
    """Runs last: no check of SGLang's or ours on pages, slots and tails has ended the server."""
    assert speculating.server.is_alive()
    assert "Traceback" not in speculating.server.log
