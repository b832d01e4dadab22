"""The tail store: slots of two tiers, their holders, which copies between them are due, and which tail is evicted.

Pure bookkeeping: no tensor, no stream. The caller executes the copies that `pop_copies` returns, in order, in one
stream (or with equivalent fences). The store assumes that order and nothing else about time, so all ranks of a
tensor-parallel group that make the same calls come to the same decisions.

Life of a tail:

    reserve -> held by its request, on the device, written by the next forward
    publish -> held by the tree; a copy to the host is queued at once (write-through), so that giving up the device
               slot later is free
    hit     -> its value is renewed; a tail that only the host has is promoted if that evicts nothing
    release -> gone: its tree node was deleted, or its request ended without publishing it
    evicted -> gone, to make room for another tail (`_evict`; `eviction_policy` says which)

Why write-through and not a copy at eviction: a tail is written once per 2,048 prefilled tokens or 256 decoded tokens,
3.6 MB each, so the copies need a few hundred MB/s of PCIe at most, and a slot is free the moment it is needed instead
of after a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from dsv4_radix_cache.eviction_policy import CreditHeap, value_tokens
from dsv4_radix_cache.moves import Tier, TierCopy
from dsv4_radix_cache.ring import check_position
from dsv4_radix_cache.slots import Holder, SlotPool


class CopyState(Enum):
    """State of one tier's copy of a tail."""

    ABSENT = "absent"  # no slot in this tier
    QUEUED = "queued"  # has a slot, and a copy into it is queued
    PRESENT = "present"  # has a slot, and all later work of the stream may read it


@dataclass
class Tail:
    """One tail: window rows and compressor rows of a sequence at `position`, in one or two tiers."""

    id: int
    position: int
    holder: Holder
    device_slot: int | None
    device_state: CopyState
    host_slot: int | None = None
    host_state: CopyState = CopyState.ABSENT
    before: int | None = None  # id of the nearest tail before this one on its path
    after: set[int] = field(default_factory=set)  # ids of the tails whose `before` is this one
    hits: int = 0
    pins: int = 0  # requests that are about to resume from it; a pinned tail may change tiers but is not evicted
    clock: float = 0.0  # the policy's clock when it was published or last hit


@dataclass
class Counters:
    """Events since the store was made; they only grow. The field names are labels of a Prometheus metric."""

    reserved: int = 0
    refused: int = 0  # reservations that found every slot in use
    published: int = 0
    lost: int = 0  # evicted from their last tier
    device_drops: int = 0  # device copies given up while the host kept one
    host_writes: int = 0  # copies queued to the host
    promotions: int = 0  # copies queued to the device
    hits_device: int = 0
    hits_host: int = 0


