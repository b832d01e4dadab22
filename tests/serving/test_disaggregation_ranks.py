"""Prefill and decode servers that have several ranks with requests of their own, over sockets on loopback.

Rows are exchanged between the groups (`SGLANG_DSV4_EXPERT_ROWS=exchange`), so that every answer has the bits of one
server of one rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from serving.pair import Pair, running_pair
from serving.server import SLEEP_ON_IDLE, TAILS, Server, flush, output_logprobs, running_server
from serving.speculation import ALGORITHMS, drafting_flags

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers.row_exchange import VARIABLE

pytestmark = pytest.mark.slow

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8")
RADIX = ("--disaggregation-decode-enable-radix-cache",)
CHUNK = ("--chunked-prefill-size", "512")
GROUPS = ("--tp-size", "2", "--attn-dp-size", "2", "--chunked-prefill-size", "1024")  # of all groups together
SIDES: dict[str, tuple[str, ...]] = {
    "1": CHUNK,
    "groups": (*GROUPS, "--ep-size", "2"),
    "replicas": ("--dp-size", "2", *CHUNK),
}
KINDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "fp8": ("--kv-cache-dtype", "fp8_e4m3"),
    "EAGLE": drafting_flags("EAGLE"),
}
PAIRS = (
    ("groups", "1", "plain"),
    ("groups", "1", "EAGLE"),
    ("1", "groups", "plain"),
    ("1", "groups", "EAGLE"),
    ("groups", "groups", "plain"),
    ("groups", "groups", "fp8"),
    ("replicas", "replicas", "plain"),
)
"""The prefill server, the decode server, and their kind."""
LENGTHS = (5, 127, 256, 257, 511, 700, 1030, 64)


class Ranks(NamedTuple):
    """A prefill and a decode server, one server whose answers they must give, and the names in `PAIRS`."""

    pair: Pair
    one: Server
    sides: tuple[str, str]
    kind: str

    def flushed(self) -> Pair:
        """Return the pair; no server has pages."""
        for server in (self.pair.prefill, self.pair.decode, self.one):
            flush(server)
        return self.pair


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder, (prefill, decode, kind) = tmp_path_factory.mktemp("ranks"), request.param
    write_checkpoint(folder / "model", ALGORITHMS[kind][0] if kind in ALGORITHMS else PRESETS["tiny"])
    flags, env = (*FLAGS, *KINDS[kind]), TAILS | {VARIABLE: "exchange"}
    sides = {"prefill": SIDES[prefill], "decode": (*SIDES[decode], *RADIX)}
    with (
        running_pair(folder / "model", folder, *flags, **sides, env=env) as pair,
        running_server(folder / "model", folder / "one", *flags, *CHUNK, SLEEP_ON_IDLE, env=TAILS) as one,
    ):
        yield Ranks(pair, one, (prefill, decode), kind)


def some(seed: Any, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(10, 990) for _ in range(count)]


def bits(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    return result["output_ids"], output_logprobs(result)


def ranks_of(results: list[dict[str, Any]]) -> set[int | None]:
    return {result["meta_info"].get("dp_rank") for result in results}


def test_requests_at_once_have_the_bits_of_one_server(served: Ranks) -> None:
    """More requests than may run, so that all ranks are busy, and finish at different times."""
    pair, drawn = served.flushed(), {"temperature": 0.8, "sampling_seed": 7, "repetition_penalty": 1.1}
    if served.kind in ALGORITHMS:
        drawn = {}  # drafts are accepted with draws of their own, which have no seed
    asked = [
        (some(length, length), {"max_new_tokens": 8 + 5 * i, **(drawn if i % 2 else {})})
        for i, length in enumerate(LENGTHS)
    ]
    asked = asked + asked[::-1]
    prefills: list[dict[str, Any]] = []

    def ask(one: tuple[list[int], dict[str, Any]]) -> dict[str, Any]:
        response, at_prefill = pair.both(one[0], **one[1])
        assert response.status_code == 200, response.text
        prefills.append(at_prefill.result().json())
        return response.json()

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    for (prompt, sampling), answer in zip(asked, answers, strict=True):
        assert bits(answer) == bits(served.one.generate(prompt, **sampling)), len(prompt)
    for name, results in zip(served.sides, (prefills, answers), strict=True):
        assert ranks_of(results) == ({None} if name == "1" else {0, 1}), "each rank has requests"


def test_the_turns_of_a_conversation_find_their_rank(served: Ranks) -> None:
    """On the prefill side; rooms are numbered in turn, so that their numbers would lead to another rank each time."""
    pair, tokens, cached = served.flushed(), some("turns", 700), []
    for turn in range(3):
        answer, expected = (server.generate(tokens, max_new_tokens=60) for server in (pair, served.one))
        assert bits(answer) == bits(expected), turn
        cached.append(answer["meta_info"]["cached_tokens"])
        tokens = tokens + answer["output_ids"] + some(turn, 250)
        flush(pair.decode)
    assert cached == [0, 512, 768]


def test_a_router_may_choose_the_ranks(served: Ranks) -> None:
    if "1" in served.sides:
        pytest.skip("one rank on a side")
    pair, prompt = served.flushed(), some("chosen", 300)
    expected = bits(served.one.generate(prompt))
    for prefill, decode in ((0, 1), (1, 0), (1, 1)):
        body = pair.body(prompt)
        at_prefill = pair.answers.submit(
            requests.post, f"{pair.prefill.url}/generate", json=body | {"routed_dp_rank": prefill}, timeout=300
        )
        chosen = {"routed_dp_rank": decode, "disagg_prefill_dp_rank": prefill}
        response = requests.post(f"{pair.decode.url}/generate", json=body | chosen, timeout=300)
        assert response.status_code == 200, response.text
        assert (bits(response.json()), response.json()["meta_info"]["dp_rank"]) == (expected, decode)
        assert at_prefill.result().json()["meta_info"]["dp_rank"] == prefill


def test_an_abort_before_the_rank_is_known_ends_the_request_on_both(served: Ranks) -> None:
    """The decode server has the request, and the prefill server, which chooses the rank, not yet. SGLang told nobody,
    and the prefill server kept the request until a timeout of minutes."""
    if served.sides[0] == "1":
        pytest.skip("one rank on the prefill side, which is known")
    pair = served.flushed()
    pair.generate(some("known", 40))  # the decode server knows the prefill server
    for i in range(3):
        body = pair.body(some(("aborted", i), 300), rid=f"early-{i}")
        at_decode = pair.answers.submit(requests.post, f"{pair.decode.url}/generate", json=body, timeout=300)
        time.sleep(1)
        requests.post(f"{pair.decode.url}/abort_request", json={"rid": body["rid"]}, timeout=60)
        assert at_decode.result(30).status_code != 200
        response = requests.post(f"{pair.prefill.url}/generate", json=body, timeout=30)
        assert response.status_code == 500 and "decode server has aborted" in response.text, response.text
    flush(pair.prefill)  # every rank is idle
    flush(pair.decode)


def test_the_numbers_of_rooms_may_name_the_rank(checkpoint: Path, tmp_path: Path) -> None:
    """SGLang's default method for a prefill server. With replicas it failed each second room."""
    follow = ("--dp-size", "2", "--load-balance-method", "follow_bootstrap_room")
    with running_pair(checkpoint, tmp_path, *FLAGS, *CHUNK, prefill=follow) as pair:
        found = []
        for i in range(4):
            response, at_prefill = pair.both(some(i, 300))
            assert response.status_code == 200, response.text
            found.append(at_prefill.result().json()["meta_info"]["dp_rank"])
    assert found in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_groups_that_add_parts_have_the_bits_of_one_server_with_groups(tmp_path: Path) -> None:
    """Without the exchange of rows both servers add as one server with the same groups does."""
    write_checkpoint(tmp_path / "model", replace(PRESETS["tiny"], moe_intermediate_size=256))
    flags = (*FLAGS, *GROUPS)
    prompts = [some(("gather", length), length) for length in LENGTHS]
    with running_server(tmp_path / "model", tmp_path / "one", *flags, SLEEP_ON_IDLE, env=TAILS) as one:
        expected = [bits(one.generate(prompt)) for prompt in prompts]
    with (
        running_pair(tmp_path / "model", tmp_path, *flags, decode=RADIX, env=TAILS) as pair,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        assert [bits(answer) for answer in pool.map(pair.generate, prompts)] == expected
