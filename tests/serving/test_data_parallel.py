"""Attention data parallelism over gloo: groups of ranks with requests of their own share the experts.

A request's bits depend neither on the other groups' requests, nor on the group that has it. CPU only: the GPU's tests
are in `test_data_parallel_gpu.py`.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import requests
import zmq
from serving import held_resources, replayed_graphs
from serving.groups import (
    KINDS,
    LONG,
    QUESTIONS,
    Question,
    at_once,
    bits,
    environment,
    group_flags,
    has_tiers,
    is_crowded,
    questions,
    shape_for,
    some,
)
from serving.server import TAILS, Server, account, flush, free_port, running_server, wait_for_files, wait_until
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

TOPOLOGIES = [(2, 2), (4, 2), (4, 4)]
"""Ranks of tensor parallelism, and groups of ranks."""
KINDS_OF_ONE_TOPOLOGY = {"tiers-fp8": (2, 2), "tiers-EAGLE": (4, 2), "tiers-DSPARK": (2, 2)}


class Served(NamedTuple):
    server: Server
    groups: int
    kind: str
    files: Path  # of the tiers
    held: Path  # folder of `held_resources`
    events_port: int  # of group 0's cache events


def served() -> list[Any]:
    """Return topology and kind of each server: DSpark drafts with one rank a group only (other numbers are refused)."""
    return [
        pytest.param((ranks, groups, kind), id=f"tp{ranks}-dp{groups}-{kind}", marks=pytest.mark.slow)
        for ranks, groups in TOPOLOGIES
        for kind in KINDS
        if (kind != "DSPARK" or ranks == groups) and KINDS_OF_ONE_TOPOLOGY.get(kind) in (None, (ranks, groups))
    ]


@pytest.fixture(scope="module", params=served())
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ranks, groups, kind = request.param
    folder = tmp_path_factory.mktemp("groups")
    write_checkpoint(folder / "model", shape_for(kind, ranks))
    env = TAILS | {FOLDER_VARIABLE: str(folder / "files")} | environment(kind)
    env |= held_resources.install(folder / "held")
    port = consecutive_free_ports(groups)
    events = ("--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{port}"}))
    flags = (*group_flags(kind, ranks, groups), *events)
    with running_server(folder / "model", folder / "log", *flags, env=env) as server:
        yield Served(server, groups, kind, folder / "files", folder / "held", port)


def consecutive_free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def begin(server: Server, question: Question, group: int) -> threading.Thread:
    """Ask in another thread, and wait until the group decodes."""
    thread = threading.Thread(target=lambda: requests.post(**_streamed(server, question, group)))
    thread.start()
    deadline = time.monotonic() + 60
    while not loads(server)[group]["num_running_reqs"]:
        assert time.monotonic() < deadline, "the request does not run"
        time.sleep(0.05)
    return thread


def _streamed(server: Server, question: Question, group: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": question.new, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": list(question.tokens),
        "sampling_params": sampling,
        "routed_dp_rank": group,
        "rid": f"on {group}",
    }
    return {"url": f"{server.url}/generate", "json": body, "timeout": 300}


def loads(server: Server) -> dict[int, dict[str, Any]]:
    """Return each group's load."""
    return {load["dp_rank"]: load for load in requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"]}


def test_busy_answers_are_those_of_alone_on_every_group(running: Served) -> None:
    """Alone, all other groups are idle from start to end; at once, groups prefill while others decode, and finish at
    different times."""
    server, groups, asked_of_all = running.server, running.groups, questions(running.kind)
    flush(server)
    alone = {(i, g): bits(question.ask(server, g)) for i, question in enumerate(asked_of_all) for g in range(groups)}
    for i in range(len(asked_of_all)):
        assert all(alone[i, g] == alone[i, 0] for g in range(groups)), "a group has other bits"
    flush(server)
    asked = [(i, g) for g in range(groups) for i in range(len(asked_of_all))]
    crowded = is_crowded(running.kind)  # a retracted request finds its own prefix
    asked = (asked[::2] + asked[1::2]) * (2 if crowded else 1)
    busy = at_once(server, [(asked_of_all[i], g) for i, g in asked])
    assert [bits(answer) for answer in busy] == [alone[one] for one in asked]
    assert has_tiers(running.kind) or crowded or not any(answer["meta_info"]["cached_tokens"] for answer in busy)
    hits = at_once(server, [(asked_of_all[2], g) for g in range(groups)])
    assert [bits(answer) for answer in hits] == [alone[2, g] for g in range(groups)]
    cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
    assert crowded or cached == [512] * groups, "each group has a tree of its own"
    assert not crowded or sum(answer["meta_info"]["num_retractions"] for answer in busy)


def test_a_flush_empties_all_groups_or_none(running: Served) -> None:
    server, last = running.server, running.groups - 1
    flush(server)
    kept = Question(tuple(some(20, 600)), 2)
    kept.ask(server, 0)
    thread = begin(server, Question(tuple(some(21, 40)), 400), last)
    assert requests.post(f"{server.url}/flush_cache", timeout=60).status_code == 400
    waiting = requests.post(f"{server.url}/flush_cache", params={"timeout": 5}, timeout=60)
    assert waiting.status_code == 400 and "ask again" in waiting.text
    assert kept.ask(server, 0)["meta_info"]["cached_tokens"] == 512
    requests.post(f"{server.url}/abort_request", json={"rid": f"on {last}"}, timeout=60)
    thread.join(60)
    assert not thread.is_alive(), "the abort did not end the request"
    flush(server)
    assert kept.ask(server, 0)["meta_info"]["cached_tokens"] in ((0, 512) if has_tiers(running.kind) else (0,))


@pytest.mark.parametrize("wrong", ["too large", -1, "one", 1.5, True])
def test_an_invalid_group_gets_a_400(running: Served, wrong: Any) -> None:
    if running.kind != "plain":
        pytest.skip("the launcher's check, as in every kind")
    group = running.groups if wrong == "too large" else wrong
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": group}
    response = requests.post(f"{running.server.url}/generate", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert running.server.is_alive()


def test_metrics_name_the_group(running: Served) -> None:
    for group in range(running.groups):
        QUESTIONS[1].ask(running.server, group)
    text = requests.get(f"{running.server.url}/metrics", timeout=60).text
    for group in range(running.groups):
        lines = [line for line in text.splitlines() if f'dp_rank="{group}"' in line]
        assert any(line.startswith("sglang_dsv4:prefix_recomputed_tokens_total") for line in lines), group
        assert any(line.startswith("sglang:") for line in lines), group


def test_cache_events_come_from_the_group_that_has_the_prefix(running: Served) -> None:
    """Each group publishes on a port of its own, so that a router can tell the groups' caches apart."""
    if running.kind not in ("plain", "crowded"):
        pytest.skip("as in these kinds")
    server, last = running.server, running.groups - 1
    flush(server)
    question, events = Question(tuple(some(50, 600)), 2), [[] for _ in range(running.groups)]
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(context.socket(zmq.SUB)) for _ in range(running.groups)]
        for group, subscriber in enumerate(sockets):
            subscriber.setsockopt(zmq.LINGER, 0)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(f"tcp://127.0.0.1:{running.events_port + group}")
        time.sleep(1)  # ZeroMQ drops what is published before a subscription has arrived
        question.ask(server, last)
        decode, deadline = msgspec.msgpack.Decoder(KVEventBatch).decode, time.monotonic() + 20
        while time.monotonic() < deadline and not any(isinstance(event, BlockStored) for event in events[last]):
            for group, subscriber in enumerate(sockets):
                while subscriber.poll(100):
                    batch = decode(subscriber.recv_multipart()[-1])
                    assert batch.attn_dp_rank == group
                    events[group] += batch.events
    stored = [event for event in events[last] if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids][:512] == list(question.tokens[:512])
    assert not any(isinstance(event, BlockStored) for group in range(last) for event in events[group])


def test_prefixes_in_host_memory_and_files_are_found_by_groups(running: Served) -> None:
    """A group's host memory is its own: it finds the prefix there after other requests filled its pool. All groups find
    the files of one of them."""
    if not has_tiers(running.kind):
        pytest.skip("without host memory and files")
    server = running.server
    flush(server)
    cold = bits(LONG.ask(server, 0))
    for seed in range(60, 68):
        Question(tuple(some(seed, 900)), 2).ask(server, 0)
    assert pages_from(server, 0, cold) == {"host": 1024}
    wait_for_files(running.files)
    flush(server)
    for group in reversed(range(running.groups)):
        assert pages_from(server, group, cold) == {"storage": 1024}, group


def pages_from(server: Server, group: int, cold: tuple[list[int], list[float]]) -> dict[str, int]:
    """Return where the pages of the long question's hit in a group were; its bits must be those of a cold answer."""
    answer = LONG.ask(server, group)
    assert bits(answer) == cold and answer["meta_info"]["cached_tokens"] == 1024, account(answer)
    return account(answer)["pages_from"]


def test_a_storm_of_aborts_leaves_nothing_held(running: Served) -> None:
    """Requests end at any moment: while they wait, are read from files, compute, decode, or were retracted. Others get
    their slots, pages and tails, and have their bits; afterwards no rank holds anything for a request."""
    if running.kind in ("deterministic", "EAGLE", "DSPARK"):
        pytest.skip("with tiers and retractions in other kinds")
    server, rng = running.server, random.Random(5)
    prefixes = [some(700 + i, 256 * (1 + i % 4)) for i in range(8)]  # of all groups, and more than a pool holds
    asked = [Question(tuple(prefixes[i % 8] + some(800 + i, 5 + 13 * i)), 20) for i in range(48)]
    asked = [with_fields(one, logprobs=running.kind != "crowded") for one in asked]
    aborted = {i: 0.2 + 3 * rng.random() for i in range(len(asked)) if i % 3}
    flush(server)
    expected = {i: bits(asked[i].ask(server, None)) for i in range(len(asked)) if i not in aborted}
    flush(server)
    ends = []

    def ask(i: int) -> None:
        if i not in aborted:
            assert bits(asked[i].ask(server, i % running.groups)) == expected[i], i
            return
        body = _streamed(server, with_fields(asked[i], new=400), i % running.groups)
        timer = threading.Timer(aborted[i], requests.post, (f"{server.url}/abort_request", None, {"rid": f"storm {i}"}))
        timer.start()
        body["json"]["rid"] = f"storm {i}"
        if i % 3 == 1:
            body["timeout"] = aborted[i]  # the client disconnects
        try:
            ends.append(requests.post(**body).json()["meta_info"]["finish_reason"]["type"])
        except requests.RequestException:
            pass
        timer.join()

    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(ask, range(len(asked))))
    assert ends.count("abort") > 5, ends
    held: dict[str, int] = {}

    def is_free() -> bool:
        held.update(held_resources.counts(running.held, held_resources.WHOLE))
        return not any(held.values())

    wait_until(is_free, 30)
    assert held.keys() >= {"request_slots", "pages", "tails", "protected_tokens"}
    assert server.is_alive() and "Traceback" not in server.log


