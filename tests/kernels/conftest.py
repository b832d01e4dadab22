"""Fixtures of kernels in the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4_kernels import registry
from dsv4_kernels.device import dependent_launch


@pytest.fixture
def in_turns() -> Iterator[None]:
    """Turn dependent launch off: the reasons in emulator/results for deletions that go unnoticed name PTX lines of
    kernels that were compiled without it."""
    with dependent_launch.switched(False):
        yield


@pytest.fixture(scope="session")
def kernel_on_gpu() -> Callable[[str], str]:
    """Return a function: op -> name of the kernel for this GPU. It skips the test if the op has no kernel here."""

    def name_of(op: str) -> str:
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU: torch sees none")
        name = registry.chosen(op, torch.device("cuda"), torch.bfloat16).name
        if name == "ref":
            pytest.skip(f"no kernel of {op} for {torch.cuda.get_device_name()}")
        return name

    return name_of
