"""Servers of several ranks with requests of their own: sessions, and control requests that all ranks must answer alike.

Replicas (`--dp-size`) share nothing; groups (`--attn-dp-size`) share the experts. `test_data_parallel.py` has the bits
of groups, `test_rank_choice.py` the rank that a request gets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from serving.groups import DETERMINISTIC, Question, bits, shape_for, some
from serving.server import SLEEP_ON_IDLE, TAILS, Server, flush, running_server, wait_until

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

pytestmark = pytest.mark.slow

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8", SLEEP_ON_IDLE, *DETERMINISTIC)
KINDS = {
    "replicas": ("--dp-size", "2", "--chunked-prefill-size", "512"),
    "groups": ("--tp-size", "2", "--attn-dp-size", "2", "--chunked-prefill-size", "1024"),
}
TIMEOUT_S = 300
HEALTH_CHECK_S = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with other weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new"), 11):
        write_checkpoint(folder / name, shape_for("plain", 2), seed=seed)
    return folder / "old", folder / "new"


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    env = TAILS | {"SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_CHECK_S)}
    with running_server(models[0], log, *FLAGS, *KINDS[request.param], env=env) as running:
        yield running


def post(server: Server, route: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/{route}", json=body, timeout=TIMEOUT_S)


def begin(server: Server, rank: int) -> threading.Thread:
    """Ask a rank for a long answer in another thread, and wait until it decodes."""
    sampling = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": some(70, 40), "sampling_params": sampling, "rid": "long", "routed_dp_rank": rank}
    thread = threading.Thread(target=lambda: post(server, "generate", **body))
    thread.start()
    deadline = time.monotonic() + 60
    while not any(
        load["num_running_reqs"]
        for load in requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"]
        if load["dp_rank"] == rank
    ):
        assert time.monotonic() < deadline, "the request does not run"
        time.sleep(0.05)
    return thread


def end(server: Server, thread: threading.Thread) -> None:
    post(server, "abort_request", rid="long")
    thread.join(60)
    assert not thread.is_alive(), "the abort did not end the request"


def turn(server: Server, session: str, before: str | None, tokens: list[int]) -> dict[str, Any]:
    """Return the answer to the next turn of a session, after the request `before`."""
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
    response = post(server, "generate", **body, session_params={"id": session, "rid": before})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_turns_of_a_session_find_their_rank(server: Server) -> None:
    """A turn sends its own tokens only; the rank of the turns before has the others. Another rank refuses the turn."""
    flush(server)
    sessions = [post(server, "open_session", capacity_of_str_len=10000).json() for _ in range(3)]
    histories: list[list[int]] = [[] for _ in sessions]
    last: list[str | None] = [None] * len(sessions)
    found: list[tuple[list[int], Any, int]] = []
    for number, order in enumerate(((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        for i in order:
            tokens = some(100 * i + number, 300)
            answer = turn(server, sessions[i], last[i], tokens)
            histories[i] += tokens
            found.append((list(histories[i]), bits(answer), answer["meta_info"]["dp_rank"]))
            histories[i] += answer["output_ids"]
            last[i] = answer["meta_info"]["id"]
    assert {rank for _, _, rank in found} == {0, 1}, "sessions are spread"
    for prompt, answered, rank in found:
        assert answered == bits(Question(tuple(prompt), 6).ask(server, 1 - rank))


@pytest.mark.parametrize("busy", [0, 1])
def test_a_flush_that_a_rank_refuses_is_a_400(server: Server, busy: int) -> None:
    """SGLang's answer was that of the rank that answered first."""
    thread = begin(server, busy)
    try:
        for _ in range(5):
            assert post(server, "flush_cache").status_code == 400
    finally:
        end(server, thread)
    flush(server)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_keeps_its_weights_makes_all_keep_them(
    server: Server, busy: int, models: tuple[Path, Path]
) -> None:
    old, new = models
    question = Question(tuple(some(80, 300)), 4)
    before = [bits(question.ask(server, rank)) for rank in (0, 1)]
    thread = begin(server, busy)
    try:
        post(server, "pause_generation", mode="in_place").raise_for_status()
        refused = post(server, "update_weights_from_disk", model_path=str(new))
        assert refused.status_code == 400 and "Requests are running" in refused.text, refused.text
        post(server, "continue_generation").raise_for_status()
    finally:
        end(server, thread)
    flush(server)
    assert [bits(question.ask(server, rank)) for rank in (0, 1)] == before
    for folder in (new, old):
        done = post(server, "update_weights_from_disk", model_path=str(folder))
        assert done.status_code == 200, done.text
        found = [bits(question.ask(server, rank)) for rank in (0, 1)]
        assert found[0] == found[1] and (found == before) == (folder == old)


