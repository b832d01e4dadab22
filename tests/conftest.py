"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving.server import Server

# What only the fixtures need is imported by them: this file is also read where kernels are tested without SGLang.


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random checkpoint of `make serve`, in the released format."""
    from sglang_dsv4.random_checkpoint import PRESETS, write_checkpoint

    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, PRESETS["tiny"])
    return path


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the session: the tiny checkpoint behind a small pool, short prefill chunks and few checkpoints."""
    from serving.server import MAX_RUNNING, POOL_TOKENS, SLEEP_ON_IDLE, TAILS, running_server

    log_path = tmp_path_factory.mktemp("server") / "log"
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING))
    # A random model would fill the white space that a JSON grammar allows without end.
    flags += ("--chunked-prefill-size", "512", "--constrained-json-disable-any-whitespace", "--enable-metrics")
    with running_server(checkpoint, log_path, *flags, SLEEP_ON_IDLE, env=TAILS) as running:
        yield running
