"""Moves of a tail's bytes that the bookkeeping decides and the caller carries out: data alone, no tensor, no stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """Memory that holds a copy of a tail."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class TierCopy:
    """One queued copy of a whole tail; `to` is its destination."""

    to: Tier
    device_slot: int
    host_slot: int


@dataclass(frozen=True)
class TailWrite:
    """A tail at `position` that is to be written into a device slot, from a prefill chunk or from a request's rings."""

    position: int
    device_slot: int


@dataclass(frozen=True)
class TailRestore:
    """A tail at `position` that is to be copied from a slot of `tier` into the rings of a request."""

    position: int
    tier: Tier
    slot: int
