"""The tail store against a naive model: 10,000 random operations, and the eviction policy case by case."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dsv4_radix_cache.eviction_policy import PASSED_WEIGHT, CreditHeap, value_tokens
from dsv4_radix_cache.invariants import check
from dsv4_radix_cache.moves import Tier
from dsv4_radix_cache.slots import Holder, SlotPool
from dsv4_radix_cache.tail_store import TailStore


class Memory:
    """Contents of the two tiers' slots, moved only by the store's copies: finds a slot that was reused too early."""

    def __init__(self, store: TailStore) -> None:
        self.store = store
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}

    def issue(self) -> None:
        for copy in self.store.pop_copies():
            if copy.to is Tier.HOST:
                self.host[copy.host_slot] = self.device[copy.device_slot]
            else:
                self.device[copy.device_slot] = self.host[copy.host_slot]

    def read(self, tail_id: int) -> object:
        tier, slot = self.store.source(tail_id)
        return (self.device if tier is Tier.DEVICE else self.host)[slot]


class StoreMachine(RuleBasedStateMachine):
    """Random calls. The model is a dict: id -> (payload, path), and a path is a tuple of branch choices."""

    tails = Bundle("tails")

    @initialize(device=st.integers(0, 6), host=st.integers(0, 8))
    def build(self, device: int, host: int) -> None:
        self.store = TailStore(device, host)
        self.memory = Memory(self.store)
        self.cached: dict[int, str] = {}  # id -> payload
        self.writing: dict[int, str] = {}
        self.pinned: dict[int, int] = {}

    def forget(self, lost: list[int]) -> None:
        for tail_id in lost:
            assert not self.pinned.get(tail_id), "a pinned tail was evicted"
            del self.cached[tail_id]

    @rule(target=tails, depth=st.integers(1, 9))
    def reserve(self, depth: int) -> int:
        tail, lost = self.store.reserve(depth * 256)
        self.forget(lost)
        if tail is None:
            unlosable = self.writing.keys() | {i for i, n in self.pinned.items() if n and i in self.cached}
            assert self.store.device.in_use + len(unlosable & self.cached.keys()) >= self.store.device.capacity
            return 0
        assert tail.id not in self.cached and tail.id not in self.writing, "an id was reused"
        self.writing[tail.id] = f"tail {tail.id}"
        self.memory.device[tail.device_slot] = self.writing[tail.id]
        return tail.id

    @rule(tail_id=tails, choice=st.integers(0, 99), adopt=st.booleans())
    def publish(self, tail_id: int, choice: int, adopt: bool) -> None:
        if tail_id not in self.writing:
            return
        position = self.store[tail_id].position
        earlier = [None, *(i for i in self.cached if self.store[i].position < position)]
        before = earlier[choice % len(earlier)]
        later = [i for i in self.cached if self.store[i].before == before and self.store[i].position > position]
        after = later if adopt else []
        self.cached[tail_id] = self.writing.pop(tail_id)
        self.forget(self.store.publish(tail_id, before, after))

    @rule(tail_id=tails)
    def hit(self, tail_id: int) -> None:
        if tail_id not in self.cached:
            return
        self.store.hit(tail_id)
        self.memory.issue()
        assert self.memory.read(tail_id) == self.cached[tail_id]

    @rule(tail_id=tails)
    def pin(self, tail_id: int) -> None:
        if tail_id in self.cached:
            self.store.pin(tail_id)
            self.pinned[tail_id] = self.pinned.get(tail_id, 0) + 1

    @rule(tail_id=tails)
    def unpin(self, tail_id: int) -> None:
        if self.pinned.get(tail_id):
            self.store.unpin(tail_id)
            self.pinned[tail_id] -= 1

    @rule()
    def issue(self) -> None:
        self.memory.issue()

    @rule(tail_id=consumes(tails))
    def release(self, tail_id: int) -> None:
        if tail_id in self.cached or tail_id in self.writing:
            self.cached.pop(tail_id, None)
            self.writing.pop(tail_id, None)
            self.pinned.pop(tail_id, None)
            self.store.release(tail_id)

    @rule(really=st.integers(0, 30))
    def flush(self, really: int) -> None:
        if really == 0:
            self.store.reset()
            self.cached, self.writing, self.pinned = {}, {}, {}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        check(self.store)
        assert set(self.store.ids()) == self.cached.keys() | self.writing.keys()
        assert self.store.device.in_use == len(self.writing)
        waiting = {tail_id for _, tail_id in self.store._copies}
        for tail_id in self.cached.keys() - waiting:
            assert self.memory.read(tail_id) == self.cached[tail_id]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=100,
    stateful_step_count=100,  # 100 x 100 = 10,000 operations
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("host", [0, 40], ids=["no-host-tier", "host-tier"])
def test_one_long_run_of_10_000_operations(host: int) -> None:
    """One store, never rebuilt, with more slots than the machine above: drift shows only over time."""
    rng = random.Random(5)
    store = TailStore(16, host)
    memory = Memory(store)
    payloads: dict[int, str] = {}
    cached: set[int] = set()
    for step in range(10_000):
        action = rng.random()
        if action < 0.4:
            tail, lost = store.reserve(rng.randint(1, 40) * 256)
            if tail is not None:
                payloads[tail.id] = memory.device[tail.device_slot] = f"tail {tail.id}"
        elif action < 0.7 and (writing := [i for i in payloads if i not in cached]):
            tail = store[rng.choice(writing)]
            earlier = [i for i in cached if store[i].position < tail.position]
            before = rng.choice(earlier) if earlier and rng.random() < 0.8 else None
            cached.add(tail.id)
            lost = store.publish(tail.id, before)
        elif action < 0.85 and cached:
            chosen = rng.choice(sorted(cached))
            store.hit(chosen)
            memory.issue()
            assert memory.read(chosen) == payloads[chosen], f"step {step}"
            lost = []
        elif action < 0.93 and payloads:
            chosen = rng.choice(sorted(payloads))
            store.release(chosen)
            del payloads[chosen]
            cached.discard(chosen)
            lost = []
        else:
            memory.issue()
            lost = []
        for tail_id in lost:
            del payloads[tail_id]
            cached.remove(tail_id)
        if step % 50 == 0:
            check(store)
        assert len(store) == len(payloads)
    check(store)
    assert store.counters.lost > 100, "the run never came under pressure"


def publish(store: TailStore, position: int, before: int | None = None) -> int:
    tail, _ = store.reserve(position)
    store.publish(tail.id, before)
    store.pop_copies()
    return tail.id


def test_losing_the_device_slot_costs_nothing_once_the_host_has_a_copy() -> None:
    store = TailStore(1, 4)
    first = publish(store, 256)
    second, lost = store.reserve(512)
    assert lost == [] and store.source(first) == (Tier.HOST, store[first].host_slot)
    assert second.device_slot == 0 and store.counters.device_drops == 1


def test_a_hit_on_the_host_is_promoted_over_the_least_recently_used_device_copy() -> None:
    store = TailStore(2, 4)
    first, second, third = (publish(store, 256) for _ in range(3))
    assert store.source(first)[0] is Tier.HOST
    assert store.hit(first) is Tier.HOST
    [copy] = store.pop_copies()
    assert copy.to is Tier.DEVICE and store.source(first) == (Tier.DEVICE, copy.device_slot)
    assert store.source(second)[0] is Tier.HOST and store.source(third)[0] is Tier.DEVICE


def test_slots_of_running_requests_are_never_freed_for_others() -> None:
    store = TailStore(2, 0)
    held = [store.reserve(256)[0], store.reserve(512)[0]]
    assert store.reserve(768) == (None, []) and store.counters.refused == 1
    assert all(c.id in store for c in held)


def test_the_cheap_tail_is_evicted_before_the_expensive_one() -> None:
    """Ends at 256 (after 0) and at 8192: evicting the second costs 32 times as many tokens, although it is older."""
    store = TailStore(2, 0)
    dear = publish(store, 8192)
    cheap = publish(store, 256)
    _, lost = store.reserve(512)
    assert lost == [cheap] and dear in store


def test_a_long_prompt_thins_out_itself_and_not_the_end_of_another_session() -> None:
    """Two 1M-token sessions alternate with slots for 64 tails, 512 written by each visit: both ends survive."""
    store = TailStore(64, 0)
    ends = []
    for _session in range(2):
        before = None
        for position in range(2048, 2**20 + 1, 2048):
            before = publish(store, position, before if before in store else None)
        ends.append(before)
    assert ends[0] in store and ends[1] in store
    check(store)


def test_an_evicted_neighbour_makes_the_next_tail_more_expensive() -> None:
    store = TailStore(3, 0)
    first = publish(store, 2048)
    second = publish(store, 4096, first)
    third = publish(store, 6144, second)
    assert store.value(store[second]) == 2048 * PASSED_WEIGHT and store.value(store[third]) == 2048
    _, lost = store.reserve(256)
    assert lost == [first]
    assert store.value(store[second]) == 4096 * PASSED_WEIGHT


@pytest.mark.parametrize(
    ("successors", "hits", "weight"),
    [(0, 0, 1.0), (1, 0, PASSED_WEIGHT), (2, 0, 1.0), (1, 1, 1.0)],
    ids=["end", "passed", "branch-point", "passed-but-hit"],
)
def test_value_is_gap_times_likelihood(successors: int, hits: int, weight: float) -> None:
    assert value_tokens(1024, successors, hits) == 1024 * weight


def test_a_pinned_tail_may_move_but_is_not_evicted() -> None:
    store = TailStore(1, 0)
    pinned = publish(store, 256)
    store.pin(pinned)
    assert store.reserve(512) == (None, [])
    store.unpin(pinned)
    assert store.reserve(512)[1] == [pinned]


def test_stale_ids_are_told_from_live_ones() -> None:
    store = TailStore(2, 2)
    gone = publish(store, 256)
    store.reset()
    fresh = publish(store, 256)
    assert fresh != gone and gone not in store
    with pytest.raises(KeyError, match=f"tail {gone} is not live"):
        store.hit(gone)


def test_slot_pool_says_its_sums() -> None:
    pool = SlotPool("device tails", 2)
    slot = pool.acquire(Holder.REQUEST)
    pool.transfer(slot, Holder.TREE)
    assert (pool.free, pool.cached, pool.in_use) == (1, 1, 0)
    pool._held[Holder.TREE] = 5  # a planted leak
    with pytest.raises(AssertionError, match=r"free 1 \+ cached 5 \+ in use 0 != total 2"):
        pool.check()
    with pytest.raises(ValueError, match="slot 0 is not held"):
        SlotPool("host tails", 1).release(0)


def test_credit_heap_orders_and_forgets() -> None:
    heap = CreditHeap()
    for item, credit in [(1, 5.0), (2, 3.0), (3, 4.0)]:
        heap.put(item, credit)
    heap.put(2, 9.0)
    heap.discard(3)
    assert heap.least(lambda _: True) == 1
    assert heap.least(lambda item: item != 1) == 2
    assert heap.least(lambda _: False) is None
    assert heap.least(lambda _: True) == 1 and len(heap) == 2


def test_a_tail_between_one_on_the_tree_and_one_that_was_off_it() -> None:
    """768 is published between 256 and 1,024; 512, which is off the tree, was 1,024's predecessor until then. 512 loses
    its only successor and is no longer a passed tail, so its credit changes."""
    store = TailStore(8, 8)
    ids = {position: store.reserve(position)[0].id for position in (256, 512, 768, 1024)}
    store.publish(ids[256], None)
    store.publish(ids[512], ids[256])
    store.publish(ids[1024], ids[512])
    store.publish(ids[768], ids[256], [ids[1024]])
    check(store)
    assert store[ids[1024]].before == ids[768] and not store[ids[512]].after
