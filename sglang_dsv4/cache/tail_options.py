"""Numbers of tail slots, from environment variables, and of pages in host memory, from SGLang's flags.

    SGLANG_DSV4_TAIL_INTERVAL      tokens between the tails of a prefill, a multiple of 256 (2048)
    SGLANG_DSV4_TAIL_SLOTS         tails on the device (one per running request and one per 4,096 tokens)
    SGLANG_DSV4_TAIL_HOST_SLOTS    tails in host memory (4 times the device's, in at most 1/32 of host memory)

They are environment variables because SGLang's command line cannot be extended from outside. All ranks of a
tensor-parallel group must compute the same numbers, or their trees would diverge: device slots do not depend on free
memory, and for host memory the ranks agree on the least of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch.distributed import ProcessGroup

from dsv4_radix_cache.placement import DEFAULT_INTERVAL_TOKENS, Placement
from sglang_dsv4 import env
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS

TOKENS_PER_SLOT = 4096
HOST_SLOTS_PER_DEVICE_SLOT = 4
HOST_MEMORY_SHARE = 32
FREE_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class TailSizes:
    """Sizes of a worker's prefix reuse: tail slots of two tiers, and the tokens between the tails of a prefill."""

    device_slots: int
    host_slots: int
    interval_tokens: int = DEFAULT_INTERVAL_TOKENS
    host_pages: int = 0
    """Pages of prefixes in host memory (`--enable-hierarchical-cache`)."""


@dataclass(frozen=True)
class TailOptions:
    """The user's choice; None where the default depends on the pool."""

    interval_tokens: int = DEFAULT_INTERVAL_TOKENS
    device_slots: int | None = None
    host_slots: int | None = None

    @classmethod
    def from_environment(cls) -> TailOptions:
        """Read the variables.

        Raises:
            ValueError: a variable is no number, or the interval is no multiple of the page.
        """
        options = cls(
            interval_tokens=_number("SGLANG_DSV4_TAIL_INTERVAL", DEFAULT_INTERVAL_TOKENS),
            device_slots=_number("SGLANG_DSV4_TAIL_SLOTS", None),
            host_slots=_number("SGLANG_DSV4_TAIL_HOST_SLOTS", None),
        )
        Placement(options.interval_tokens)  # raises if it is no multiple of the page
        return options

    def slots_on_device(self, full_tokens: int, request_slots: int) -> int:
        """Tails on the device for a pool of this size. `request_slots` counts the null slot."""
        if self.device_slots is not None:
            return self.device_slots
        return request_slots - 1 + -(-full_tokens // TOKENS_PER_SLOT)

    def slots_on_host(self, device_slots: int, slot_bytes: int) -> int:
        """Tails in host memory, by this host's memory alone (see `least_of_ranks`)."""
        if self.host_slots is not None:
            return self.host_slots
        fitting = psutil.virtual_memory().total // HOST_MEMORY_SHARE // max(1, slot_bytes)
        return min(HOST_SLOTS_PER_DEVICE_SLOT * device_slots, fitting)


@dataclass(frozen=True)
class HostOptions:
    """Host memory that pages of prefixes may use: SGLang's flags, in its units."""

    ratio: float  # --hicache-ratio: tokens in host memory for each token of the pool
    gigabytes: float = 0  # --hicache-size, overrides the ratio; 10**9 bytes, tails included
    fitting: bool = False  # neither flag was given: limited by the machine's free memory

    def sizes(self, full_tokens: int, token_bytes: float, slot_bytes: int) -> tuple[int, int]:
        """Pages and tails in host memory, by this host's memory alone: one tail for 4,096 tokens.

        Args:
            full_tokens: tokens of the pool.
            token_bytes: bytes of a token's entries and keys.
            slot_bytes: bytes of a tail.

        Raises:
            ValueError: no page fits.
        """
        unit_bytes = TOKENS_PER_SLOT * token_bytes + slot_bytes
        units = self.gigabytes * 1e9 / unit_bytes if self.gigabytes else self.ratio * full_tokens / TOKENS_PER_SLOT
        if self.fitting:
            units = min(units, FREE_MEMORY_SHARE * psutil.virtual_memory().available / unit_bytes)
        pages = int(units * TOKENS_PER_SLOT) // FULL_PAGE_TOKENS
        if not pages:
            raise ValueError(
                f"--enable-hierarchical-cache: {units * unit_bytes:.0f} bytes of host memory hold no page of "
                f"{FULL_PAGE_TOKENS * token_bytes:.0f}: raise --hicache-ratio or --hicache-size, or free memory"
            )
        return pages, max(1, int(units))


def least_of_ranks(count: int, group: ProcessGroup | None) -> int:
    """The least `count` of all ranks of the group, all of which must call this; `count` itself without a group.

    Args:
        count: slots that this rank's host has memory for.
        group: all ranks that keep equal trees, with a backend for CPU tensors (gloo).
    """
    if group is None or torch.distributed.get_world_size(group) == 1:
        return count
    least = torch.tensor([count], dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least)


def _number(name: str, default: int | None) -> int | None:
    number = env.number(name)
    return default if number is None else number
