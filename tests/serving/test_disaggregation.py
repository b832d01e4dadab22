"""Prefill and decode on different servers, over sockets on loopback: the bits of one server.

Two servers and the one that they are compared with are started for each kind; requests go to both as a router sends
them. SGLang's Mooncake backend transfers, over the engine of `sglang_dsv4.cpu.transfer_engine`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
from model.checkpoint_tensors import read
from model.updates import buckets_of
from serving.pair import NIXL, Pair, Served, needs_nixl, running_pair
from serving.server import (
    READY_TIMEOUT_S,
    SLEEP_ON_IDLE,
    TAILS,
    Server,
    account,
    flush,
    free_port,
    is_ready,
    output_logprobs,
    running_server,
    stop,
    wait_for_files,
    wait_until,
)
from serving.speculation import ALGORITHMS, HOST_TIERS, drafting_flags
from serving.trainer import Trainer

from sglang_dsv4 import doctor
from sglang_dsv4.cache.pool_plan import PACKED_PAGES, PoolPlan
from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS

pytestmark = pytest.mark.slow

CHUNK = 512
FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8", "--chunked-prefill-size", str(CHUNK))
RADIX = ("--disaggregation-decode-enable-radix-cache",)
KINDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "fp8": ("--kv-cache-dtype", "fp8_e4m3"),
    "deterministic": ("--enable-deterministic-inference",),
    "EAGLE": drafting_flags("EAGLE"),
    "DSPARK": drafting_flags("DSPARK"),
    "nixl-fp8": (*NIXL, "--kv-cache-dtype", "fp8_e4m3"),
    "nixl-EAGLE": (*NIXL, *drafting_flags("EAGLE")),
}
LENGTHS = (1, 2, 40, *(end + by for end in (128, 256, CHUNK, 768, 2 * CHUNK) for by in (-1, 0, 1)))
"""Around the window, a page and the ends of chunks."""


def algorithm(kind: str) -> str | None:
    """Return the algorithm by which a kind of server drafts."""
    name = kind.removeprefix("nixl-")
    return name if name in ALGORITHMS else None


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=needs_nixl if kind.startswith("nixl") else ()) for kind in KINDS],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, kind = tmp_path_factory.mktemp("pair"), request.param
    write_checkpoint(folder / "model", ALGORITHMS[algorithm(kind)][0] if algorithm(kind) else PRESETS["tiny"])
    flags = (*FLAGS, *KINDS[kind], "--enable-metrics")
    with (
        running_pair(folder / "model", folder, *flags, decode=RADIX) as pair,
        running_server(folder / "model", folder / "one", *flags, SLEEP_ON_IDLE) as one,
    ):
        yield Served(pair, one, kind)


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 990) for _ in range(count)]


def bits(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the tokens of an answer and their log-probabilities, the first token's too."""
    assert len(output_logprobs(result)) == len(result["output_ids"])
    return result["output_ids"], output_logprobs(result)


def flush_all(served: Served) -> None:
    for server in (served.pair.prefill, served.pair.decode, served.one):
        flush(server)


def test_every_length_has_the_bits_of_one_server(served: Served) -> None:
    flush_all(served)
    wrong = [
        length
        for length in LENGTHS
        if bits(served.pair.generate(some(length, length))) != bits(served.one.generate(some(length, length)))
    ]
    assert not wrong


def test_requests_at_once_have_the_bits_of_one_server(served: Served) -> None:
    """More requests than may run, so that slots are used again while others decode."""
    flush_all(served)
    lengths = (700, 5, 257, 130, 1030, 64, 512, 300, 90, 900, 33, 256)
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda n: served.pair.generate(some(n + 1, n), max_new_tokens=24), lengths))
    for length, answer in zip(lengths, answers, strict=True):
        assert bits(answer) == bits(served.one.generate(some(length + 1, length), max_new_tokens=24)), length