class TailStore:
    """Slots, holders, tiers and eviction of tails. All methods are O(log n) or better, except `reset`."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        """Make an empty store. With `host_slots=0` a tail that is evicted from the device is gone."""
        self.device_capacity = device_slots
        self.host_capacity = host_slots
        self.counters = Counters()
        self._next_id = 1
        self.reset()

    def reset(self) -> None:
        """Forget every tail. Ids are not reused, so a stale id is told from a live one."""
        self.device = SlotPool("device tails", self.device_capacity)
        self.host = SlotPool("host tails", self.host_capacity)
        self.clock = 0.0
        self._tails: dict[int, Tail] = {}
        self._both: OrderedDict[int, None] = OrderedDict()  # cached in both tiers, least recently used first
        self._device_only = CreditHeap()  # cached, no host slot
        self._on_host = CreditHeap()  # cached, with a host slot
        self._copies: OrderedDict[tuple[Tier, int], None] = OrderedDict()  # (destination, tail id)

    def __len__(self) -> int:
        return len(self._tails)

    def __contains__(self, tail_id: int) -> bool:
        return tail_id in self._tails

    def __getitem__(self, tail_id: int) -> Tail:
        """The live tail of that id.

        Raises:
            KeyError: it was released or evicted.
        """
        try:
            return self._tails[tail_id]
        except KeyError:
            raise KeyError(f"tail {tail_id} is not live ({len(self)} are)") from None

    def ids(self) -> Iterable[int]:
        """Ids of the live tails."""
        return self._tails.keys()

    # Written by a request

    def reserve(self, position: int) -> tuple[Tail | None, list[int]]:
        """Reserve a device slot for a tail at `position` that the next forward writes.

        Returns:
            The tail, held by its request, or None when no slot could be freed; and the ids of the tails that were
            evicted to make room, which the caller removes from their tree nodes.
        """
        check_position(position)
        evicted: list[int] = []
        slot = self._acquire_device(evicted)
        if slot is None:
            self.counters.refused += 1
            return None, evicted
        tail = Tail(self._next_id, position, Holder.REQUEST, slot, CopyState.PRESENT)
        self._next_id += 1
        self._tails[tail.id] = tail
        self.counters.reserved += 1
        return tail, evicted

    def publish(self, tail_id: int, before: int | None, after: Iterable[int] = ()) -> list[int]:
        """Hand a request's tail to the tree.

        Args:
            tail_id: the tail.
            before: id of the nearest tail before it on its path.
            after: ids of the tails for which it becomes the nearest tail before them.

        Returns:
            Ids of the tails that were evicted to make room on the host.
        """
        tail = self[tail_id]
        assert tail.holder is Holder.REQUEST, f"tail {tail_id} is {tail.holder.value} already"
        tail.holder = Holder.TREE
        self.device.transfer(tail.device_slot, Holder.TREE)
        tail.clock = self.clock
        self._link(tail, before, after)
        self._requeue(tail)
        self.counters.published += 1
        return self._write_through(tail)

    # Used by a request

    def hit(self, tail_id: int) -> Tier:
        """A request resumes from the tail: renew its value, and promote it to the device if that evicts nothing.

        Returns:
            The fastest tier that had it.
        """
        tail = self[tail_id]
        tail.hits += 1
        tail.clock = self.clock
        self._requeue(tail)
        if tail.device_slot is not None:
            self.counters.hits_device += 1
            return Tier.DEVICE
        self.counters.hits_host += 1
        slot = self.device.acquire(Holder.TREE)
        if slot is None and self._both:
            self._drop_device_copy(self[next(iter(self._both))])
            slot = self.device.acquire(Holder.TREE)
        if slot is not None:
            tail.device_slot, tail.device_state = slot, CopyState.QUEUED
            self._copies[Tier.DEVICE, tail.id] = None
            self._requeue(tail)
            self.counters.promotions += 1
        return Tier.HOST

    def pin(self, tail_id: int) -> None:
        """Keep the tail from being evicted until `unpin`, in whichever tier it is."""
        self[tail_id].pins += 1

    def unpin(self, tail_id: int) -> None:
        """Undo one `pin`."""
        tail = self[tail_id]
        assert tail.pins > 0, f"tail {tail_id} is not pinned"
        tail.pins -= 1

    def source(self, tail_id: int) -> tuple[Tier, int]:
        """Tier and slot to read the tail from now, after the copies popped so far."""
        tail = self[tail_id]
        if tail.device_state is CopyState.PRESENT:
            return Tier.DEVICE, tail.device_slot
        assert tail.host_state is CopyState.PRESENT, (
            f"tail {tail_id} is in no tier: device {tail.device_state}, host {tail.host_state}"
        )
        return Tier.HOST, tail.host_slot

    # Copies

    def pop_copies(self) -> list[TierCopy]:
        """The queued copies, oldest first. The caller issues them before other work that touches these slots."""
        copies = []
        for tier, tail_id in self._copies:
            tail = self[tail_id]
            copies.append(TierCopy(tier, tail.device_slot, tail.host_slot))
            if tier is Tier.HOST:
                tail.host_state = CopyState.PRESENT
            else:
                tail.device_state = CopyState.PRESENT
            self._requeue(tail)
        self._copies.clear()
        return copies

    # Release

    def release(self, tail_id: int) -> None:
        """Forget the tail and free its slots: its node was deleted, or its request ended without publishing it."""
        tail = self[tail_id]
        if tail.holder is Holder.TREE:
            self._unlink(tail)
        self._free_device(tail)
        self._free_host(tail)
        for queue in (self._device_only, self._on_host):
            queue.discard(tail_id)
        self._both.pop(tail_id, None)
        del self._tails[tail_id]

    # Inside

    def value(self, tail: Tail) -> float:
        """Expected tokens to recompute if the tail is evicted (`eviction_policy`)."""
        start = 0 if tail.before is None else self[tail.before].position
        return value_tokens(tail.position - start, len(tail.after), tail.hits)

    def _requeue(self, tail: Tail) -> None:
        """Put a cached tail into exactly the eviction queues that its state demands."""
        if tail.holder is not Holder.TREE:
            return
        on_host = tail.host_slot is not None
        queue, other = (self._on_host, self._device_only) if on_host else (self._device_only, self._on_host)
        other.discard(tail.id)
        queue.put(tail.id, tail.clock + self.value(tail))
        if tail.device_state is CopyState.PRESENT and tail.host_state is CopyState.PRESENT:
            self._both[tail.id] = None
            self._both.move_to_end(tail.id)
        else:
            self._both.pop(tail.id, None)

    def _reprice(self, tail: Tail) -> None:
        """Requeue a tail whose value changed with its neighbours; its recency did not change."""
        queue = self._on_host if tail.host_slot is not None else self._device_only
        queue.put(tail.id, tail.clock + self.value(tail))

    def _link(self, tail: Tail, before: int | None, after: Iterable[int]) -> None:
        tail.before = before
        for later_id in after:
            later = self[later_id]
            if later.before is not None:  # `before`, or a tail that was off the tree when the later one was published
                followed = self[later.before]
                followed.after.discard(later_id)
                self._reprice(followed)
            later.before = tail.id
            tail.after.add(later_id)
        if before is not None:
            earlier = self[before]
            assert earlier.position < tail.position, f"{earlier.position} is not before {tail.position}"
            earlier.after.add(tail.id)
            self._reprice(earlier)
        for later_id in tail.after:
            self._reprice(self[later_id])

    def _unlink(self, tail: Tail) -> None:
        before = tail.before
        for later_id in tail.after:
            self[later_id].before = before
        if before is not None:
            earlier = self[before]
            earlier.after.discard(tail.id)
            earlier.after |= tail.after
            self._reprice(earlier)
        for later_id in tail.after:
            self._reprice(self[later_id])

    def _acquire_device(self, evicted: list[int]) -> int | None:
        slot = self.device.acquire(Holder.REQUEST)
        if slot is not None:
            return slot
        if self._both:
            self._drop_device_copy(self[next(iter(self._both))])
        else:
            # A copy to the host that is still queued cannot be waited for: the host copy counts as absent.
            victim = self._least(self._device_only)
            queued = self._least(self._on_host, lambda tail: tail.host_state is CopyState.QUEUED)
            candidates = [(q.credit(i), i) for q, i in ((self._device_only, victim), (self._on_host, queued)) if i]
            if not candidates:
                return None
            self._evict(min(candidates)[1], evicted)
        return self.device.acquire(Holder.REQUEST)

    def _write_through(self, tail: Tail) -> list[int]:
        evicted: list[int] = []
        slot = self.host.acquire(Holder.TREE)
        if slot is None:
            victim_id = self._least(self._on_host, lambda other: other.host_state is CopyState.PRESENT)
            credit = tail.clock + self.value(tail)
            if victim_id is None or self._on_host.credit(victim_id) > credit:
                return evicted
            victim = self[victim_id]
            if victim.device_state is CopyState.PRESENT:
                self._free_host(victim)
                self._requeue(victim)
            else:
                self._evict(victim_id, evicted)
            slot = self.host.acquire(Holder.TREE)
        tail.host_slot, tail.host_state = slot, CopyState.QUEUED
        self._copies[Tier.HOST, tail.id] = None
        self._requeue(tail)
        self.counters.host_writes += 1
        return evicted

    def _least(self, queue: CreditHeap, allowed: Callable[[Tail], bool] = lambda _: True) -> int | None:
        return queue.least(lambda tail_id: not self[tail_id].pins and allowed(self[tail_id]))

    def _evict(self, tail_id: int, evicted: list[int]) -> None:
        """Release a tail from its last tier to make room; its id is appended to `evicted`."""
        tail = self[tail_id]
        self.clock = max(self.clock, tail.clock + self.value(tail))
        self.release(tail_id)
        self.counters.lost += 1
        evicted.append(tail_id)

    def _drop_device_copy(self, tail: Tail) -> None:
        self._free_device(tail)
        self._requeue(tail)
        self.counters.device_drops += 1

    def _free_device(self, tail: Tail) -> None:
        self._copies.pop((Tier.DEVICE, tail.id), None)
        if tail.device_slot is not None:
            self.device.release(tail.device_slot)
        tail.device_slot, tail.device_state = None, CopyState.ABSENT

    def _free_host(self, tail: Tail) -> None:
        self._copies.pop((Tier.HOST, tail.id), None)
        if tail.host_slot is not None:
            self.host.release(tail.host_slot)
        tail.host_slot, tail.host_state = None, CopyState.ABSENT
