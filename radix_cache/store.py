"""The checkpoint store: slots of two tiers, who holds them, what is copied between them, and who has to go.

Pure bookkeeping: no tensor, no stream. The caller executes the copies that `take_copies` returns, in order, in one
stream (or with equivalent fences); everything here assumes that order and nothing else about time, so that every rank
of a tensor-parallel group that makes the same calls takes the same decisions.

Life of a checkpoint:

    reserve -> REQUEST, on the device, being written by a forward
    publish -> TREE; a copy to the host is queued at once (write-through), so that losing the device slot later is free
    hit     -> its value is renewed; if only the host has it, it is promoted when that costs nobody else anything
    release -> gone (its tree node went, or its request ended without publishing it)

Why write-through and not a copy at eviction: a checkpoint is written once per 2,048 prefilled tokens or 256 decoded
ones, 3.6 MB each, so the copies take a few hundred MB/s of PCIe at most, and a slot is then free the moment it is
needed instead of after a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from dsv4_radix_cache.policy import CreditHeap, value_tokens
from dsv4_radix_cache.ring import check_position
from dsv4_radix_cache.slots import Holder, SlotPool


class Tier(Enum):
    """Where a copy of a checkpoint lies."""

    DEVICE = "device"
    HOST = "host"


class CopyState(Enum):
    """State of one tier's copy of a checkpoint."""

    ABSENT = "absent"  # no slot in this tier
    QUEUED = "queued"  # has a slot, and a copy into it is queued
    PRESENT = "present"  # has a slot, and whatever the stream does next may read it


@dataclass(frozen=True)
class Copy:
    """One queued copy of a whole checkpoint; `to` says in which direction."""

    to: Tier
    device_slot: int
    host_slot: int


@dataclass
class Checkpoint:
    """One checkpoint: the tail of a sequence at `position`, in one or two tiers."""

    id: int
    position: int
    holder: Holder
    device_slot: int | None
    device_state: CopyState
    host_slot: int | None = None
    host_state: CopyState = CopyState.ABSENT
    before: int | None = None  # id of the nearest checkpoint before this one on its path
    after: set[int] = field(default_factory=set)  # ids whose `before` is this one
    hits: int = 0
    pins: int = 0  # requests that are about to be resumed from it; it may move between tiers but not be lost
    clock: float = 0.0  # the policy's clock when it was stored or last hit


@dataclass
class Counters:
    """What happened since the store was made; only ever grows."""

    reserved: int = 0
    refused: int = 0  # reservations that found every slot in use
    published: int = 0
    lost: int = 0  # evicted from their last tier
    device_drops: int = 0  # device copies given up while the host kept one
    host_writes: int = 0  # copies queued to the host
    promotions: int = 0  # copies queued to the device
    hits_device: int = 0
    hits_host: int = 0


