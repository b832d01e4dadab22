"""A checkpoint whose CSA layers choose among a prompt's entries; write policies, and a storage backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from prefix.tiered import Backend

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.prefix.host_tier import WritePolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `tiny` preset, whose indexer chooses 16 entries."""
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, dataclasses.replace(PRESETS["tiny"], index_topk=16))
    return path


@pytest.fixture(params=list(WritePolicy), ids=[policy.value for policy in WritePolicy])
def policy(request: pytest.FixtureRequest) -> WritePolicy:
    return request.param


@pytest.fixture
def backend() -> Backend:
    return Backend()
