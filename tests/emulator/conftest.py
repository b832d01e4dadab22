"""Fixtures of the emulator's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ptx_emulator import Device


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; run by hand, results committed")


@pytest.fixture
def emulated_device() -> Iterator[Callable[..., "Device"]]:
    """A function that opens an emulated device for this test: `emulated_device(schedule="late", ...)`."""
    from ptx_emulator import emulated

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(emulated(**options))
