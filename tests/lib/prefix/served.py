"""A prefix cache over a real model in this process: SGLang's tree, request rows, page allocator and model runner, this
project's pool, backend and tails. Logits are returned for every computed position; rows that a request must not read
are NaN."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from lib.prefix_replay import PAGE, ReplayEngine, Running
from model.harness import Harness, Request
from prefix.waiting import WithStorage
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from sglang_dsv4.prefix.prefix_cache import Dsv4PrefixCache
from sglang_dsv4.prefix.storage_tier import StorageTier
from sglang_dsv4.prefix.tier_setup import open_storage, write_policy


class ServedEngine(WithStorage, ReplayEngine):
    """A replay whose forwards are computed."""

    def __init__(self, checkpoint: Path, chunk_tokens: int = 1024, **server_args: object) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams

        self.harness = Harness(checkpoint, **server_args)
        runner = self.harness.runner
        self.pool = self.harness.pool
        with self.active():
            params = CacheInitParams(
                disable=False,
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                page_size=PAGE,
                is_eagle=runner.spec_algorithm.is_eagle(),
            )

            def storage_of(cache: Dsv4PrefixCache) -> StorageTier:
                return open_storage(runner, cache.host, cache.nodes)

            has_storage = runner.server_args.hicache_storage_backend is not None
            cache = Dsv4PrefixCache(
                params,
                self.pool.ledger,
                page_copies=self.pool.page_copies,
                policy=write_policy(),
                open_storage=storage_of if has_storage else None,
            )
        super().__init__(cache, runner.token_to_kv_pool_allocator, self.pool.ledger, chunk_tokens)
        self.logits: dict[str, list[Tensor]] = defaultdict(list)

    def active(self) -> AbstractContextManager[None]:
        """SGLang's context of this engine; everything runs inside it."""
        return self.harness._active()

    def serve(self, prompt: Sequence[int], output: Sequence[int] = ()) -> tuple[int, Tensor]:
        """Run one request from start to finish with a given output; returns hit tokens, and logits of [hit, end)."""
        with self.active():
            done = self.run(prompt, [*output, 7])  # the last token is never computed
        return done.hit_tokens, torch.cat(self.logits.pop(done.req.rid))

    def prefill_chunk(self, running: Running) -> None:
        """Prefill as SGLang does, after poisoning the rows of earlier owners of the slot and the pages."""
        self._fresh = not running.req.kv.holds_kv
        super().prefill_chunk(running)

    def forward_extend(self, req: object, begin: int, end: int) -> None:
        """Compute [begin, end)."""
        if self._fresh:
            self.poison(req.kv.req_pool_idx)
        self.poison_pages(req, begin, end)
        self._forward(req, begin, end, "extend")

    def forward_decode(self, req: object, position: int) -> None:
        """Compute one token."""
        if position % PAGE == 0:
            self.poison_pages(req, position, position + 1)
        self._forward(req, position, position + 1, "decode")

    def _forward(self, req: object, begin: int, end: int, mode: str) -> None:
        tokens = list(req.full_untruncated_fill_ids[begin:end])
        row = Request(
            req.kv.req_pool_idx, begin, end, list(req.full_untruncated_fill_ids[:begin]), req.tail_match, req.lock
        )
        self.logits[req.rid].extend(self.harness.step([(row, tokens)], mode))

    def flush(self) -> None:
        """Flush as `/flush_cache` does: the next request is cold."""
        with self.active():
            super().flush()

    # NaN

    def poison(self, request_slot: int) -> None:
        """Write NaN into a request slot's rings and states, the transit slot, and every tail slot without a holder."""
        pool, g, memory = self.pool, self.pool.geometry, self.pool.tail_memory
        for layer in g.layers():
            fill_rows(pool.window(layer), request_slot * g.ring_rows, g.ring_rows)
            ratio = g.layer_ratio(layer)
            if ratio:
                rows = slice(request_slot * g.state_rows(ratio), (request_slot + 1) * g.state_rows(ratio))
                pool.compressor_state(layer)[rows] = torch.nan
                if ratio == 4:
                    pool.indexer_state(layer)[rows] = torch.nan
        store = self.ledger.store
        for slots, held in ((memory.device, store.device.holders()), (memory.host, store.host.holders())):
            for slot in set(range(slots.slots)) - set(held):
                for part in slots.parts():
                    fill(part[:, slot])

    def poison_pages(self, req: object, begin: int, end: int) -> None:
        """Write NaN into entries and keys of the pages that start in [begin, end)."""
        table = self.rows.req_to_token[req.kv.req_pool_idx]
        for position in range(-(-begin // PAGE) * PAGE, end, PAGE):
            page = int(table[position]) // PAGE
            for layer in self.pool.geometry.layers():
                ratio = self.pool.geometry.layer_ratio(layer)
                if ratio:
                    fill_rows(self.pool.entries(layer), page * PAGE // ratio, PAGE // ratio)
                if ratio == 4:
                    fill_rows(self.pool.index_keys(layer), page * PAGE // ratio, PAGE // ratio)


def fill(storage: Tensor) -> None:
    """Fill with NaN in any format: 0xFF is NaN in e4m3, bf16 and ue8m0."""
    storage.fill_(0xFF if storage.dtype == torch.uint8 else torch.nan)


def fill_rows(rows: KVRows, first: int, count: int) -> None:
    """Write NaN into rows [first, first + count), which may be half of a byte format's page."""
    if rows.storage.dtype != torch.uint8:
        rows.storage[first : first + count] = torch.nan
        return
    poison = KVRows.allocate(count, rows.format, rows.row_dim, rows.rope_dim, rows.storage.dtype, "cpu", torch.nan)
    rows.copy_rows(torch.arange(first, first + count), poison, torch.arange(count))


def push_out(engine: ServedEngine) -> None:
    """Evict every page from the tree, as requests that need them would."""
    with engine.active():
        engine.cache.evict(EvictParams(num_tokens=engine.pool.size))
    assert not engine.cache.host.in_tree()


def poison_free_pages(engine: ServedEngine) -> None:
    held = {page.page.number for page in engine.cache.host.in_tree().values()}
    for part in engine.cache.host.copies.records.records.parts:
        per = part.view.shape[2]
        for page in set(range(1 + engine.pool.size // 256)) - held:
            part.view[:, page // per, page % per] = -1  # 0xFF: NaN in every format
