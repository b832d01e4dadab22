"""Prefill and decode on different servers when something ends in the middle: requests, their slots, and servers.

An idle server checks that all its slots and pages are free, and ends itself if they are not.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from model.checkpoint_tensors import changed_tensor
from serving.pair import NIXL, Pair, needs_nixl, running_pair, started_side
from serving.server import SLEEP_ON_IDLE, Server, output_logprobs, running_server, wait_until
from serving.speculation import drafting_flags

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

pytestmark = pytest.mark.slow

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8", "--chunked-prefill-size", "512")
RADIX = ("--disaggregation-decode-enable-radix-cache",)
BROKEN = 1000
"""A token whose embedding makes every row after it NaN."""
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
# A dead peer is noticed after two of these seconds, not after ten.
HEARTBEATS = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20"}
HEARTBEATS |= {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20"}


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 990) for _ in range(count)]


def bits(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    return result["output_ids"], output_logprobs(result)


def expected_of(checkpoint: Path, log: Path, prompts: list[list[int]], new: int, *flags: str) -> list[Any]:
    """Return the bits of one server's answers."""
    with running_server(checkpoint, log, *FLAGS, *flags, SLEEP_ON_IDLE) as one:
        return [bits(one.generate(prompt, max_new_tokens=new)) for prompt in prompts]


def is_idle_and_sound(server: Server) -> bool:
    """Whether the server has checked that nothing is leaked, and still answers."""
    time.sleep(3)
    return server.process.poll() is None and requests.get(f"{server.url}/health", timeout=30).status_code == 200


