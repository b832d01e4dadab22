"""How a sum over ranks is divided among CTAs, and where its parts lie in a mailbox."""

from __future__ import annotations

from dataclasses import dataclass

VECTOR_BYTES = 16
MOST_RANKS = 8
MOST_CHANNELS = 128
"""CTAs of a launch: fewer than the multiprocessors of an H100 or B200, so all of them are resident at once."""
FEWEST_THREADS, MOST_THREADS = 128, 512
"""Threads of a CTA, unless a benchmark tries others: few for small sums, so that many multiprocessors send at once."""
BUFFERS = 2
MOST_MAILBOX_BYTES = 1 << 30
EMPTY = 0xFFFFFFFF
"""A word that says that nothing has arrived: as bf16 and as fp32 a NaN that no arithmetic instruction returns."""
NAN = 0x7FFFFFFF
"""A word of NaN that is sent where a part holds EMPTY; in bf16 both halves are NaN."""


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
