"""Messages about other models and other machines are not shown; SGLang still has them, and all other messages stay."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path

import pytest

from sglang_dsv4.cpu import noise

ALL = (*noise.WARNINGS, *noise.LOGGED)


@pytest.mark.parametrize("message", ALL, ids=[message.module.rsplit(".", 1)[1] for message in ALL])
def test_sglang_has_the_message(message: noise.Message) -> None:
    """Each message still occurs in SGLang's source; else its row could go."""
    spec = importlib.util.find_spec(message.module)
    source = Path(spec.origin).read_text()
    assert message.begin in source.replace('"\n            "', "").replace('"\n        "', "")


def test_warnings_are_not_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        noise.silence()
        for message in noise.WARNINGS:
            warnings.warn(f"{message.begin} and more.", UserWarning, stacklevel=1)
        warnings.warn("Only CUDA supports this", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["Only CUDA supports this"]


def test_log_lines_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logging.getLogger(message.module) for message in noise.LOGGED]
    before = [list(logger.filters) for logger in loggers]
    try:
        noise.silence()
        for message, logger in zip(noise.LOGGED, loggers, strict=True):
            logger.warning("%s and more", message.begin)
            logger.warning("another line")
    finally:
        for logger, filters in zip(loggers, before, strict=True):
            logger.filters[:] = filters
    assert [record.getMessage() for record in caplog.records] == ["another line"] * len(noise.LOGGED)
