"""A replay engine that checks, on every resume, that a tail holds the token prefix it was stored for."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lib.prefix_replay import ReplayEngine, Running

from dsv4_radix_cache.invariants import check
from dsv4_radix_cache.moves import TailWrite, Tier, TierCopy
from dsv4_radix_cache.slots import Holder
from sglang_dsv4.prefix.request_state import TAIL, tail_receipt


class CheckedEngine(ReplayEngine):
    """A replay whose tails hold the token prefix that they stand for."""

    device: dict[int, tuple[int, ...]]
    host: dict[int, tuple[int, ...]]
    rings: dict[int, tuple[int, ...]]  # by request slot: the tokens whose rows its rings hold

    @classmethod
    def of(cls, engine: ReplayEngine) -> CheckedEngine:
        checked = cls(engine.cache, engine.allocator, engine.ledger, engine.chunk_tokens)
        checked.device, checked.host, checked.rings = {}, {}, {}
        return checked

    def issue(self) -> None:
        self.carry_out(self.ledger.pop_ring_saves(), self.ledger.pop_copies())

    def carry_out(self, ring_saves: list[tuple[int, TailWrite]], copies: list[TierCopy]) -> None:
        """Do with token prefixes what `TailMemory.issue` does with bytes."""
        for slot, write in ring_saves:
            assert len(self.rings[slot]) == write.position, "the rings have moved on"
            self.device[write.device_slot] = self.rings[slot]
        for copy in copies:
            if copy.to is Tier.HOST:
                self.host[copy.host_slot] = self.device[copy.device_slot]
            else:
                self.device[copy.device_slot] = self.host[copy.host_slot]

    def forward_extend(self, req: object, begin: int, end: int) -> None:
        tokens = tuple(req.full_untruncated_fill_ids)
        holder = self.holder(req)
        self.ledger.admit(*holder, req.tail_match, tail_receipt(req))
        tail_id = self.ledger.resume(*holder, begin)
        self.issue()
        if tail_id is not None:
            restore = self.ledger.restore(tail_id)
            memory = self.device if restore.tier is Tier.DEVICE else self.host
            assert restore.position == begin
            assert memory[restore.slot] == tokens[:begin], f"the tail at {begin} is another prefix's"
        for write in self.ledger.extend(*holder, begin, end):
            self.device[write.device_slot] = tokens[: write.position]
        self.rings[req.kv.req_pool_idx] = tokens[:end]

    def forward_decode(self, req: object, position: int) -> None:
        self.issue()
        write = self.ledger.decode(*self.holder(req), position, 1)
        if write is not None:
            slot = req.kv.req_pool_idx
            assert len(self.rings[slot]) == write.position, "the rings have moved on"
            self.device[write.device_slot] = self.rings[slot]
        tokens = tuple(req.origin_input_ids) + tuple(req.output_ids)
        self.rings[req.kv.req_pool_idx] = tokens[: position + 1]

    def check(self) -> None:
        """Check slots and pages, and that exactly the cached tails are on nodes, at their positions."""
        check(self.ledger.store)
        self.cache.sanity_check()
        core, component = self.cache.tree_core, self.cache.nodes
        on_nodes = component.on_nodes()
        store = self.ledger.store
        assert set(on_nodes) == {i for i in store.ids() if store[i].holder is Holder.TREE}
        carriers = {n.id for n in core._collect_all_nodes() if n.component_data[TAIL].value is not None}
        assert set(on_nodes.values()) == carriers
        for tail_id, node_id in on_nodes.items():
            assert len(self.cache.path_device_indices(node_id)) == store[tail_id].position

    def check_idle(self) -> None:
        """Check that no request runs: no slot is in use, no pin or lock is left, and every page is free or cached."""
        self.check()
        assert self.ledger.store.device.in_use == 0 and len(self.ledger) == 0
        assert all(not self.ledger.store[i].pins for i in self.ledger.store.ids())
        assert self.cache.protected_size() == 0
        free, cached = self.allocator.available_size(), self.cache.evictable_size()
        assert free + cached == self.allocator.size, f"free {free} + cached {cached} != total {self.allocator.size}"


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(count)]


def retract_or_finish(
    engine: CheckedEngine, rng: random.Random, running: list[Running], stems: list[list[int]]
) -> None:
    """End a random running request. `stems` gets a finished request's tokens and keeps its last twelve elements."""
    request = running.pop(rng.randrange(len(running)))
    if request.length < request.prompt_tokens or rng.random() < 0.2:
        engine.retract(request)
    else:
        engine.finish(request)
        stems.append([*request.req.origin_input_ids, *request.req.output_ids])
        del stems[:-12]


def retract_all(engine: CheckedEngine, running: list[Running]) -> None:
    """End all running requests."""
    while running:
        engine.retract(running.pop())


def longest_stored(engine: CheckedEngine, prompt: Sequence[int]) -> int:
    """The naive model: the longest prefix of the prompt that some live cached tail stands for."""
    store = engine.ledger.store
    best = 0
    for tail_id in store.ids():
        c = store[tail_id]
        payload = engine.host[c.host_slot] if c.device_slot is None else engine.device.get(c.device_slot)
        if c.holder is Holder.TREE and best < c.position < len(prompt) and tuple(prompt[: c.position]) == payload:
            best = c.position
    return best