@pytest.mark.parametrize("radix", [(), RADIX], ids=["no-reuse", "reuse"])
@pytest.mark.parametrize("drafting", [(), drafting_flags("EAGLE")], ids=["", "EAGLE"])
def test_a_retracted_request_goes_on(
    checkpoint: Path, tmp_path: Path, radix: tuple[str, ...], drafting: tuple[str, ...]
) -> None:
    """Every fifth step of the decode server takes the pages and the slot of a request, and gives it others later."""
    prompts = [some(seed, length) for seed, length in enumerate((40, 300, 511, 130, 700, 257))]
    expected = expected_of(checkpoint, tmp_path / "one", prompts, 60, *drafting)
    flags = (*FLAGS, *drafting, "--num-reserved-decode-tokens", "256")
    decode = ("--disaggregation-decode-extra-slots", "4", "--disaggregation-decode-polling-interval", "2")
    decode += ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    with (
        running_pair(checkpoint, tmp_path, *flags, decode=(*decode, *radix), env=RETRACTING) as pair,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        answers = list(pool.map(lambda prompt: bits(pair.generate(prompt, max_new_tokens=60)), prompts))
        assert answers == expected
        assert re.search("#retracted_reqs: [1-9]", pair.decode.log)
        assert is_idle_and_sound(pair.prefill) and is_idle_and_sound(pair.decode)


@pytest.mark.parametrize("rows", ["auto", "fp8_e4m3"])
def test_a_request_that_a_pause_retracts_goes_on(checkpoint: Path, tmp_path: Path, rows: str) -> None:
    """A trainer pauses so before it sends weights. The prefill server computes prompt and answer so far again, several
    pages of each. With FP8 rows the pages of the answer were not unpacked."""
    prompt, flags, tokens = some(1, 300), ("--kv-cache-dtype", rows), 500
    (expected,) = expected_of(checkpoint, tmp_path / "one", [prompt], tokens, *flags)
    with running_pair(checkpoint, tmp_path, *FLAGS, *flags, decode=RADIX) as pair:
        body = pair.body(prompt, max_new_tokens=tokens)
        at_prefill = pair.answers.submit(requests.post, f"{pair.prefill.url}/generate", json=body, timeout=300)
        answer: dict[str, Any] = {}
        with requests.post(
            f"{pair.decode.url}/generate", json=body | {"stream": True}, stream=True, timeout=300
        ) as got:
            events = (json.loads(line[6:]) for line in got.iter_lines() if line.startswith(b"data: {"))
            paused = 0
            for answer in events:
                if len(answer["output_ids"]) > 240 * (paused + 1) and paused < 2:
                    paused += 1
                    for route, words in (("pause_generation", {"mode": "retract"}), ("continue_generation", {})):
                        requests.post(f"{pair.decode.url}/{route}", json=words, timeout=60).raise_for_status()
        assert at_prefill.result().status_code == 200
        assert answer["output_ids"] == expected[0] and bits(answer) == expected
        assert answer["meta_info"]["num_retractions"] == paused == 2
        assert is_idle_and_sound(pair.prefill) and is_idle_and_sound(pair.decode)


def test_a_request_that_a_pause_retracts_can_be_aborted(checkpoint: Path, tmp_path: Path) -> None:
    """By its id, and by a further pause that ends all requests; that pause waited for it without an end."""
    with running_pair(checkpoint, tmp_path, *FLAGS, decode=RADIX) as pair, ThreadPoolExecutor(1) as pool:

        def tell(route: str, **words: str) -> None:
            requests.post(f"{pair.decode.url}/{route}", json=words, timeout=60).raise_for_status()

        for end in (partial(tell, "abort_request", rid="one"), partial(tell, "pause_generation", mode="abort")):
            answer = pool.submit(pair.both, some(1, 300), "one", max_new_tokens=3000)
            wait_until(lambda: running(pair.decode) == 1)
            tell("pause_generation", mode="retract")
            end()
            assert answer.result(60), "during the pause"
            tell("continue_generation")
            assert is_idle_and_sound(pair.prefill) and is_idle_and_sound(pair.decode)
        assert pair.post(some(1, 300)).status_code == 200


def running(server: Server) -> int:
    """Return the number of requests that a server decodes."""
    return sum(load["num_running_reqs"] for load in requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"])


TRANSPORTS = [pytest.param((), id="sockets"), pytest.param(NIXL, id="nixl", marks=needs_nixl)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_aborted_requests_leave_nothing_behind(checkpoint: Path, tmp_path: Path, transport: tuple[str, ...]) -> None:
    """Requests end at any moment: while they wait, compute, travel and decode. Others get their slots and pages, and
    the answers of one server."""
    rng = random.Random(5)
    lengths = [rng.choice((5, 130, 257, 512, 700, 1030)) for _ in range(60)]
    prompts = [some(i % 20, length) for i, length in enumerate(lengths)]
    aborted = {i: rng.random() * 2 for i in range(len(prompts)) if rng.random() < 0.5}
    kept = [prompt for i, prompt in enumerate(prompts) if i not in aborted]
    expected = expected_of(checkpoint, tmp_path / "one", kept, 24)
    with running_pair(checkpoint, tmp_path, *FLAGS, *transport, decode=RADIX) as pair:

        def ask(i: int) -> Any:
            rid = f"request-{i}"
            if i in aborted:
                threading.Timer(aborted[i], abort, (pair, rid)).start()
            response = pair.post(prompts[i], rid=rid, max_new_tokens=24)
            return response if i in aborted else bits(response.json())

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, range(len(prompts))))
        assert [answer for i, answer in enumerate(answers) if i not in aborted] == expected
        assert is_idle_and_sound(pair.prefill) and is_idle_and_sound(pair.decode)
        assert bits(pair.generate(kept[0], max_new_tokens=24)) == expected[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_that_ends_on_the_prefill_side_ends_on_both(tmp_path: Path, transport: tuple[str, ...]) -> None:
    """No first token can be drawn, or its logits are not finite: the client hears it from the decode server, at once
    and with the reason, and metrics count the transfers that failed. The second token's logits are the decode server's.
    """
    write_checkpoint(tmp_path / "model", PRESETS["tiny"])
    with changed_tensor(tmp_path / "model", "embed.weight") as embedding:
        embedding[BROKEN] = 3e38
    no_token = {"stop_token_ids": list(range(1024)), "min_new_tokens": 3}
    with running_pair(tmp_path / "model", tmp_path, *FLAGS, *transport, "--enable-metrics") as pair:
        for prompt, sampling, reason in (
            (some(1, 300), no_token, "no token can be drawn"),
            ([*some(1, 300), BROKEN, 5], {}, "logits are not finite"),
            (some(1, 300), {"logit_bias": {str(BROKEN): 1e4}}, "logits are not finite"),
        ):
            begin = time.monotonic()
            response = pair.post(prompt, **sampling)
            assert time.monotonic() - begin < 60
            assert response.status_code == 500 and reason in response.text, response.text
        assert is_idle_and_sound(pair.prefill) and is_idle_and_sound(pair.decode)
        assert counted(pair.decode, "num_transfer_failed_reqs_total") == 2
        assert pair.post(some(1, 300)).status_code == 200
        assert counted(pair.decode, "num_transfer_failed_reqs_total") == 2


def counted(server: Server, name: str) -> float:
    """Return the sum of a counter of SGLang's over its labels."""
    lines = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}"))


def abort(pair: Pair, rid: str) -> None:
    for server in (pair.decode, pair.prefill):
        requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=60)


