"""Replays request traces through a prefix cache as SGLang's scheduler drives it, without a model.

Two engines over SGLang's own pieces (Req, ReqToTokenPool, page allocator, UnifiedRadixCache, its match,
`checkpoint_kv_cache` and `release_kv_cache`): `tail_engine` with this project's tails, `paged_engine` with SGLang's own
policy for DeepSeek-V4 (FULL + paged SWA component). Pools hold no bytes; only slots are counted.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dsv4_radix_cache.ledger import Ledger
from dsv4_radix_cache.placement import DEFAULT_INTERVAL_TOKENS, Placement
from dsv4_radix_cache.tail_store import TailStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

PAGE = 256
WINDOW = 128
DECODE_STEP = 64  # tokens that a replayed decode advances at once; divides the page


@dataclass
class Running:
    """A request between `start` and `finish`."""

    req: Req
    hit_tokens: int
    prompt_tokens: int
    length: int  # tokens whose KV exists


@dataclass
class Totals:
    """Sums over finished and running requests."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    recomputed: list[int] = field(default_factory=list)  # a number for each request

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class ReplayEngine:
    """One cache, one allocator, and the calls that SGLang's scheduler makes around them."""

    def __init__(
        self,
        cache: UnifiedRadixCache,
        allocator: BaseTokenToKVPoolAllocator,
        ledger: Ledger | None,
        chunk_tokens: int,
    ) -> None:
        """`ledger` is None for SGLang's own policy."""
        self.cache, self.allocator, self.ledger = cache, allocator, ledger
        self.rows = cache.req_to_token_pool
        self.chunk_tokens = chunk_tokens
        self.totals = Totals()
        self._ids = itertools.count()

    # Calls of a scheduler

    def run(self, prompt: Sequence[int], output: Sequence[int] = (), **how: str | None) -> Running:
        """Run one request from start to finish."""
        running = self.start(prompt, **how)
        self.decode(running, output)
        self.finish(running)
        return running

    def start(self, prompt: Sequence[int], extra_key: str | None = None, cache_salt: str | None = None) -> Running:
        """Match and prefill a request, chunk by chunk."""
        running = self.admit(prompt, extra_key, cache_salt)
        while running.length < running.prompt_tokens:
            self.prefill_chunk(running)
        return running

    def admit(self, prompt: Sequence[int], extra_key: str | None = None, cache_salt: str | None = None) -> Running:
        """Match a request and lock its prefix."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req(
            rid=f"replay-{next(self._ids)}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(max_new_tokens=1 << 20),
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        req.init_next_round_input(self.cache)
        if req.host_hit_length:
            self._load_back(req)
        hit = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        self.totals.requests += 1
        self.totals.prompt_tokens += len(prompt)
        self.totals.hit_tokens += hit
        self.totals.recomputed.append(len(prompt) - hit)
        return Running(req, hit, len(prompt), hit)

    def _load_back(self, req: Req) -> None:
        """Load the part of the prefix that is not on the device, as the scheduler's planner asks for it."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        lock = self.cache.lock(req.last_node)
        wanted = InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
        tokens, req.last_node = self.cache.init_load_back(wanted)
        self.cache.unlock(lock)
        req.prefix_len += tokens
        req.kv.cache_protected_len = req.prefix_len

    def prefill_chunk(self, running: Running) -> None:
        """Compute the next chunk and publish it."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        req = running.req
        begin = running.length
        end = min(begin + self.chunk_tokens, running.prompt_tokens)
        self._grow(running, end)
        req.extend_end = end
        if self.ledger is not None:
            self.forward_extend(req, begin, end)
        req.prefix_len = end
        checkpoint_kv_cache(req, self.cache)

    def forward_extend(self, req: Req, begin: int, end: int) -> None:
        """Do the attention backend's bookkeeping before a prefill forward."""
        from sglang_dsv4.prefix.request_state import tail_receipt

        holder = self.holder(req)
        self.ledger.admit(*holder, req.tail_match, tail_receipt(req))
        self.ledger.resume(*holder, begin)
        self.ledger.pop_ring_saves()
        self.ledger.pop_copies()
        self.ledger.extend(*holder, begin, end)

    def holder(self, req: Req) -> tuple[int, int]:
        """Return the request's slot and its generation."""
        slot = req.kv.req_pool_idx
        return slot, int(self.rows.req_generation[slot])

    def decode(self, running: Running, output: Sequence[int]) -> None:
        """Generate these tokens. The last one's KV is never computed, as in SGLang."""
        req = running.req
        req.output_ids.extend(output)
        end = running.prompt_tokens + len(req.output_ids) - 1
        while running.length < end:
            begin, step = running.length, min(DECODE_STEP - running.length % DECODE_STEP, end - running.length)
            self._grow(running, begin + step)
            req.refresh_fill_ids()
            if self.ledger is not None:
                for position in range(begin, begin + step):
                    self.forward_decode(req, position)
            if self.ledger is None:
                self.cache.evict_sliding_windows(req, running.length - 1, eviction_interval=1)

    def forward_decode(self, req: Req, position: int) -> None:
        """Do the attention backend's bookkeeping before a decode forward that writes `position`."""
        self.ledger.pop_ring_saves()
        self.ledger.pop_copies()
        self.ledger.decode(*self.holder(req), position, 1)

    def finish(self, running: Running) -> None:
        """End the request normally: its KV goes to the tree."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        running.req.finished_reason = FINISH_LENGTH(length=len(running.req.output_ids))
        release_kv_cache(running.req, self.cache, checkpoint=True)

    def retract(self, running: Running) -> None:
        """Give up the request's KV, as when memory runs out or the request is aborted."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if running.req.kv.holds_kv:
            release_kv_cache(running.req, self.cache, checkpoint=False)
        else:
            self.cache.unlock(running.req.lock)

    def flush(self) -> None:
        """Flush as `/flush_cache` does; no request may be running."""
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    # Pool slots

    def _grow(self, running: Running, end: int) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        req, begin = running.req, running.length
        if not req.kv.holds_kv:
            assert self.rows.alloc([req]) is not None, "no request row is free"
            self.rows.req_to_token[req.kv.req_pool_idx, :begin] = self.cache.prefix_device_indices(req).int()
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        evict_from_tree_cache(self.cache, end - begin + PAGE)
        lengths = torch.tensor([begin]), torch.tensor([end])
        last = row[begin - 1 : begin].long() if begin else torch.tensor([-1])
        slots = self.allocator.alloc_extend(lengths[0], lengths[0], lengths[1], lengths[1], last, end - begin)
        assert slots is not None, f"no pages for {end - begin} tokens"
        row[begin:end] = slots.int()
        req.kv.kv_allocated_len = req.kv.kv_committed_len = running.length = end


