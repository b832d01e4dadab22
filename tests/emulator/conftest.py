"""Fixtures of the emulator's tests, and its modules' place on the import path."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

if TYPE_CHECKING:
    from host import Device


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; run by hand, results committed")


@pytest.fixture
def emulated_device() -> Iterator[Callable[..., "Device"]]:
    """`emulated_device(schedule="late", ...)` returns the device that this test launches on."""
    from host import emulated

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(emulated(**options))
