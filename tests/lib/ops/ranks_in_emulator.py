"""Ranks of `all_reduce` as GPUs of the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from ptx_emulator import Device
from torch import Tensor

from dsv4_kernels.all_reduce import gpu
from dsv4_kernels.host.mailboxes import Mailboxes, Plan

SECOND = 10**9


CLUSTERS = 16
"""Clusters of eight CTAs that run at once on an H200."""
Call = Callable[[int, Mailboxes], object]
"""A launch on one rank."""


class Ranks:
    """The mailboxes of a group whose ranks are emulated GPUs; made inside `emulated(...)`."""

    def __init__(self, device: Device, plan: Plan, impl: str) -> None:
        self.device, self.plan, self.all_reduce = device, plan, getattr(gpu, impl)
        self.memory = [torch.full((plan.mailbox_bytes // 4,), -1, dtype=torch.int32) for _ in range(plan.ranks)]
        addresses = tuple(box.data_ptr() for box in self.memory)
        self.boxes = [
            Mailboxes(
                None,
                rank,
                plan,
                addresses,
                torch.zeros(plan.channels, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                torch.zeros(plan.ranks, dtype=torch.int32),
                SECOND,
                CLUSTERS,
            )
            for rank in range(plan.ranks)
        ]

    def sums(
        self, calls: Sequence[Sequence[Tensor]], absent: Sequence[int] = (), late: Sequence[int] = ()
    ) -> list[list[Tensor]]:
        """[call][rank] results of several calls, one after the other on each rank, all ranks side by side.

        Args:
            calls: [call][rank] parts.
            absent: ranks that launch nothing; None stands for their results.
            late: ranks that start only when all others wait.
        """
        made = [lambda rank, boxes, parts=parts: self.all_reduce(parts[rank], boxes) for parts in calls]
        return self.results(made, absent, late)

    def results(self, calls: Sequence[Call], absent: Sequence[int] = (), late: Sequence[int] = ()) -> list[list]:
        """[call][rank] results of several calls; see `sums`."""
        results: list[list] = [[None] * self.plan.ranks for _ in calls]
        with self.device.several_gpus(late) as choose:
            for rank, boxes in enumerate(self.boxes):
                choose(rank)
                for number, call in enumerate(calls):
                    if rank not in absent:
                        results[number][rank] = call(rank, boxes)
        return results

    def is_empty(self) -> bool:
        """Whether all mailboxes are as at the start, and no sum has failed."""
        flags = [flag for boxes in self.boxes for flag in (boxes.failed, boxes.late)]
        return all(bool((box == -1).all()) for box in self.memory) and not any(map(torch.any, flags))


def parts_of(shape: tuple[int, ...], ranks: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """A random part for each rank; in every third column the first two of several cancel.

    Another order of adding then gives other bits.
    """
    g = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 3, 31)[torch.randint(31, (ranks, *shape), generator=g)]
    parts = (torch.randn(ranks, *shape, generator=g) * scale).to(dtype)
    if ranks > 2:
        parts[0, ..., ::3] *= 256
        parts[1, ..., ::3] = -parts[0, ..., ::3]
    return list(parts)
