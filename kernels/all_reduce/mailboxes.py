"""The memory through which the ranks of a group send each other their parts of a sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.all_reduce.plan import Plan


@dataclass(frozen=True)
class Mailboxes:
    """One rank's view of its group's mailboxes (`dsv4_kernels.all_reduce.peer_memory.connect` makes them)."""

    group: torch.distributed.ProcessGroup | None
    """Process group of the ranks, for implementations that do not use the mailboxes."""
    rank: int
    plan: Plan
    addresses: tuple[int, ...]
    """[ranks] address of each rank's mailbox in this rank's address space."""
    buffer_of: Tensor
    """[channels] int32 on the device: which buffer a channel uses next; 0 at the start."""
    failed: Tensor
    """[1] int32 on the device: 1 after a sum in which a part did not arrive in time."""
    late: Tensor
    """[ranks] int32 in pinned host memory: 1 for each rank whose part did not arrive in time."""
    time_limit: int
    """Nanoseconds that a sum waits for a part."""

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.plan.ranks

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest part."""
        return self.plan.most_bytes

    def late_ranks(self) -> list[int]:
        """Ranks whose parts did not arrive in time; reads the host's memory only."""
        return self.late.nonzero().flatten().tolist()
