"""Mailboxes: the memory through which the ranks of a group send each other their parts of a sum, and who uses which
bytes of it.

Two ops share the mailboxes of a group: `all_reduce` and `hc_boundary_of_parts`, whose launches may follow each other in
any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VECTOR_BYTES = 16
CLUSTER = 8
"""CTAs of a cluster of the hyper-connections' kernel: the largest cluster that every GPU supports."""
MOST_RANKS = 8
MOST_CHANNELS = 128
"""CTAs of a launch: fewer than the multiprocessors of an H100 or B200, so all of them are resident at once."""
FEWEST_THREADS, MOST_THREADS = 128, 512
"""Threads of a CTA, unless a benchmark tries others: few for small sums, so that many multiprocessors send at once."""
BUFFERS = 2
MOST_MAILBOX_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Geometry of a group's mailboxes; the same on all its ranks.

    A block has a vector of 16 bytes for each thread of a CTA. Block b of a launch of n CTAs belongs to CTA b % n, and
    lies in place b // n of the CTA's channel. So a byte of a mailbox belongs to one channel whatever the size of a
    launch.

    A mailbox is [BUFFERS, channels, places, ranks, threads] vectors; the fourth dimension is the sender. A launch of
    fewer threads a CTA uses the first ones.
    """

    ranks: int
    threads: int
    """Most threads of a CTA."""
    fewest_threads: int
    channels: int
    places: int
    """Blocks of a launch that one CTA sums at most."""

    @staticmethod
    def of(
        ranks: int,
        most_bytes: int,
        threads: int = MOST_THREADS,
        fewest_threads: int = FEWEST_THREADS,
        channels: int = MOST_CHANNELS,
    ) -> Plan:
        """The plan for sums of at most `most_bytes` bytes.

        Raises:
            ValueError: more ranks or channels than a kernel serves, no bytes, or mailboxes that are too large.
        """
        if not 2 <= ranks <= MOST_RANKS or not 1 <= channels <= MOST_CHANNELS or most_bytes < 1:
            raise ValueError(
                f"all_reduce: {ranks} ranks, {channels} channels, {most_bytes} bytes; expected 2 to {MOST_RANKS} "
                f"ranks, 1 to {MOST_CHANNELS} channels and at least one byte"
            )
        vectors = -(-most_bytes // VECTOR_BYTES)
        channels = min(channels, -(-vectors // fewest_threads))
        made = Plan(ranks, threads, fewest_threads, channels, -(-vectors // (threads * channels)))
        if made.mailbox_bytes > MOST_MAILBOX_BYTES:
            raise ValueError(
                f"all_reduce: sums of {most_bytes} bytes over {ranks} ranks need mailboxes of {made.mailbox_bytes} "
                f"bytes; at most {MOST_MAILBOX_BYTES} are possible"
            )
        return made

    @property
    def place_bytes(self) -> int:
        """Bytes of one block from all senders."""
        return self.ranks * self.threads * VECTOR_BYTES

    @property
    def channel_bytes(self) -> int:
        """Bytes of one channel in one buffer."""
        return self.places * self.place_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one of the BUFFERS."""
        return self.channels * self.channel_bytes

    @property
    def mailbox_bytes(self) -> int:
        """Bytes of a rank's mailbox."""
        return BUFFERS * self.buffer_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest sum."""
        return self.channels * self.places * self.threads * VECTOR_BYTES

    def launch(self, vectors: int) -> tuple[int, int]:
        """(CTAs, threads of a CTA) of a launch: as few threads as give each CTA one block, if any do."""
        threads = self.fewest_threads
        while threads < self.threads and vectors > self.channels * threads:
            threads *= 2
        return min(self.channels, -(-vectors // threads)), threads


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
    clusters: int
    """Clusters of CLUSTER CTAs that run at once on every GPU of the group, with one CTA on each multiprocessor."""

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
