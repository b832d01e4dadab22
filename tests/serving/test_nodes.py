"""Two nodes of one rank each, two launches on this machine: tiers on a shared folder, and a node that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving.groups import DETERMINISTIC, Question, bits, shape_for, some
from serving.server import (
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
)

from sglang_dsv4.cache.record_files import FOLDER_VARIABLE
from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

FLAGS = ("--max-total-tokens", "6144", "--max-running-requests", "8", "--chunked-prefill-size", "256", SLEEP_ON_IDLE)
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file")
TIERS += ("--hicache-storage-prefetch-policy", "wait_complete")
KINDS = {"tp": ("--tp-size", "2", *DETERMINISTIC), "stages": ("--pp-size", "2")}
LONG = Question(tuple(some(30, 1100)), 6)
MOST_SECONDS = 60
"""In which a node ends after another one's death; gloo notices a closed connection at once."""


@contextmanager
def two_nodes(model: Path, folder: Path, *flags: str) -> Iterator[tuple[Server, Any]]:
    """Yield the first node's server and the second node's process."""
    folder.mkdir()
    nodes = ("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank")
    env = TAILS | {"GLOO_SOCKET_IFNAME": "lo", FOLDER_VARIABLE: str(folder / "files")}
    other, _ = start(model, folder / "log1", (*flags, *nodes, "1"), env, from_command=False)
    try:
        with running_server(model, folder / "log0", *flags, *nodes, "0", env=env) as server:
            yield server, other
    finally:
        stop(other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_of_every_tier_and_a_node_that_dies(kind: str, tmp_path: Path) -> None:
    """Both nodes keep their files in one folder. The end of the second node ends the first one, with a reason."""
    write_checkpoint(tmp_path / "model", shape_for("plain", 2))
    flags = (*FLAGS, *KINDS[kind], *TIERS)
    with running_server(
        tmp_path / "model", tmp_path / "log", *flags, env=TAILS | {FOLDER_VARIABLE: str(tmp_path / "of one")}
    ) as server:
        expected = bits(LONG.ask(server, None))
    with two_nodes(tmp_path / "model", tmp_path / "nodes", *flags) as (server, other):
        assert bits(LONG.ask(server, None)) == expected
        assert account(hit(server, expected))["pages_from"] == {"device": 1024}
        for seed in range(60, 68):
            server.generate(some(seed, 900), max_new_tokens=2)
        assert account(hit(server, expected))["pages_from"] == {"host": 1024}
        assert wait_for_files(tmp_path / "nodes" / "files") > 20
        flush(server)
        assert account(hit(server, expected))["pages_from"] == {"storage": 1024}
        assert "Traceback" not in server.log
        os.killpg(other.pid, signal.SIGKILL)
        deadline = time.monotonic() + MOST_SECONDS
        while server.process.poll() is None:
            assert time.monotonic() < deadline, f"the first node goes on: {server.log[-2000:]}"
            time.sleep(0.2)
        assert "Connection closed by peer" in server.log or "Connection reset by peer" in server.log
        assert "another rank of this server has ended" in server.log


def hit(server: Server, expected: tuple[list[int], list[float]]) -> dict[str, Any]:
    """Return the answer to the long question, which must have a hit and these bits."""
    answer = LONG.ask(server, None)
    assert bits(answer) == expected and answer["meta_info"]["cached_tokens"] == 1024
    return answer
