"""A replay without a model over three tiers, in which a page's bytes are the digest of the prefix that it ends.

So a page that was saved too late, loaded too early, from another slot or into another page is noticed by the next
request that reads it. Tails are as in `checked_engine`; the storage backend is a dict that may fail.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from types import SimpleNamespace

import torch
from lib.prefix_replay import PAGE, Running, tail_engine
from prefix.checked_engine import CheckedEngine, some
from prefix.waiting import WithStorage
from torch import Tensor

from dsv4_radix_cache.invariants import check
from dsv4_radix_cache.slots import Holder
from sglang_dsv4.cache.host_records import CopyTotals
from sglang_dsv4.cache.page_copies import PageCopies
from sglang_dsv4.cache.record_files import Fault
from sglang_dsv4.pipeline.votes import Votes
from sglang_dsv4.prefix.host_tier import HostTier, WritePolicy
from sglang_dsv4.prefix.prefix_cache import Dsv4PrefixCache
from sglang_dsv4.prefix.request_state import TAIL
from sglang_dsv4.prefix.storage_tier import PrefetchOptions, StorageTier
from sglang_dsv4.prefix.tail_nodes import TailNodes

BYTES = 16
PROMPT = some(random.Random(1), 5 * PAGE + 100)
OTHERS = [some(random.Random(10 + i), 6 * PAGE) for i in range(6)]


def name_of(tokens: Sequence[int]) -> bytes:
    """The digest that stands for a prefix."""
    return blake2b(array("q", tokens).tobytes(), digest_size=BYTES).digest()


def tensor_of(name: bytes) -> Tensor:
    return torch.tensor(list(name), dtype=torch.uint8)


class Records:
    """Pages of the pool and of host memory, each with the name of its prefix."""

    def __init__(self, pages: int, slots: int) -> None:
        self.device = torch.zeros(pages, BYTES, dtype=torch.uint8)
        self.memory = torch.zeros(slots, BYTES, dtype=torch.uint8)
        self.saved, self.loaded = CopyTotals(), CopyTotals()

    def save(self, pages: Tensor, slots: Sequence[int]) -> None:
        pages = pages.as_subclass(Tensor)  # reading page numbers is no wait here
        assert len(set(slots)) == len(slots) == len(pages)
        self.memory[list(slots)] = self.device[pages]
        self.saved.pages += len(pages)

    def load(self, slots: Sequence[int], pages: Tensor) -> None:
        pages = pages.as_subclass(Tensor)
        assert len(set(pages.tolist())) == len(pages) == len(slots)
        self.device[pages] = self.memory[list(slots)]
        self.loaded.pages += len(pages)

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def collect_times(self) -> None:
        pass


class Backend:
    """SGLang's storage interface over a dict. `fault_rate`: share of look-ups, reads and writes that fail."""

    batch, is_limited = 3, False

    def __init__(self, fault_rate: float = 0.0, seed: int = 0) -> None:
        self.records: dict[str, Tensor] = {}
        self.faults: Counter[Fault] = Counter()
        self.fault_rate, self._rng, self._lock = fault_rate, random.Random(seed), threading.Lock()

    def _fails(self) -> bool:
        with self._lock:
            return self._rng.random() < self.fault_rate

    def exists(self, key: str) -> bool:
        return key in self.records and not self._fails()

    def get(self, key: str, target: Tensor) -> Tensor | None:
        if key not in self.records or self._fails():
            target.fill_(0xEE)  # a miss leaves garbage
            self.faults[Fault.MISSING] += 1
            return None
        return target.copy_(self.records[key])

    def batch_exists(self, keys: Sequence[str]) -> int:
        return next((i for i, key in enumerate(keys) if not self.exists(key)), len(keys))

    def batch_get(self, keys: Sequence[str], targets: Sequence[Tensor]) -> list[Tensor | None]:
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(self, key: str, record: Tensor) -> bool:
        if self._fails():
            raise OSError("no space left")
        self.records[key] = record.clone()
        return True

    def clear(self) -> None:
        self.records.clear()