def test_weights_are_exchanged_on_all_groups_or_on_none(running: Served) -> None:
    """One group's request is paused; SGLang would wait for the end of a running one."""
    if running.kind not in ("plain", "EAGLE"):
        pytest.skip("as in these kinds")
    server, last = running.server, running.groups - 1
    model = requests.get(f"{server.url}/model_info", timeout=60).json()["model_path"]
    before = bits(QUESTIONS[1].ask(server, 0))
    thread = begin(server, Question(tuple(some(41, 40)), 400), last)
    requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
    busy = requests.post(f"{server.url}/update_weights_from_disk", json={"model_path": model}, timeout=120)
    assert busy.status_code == 400 and "Requests are running" in busy.text
    requests.post(f"{server.url}/continue_generation", json={}, timeout=60).raise_for_status()
    requests.post(f"{server.url}/abort_request", json={"rid": f"on {last}"}, timeout=60)
    thread.join(60)
    done = requests.post(f"{server.url}/update_weights_from_disk", json={"model_path": model}, timeout=120)
    assert done.status_code == 200, done.text
    answers = [QUESTIONS[1].ask(server, group) for group in range(running.groups)]
    assert [bits(answer) for answer in answers] == [before] * running.groups
    assert not answers[0]["meta_info"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "groups", "kind"),
    [(2, 2, "plain"), (2, 2, "EAGLE"), (2, 2, "DSPARK"), (4, 2, "plain"), (4, 2, "EAGLE")],
)
def test_replayed_graphs_of_all_groups(ranks: int, groups: int, kind: str, tmp_path: Path) -> None:
    """Steps run in graphs of the largest group's size, without graphs while a group prefills: the same bits.

    A group without requests replays, too. `serving.replayed_graphs` says what of a GPU's graphs this shows.
    """
    write_checkpoint(tmp_path / "model", shape_for(kind, ranks))
    env = TAILS | replayed_graphs.install(tmp_path / "graphs")
    flags = (*group_flags(kind, ranks, groups), "--cuda-graph-bs-decode", "2", "4", "16")
    with running_server(tmp_path / "model", tmp_path / "log", *flags, env=env) as server:
        asked_of_all = questions(kind)
        alone = [[bits(question.ask(server, group)) for group in range(groups)] for question in asked_of_all]
        assert all(answers == [answers[0]] * groups for answers in alone), "a group has other bits"
        flush(server)
        asked = [(i, group) for i in range(len(asked_of_all)) for group in range(groups)]
        busy = at_once(server, [(asked_of_all[i], group) for i, group in asked + asked[::-1] + asked[::3]])
        assert [bits(answer) for answer in busy] == [alone[i][group] for i, group in asked + asked[::-1] + asked[::3]]
        assert server.log.count("replayed graphs: DecodeCudaGraphRunner") == ranks, "on every rank"
        assert server.is_alive()
