"""Sums over ranks by our own kernel, through memory that all GPUs of a host can write (`dsv4_kernels.all_reduce`).

    SGLANG_DSV4_ALL_REDUCE    auto (default): ours for parts of at most `MOST_BYTES`, where the ranks can map each
                              other's memory.
                              ours: the same, and the server stops where they cannot.
                              sglang: SGLang's all-reduce, or the gather of `rank_sum` under the flag.

Our sum adds in fp32 in the order of the ranks, as `rank_sum` does under --enable-deterministic-inference, and gives the
same bits. So it serves under the flag, too, and a larger part is gathered there.

With up to `BOUNDARY_TOKENS` tokens a sublayer returns its part (`Part`), and the boundary to the next sublayer sums:
one launch a sublayer less, and the same bits.

The mailboxes are made while the target model is built, before SGLang measures the memory that is left for pools. If a
rank does not send its part in time, the others name it in the log and end the server.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from sglang.srt.distributed import get_tp_group
from torch import Tensor

from dsv4_kernels.all_reduce import all_reduce
from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.host.mailboxes import VECTOR_BYTES, Mailboxes
from sglang_dsv4 import env
from sglang_dsv4.layers import data_parallel
from sglang_dsv4.model_config.config import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DSV4_ALL_REDUCE"
MOST_BYTES = {2: 8 << 20, 4: 4 << 20, 8: 1 << 20}
"""Bytes of the largest part that our kernel sums, by number of ranks. It sends a part to every other rank, so a library
that cuts parts into shards is faster for large ones. At these sizes NCCL takes 1.6 and 1.1 times as long on two and
four H200s (`benchmarks/results/all_reduce_h200_x2.json`, `_x4`); eight ranks were not measured."""
BOUNDARY_TOKENS = 64
"""Most tokens of a forward whose boundaries sum. On four H200s one launch then takes as long as two; with fewer tokens
it takes less time (`benchmarks/results/boundary_h200_x4.json`)."""
SECONDS_IN_GRAPHS = 240.0
"""Longest wait of a captured sum for a part. SGLang's watchdog ends a server after 300 s, and names no rank."""
SECONDS = 1800.0
"""Longest wait of any other sum: while a server starts, one rank may compile DeepGEMM's kernels for many minutes."""
WATCH_SECONDS = 1.0

_mailboxes: Mailboxes | None = None


@functools.cache
def choice() -> str:
    """The switch: "auto", "ours" or "sglang".

    Raises:
        ValueError: another word.
    """
    return env.choice(VARIABLE) or "auto"


def ranks() -> int:
    """Ranks that sum through each other's memory; 0 if SGLang sums."""
    return 0 if _mailboxes is None else _mailboxes.ranks


def set_up(device: torch.device) -> None:
    """Make the mailboxes of the TP group, if the switch asks for our sum; all ranks call it at the same time.

    A process makes them once, whatever it is called for.

    Raises:
        ConfigError: `ours` was asked for, and cannot be.
    """
    global _mailboxes
    group = get_tp_group()
    if _mailboxes is not None or choice() == "sglang" or group.world_size == 1:
        return
    reason = _obstacle(group.world_size, device)
    if not reason:
        # CUDA's bindings are missing where there is no GPU.
        from dsv4_kernels.all_reduce import peer_memory

        most = MOST_BYTES[group.world_size]
        try:
            made = peer_memory.connect(group.device_group, group.cpu_group, device, most, SECONDS)
            peer_memory.try_out(made, group.cpu_group, device)
        except peer_memory.CannotConnectError as error:
            reason = str(error)
    if reason:
        if choice() == "ours":
            raise ConfigError(VARIABLE, "ours", f"auto or sglang here, since {reason}")
        if group.rank_in_group == 0:
            logger.info("sums over %d ranks: SGLang's all-reduce, since %s", group.world_size, reason)
        return
    _mailboxes = made
    threading.Thread(target=_watch, args=(made,), name="sums over ranks", daemon=True).start()
    if made.rank == 0:
        most, mailbox = made.most_bytes / 2**20, made.plan.mailbox_bytes / 2**20
        logger.info("sums over %d ranks of up to %.1f MB: ours; mailboxes of %.1f MB a rank", made.ranks, most, mailbox)