class TieredEngine(WithStorage, CheckedEngine):
    """A replay over device, host memory and, if given, a storage backend."""

    prefixes: dict[bytes, tuple[int, ...]]  # by digest, for the tails seen so far

    @classmethod
    def made(
        cls,
        *,
        pages: int,
        host_pages: int,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        backend: Backend | None = None,
        device_slots: int = 8,
        host_slots: int = 40,
        options: PrefetchOptions | None = None,
        votes: Votes | None = None,
        **how: int,
    ) -> TieredEngine:
        memory = SimpleNamespace(
            host=SimpleNamespace(record=lambda slot: tensor_of(engine.named(engine.host[slot]))),
            new_host_slot=FetchedTail,
            issue=lambda ring_saves, copies: engine.carry_out(ring_saves, copies),
            load_fetched=lambda tail, device_slot: engine.load_fetched(tail, device_slot),
        )

        def storage_of(cache: Dsv4PrefixCache) -> StorageTier:
            chosen = options or PrefetchOptions()
            parts = cache.host, cache.nodes, cache.ledger, memory
            return StorageTier(lambda: backend, *parts, options=chosen, votes=votes)

        plain = tail_engine(
            full_tokens=pages * PAGE,
            device_slots=device_slots,
            host_slots=host_slots,
            page_copies=PageCopies(Records(pages + 1, host_pages), memory),
            policy=policy,
            open_storage=None if backend is None else storage_of,
            **how,
        )
        engine = cls(plain.cache, plain.allocator, plain.ledger, plain.chunk_tokens)
        engine.device, engine.host, engine.rings, engine.prefixes = {}, {}, {}, {}
        return engine

    @property
    def tiers(self) -> HostTier:
        return self.cache.host

    @property
    def storage(self) -> StorageTier | None:
        return self.cache.storage

    @property
    def nodes(self) -> TailNodes:
        return self.cache.nodes

    def named(self, prefix: tuple[int, ...]) -> bytes:
        name = name_of(prefix)
        self.prefixes[name] = prefix
        return name

    def load_fetched(self, tail: FetchedTail, device_slot: int) -> None:
        self.device[device_slot] = self.prefixes[bytes(tail.payload.tolist())]

    # Forwards

    def forward_extend(self, req: object, begin: int, end: int) -> None:
        self.tiers.copies.issue()
        tokens = req.full_untruncated_fill_ids
        self.verify(req, tokens, begin)
        super().forward_extend(req, begin, end)
        self.write(req, tokens, begin, end)

    def forward_decode(self, req: object, position: int) -> None:
        self.tiers.copies.issue()
        super().forward_decode(req, position)
        tokens = [*req.origin_input_ids, *req.output_ids]
        self.write(req, tokens, position, position + 1)

    def pages(self, req: object, end: int) -> list[int]:
        return (self.rows.req_to_token[req.kv.req_pool_idx, :end:PAGE] // PAGE).tolist()

    def verify(self, req: object, tokens: Sequence[int], begin: int) -> None:
        """Check that every whole page before `begin` holds the prefix's digest."""
        for i, page in enumerate(self.pages(req, begin // PAGE * PAGE)):
            expected = tensor_of(name_of(tokens[: (i + 1) * PAGE]))
            assert torch.equal(self.tiers.copies.records.device[page], expected), f"page {i} is another prefix's"

    def write(self, req: object, tokens: Sequence[int], begin: int, end: int) -> None:
        pages = self.pages(req, end)
        for i in range(begin // PAGE, len(pages)):
            whole = (i + 1) * PAGE <= end
            self.tiers.copies.records.device[pages[i]] = tensor_of(name_of(tokens[: (i + 1) * PAGE])) if whole else 0xEE

    def flush(self) -> None:
        super().flush()
        assert len(self.tiers.pages) == 0 and self.tiers.copies.idle

    # Checks

    def check(self) -> None:
        check(self.ledger.store)
        self.cache.sanity_check()
        component, store, tiers = self.nodes, self.ledger.store, self.tiers
        on_nodes = component.on_nodes()
        detached = {i for i, node in component._node_of.items() if node is None}
        assert set(on_nodes) | detached == {i for i in store.ids() if store[i].holder is Holder.TREE}
        nodes = {n.id: n for n in self.cache.tree_core._collect_all_nodes()}
        carriers = {i for i, node in nodes.items() if node.component_data[TAIL].value is not None}
        assert set(on_nodes.values()) == carriers
        for tail_id, node_id in on_nodes.items():
            assert len(self.cache.path_device_indices(node_id)) == store[tail_id].position
        for tail_id in detached:
            assert component._digest_of[tail_id] in tiers.pages, "a detached tail without its pages"
        tiers.check(0 if self.storage is None else self.storage.reserved)
        assert set(component._end_of) == {i for i, node in nodes.items() if node.parent is not None}
        values = [node.component_data[0].value for node in nodes.values() if node.parent is not None]
        in_tree = [page for value in values for page in (value[::PAGE] // PAGE).tolist()]
        assert sorted(in_tree) == sorted(page.page.number for page in tiers.in_tree().values())

    def check_idle(self) -> None:
        self.settle()
        super().check_idle()
        assert all(not self.tiers.pages.get(d).pins for d in list(self.tiers.pages._pages))


class FetchedTail:
    """One tail on its way from the storage backend."""

    def __init__(self) -> None:
        self.payload = torch.zeros(BYTES, dtype=torch.uint8)

    def record(self, slot: int) -> Tensor:
        return self.payload.clone()

    def set_record(self, slot: int, record: Tensor) -> None:
        self.payload.copy_(record)


def admit(engine: TieredEngine, prompt: Sequence[int]) -> Running:
    """Let a request arrive, wait for the storage backend, and be admitted."""
    engine.arrive(prompt)
    return engine.admit(prompt)


def push_out(engine: TieredEngine) -> None:
    """Run other requests until they have used every page of the device."""
    for other in OTHERS[:3]:
        engine.run(other, [7])
        engine.check()