def test_health_checks_go_to_the_ranks_in_turn(server: Server, request: pytest.FixtureRequest) -> None:
    """With idle ranks, and with a busy one; a rank that hangs is found by one of two checks. Groups compute together:
    there no check ends while a rank hangs. The prefix of a conversation is found afterwards as before."""
    flush(server)
    question = Question(tuple(some(90, 600)), 4)
    cold = bits(question.ask(server, 1))
    assert [health(server) for _ in range(3)] == [200] * 3
    thread = begin(server, 0)
    try:
        assert [health(server) for _ in range(3)] == [200] * 3
    finally:
        end(server, thread)
    hanging = schedulers(server)[-1]
    hanging.suspend()
    try:
        found = sorted(health(server) for _ in range(2))
    finally:
        hanging.resume()
    groups = request.node.callspec.params["server"] == "groups"
    assert found == ([503, 503] if groups else [200, 503])
    assert [health(server) for _ in range(2)] == [200] * 2
    answer = question.ask(server, None)
    assert (answer["meta_info"]["dp_rank"], answer["meta_info"]["cached_tokens"]) == (1, 512)
    assert bits(answer) == cold


def health(server: Server) -> int:
    return requests.get(f"{server.url}/health_generate", timeout=4 * HEALTH_CHECK_S).status_code


def schedulers(server: Server) -> list[psutil.Process]:
    """Return the processes of the ranks, by rank: their titles end with its number."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    titles = {" ".join(child.cmdline()): child for child in children}
    return [titles[title] for title in sorted(titles) if title.startswith("sglang::scheduler")]


def test_replicas_take_no_tensors(server: Server, request: pytest.FixtureRequest) -> None:
    """SGLang's answer was a 500, or an update that one replica might end without the other."""
    if request.node.callspec.params["server"] == "groups":
        pytest.skip("groups take them, see `test_weight_updates.py`")
    for route, body in (
        ("begin_weight_update", {}),
        ("update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
    ):
        refused = post(server, route, **body)
        assert refused.status_code == 400 and "(--dp-size 2) take new weights from files only" in refused.text


def test_a_replica_that_is_killed_ends_the_server(models: tuple[Path, Path], tmp_path: Path) -> None:
    """An out-of-memory killer takes one. No request waits for it, nor one of the other replica, and nothing stays."""
    with running_server(models[0], tmp_path / "log", *FLAGS, *KINDS["replicas"], env=TAILS) as running:
        answers: list[Any] = []

        def ask(rank: int) -> None:
            sampling = {"max_new_tokens": 2500, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": some(90 + rank, 40), "sampling_params": sampling, "routed_dp_rank": rank}
            try:
                answers.append(post(running, "generate", **body).status_code)
            except requests.RequestException as error:
                answers.append(error)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        wait_until(lambda: requests.get(f"{running.url}/health_generate", timeout=60).status_code == 200)
        children = psutil.Process(running.process.pid).children(recursive=True)
        schedulers(running)[-1].kill()
        wait_until(lambda: running.process.poll() is not None, 120)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a request waits for a rank that is gone"
        assert len(answers) == 2 and 200 not in answers
        wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 60)