@pytest.mark.parametrize("decode_has_it", [False, True], ids=["on the prefill side", "on the decode side"])
def test_a_conversation_hits_and_has_the_bits_of_one_server(served: Served, decode_has_it: bool) -> None:
    """Each turn begins with all tokens so far. The prefill server has the pages of prompts, up to a tail; the decode
    server also has those that decoding has filled, and only the rest is transferred."""
    flush_all(served)
    tokens, cached = some(31, 700), []
    for turn in range(3):
        answer, expected = (server.generate(tokens, max_new_tokens=110) for server in (served.pair, served.one))
        assert bits(answer) == bits(expected), turn
        cached.append(answer["meta_info"]["cached_tokens"])
        tokens = tokens + answer["output_ids"] + some(turn, 150)
        flush(served.pair.prefill if decode_has_it else served.pair.decode)
    assert cached == ([0, 768, 1024] if decode_has_it else [0, 512, 768])


def test_draws_and_penalties_go_on_after_the_transfer(served: Served) -> None:
    """The prefill server draws the first token, the decode server counts it."""
    if algorithm(served.kind):
        pytest.skip("drafts are accepted with draws of their own, which have no seed")
    drawn = {"temperature": 0.8, "sampling_seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    for length in (5, 300):
        answers = [server.generate(some(9, length), **drawn) for server in (served.pair, served.one)]
        assert bits(answers[0]) == bits(answers[1])
        greedy = {"presence_penalty": 1.5, "max_new_tokens": 40}
        answers = [server.generate(some(9, length), **greedy) for server in (served.pair, served.one)]
        assert bits(answers[0]) == bits(answers[1])


CONSTRAINED: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-c]{6}(de|fg)+h", "ignore_eos": False},
    "one letter": {"regex": "[a-c]", "ignore_eos": False},
    "json": {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}', "ignore_eos": False},
    "logit_bias": {"logit_bias": {"77": 1e4}, "max_new_tokens": 3},
    "min_new_tokens": {"min_new_tokens": 5, "stop_token_ids": list(range(0, 1024, 2)), "max_new_tokens": 20},
}
"""Limits of tokens, and of an answer's end. The prefill server draws the first token; the decode server goes on."""


@pytest.mark.parametrize("limit", CONSTRAINED)
def test_what_limits_tokens_holds_on_both_sides(served: Served, limit: str) -> None:
    for length in (5, 300):
        sampling = {"max_new_tokens": 40, **CONSTRAINED[limit]}
        answer, expected = (server.generate(some(8, length), **sampling) for server in (served.pair, served.one))
        assert bits(answer) == bits(expected)
        assert answer["text"] == expected["text"]
        assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


@pytest.mark.parametrize("rows", ["auto", "fp8_e4m3"])
def test_hits_in_host_memory_and_in_files_travel(checkpoint: Path, tmp_path: Path, rows: str) -> None:
    """The prefill server's pool holds few prompts: pages come back from host memory, and after a flush from files, and
    are sent on as if they had been computed there."""
    env = TAILS | {FOLDER_VARIABLE: str(tmp_path / "files")}
    flags = (*FLAGS, "--kv-cache-dtype", rows)
    tiers = (*HOST_TIERS, "--max-total-tokens", "2560")
    with running_pair(checkpoint, tmp_path, *flags, prefill=tiers, env=env) as pair:
        prompts = [some(seed, 780) for seed in range(5)]
        cold = [ask(pair, prompt) for prompt in prompts]
        assert not any(found["position"] for _, found in cold)
        answer, found = ask(pair, prompts[0])
        assert (answer, found["pages_from"]) == (cold[0][0], {"host": 768})
        wait_for_files(tmp_path / "files")
        flush(pair.prefill)
        for prompt, (expected, _) in zip(prompts[:2], cold, strict=False):
            answer, found = ask(pair, prompt)
            assert (answer, found["pages_from"]) == (expected, {"storage": 768})


