"""Prefill and decode on two GPUs of a host, against one server: bit for bit under the deterministic flag.

NIXL transfers where it is installed, else Mooncake over TCP. Without either, transfers go through host memory and
sockets (`tests/lib/gpu_sockets`), which is slow: then the printed times compare servers, not transports.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from lib.transfer_engines import visible_gpus
from serving.pair import NIXL, Served, running_pair
from serving.server import flush, output_logprobs, running_server
from serving.small_release import FLAGS, SHAPE
from serving.speculation import drafting_flags

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a server on each"),
]

SOCKETS = Path(__file__).resolve().parents[1] / "lib" / "gpu_sockets"
KINDS = {"plain": (), "EAGLE": drafting_flags("EAGLE"), "DSPARK": drafting_flags("DSPARK")}
LENGTHS = (1, 40, *(end + by for end in (128, 256, 512, 2048) for by in (-1, 0, 1)), 3000)


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, kind = tmp_path_factory.mktemp("pair"), request.param
    drafts = {"dspark_markov_rank": 32, "dspark_target_layer_ids": (0, 1, 2)} if kind == "DSPARK" else {}
    write_checkpoint(folder / "model", replace(SHAPE, **drafts))
    flags = (*FLAGS, "--enable-deterministic-inference", "--enable-metrics", *KINDS[kind])
    env, other = ({"CUDA_VISIBLE_DEVICES": visible_gpus(number)} for number in (0, 1))
    pair_flags = flags
    if importlib.util.find_spec("nixl") is not None:
        pair_flags = (*flags, *NIXL)
    elif importlib.util.find_spec("mooncake") is None:
        env["PYTHONPATH"] = str(SOCKETS)
    radix = ("--disaggregation-decode-enable-radix-cache",)
    with (
        running_pair(folder / "model", folder, *pair_flags, decode=radix, env=env, decode_env=other) as pair,
        # Beside the decode server, whose pools have a fixed size: a share of memory is left.
        running_server(folder / "model", folder / "one", *flags, "--mem-fraction-static", "0.45", env=other) as one,
    ):
        yield Served(pair, one, kind)


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 990) for _ in range(count)]


def bits(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    return result["output_ids"], output_logprobs(result)


def test_every_length_has_the_bits_of_one_server(served: Served) -> None:
    wrong = []
    for length in LENGTHS:
        begin = time.monotonic()
        answer = served.pair.generate(some(length, length), max_new_tokens=32)
        between = time.monotonic()
        expected = served.one.generate(some(length, length), max_new_tokens=32)
        times = f"pair {between - begin:.3f} s, one {time.monotonic() - between:.3f} s"
        print(f"{served.kind} {length} tokens: {times}")
        if bits(answer) != bits(expected):
            wrong.append(length)
    assert not wrong


def test_requests_at_once_have_the_bits_of_one_server(served: Served) -> None:
    """More requests than may run: slots are used again while steps of other requests are under way."""
    lengths = [random.Random(i).choice((5, 64, 130, 257, 512, 900, 1030, 2500)) for i in range(48)]
    prompts = [some(100 + i, length) for i, length in enumerate(lengths)]
    with ThreadPoolExecutor(32) as pool:
        answers, expected = (
            list(pool.map(lambda prompt, to=to: bits(to.generate(prompt, max_new_tokens=48)), prompts))
            for to in (served.pair, served.one)
        )
    assert [i for i, answer in enumerate(answers) if answer != expected[i]] == []


def test_a_conversation_hits_on_both_sides(served: Served) -> None:
    for server in (served.pair.prefill, served.pair.decode, served.one):
        flush(server)
    tokens, cached = some(31, 520), []
    for turn in range(3):
        answer, expected = (server.generate(tokens, max_new_tokens=250) for server in (served.pair, served.one))
        assert bits(answer) == bits(expected), turn
        cached.append(answer["meta_info"]["cached_tokens"])
        tokens = tokens + answer["output_ids"] + some(turn, 150)
    assert cached == [0, 768, 1024]


def test_transfers_are_measured(served: Served) -> None:
    lines = requests.get(f"{served.pair.prefill.url}/metrics", timeout=60).text.splitlines()
    measured = [line for line in lines if line.startswith("sglang:kv_transfer") and "_bucket" not in line]
    print("\n".join(measured))
    assert measured
