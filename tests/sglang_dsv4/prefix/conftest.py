"""A checkpoint whose CSA layers choose among a prompt's entries."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `tiny` preset, whose indexer chooses 16 entries."""
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, dataclasses.replace(PRESETS["tiny"], index_topk=16))
    return path
