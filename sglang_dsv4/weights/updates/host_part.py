"""A part of a model's weights in host memory, to be exchanged with the served part."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Part(Protocol):
    """A part of a model's weights in a weight update."""

    rounded: int
    """Codes that the served layout can't hold, and that were rounded in the exchange."""

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""

    def exchange(self) -> None:
        """Swap the served weights with those in host memory; a second call undoes the first."""


class HostPart:
    """A copy of a parameter, or of one expert of it, in host memory; a weight update writes to the copy.

    Args:
        memory: the parameter's memory, whose values the copy begins with.
    """

    rounded = 0

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.value = torch.empty_like(memory, device="cpu").copy_(memory)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self.value.nbytes

    def exchange(self) -> None:
        """Swap the parameter's values with those in host memory; a second call undoes the first."""
        old = self._memory.to("cpu", copy=True)
        self._memory.copy_(self.value)
        self.value = old
