"""How many tail checkpoints are kept and where, from the environment; and, with SGLang's flags, how many host pages.

    SGLANG_DSV4_TAIL_INTERVAL      tokens between the checkpoints of a prefill, a multiple of 256 (2048)
    SGLANG_DSV4_TAIL_SLOTS         checkpoints on the device (one a running request and one per 4,096 tokens)
    SGLANG_DSV4_TAIL_HOST_SLOTS    checkpoints in host memory (4 times those on the device, at most 1/32 of it)

    SGLANG_DSV4_TAIL_ERRORS        raise: an error in their bookkeeping ends the server, as the tests want it;
                                   count (the default): it is logged once and counted, the request loses its checkpoints

Environment variables, because SGLang's command line can't be extended from outside. Every rank of a tensor-parallel
group must come to the same numbers, or their trees would drift apart: nothing here depends on free memory, and of what
the memory of their hosts would allow they take the least.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch
from torch.distributed import ProcessGroup

from dsv4_radix_cache.placement import DEFAULT_INTERVAL_TOKENS, Placement
from dsv4_radix_cache.ring import PAGE_TOKENS
from sglang_dsv4 import env

TOKENS_PER_SLOT = 4096
HOST_SLOTS_PER_DEVICE_SLOT = 4
HOST_MEMORY_SHARE = 32
FREE_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class TailSizes:
    """What a worker keeps: slots of checkpoints in two tiers, and the tokens between those of a prefill."""

    device_slots: int
    host_slots: int
    interval_tokens: int = DEFAULT_INTERVAL_TOKENS
    strict: bool = True
    """A bookkeeping error is raised."""
    host_pages: int = 0
    """Pages of prefixes in host memory (`--enable-hierarchical-cache`)."""


@dataclass(frozen=True)
class TailOptions:
    """What the user chose; None where the default depends on the pool."""

    interval_tokens: int = DEFAULT_INTERVAL_TOKENS
    device_slots: int | None = None
    host_slots: int | None = None
    strict: bool = False

    @classmethod
    def from_environment(cls) -> TailOptions:
        """Read the variables.

        Raises:
            ValueError: one of them is not what it can be.
        """
        on_error = os.environ.get("SGLANG_DSV4_TAIL_ERRORS", "").strip().lower()
        if on_error not in ("", "raise", "count"):
            raise ValueError(f"SGLANG_DSV4_TAIL_ERRORS must be 'raise' or 'count', got {on_error!r}")
        options = cls(
            interval_tokens=_number("SGLANG_DSV4_TAIL_INTERVAL", DEFAULT_INTERVAL_TOKENS),
            device_slots=_number("SGLANG_DSV4_TAIL_SLOTS", None),
            host_slots=_number("SGLANG_DSV4_TAIL_HOST_SLOTS", None),
            strict=on_error == "raise",
        )
        Placement(options.interval_tokens)  # refuses what is no multiple of the page
        return options

    def slots_on_device(self, full_tokens: int, request_slots: int) -> int:
        """Checkpoints on the device for a pool of that size. `request_slots` counts the null slot."""
        if self.device_slots is not None:
            return self.device_slots
        return request_slots - 1 + -(-full_tokens // TOKENS_PER_SLOT)

    def slots_on_host(self, device_slots: int, slot_bytes: int) -> int:
        """Checkpoints in host memory, as far as this host knows."""
        if self.host_slots is not None:
            return self.host_slots
        fitting = psutil.virtual_memory().total // HOST_MEMORY_SHARE // max(1, slot_bytes)
        return min(HOST_SLOTS_PER_DEVICE_SLOT * device_slots, fitting)


@dataclass(frozen=True)
class HostOptions:
    """How much host memory whole prefixes may take: SGLang's flags, in its units."""

    ratio: float  # --hicache-ratio: tokens in host memory for each of the pool
    gigabytes: float = 0  # --hicache-size, which takes the place of the ratio; 10**9 bytes, checkpoints included
    fitting: bool = False  # neither flag was given: what the machine has free sets a limit

    def sizes(self, full_tokens: int, token_bytes: float, slot_bytes: int) -> tuple[int, int]:
        """Pages and checkpoints in host memory, as far as this host knows: one checkpoint for 4,096 tokens.

        Args:
            full_tokens: tokens of the pool.
            token_bytes: bytes of a token's entries and keys.
            slot_bytes: bytes of a checkpoint.

        Raises:
            ValueError: not even one page fits.
        """
        unit_bytes = TOKENS_PER_SLOT * token_bytes + slot_bytes
        units = self.gigabytes * 1e9 / unit_bytes if self.gigabytes else self.ratio * full_tokens / TOKENS_PER_SLOT
        if self.fitting:
            units = min(units, FREE_MEMORY_SHARE * psutil.virtual_memory().available / unit_bytes)
        pages = int(units * TOKENS_PER_SLOT) // PAGE_TOKENS
        if not pages:
            raise ValueError(
                f"--enable-hierarchical-cache: {units * unit_bytes:.0f} bytes of host memory hold no page of "
                f"{PAGE_TOKENS * token_bytes:.0f}: raise --hicache-ratio or --hicache-size, or free memory"
            )
        return pages, max(1, int(units))


def least_of_ranks(count: int, group: ProcessGroup | None) -> int:
    """The least `count` that a rank of the group has; all of them must call it. `count` itself without a group.

    Args:
        count: host slots that this rank's host has memory for.
        group: of all ranks that keep equal trees, with a backend for CPU tensors (gloo).
    """
    if group is None or torch.distributed.get_world_size(group) == 1:
        return count
    least = torch.tensor([count], dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least)


def _number(name: str, default: int | None) -> int | None:
    number = env.number(name)
    return default if number is None else number
