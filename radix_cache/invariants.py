"""Invariants of a tail store after any sequence of calls; the message of every assertion has the values."""

from __future__ import annotations

from dsv4_radix_cache.slots import Holder
from dsv4_radix_cache.tail_store import CopyState, TailStore


def check(store: TailStore) -> None:
    """Assert the store's invariants. O(tails): for tests and idle checks.

    * free + cached + in use = total in either tier, and every held slot belongs to exactly one live tail;
    * a tail has a slot in a tier if and only if its copy there is queued or present, and every tail is in some tier;
    * a tail held by its request is on the device only, and neither linked nor queued for eviction;
    * `before` and `after` mirror each other and positions grow along them;
    * every cached tail is in exactly one of the two eviction queues, under its present value.
    """
    for pool in (store.device, store.host):
        pool.check()
    owners: dict[str, dict[int, Holder]] = {"device": {}, "host": {}}
    for tail_id in store.ids():
        c = store[tail_id]
        for tier, slot, state in (("device", c.device_slot, c.device_state), ("host", c.host_slot, c.host_state)):
            assert (slot is None) == (state is CopyState.ABSENT), f"tail {c.id}: {tier} slot {slot} is {state}"
            if slot is not None:
                assert slot not in owners[tier], f"{tier} slot {slot} has two tails, one of them {c.id}"
                owners[tier][slot] = c.holder
        assert CopyState.PRESENT in (c.device_state, c.host_state), f"tail {c.id} is in no tier"
        if c.holder is Holder.REQUEST:
            assert c.host_slot is None and c.before is None and not c.after, f"unpublished tail {c.id} is linked"
            assert c.id not in store._device_only and c.id not in store._on_host, f"tail {c.id} may be evicted"
            continue
        if c.before is not None:
            earlier = store[c.before]
            assert c.id in earlier.after, f"tail {c.id} follows {earlier.id}, which lacks the link"
            assert earlier.position < c.position, f"{c.id} at {c.position} follows {earlier.id} at {earlier.position}"
        for later_id in c.after:
            assert store[later_id].before == c.id, f"tail {later_id} follows {store[later_id].before}, not {c.id}"
        queue, other = (
            (store._on_host, store._device_only) if c.host_slot is not None else (store._device_only, store._on_host)
        )
        assert c.id in queue and c.id not in other, f"tail {c.id} is in the wrong eviction queue"
        credit = c.clock + store.value(c)
        assert queue.credit(c.id) == credit, f"tail {c.id} is queued at {queue.credit(c.id)}, worth {credit}"
        both = c.device_state is CopyState.PRESENT and c.host_state is CopyState.PRESENT
        assert (c.id in store._both) == both, f"tail {c.id}: in both tiers is {both}"
    assert owners["device"] == store.device.holders(), f"{owners['device']} != {store.device.holders()}"
    assert owners["host"] == store.host.holders(), f"{owners['host']} != {store.host.holders()}"
    live = set(store.ids())
    for name in ("_device_only", "_on_host", "_both"):
        assert set(getattr(store, name)) <= live, f"{name} holds dead tails {set(getattr(store, name)) - live}"
