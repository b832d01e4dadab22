"""The stage of this process, and small messages between the stages' schedulers.

A stage (`--pp-size`) has consecutive layers, with their pools, tails and files. Between two stages travel the four
streams of each row, complete: the output of a stage's last sublayer is written back before they are sent, by a
boundary, so that a row's bits do not depend on the number of stages. Every stage has the batch's token ids, which
hash-routed layers read.

Each stage has a scheduler of its own, which gets the same requests in the same round of its loop and must decide alike.
Stage 0 may be some rounds ahead, and later stages finish a round only after stage 0 has begun the next: a reduction
over all stages within a round would never end. So decisions travel forward, with the round that they belong to
(`plans`, `votes`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_dsv4 import env
from sglang_dsv4.model_config.stages import SIZES_VARIABLE, Stage, stages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang_dsv4.model_config.config import Config

MOST_UNRECEIVED = 64
"""Messages from one stage to another that may be under way; before the next one the sender waits for the oldest."""


def stage_of_this_process(config: Config) -> Stage:
    """The stage whose layers this process has."""
    parallel = get_parallel()
    if parallel.pp_size == 1:
        return Stage.whole(config.num_hidden_layers)
    return stages(config.num_hidden_layers, parallel.pp_size, env.text(SIZES_VARIABLE))[parallel.pp_rank]


def is_divided() -> bool:
    """Whether the model is divided into stages."""
    return get_parallel().pp_size > 1


class Messages:
    """Messages of whole numbers between the processes of all stages that have the same tensor-parallel rank.

    Args:
        group: these processes, in the order of the stages, with a backend for CPU tensors (gloo).
        tag: distinguishes these messages from others in the group.
    """

    def __init__(self, group: ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self.index, self.count = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self._under_way: dict[int, deque[tuple[torch.distributed.Work, torch.Tensor]]] = {}

    @classmethod
    def between_stages(cls, tag: int) -> Messages:
        """Messages between this server's stages."""
        return cls(get_parallel().pp_group.cpu_group, tag)

    def send(self, numbers: list[int], to: int) -> None:
        """Send `numbers` (each below 2**63) to a stage, without waiting for it."""
        message = torch.tensor(numbers, dtype=torch.int64)
        sent = self._under_way.setdefault(to, deque())
        if len(sent) == MOST_UNRECEIVED:
            sent.popleft()[0].wait()
        sent.append((torch.distributed.isend(message, group=self._group, group_dst=to, tag=self._tag), message))

    def receive(self, count: int, sender: int) -> list[int]:
        """The next message from stage `sender`, `count` numbers; waits for it.

        Raises:
            RuntimeError: the stage's process has ended, or its message has another length.
        """
        message = torch.empty(count, dtype=torch.int64)
        torch.distributed.recv(message, group=self._group, group_src=sender, tag=self._tag)
        return message.tolist()