class CheckpointStore:
    """Slots, ownership, tiers and eviction of checkpoints. All methods are O(log n) or better, save `reset`."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        """Slots of each tier; `host_slots=0` means that a checkpoint evicted from the device is lost."""
        self.device_capacity = device_slots
        self.host_capacity = host_slots
        self.counters = Counters()
        self._next_id = 1
        self.reset()

    def reset(self) -> None:
        """Forget every checkpoint. Ids are not reused, so that a stale one is told from a live one."""
        self.device = SlotPool("device checkpoints", self.device_capacity)
        self.host = SlotPool("host checkpoints", self.host_capacity)
        self.clock = 0.0
        self._checkpoints: dict[int, Checkpoint] = {}
        self._both: OrderedDict[int, None] = OrderedDict()  # cached in both tiers, least recently used first
        self._device_only = CreditHeap()  # cached, no host slot
        self._on_host = CreditHeap()  # cached, with a host slot
        self._copies: OrderedDict[tuple[Tier, int], None] = OrderedDict()  # (destination, checkpoint id)

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __contains__(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self._checkpoints

    def __getitem__(self, checkpoint_id: int) -> Checkpoint:
        """The live checkpoint of that id.

        Raises:
            KeyError: it was released or evicted.
        """
        try:
            return self._checkpoints[checkpoint_id]
        except KeyError:
            raise KeyError(f"checkpoint {checkpoint_id} is not live ({len(self)} are)") from None

    def ids(self) -> Iterable[int]:
        """Ids of the live checkpoints."""
        return self._checkpoints.keys()

    # Written by a request

    def reserve(self, position: int) -> tuple[Checkpoint | None, list[int]]:
        """A device slot for a checkpoint at `position` which the next forward writes.

        Returns:
            The checkpoint, held by its request, or None when no slot could be had; and the ids of the checkpoints
            that were lost to make room, which the caller takes off their tree nodes.
        """
        check_position(position)
        lost: list[int] = []
        slot = self._acquire_device(lost)
        if slot is None:
            self.counters.refused += 1
            return None, lost
        checkpoint = Checkpoint(self._next_id, position, Holder.REQUEST, slot, CopyState.PRESENT)
        self._next_id += 1
        self._checkpoints[checkpoint.id] = checkpoint
        self.counters.reserved += 1
        return checkpoint, lost

    def publish(self, checkpoint_id: int, before: int | None, after: Iterable[int] = ()) -> list[int]:
        """Hand a request's checkpoint to the tree.

        Args:
            before: the nearest checkpoint before it on its path.
            after: those checkpoints whose nearest one before them it becomes.

        Returns:
            Ids of checkpoints lost to make room on the host.
        """
        checkpoint = self[checkpoint_id]
        assert checkpoint.holder is Holder.REQUEST, f"checkpoint {checkpoint_id} is {checkpoint.holder.value} already"
        checkpoint.holder = Holder.TREE
        self.device.transfer(checkpoint.device_slot, Holder.TREE)
        checkpoint.clock = self.clock
        self._link(checkpoint, before, after)
        self._requeue(checkpoint)
        self.counters.published += 1
        return self._write_through(checkpoint)

    # Used by a request

    def hit(self, checkpoint_id: int) -> Tier:
        """A request resumes from it: renew its value, and bring it to the device if that costs nobody anything.

        Returns:
            The best tier that had it.
        """
        checkpoint = self[checkpoint_id]
        checkpoint.hits += 1
        checkpoint.clock = self.clock
        self._requeue(checkpoint)
        if checkpoint.device_slot is not None:
            self.counters.hits_device += 1
            return Tier.DEVICE
        self.counters.hits_host += 1
        slot = self.device.acquire(Holder.TREE)
        if slot is None and self._both:
            self._drop_device_copy(self[next(iter(self._both))])
            slot = self.device.acquire(Holder.TREE)
        if slot is not None:
            checkpoint.device_slot, checkpoint.device_state = slot, CopyState.QUEUED
            self._copies[Tier.DEVICE, checkpoint.id] = None
            self._requeue(checkpoint)
            self.counters.promotions += 1
        return Tier.HOST

    def pin(self, checkpoint_id: int) -> None:
        """Keep it from being lost until `unpin`, whatever tier it is in."""
        self[checkpoint_id].pins += 1

    def unpin(self, checkpoint_id: int) -> None:
        """Undo one `pin`."""
        checkpoint = self[checkpoint_id]
        assert checkpoint.pins > 0, f"checkpoint {checkpoint_id} is not pinned"
        checkpoint.pins -= 1

    def source(self, checkpoint_id: int) -> tuple[Tier, int]:
        """Tier and slot to read it from now, after the copies taken so far."""
        checkpoint = self[checkpoint_id]
        if checkpoint.device_state is CopyState.PRESENT:
            return Tier.DEVICE, checkpoint.device_slot
        assert checkpoint.host_state is CopyState.PRESENT, (
            f"checkpoint {checkpoint_id} is nowhere: device {checkpoint.device_state}, host {checkpoint.host_state}"
        )
        return Tier.HOST, checkpoint.host_slot

    # Copies

    def take_copies(self) -> list[Copy]:
        """The queued copies, oldest first. The caller issues them before anything else that touches these slots."""
        copies = []
        for tier, checkpoint_id in self._copies:
            checkpoint = self[checkpoint_id]
            copies.append(Copy(tier, checkpoint.device_slot, checkpoint.host_slot))
            if tier is Tier.HOST:
                checkpoint.host_state = CopyState.PRESENT
            else:
                checkpoint.device_state = CopyState.PRESENT
            self._requeue(checkpoint)
        self._copies.clear()
        return copies

    # Let go

    def release(self, checkpoint_id: int) -> None:
        """Forget it and free its slots: its node was deleted, or its request ended without publishing it."""
        checkpoint = self[checkpoint_id]
        if checkpoint.holder is Holder.TREE:
            self._unlink(checkpoint)
        self._free_device(checkpoint)
        self._free_host(checkpoint)
        for queue in (self._device_only, self._on_host):
            queue.discard(checkpoint_id)
        self._both.pop(checkpoint_id, None)
        del self._checkpoints[checkpoint_id]

    # Inside

    def value(self, checkpoint: Checkpoint) -> float:
        """Expected tokens to recompute if it is lost (policy.py)."""
        start = 0 if checkpoint.before is None else self[checkpoint.before].position
        return value_tokens(checkpoint.position - start, len(checkpoint.after), checkpoint.hits)

    def _requeue(self, checkpoint: Checkpoint) -> None:
        """Put a cached checkpoint into exactly the eviction queues that its state says."""
        if checkpoint.holder is not Holder.TREE:
            return
        on_host = checkpoint.host_slot is not None
        queue, other = (self._on_host, self._device_only) if on_host else (self._device_only, self._on_host)
        other.discard(checkpoint.id)
        queue.put(checkpoint.id, checkpoint.clock + self.value(checkpoint))
        if checkpoint.device_state is CopyState.PRESENT and checkpoint.host_state is CopyState.PRESENT:
            self._both[checkpoint.id] = None
            self._both.move_to_end(checkpoint.id)
        else:
            self._both.pop(checkpoint.id, None)

    def _reprice(self, checkpoint: Checkpoint) -> None:
        """Its value changed with its neighbours; its recency did not."""
        queue = self._on_host if checkpoint.host_slot is not None else self._device_only
        queue.put(checkpoint.id, checkpoint.clock + self.value(checkpoint))

    def _link(self, checkpoint: Checkpoint, before: int | None, after: Iterable[int]) -> None:
        checkpoint.before = before
        for later_id in after:
            later = self[later_id]
            if later.before is not None:  # `before`, or one that was off the tree when the later one was published
                followed = self[later.before]
                followed.after.discard(later_id)
                self._reprice(followed)
            later.before = checkpoint.id
            checkpoint.after.add(later_id)
        if before is not None:
            earlier = self[before]
            assert earlier.position < checkpoint.position, f"{earlier.position} is not before {checkpoint.position}"
            earlier.after.add(checkpoint.id)
            self._reprice(earlier)
        for later_id in checkpoint.after:
            self._reprice(self[later_id])

    def _unlink(self, checkpoint: Checkpoint) -> None:
        before = checkpoint.before
        for later_id in checkpoint.after:
            self[later_id].before = before
        if before is not None:
            earlier = self[before]
            earlier.after.discard(checkpoint.id)
            earlier.after |= checkpoint.after
            self._reprice(earlier)
        for later_id in checkpoint.after:
            self._reprice(self[later_id])

    def _acquire_device(self, lost: list[int]) -> int | None:
        slot = self.device.acquire(Holder.REQUEST)
        if slot is not None:
            return slot
        if self._both:
            self._drop_device_copy(self[next(iter(self._both))])
        else:
            # A copy to the host that is still queued can't be waited for; it is as good as absent.
            victim = self._least(self._device_only)
            queued = self._least(self._on_host, lambda c: c.host_state is CopyState.QUEUED)
            candidates = [(q.credit(i), i) for q, i in ((self._device_only, victim), (self._on_host, queued)) if i]
            if not candidates:
                return None
            self._lose(min(candidates)[1], lost)
        return self.device.acquire(Holder.REQUEST)

    def _write_through(self, checkpoint: Checkpoint) -> list[int]:
        lost: list[int] = []
        slot = self.host.acquire(Holder.TREE)
        if slot is None:
            victim_id = self._least(self._on_host, lambda c: c.host_state is CopyState.PRESENT)
            credit = checkpoint.clock + self.value(checkpoint)
            if victim_id is None or self._on_host.credit(victim_id) > credit:
                return lost
            victim = self[victim_id]
            if victim.device_state is CopyState.PRESENT:
                self._free_host(victim)
                self._requeue(victim)
            else:
                self._lose(victim_id, lost)
            slot = self.host.acquire(Holder.TREE)
        checkpoint.host_slot, checkpoint.host_state = slot, CopyState.QUEUED
        self._copies[Tier.HOST, checkpoint.id] = None
        self._requeue(checkpoint)
        self.counters.host_writes += 1
        return lost

    def _least(self, queue: CreditHeap, allowed: object = lambda _: True) -> int | None:
        return queue.least(lambda i: not self[i].pins and allowed(self[i]))

    def _lose(self, checkpoint_id: int, lost: list[int]) -> None:
        checkpoint = self[checkpoint_id]
        self.clock = max(self.clock, checkpoint.clock + self.value(checkpoint))
        self.release(checkpoint_id)
        self.counters.lost += 1
        lost.append(checkpoint_id)

    def _drop_device_copy(self, checkpoint: Checkpoint) -> None:
        self._free_device(checkpoint)
        self._requeue(checkpoint)
        self.counters.device_drops += 1

    def _free_device(self, checkpoint: Checkpoint) -> None:
        self._copies.pop((Tier.DEVICE, checkpoint.id), None)
        if checkpoint.device_slot is not None:
            self.device.release(checkpoint.device_slot)
        checkpoint.device_slot, checkpoint.device_state = None, CopyState.ABSENT

    def _free_host(self, checkpoint: Checkpoint) -> None:
        self._copies.pop((Tier.HOST, checkpoint.id), None)
        if checkpoint.host_slot is not None:
            self.host.release(checkpoint.host_slot)
        checkpoint.host_slot, checkpoint.host_state = None, CopyState.ABSENT