def _context(context_tokens: int, requests: int) -> object:
    """Set SGLang's global arguments, which its cache code reads; return the table of request rows."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE, device="cpu"))
    return ReqToTokenPool(size=requests, max_context_len=context_tokens + PAGE, device="cpu", enable_memory_saver=False)


def tail_engine(
    full_tokens: int,
    device_slots: int,
    host_slots: int = 0,
    context_tokens: int = 1 << 16,
    requests: int = 16,
    chunk_tokens: int = 8192,
    interval_tokens: int = DEFAULT_INTERVAL_TOKENS,
    drafts: bool = False,
    **cache_options: Any,  # noqa: ANN401 - of `Dsv4PrefixCache`
) -> ReplayEngine:
    """Return an engine with this project's policy: FULL pages and tails; keys as with an MTP module if `drafts`."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_dsv4.prefix.prefix_cache import Dsv4PrefixCache

    rows = _context(context_tokens, requests)
    allocator = PagedTokenToKVPoolAllocator(full_tokens, PAGE, torch.uint8, "cpu", None, False)
    store = TailStore(device_slots, host_slots)
    ledger = Ledger(store, Placement(interval_tokens), ring_rows=128, state_rows=8, strict=True)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        is_eagle=drafts,
    )
    return ReplayEngine(Dsv4PrefixCache(params, ledger, **cache_options), allocator, ledger, chunk_tokens)


def paged_engine(
    full_tokens: int,
    swa_tokens: int,
    context_tokens: int = 1 << 16,
    requests: int = 16,
    chunk_tokens: int = 8192,
) -> ReplayEngine:
    """Return an engine with SGLang 0.5.23's policy for DeepSeek-V4 on CUDA: FULL pages and paged SWA, components FULL
    and SWA."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    class NoBytes(BaseSWAKVPool):
        """A pool of slot numbers."""

        def __init__(self) -> None:
            pass

        def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
            self.full_to_swa_index_mapping = full_to_swa_index_mapping

        def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
            return self.full_to_swa_index_mapping[kv_indices]

        def _nothing(self, *args: object, **kwargs: object) -> None:
            raise NotImplementedError("this pool holds no bytes")

        get_state_buf_infos = get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _nothing
        get_contiguous_buf_infos = get_cpu_copy = load_cpu_copy = move_kv_cache = _nothing

    rows = _context(context_tokens, requests)
    allocator = SWATokenToKVPoolAllocator(full_tokens, swa_tokens, PAGE, torch.uint8, "cpu", NoBytes(), False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        sliding_window_size=WINDOW,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
    )
    return ReplayEngine(UnifiedRadixCache(params), allocator, None, chunk_tokens)
