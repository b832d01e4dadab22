"""How many tail checkpoints are kept and where, from the environment.

    SGLANG_DSV4_TAIL_INTERVAL      tokens between the checkpoints of a prefill, a multiple of 256 (2048)
    SGLANG_DSV4_TAIL_SLOTS         checkpoints on the device (one a running request and one per 4,096 tokens)
    SGLANG_DSV4_TAIL_HOST_SLOTS    checkpoints in host memory (4 times those on the device, at most 1/32 of it)

Environment variables, because SGLang's command line can't be extended from outside. Every rank of a tensor-parallel
group must come to the same numbers, or their trees would drift apart: so nothing here depends on free memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from dsv4_radix_cache.placement import DEFAULT_INTERVAL_TOKENS, Placement

TOKENS_PER_SLOT = 4096
HOST_SLOTS_PER_DEVICE_SLOT = 4
HOST_MEMORY_SHARE = 32


@dataclass(frozen=True)
class TailOptions:
    """What the user chose; None where the default depends on the pool."""

    interval_tokens: int = DEFAULT_INTERVAL_TOKENS
    device_slots: int | None = None
    host_slots: int | None = None

    @classmethod
    def from_environment(cls) -> TailOptions:
        """Read the three variables.

        Raises:
            ValueError: one of them is not a number that it can be.
        """
        options = cls(
            interval_tokens=_number("SGLANG_DSV4_TAIL_INTERVAL", DEFAULT_INTERVAL_TOKENS),
            device_slots=_number("SGLANG_DSV4_TAIL_SLOTS", None),
            host_slots=_number("SGLANG_DSV4_TAIL_HOST_SLOTS", None),
        )
        Placement(options.interval_tokens)  # refuses what is no multiple of the page
        return options

    def slots_on_device(self, full_tokens: int, request_slots: int) -> int:
        """Checkpoints on the device for a pool of that size. `request_slots` counts the sink."""
        if self.device_slots is not None:
            return self.device_slots
        return request_slots - 1 + -(-full_tokens // TOKENS_PER_SLOT)

    def slots_on_host(self, device_slots: int, slot_bytes: int) -> int:
        """Checkpoints in host memory."""
        if self.host_slots is not None:
            return self.host_slots
        fitting = psutil.virtual_memory().total // HOST_MEMORY_SHARE // max(1, slot_bytes)
        return min(HOST_SLOTS_PER_DEVICE_SLOT * device_slots, fitting)


def _number(name: str, default: int | None) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit():
        raise ValueError(f"{name} must be a number of at least 0, got {text!r}")
    return int(text)