@pytest.mark.parametrize("drafting", [None, "EAGLE"])
def test_weights_are_exchanged_on_both_servers(drafting: str | None, tmp_path: Path) -> None:
    """The loop of a trainer: pause both, send tensors to both, go on. Answers are those of one server with the new
    weights, also those of a request that was decoding: the prefill server computes it again. Prefixes of old weights
    are found on neither side."""
    shape = ALGORITHMS[drafting][0] if drafting else PRESETS["tiny"]
    for seed, name in enumerate(("old", "new"), 11):
        write_checkpoint(tmp_path / name, shape, seed=seed)
    flags, prompts = (*FLAGS, *(drafting_flags(drafting) if drafting else ())), [some(n, n) for n in (40, 300, 700)]
    expected = {}
    for name in ("old", "new"):
        with running_server(tmp_path / name, tmp_path / f"one-{name}", *flags, SLEEP_ON_IDLE) as one:
            expected[name] = [bits(one.generate(prompt)) for prompt in prompts]
    assert expected["old"] != expected["new"]
    with running_pair(tmp_path / "old", tmp_path, *flags, decode=RADIX) as pair, ThreadPoolExecutor(1) as pool:
        sides = [Trainer(pair.prefill), Trainer(pair.decode)]
        assert [bits(pair.generate(prompt)) for prompt in prompts] == expected["old"]
        new = read(tmp_path / "new")
        for mode in ("retract", "abort"):
            running = pool.submit(pair.post, some(3, 300), max_new_tokens=300)
            wait_until(lambda: decoding(pair.decode) > 0)
            for side in sides[::-1]:
                side.do("pause_generation", mode=mode)
            for side in sides:
                side.update(buckets_of(new, 40, seed=6))
            for side in sides:
                side.do("continue_generation")
            response = running.result(120)
            if mode == "retract":
                assert response.status_code == 200 and len(response.json()["output_ids"]) == 300, response.text
            assert [bits(pair.generate(prompt)) for prompt in prompts] == expected["new"], mode
            flush(pair.prefill)  # both are idle
            flush(pair.decode)
        assert "Traceback" not in pair.prefill.log + pair.decode.log


def decoding(server: Server) -> int:
    """Return the number of requests that a server decodes."""
    return sum(load["num_running_reqs"] for load in requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"])


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 2)), ((4, 2), (2, 1))],
    ids=["2-to-1", "1-to-2", "2 groups-to-1", "1-to-2 groups", "2 groups of 2-to-2"],
)
def test_sides_may_have_other_numbers_of_ranks(
    tmp_path: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    """Ranks, and groups of ranks with requests of their own. Pools are equal on all ranks of a group. Ranks add in
    another order, so only tokens are equal, of a model in fp32."""
    checkpoint = tmp_path / "model"
    ranks = max(prefill[0], decode[0])
    write_checkpoint(checkpoint, replace(PRESETS["tiny"], moe_intermediate_size=128 * ranks), quantised=False)
    flags = [("--tp-size", str(count), "--attn-dp-size", str(groups)) for count, groups in (prefill, decode)]
    prompts = [some(seed, length) for seed, length in enumerate((40, 256, 700))]
    with running_pair(checkpoint, tmp_path, *FLAGS, prefill=flags[0], decode=flags[1]) as pair:
        answers = [pair.generate(prompt, max_new_tokens=24)["output_ids"] for prompt in prompts]
    with running_server(checkpoint, tmp_path / "one", *FLAGS, SLEEP_ON_IDLE) as one:
        assert answers == [one.generate(prompt, max_new_tokens=24)["output_ids"] for prompt in prompts]


def ask(pair: Pair, prompt: list[int]) -> tuple[Any, dict[str, Any]]:
    """Return the bits of an answer, and the prefill server's account of the prompt."""
    response, at_prefill = pair.both(prompt, max_new_tokens=20)
    assert response.status_code == 200, response.text
    return bits(response.json()), account(at_prefill.result().json())


@pytest.mark.skipif(
    find_spec("sglang_router") is None, reason="needs sglang-router: pip install --no-deps sglang-router==0.3.2"
)
def test_make_serve_pd_answers_a_chat(checkpoint: Path, tmp_path: Path) -> None:
    """The command of `make serve-pd`. The three processes end together when they are asked to."""
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "sglang_dsv4.cpu.quickstart_pd", "--model-path", str(checkpoint)]
    with log.open("wb") as out:
        made = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        # Two servers that import everything at the same time.
        wait_until(lambda: "Ready after" in log.read_text() or made.poll() is not None, 2 * READY_TIMEOUT_S)
        assert made.poll() is None, log.read_text()[-3000:]
        router = Server(port, log, made, 0.0)
        whole = router.chat("Hello!", max_tokens=12, extra_body={"ignore_eos": True})
        assert whole.choices[0].message.content and whole.usage.completion_tokens == 12
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in router.chat("Hello!", max_tokens=12, stream=True, extra_body={"ignore_eos": True})
            if chunk.choices
        ]
        assert "".join(pieces) == whole.choices[0].message.content
        os.killpg(made.pid, signal.SIGTERM)
        made.wait(60)
        assert not is_ready(port) and not is_ready(port + 1) and not is_ready(port + 2)
    finally:
        stop(made)


