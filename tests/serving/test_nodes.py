"""Two nodes, two launches on this machine: tiers on a shared folder; a node that dies, hangs, or is cut off."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from serving.groups import DETERMINISTIC, Question, bits, shape_for, some
from serving.network_namespaces import Host, Unavailable, two_hosts
from serving.server import (
    LOOPBACK,
    SLEEP_ON_IDLE,
    TAILS,
    Server,
    account,
    flush,
    free_port,
    running_server,
    start,
    stop,
    wait_for_files,
    wait_until,
)

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8", "--chunked-prefill-size", "256", SLEEP_ON_IDLE)
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file")
TIERS += ("--hicache-storage-prefetch-policy", "wait_complete")
KINDS = {
    "tp": ("--tp-size", "2", *DETERMINISTIC),
    "stages": ("--pp-size", "2"),
    # A group of two ranks on each node; the chunks of both groups together.
    "groups": ("--tp-size", "4", "--attn-dp-size", "2", *DETERMINISTIC, "--chunked-prefill-size", "512"),
}
LONG = Question(tuple(some(30, 1100)), 6)
MOST_SECONDS = 60
"""In which a node ends after another one's death; gloo notices a closed connection at once."""
TIMEOUT_S = 30
CLOSED = ("Connection closed by peer", "Connection reset by peer")
TIMED_OUT = ("Timed out waiting",)