def test_a_prefill_server_with_other_pools_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """The client is told what differs; the decode server goes on, where SGLang's ends itself."""
    with running_pair(checkpoint, tmp_path, *FLAGS, decode=drafting_flags("EAGLE")) as pair:
        for _ in range(2):
            response = pair.post(some(1, 40))
            assert response.status_code == 500
            for words in ("draft-tokens: 0 there, 4 here", "window-ring: 128 there, 256 here", "Start both servers"):
                assert words in response.text, response.text
        assert is_idle_and_sound(pair.decode)


def kill(server: Server) -> None:
    """End the server's processes at once, as an out-of-memory killer does."""
    os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_dead_peer_is_an_error_and_then_another_serves(
    checkpoint: Path, tmp_path: Path, side: str, transport: tuple[str, ...]
) -> None:
    """The requests end with an error, the other server loses nothing, and serves with a new peer."""
    prompts = [some(seed, length) for seed, length in enumerate((1030, 700, 300, 40))]
    expected = expected_of(checkpoint, tmp_path / "one", prompts, 12)
    flags = (*FLAGS, *transport, "--enable-metrics")
    with running_pair(checkpoint, tmp_path, *flags, env=HEARTBEATS) as pair:
        assert bits(pair.generate(prompts[3], max_new_tokens=12)) == expected[3]
        dead = getattr(pair, side)
        results: list[Any] = []

        def ask(prompt: list[int]) -> None:
            try:
                results.append(pair.post(prompt, max_new_tokens=3000))
            except requests.RequestException as error:
                results.append(error)

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        kill(dead)
        for thread in threads:
            thread.join(120)
        assert len(results) == len(prompts)
        if side == "prefill":  # a request that was transferred before goes on without it
            failed = [result for result in results if result.status_code != 200]
            assert all(result.status_code == 500 and "error" in result.text for result in failed)
            counters = [f"num_{phase}_failed_reqs_total" for phase in ("bootstrap", "transfer")]
            assert sum(counted(pair.decode, name) for name in counters) == len(failed) > 0
        else:
            assert all(isinstance(result, requests.RequestException) for result in results)
        survivor = pair.decode if side == "prefill" else pair.prefill
        assert is_idle_and_sound(survivor)
        with started_side(checkpoint, tmp_path / "again", side, pair.bootstrap_port, *flags, env=HEARTBEATS) as new:
            setattr(pair, side, new)
            wait_until(lambda: pair.post(prompts[3], max_new_tokens=12).status_code == 200)
            for prompt, answer in zip(prompts, expected, strict=True):
                assert bits(pair.generate(prompt, max_new_tokens=12)) == answer
            assert is_idle_and_sound(survivor) and is_idle_and_sound(new)