def test_transfers_are_counted(served: Served) -> None:
    """Bytes, time and speed of each transfer: pages that the decode server lacks, and the rings of one request slot, a
    draft's too, which SGLang counted once for the target and once more for the draft."""
    page, rings = bytes_of_transfer(served)
    flush_all(served)
    for pages in (3, 1):  # the second time the decode server has two of three
        before, begin = transfers(served.pair.prefill), time.monotonic()
        served.pair.generate(some(77, 600))
        wait_until(lambda before=before: transfers(served.pair.prefill)["total_mb"][0] > before["total_mb"][0])
        elapsed_ms, after = 1000 * (time.monotonic() - begin), transfers(served.pair.prefill)
        (count, megabytes), (_, latency_ms), (_, speed) = (
            [now - then for now, then in zip(after[name], before[name], strict=True)] for name in after
        )
        assert count == 1 and megabytes * 2**20 == pytest.approx(pages * page + rings, abs=1), (pages, page, rings)
        assert 0 < latency_ms < elapsed_ms
        assert speed == pytest.approx(megabytes / 2**10 / (latency_ms / 1000), rel=1e-6)


def bytes_of_transfer(served: Served) -> tuple[float, float]:
    """Return the bytes of a page and of a request slot's rings, by the plan of the pools."""
    fp8, drafts = served.kind.endswith("fp8"), draft_tokens(served.kind)
    geometry = doctor.geometry_of_checkpoint(model_of(served.one), fp8=fp8, draft_tokens=drafts, transfers=True)
    plan = PoolPlan.of(geometry, 6144, 9)
    packed = any(pool.name == PACKED_PAGES for pool in plan.pools)
    travel = [pool for pool in plan.pools if pool.per == "token" and not (packed and pool.name == "HCA entries")]
    return FULL_PAGE_TOKENS * sum(pool.bytes_per_unit for pool in travel), plan.bytes_per_request


def model_of(server: Server) -> Path:
    return Path(requests.get(f"{server.url}/model_info", timeout=60).json()["model_path"])


def draft_tokens(kind: str) -> int:
    """Return the tokens of a verify step; 0 without drafts."""
    drafting = algorithm(kind)
    return ALGORITHMS[drafting][1] + 1 if drafting else 0


def test_the_doctor_plans_what_the_decode_server_allocates(served: Served) -> None:
    """Rings of a draft and of requests in transfer, packed pages; for 8 requests SGLang adds twice as many slots."""
    rows = "fp8" if served.kind.endswith("fp8") else "plain"
    drafts = draft_tokens(served.kind)
    (table, *_) = doctor.plan(model_of(served.one), 6144, 8, rows, draft_tokens=drafts, extra_slots=16)
    assert "6,144 tokens" in table and "24 requests" in table
    assert table in served.pair.decode.log


def transfers(server: Server) -> dict[str, tuple[float, float]]:
    """Return number and sum of the samples of each histogram, over its labels."""
    lines, found = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines(), {}
    for name in ("total_mb", "latency_ms", "speed_gb_s"):
        samples = [
            [float(line.split()[-1]) for line in lines if line.startswith(f"sglang:kv_transfer_{name}_{part}")]
            for part in ("count", "sum")
        ]
        found[name] = (sum(samples[0]), sum(samples[1]))
    return found