@contextmanager
def two_nodes(
    model: Path, folder: Path, *flags: str, hosts: tuple[Host | None, Host | None] = (None, None)
) -> Iterator[tuple[Server, Any]]:
    """Yield the first node's server and the second node's process; the nodes are on this host, or on others."""
    folder.mkdir()
    address = LOOPBACK if hosts[0] is None else hosts[0].address
    nodes = ("--nnodes", "2", "--dist-init-addr", f"{address}:{free_port()}", "--node-rank")
    env = TAILS | {"GLOO_SOCKET_IFNAME": "lo", FOLDER_VARIABLE: str(folder / "files")}
    other, _ = start(model, folder / "log1", (*flags, *nodes, "1"), env, from_command=False, host=hosts[1])
    try:
        # With groups each launch looks whether the first node's ports are free; on hosts of their own they are.
        wait_until(lambda: hosts[1] is not None or "server_args=" in (folder / "log1").read_text())
        with running_server(model, folder / "log0", *flags, *nodes, "0", env=env, host=hosts[0]) as server:
            yield server, other
    finally:
        stop(other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_of_every_tier_and_a_node_that_dies(kind: str, tmp_path: Path) -> None:
    """Both nodes keep their files in one folder. The end of the second node ends the first one, with a reason, and the
    request that is under way. Of two groups the second node's has the prefix; from files the first node's gets it, too.
    """
    group = 1 if kind == "groups" else None
    write_checkpoint(tmp_path / "model", shape_for("plain", 4))
    flags = (*FLAGS, *KINDS[kind], *TIERS)
    with running_server(
        tmp_path / "model", tmp_path / "log", *flags, env=TAILS | {FOLDER_VARIABLE: str(tmp_path / "of one")}
    ) as server:
        expected = bits(LONG.ask(server, group))
    with two_nodes(tmp_path / "model", tmp_path / "nodes", *flags) as (server, other):
        assert bits(LONG.ask(server, group)) == expected
        assert account(hit(server, group, expected))["pages_from"] == {"device": 1024}
        for seed in range(60, 68):
            Question(tuple(some(seed, 900)), 2).ask(server, group)
        assert account(hit(server, group, expected))["pages_from"] == {"host": 1024}
        assert wait_for_files(tmp_path / "nodes" / "files") > 20
        flush(server)
        assert account(hit(server, group, expected))["pages_from"] == {"storage": 1024}
        if group is not None:
            assert account(hit(server, 0, expected))["pages_from"] == {"storage": 1024}
        assert "Traceback" not in server.log
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(Question(tuple(some(1, 40)), 3000).ask, server, 0 if group else None)
            time.sleep(2)
            os.killpg(other.pid, signal.SIGKILL)
            assert_it_ends(server.process, tmp_path / "nodes" / "log0")
            with pytest.raises((requests.RequestException, AssertionError)):
                under_way.result(MOST_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_node_dies(kind: str, tmp_path: Path) -> None:
    """No client is left; the second node ends, with a reason."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 4))
    with two_nodes(tmp_path / "model", tmp_path / "nodes", *FLAGS, *KINDS[kind]) as (server, other):
        assert server.is_alive()
        os.killpg(server.process.pid, signal.SIGKILL)
        assert_it_ends(other, tmp_path / "nodes" / "log1")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "frozen"), [("tp", 1), ("tp", 0), ("stages", 1), ("stages", 0)])
def test_a_node_that_stops_answering(kind: str, frozen: int, tmp_path: Path) -> None:
    """The connections stay open, as those of a host whose cable is cut or whose kernel hangs. The other node ends after
    `--dist-timeout`; SGLang lets it wait for two hours for requests, and for a stage's answer."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 4))
    flags = (*FLAGS, *KINDS[kind], "--dist-timeout", str(TIMEOUT_S))
    with two_nodes(tmp_path / "model", tmp_path / "nodes", *flags) as (server, other), ThreadPoolExecutor(1) as pool:
        assert server.is_alive()
        nodes = (server.process, other)
        os.killpg(nodes[frozen].pid, signal.SIGSTOP)
        if frozen == 1:
            under_way = pool.submit(Question(tuple(some(1, 40)), 3000).ask, server, None)
        assert_it_ends(nodes[1 - frozen], tmp_path / "nodes" / f"log{1 - frozen}", TIMED_OUT, TIMEOUT_S + MOST_SECONDS)
        if frozen == 1:
            with pytest.raises((requests.RequestException, AssertionError)):
                under_way.result(MOST_SECONDS)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts())
        except Unavailable as error:
            pytest.skip(f"needs network namespaces, which root makes: {error}")
        yield made


@pytest.mark.slow
def test_a_cable_that_is_cut(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """In the middle of a request. No packet arrives any more, and nobody says so: both nodes end after
    `--dist-timeout`, with a reason, and the client, whom the first node still reaches, gets an error."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 4))
    seconds = 2 * TIMEOUT_S  # the nodes, each with its imports, also wait so long for each other's start
    flags = (*FLAGS, *KINDS["tp"], "--dist-timeout", str(seconds))
    nodes = two_nodes(tmp_path / "model", tmp_path / "nodes", *flags, hosts=hosts)
    with nodes as (server, other), ThreadPoolExecutor(1) as pool:
        assert server.is_alive()
        under_way = pool.submit(Question(tuple(some(1, 40)), 3000).ask, server, None)
        wait_until(lambda: running(server) == 1)
        hosts[1].cut_cable()
        assert not under_way.done(), "in the middle of the request"
        ends = time.monotonic() + seconds + MOST_SECONDS
        for number, node in enumerate((server.process, other)):
            assert_it_ends(node, tmp_path / "nodes" / f"log{number}", TIMED_OUT, ends - time.monotonic())
        with pytest.raises((requests.RequestException, AssertionError)):
            under_way.result(MOST_SECONDS)


def running(server: Server) -> int:
    """Return the number of requests that the server decodes."""
    return sum(load["num_running_reqs"] for load in requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"])


def assert_it_ends(node: Any, log: Path, signs: tuple[str, ...] = CLOSED, seconds: float = MOST_SECONDS) -> None:
    """The node's process ends by itself, and its log says why."""
    deadline = time.monotonic() + seconds
    while node.poll() is None:
        assert time.monotonic() < deadline, f"the node goes on: {log.read_text()[-2000:]}"
        time.sleep(0.2)
    text = log.read_text(errors="replace")
    assert any(sign in text for sign in signs), text[-2000:]
    assert "another rank of this server has ended" in text


def hit(server: Server, group: int | None, expected: tuple[list[int], list[float]]) -> dict[str, Any]:
    """Return the answer to the long question, which must have a hit and these bits."""
    answer = LONG.ask(server, group)
    assert bits(answer) == expected and answer["meta_info"]["cached_tokens"] == 1024
    return answer
