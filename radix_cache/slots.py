"""A pool of numbered tail slots, each of which is free, cached or in use; the three counts add up to the total."""

from __future__ import annotations

from enum import Enum


class Holder(Enum):
    """The owner of a slot that is not free."""

    REQUEST = "in use"  # a running request writes it; the tree does not know of it yet
    TREE = "cached"  # a tree node carries it; it may be evicted


class SlotPool:
    """Slots `0 .. capacity-1` of one tier. Slot numbers are reused last-in-first-out, so that hot memory stays hot."""

    def __init__(self, name: str, capacity: int) -> None:
        """Make a pool of free slots. `capacity` in slots; 0 makes a tier that is always full.

        Raises:
            ValueError: capacity is negative.
        """
        if capacity < 0:
            raise ValueError(f"{name}: a pool holds at least 0 slots, got {capacity}")
        self.name = name
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._holders: dict[int, Holder] = {}
        self._held = dict.fromkeys(Holder, 0)

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Slots owned by the tree."""
        return self._held[Holder.TREE]

    @property
    def in_use(self) -> int:
        """Slots owned by running requests."""
        return self._held[Holder.REQUEST]

    def acquire(self, holder: Holder) -> int | None:
        """Give a free slot to `holder`; returns the slot, or None when all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._holders[slot] = holder
        self._held[holder] += 1
        return slot

    def transfer(self, slot: int, holder: Holder) -> None:
        """Change the holder of a held slot."""
        self._held[self._holders[slot]] -= 1
        self._holders[slot] = holder
        self._held[holder] += 1

    def release(self, slot: int) -> None:
        """Give a held slot back.

        Raises:
            ValueError: the slot is free already, or not of this pool.
        """
        holder = self._holders.pop(slot, None)
        if holder is None:
            raise ValueError(f"{self.name}: slot {slot} is not held (of {self.capacity} slots {self.free} are free)")
        self._held[holder] -= 1
        self._free.append(slot)

    def holders(self) -> dict[int, Holder]:
        """Slot -> holder, for the slots that are not free (a copy)."""
        return dict(self._holders)

    def check(self) -> None:
        """Assert that free + cached + in use = total, and that no slot has two states."""
        assert self.free + self.cached + self.in_use == self.capacity, (
            f"{self.name}: free {self.free} + cached {self.cached} + in use {self.in_use} != total {self.capacity}"
        )
        seen = set(self._free) | set(self._holders)
        assert len(seen) == self.capacity and len(self._free) == len(set(self._free)), (
            f"{self.name}: {len(self._free)} free entries and {len(self._holders)} held ones cover {len(seen)} of "
            f"{self.capacity} slots"
        )