def total(part: Tensor) -> Tensor | None:
    """The sum of all ranks' parts in the order of the ranks, rounded once; None if our kernel does not sum them.

    Args:
        part: [T, d], this rank's; T is the same on all ranks.
    """
    num_bytes = part.numel() * part.element_size()
    if _mailboxes is None or num_bytes > _mailboxes.most_bytes or num_bytes % VECTOR_BYTES:
        return None
    return all_reduce(part.contiguous(), _with_limit(_mailboxes, part))


class Part(NamedTuple):
    """This rank's part of a sublayer's output, which the next boundary sums over the ranks."""

    rows: Tensor | ExpertRows  # [T, d] model dtype, or fp32; or rows of experts whose sum the part is
    dtype: torch.dtype  # of the model

    @property
    def mailboxes(self) -> Mailboxes:
        """The mailboxes of the group."""
        assert _mailboxes is not None, "a part has been left to a boundary without mailboxes"
        return _with_limit(_mailboxes, self.rows.shared if isinstance(self.rows, ExpertRows) else self.rows)

    def total(self) -> Tensor:
        """The sublayer's output [T, d] in the model's dtype, for a reader that is no boundary."""
        return all_reduce(summed(self.rows), self.mailboxes).to(self.dtype)


def left_to_boundary(part: Tensor | ExpertRows, dtype: torch.dtype) -> Part | None:
    """The part, if the next boundary sums it; else None. All ranks decide alike.

    Args:
        part: [T, d] of a sublayer's output, of rows that all ranks have; or the rows of experts whose sum it is.
        dtype: of the model.
    """
    tokens, dim = part.shape
    if _mailboxes is None or not 0 < tokens <= boundary_tokens(dim, part.dtype, dtype):
        return None
    return Part(part if isinstance(part, ExpertRows) else part.contiguous(), dtype)


def boundary_tokens(dim: int, parts: torch.dtype, dtype: torch.dtype) -> int:
    """The most tokens of a forward whose boundaries sum; 0 if none do.

    Args:
        dim: d.
        parts: dtype of the parts.
        dtype: of the model.
    """
    if _mailboxes is None or dtype != torch.bfloat16:  # the boundary's kernels compute in bf16
        return 0
    # The kernels' compiler is missing where there is no GPU.
    from dsv4_kernels.hyper_connection.choice import most_tokens_of_parts

    return min(BOUNDARY_TOKENS, most_tokens_of_parts(_mailboxes, dim, parts))


def _with_limit(mailboxes: Mailboxes, part: Tensor) -> Mailboxes:
    """The mailboxes with the time limit of a sum of this part."""
    return replace(mailboxes, time_limit=int(SECONDS_IN_GRAPHS * 1e9)) if _is_captured(part) else mailboxes


def _is_captured(part: Tensor) -> bool:
    """Whether a CUDA graph is captured on the stream of a part."""
    return part.is_cuda and torch.cuda.is_current_stream_capturing()


def _obstacle(ranks: int, device: torch.device) -> str:
    """Why this group cannot sum through its memory, or ""."""
    if device.type != "cuda":
        return f"the model is on a {device.type.upper()}, not on GPUs"
    if ranks not in MOST_BYTES:
        return f"there are {ranks} ranks, not {', '.join(map(str, MOST_BYTES))}"
    if data_parallel.is_on():
        return "attention data parallelism exchanges rows instead of summing over all ranks"
    return ""


def _watch(mailboxes: Mailboxes) -> None:
    while not (late := mailboxes.late_ranks()):
        time.sleep(WATCH_SECONDS)
    logger.error(
        "a sum over ranks waited %.0f s or more for a part of rank %s: that process hangs, has ended, or computes "
        "another batch; its log says more. This server ends",
        SECONDS_IN_GRAPHS,
        ", ".join(map(str, late)),
    )
    os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's watchdog: the launcher ends all processes
