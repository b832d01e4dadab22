"""SGLang's prefix cache for DeepSeek-V4: SGLang's own radix tree over FULL pages, with tails on its nodes.

A stored prefix has its compressed entries, but neither the 128 window rows nor the compressor rows at its end. A hit is
therefore legal only where a tail holds them (`tail_nodes`); `dsv4_radix_cache` decides which tails exist, where and for
how long; `restore_and_save` restores and saves them around a forward, and `sglang_dsv4.cache.tail_memory` copies their
bytes.

With `--enable-hierarchical-cache` pages outlive the tree in host memory (`host_tier`) and in a storage backend
(`storage_tier`). This class has the methods that SGLang's scheduler calls on its own hierarchical cache; SGLang's
controller and host pools are not used.
"""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictParams,
    IncLockRefResult,
    InsertParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_disagg, get_memory

from dsv4_radix_cache import invariants
from dsv4_radix_cache.host_pages import HostPages
from dsv4_radix_cache.ledger import Ledger
from dsv4_radix_cache.pages import PAGE_TOKENS, whole_pages
from sglang_dsv4.cache.page_copies import PageCopies
from sglang_dsv4.cache.page_records import pages_of
from sglang_dsv4.cache.pool_plan import format_bytes
from sglang_dsv4.prefix import tree_core
from sglang_dsv4.prefix.host_tier import HostTier, WritePolicy
from sglang_dsv4.prefix.metrics import PrefixMetrics
from sglang_dsv4.prefix.request_state import TAIL, match_of
from sglang_dsv4.prefix.storage_tier import StorageTier
from sglang_dsv4.prefix.tail_nodes import TailNodes
from sglang_dsv4.prefix.tier_setup import log_host_memory, open_storage, write_policy
from sglang_dsv4.seam.bases import RankedRadixCache
from sglang_dsv4.seam.hook_kinds import NAME
from sglang_dsv4.seam.hooks import TREE_CORE
from sglang_dsv4.seam.install import install

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheRequestHandle,
        DecLockRefParams,
        InitLoadBackParams,
        InsertResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_cache.components import TreeComponent

    from sglang_dsv4.cache.kv_pool import Dsv4KVPool

logger = logging.getLogger(__name__)


class Dsv4PrefixCache(RankedRadixCache):
    """SGLang's radix tree over FULL pages; a match ends where a tail is.

    It owns a worker's prefix reuse: it makes the tail nodes, the host tier and the storage tier, and connects them by
    arguments of their constructors.

    Attributes:
        ledger: the worker's ledger; None without prefix reuse.
        host: the host tier; None without `--enable-hierarchical-cache`.
        storage: the storage tier; None without `--hicache-storage-backend`.
    """

    def __init__(
        self,
        params: CacheInitParams,
        ledger: Ledger | None = None,
        *,
        tier_bytes: dict[str, int] | None = None,
        page_copies: PageCopies | None = None,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        open_storage: Callable[[Dsv4PrefixCache], StorageTier] | None = None,
        rings_arrive: bool = False,
    ) -> None:
        """Make an empty tree.

        Args:
            params: SGLang's.
            ledger: the ledger of the worker's KV pool. It may be left out when `params.disable` is set, where the tree
                matches and keeps nothing, or when the rings of every request arrive from another server.
            tier_bytes: memory of each tier's tails, for the metrics.
            page_copies: the pool's queue of page copies; None without `--enable-hierarchical-cache`.
            policy: when pages are saved to host memory.
            open_storage: makes the storage tier for this cache; None without `--hicache-storage-backend`.
            rings_arrive: a decode server's cache: a match may end at any page, since its requests bring their rings.
        """
        if ledger is None and not params.disable and not rings_arrive:
            raise ValueError("a prefix cache without tails must be disabled")
        self.ledger = ledger
        self.storage: StorageTier | None = None  # `super().__init__` resets the tree and the tiers
        self.host: HostTier | None = None
        if page_copies is not None:
            reports_saved = open_storage is not None
            self.host = HostTier(page_copies, policy, on_freed=self._host_copy_freed, reports_saved=reports_saved)
        super().__init__(self._with_tails(params))
        if open_storage is not None:
            self.storage = open_storage(self)
        self._metrics: PrefixMetrics | None = None
        if ledger is not None and params.enable_metrics:
            labels = self.metrics_collector.labels
            self._metrics = PrefixMetrics(ledger, tier_bytes or {}, labels, self.host, self.storage)

    def _with_tails(self, params: CacheInitParams) -> CacheInitParams:
        """SGLang's parameters with the tree's components and its core."""
        if self.ledger is None:
            return dataclasses.replace(params, tree_components=(ComponentType.FULL,))
        install(TREE_CORE)
        nodes = partial(TailNodes, ledger=self.ledger, host=self.host, on_attached=self._tail_attached)
        return dataclasses.replace(
            params,
            tree_components=(ComponentType.FULL, TAIL),
            component_registry_override={TAIL: nodes},
            tree_core_backend=NAME,
        )

    @property
    def nodes(self) -> TailNodes:
        """The tails on the tree's nodes."""
        return self.components[TAIL]

    def _host_copy_freed(self, digest: bytes, slot: int) -> None:
        """Wait until the slot of a page that host memory lost can be filled again; drop its detached tail."""
        if self.storage is not None:
            self.storage.wait_for_slot(slot)
        self.nodes.drop_detached(digest)

    def _tail_attached(self, digest: bytes, tail_id: int) -> None:
        if self.storage is not None:
            self.storage.tail_published(digest, tail_id)

    def refresh_metrics(self) -> None:
        """Copy the counts of ledger and store to Prometheus, if metrics are on."""
        if self._metrics is not None:
            self._metrics.refresh()

    def reset(self) -> None:
        """Empty the tree (`/flush_cache`): forget every page, tail and request."""
        if self.storage is not None:
            self.storage.reset()
        if self.host is not None:
            self.host.reset()
        super().reset()
        if self.ledger is not None:
            self.nodes.reset()

    def sanity_check(self) -> None:
        """Assert the invariants of SGLang's tree, the tail store and the host tier; SGLang calls it when idle."""
        super().sanity_check()
        if self.ledger is not None:
            invariants.check(self.ledger.store)
        if self.host is not None:
            self.host.check(0 if self.storage is None else self.storage.reserved)

    def account(self) -> list[int]:
        """The numbers of what this cache holds, equal on all stages of a pipeline; see `pipeline.plans.FIELDS`."""
        store = None if self.ledger is None else self.ledger.store
        return [
            self.token_to_kv_pool_allocator.available_size(),
            0 if self.disable else self.full_evictable_size(),
            0 if store is None else store.device.free,
            0 if store is None else store.host.free,
            0 if self.host is None else len(self.host.pages),
            0 if self.storage is None else self.storage.fetching,
        ]

    # -- the tree and the tiers --------------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a prefix into the tree; its pages are saved to host memory, now or when the policy says so."""
        result = super().insert(params)
        if self.host is not None and params.key is not None:
            digests = self.nodes.digests(params.key, self.nodes.inserting)
            match = match_of(self.nodes.inserting)
            hit_pages = 0 if match is None else whole_pages(match.position)
            self.nodes.note_ends(result.last_device_node, digests)
            self.host.inserted(digests, pages_of(params.value[: len(digests) * PAGE_TOKENS]), hit_pages)
        return result

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int]:
        """Insert the pages of a request's host hit into the tree; queued copies fill them before the next forward.

        Returns:
            Tokens brought back, all of `params.host_hit_length` or 0; and the node at which the prefix ends now.
        """
        req, tokens = params.req, params.host_hit_length
        node = self._load_back(req, tokens) if self.host is not None and tokens > 0 else None
        return (0, req.last_node) if node is None else (tokens, node)

    def _load_back(self, req: Req, tokens: int) -> int | None:
        """The node at which the prefix ends afterwards; None if host memory or the pool no longer allows the hit."""
        begin, end = req.prefix_len, req.prefix_len + tokens
        key = self._key(req.full_untruncated_fill_ids[: end + self._boundary_tokens], req.extra_key, req.cache_salt)
        if self.nodes.host_hit_tokens(key, req, begin) != tokens:  # freed while the request waited for its turn
            return None
        digests, first = self.nodes.digests(key, req), whole_pages(begin)
        with self.host.pinned(digests[first:]):
            slots = self._slots_for(tokens)
            if slots is None:
                return None
            value = torch.cat([self.path_device_indices(req.last_node)[:begin], slots])
            node = super().insert(InsertParams(key=key, value=value, prev_prefix_len=begin)).last_device_node
            # The tree keeps the pages that it already had beyond `begin`, and frees the new slots for them.
            new = self.host.inserted(digests, pages_of(value))
            from_storage = self.host.load(digests[first:], [digests[i] for i in new])
        self.nodes.came_back(node, digests, first, req, from_storage)
        return node

    @property
    def _boundary_tokens(self) -> int:
        """Tokens of a key beyond the positions it names: an MTP module's row depends on the next token too."""
        return int(self.tree_core.is_eagle)

    def _key(self, tokens: array[int], extra_key: str | None, cache_salt: str | None) -> RadixKey:
        """The key of these tokens, as SGLang makes it for this tree."""
        return RadixKey(tokens, extra_key, is_bigram=self.tree_core.is_eagle, cache_salt=cache_salt)

    def _slots_for(self, tokens: int) -> torch.Tensor | None:
        """FULL slots of whole pages for `tokens` tokens; evicts unused pages if needed. None if too few are free."""
        allocator = self.token_to_kv_pool_allocator
        missing = tokens - allocator.available_size()
        if missing > 0:
            self.evict_for_alloc(EvictParams(num_tokens=missing))
        return allocator.alloc(tokens) if allocator.available_size() >= tokens else None

    # -- methods that the scheduler calls on a hierarchical cache -----------------------------------------------------

    def inc_host_lock_ref(self, node_id: int) -> IncLockRefResult:
        """Nothing to lock: host memory is not tied to nodes, and `init_load_back` pins the pages that it uses."""
        return super().inc_host_lock_ref(node_id) if self.host is None else IncLockRefResult()

    def dec_host_lock_ref(self, node_id: int, params: DecLockRefParams) -> DecLockRefResult:
        """Nothing to unlock, see `inc_host_lock_ref`."""
        return super().dec_host_lock_ref(node_id, params) if self.host is None else DecLockRefResult()

    def ready_to_load_host_cache(self) -> int:
        """-1, no load of SGLang's controller: a forward waits for loads by the order of its stream."""
        return -1

    def check_hicache_events(self) -> None:
        """Issue queued copies between forwards, and poll the storage tier; called in every round of the scheduler."""
        if self.host is None:
            return
        with self.host.copies.between_forwards():
            self.host.copies.issue()
            over = {} if self.storage is None else self.storage.poll()
        for handle, (begin, tokens) in over.items():
            if tokens:
                self.prefetch_loaded_tokens_by_reqid[handle] = tokens
                self.prefetch_loaded_storage_start_by_reqid[handle] = begin

    @property
    def full_kv_pool_host(self) -> HostUse | None:
        """The use of host memory, for SGLang's metrics."""
        return None if self.host is None else HostUse(self.host.pages)

    def is_backuped(self, node_id: int) -> bool:
        """True with a host tier: the scheduler may always look for more of a prefix after this node."""
        return super().is_backuped(node_id) if self.host is None else True

    def get_last_hash_value(self, node_id: int) -> str | None:
        """None with a host tier: digests are computed here, from the prompt's first token on."""
        return super().get_last_hash_value(node_id) if self.host is None else None

    def prefetch_from_storage(
        self,
        request: CacheRequestHandle,
        last_host_node_id: int,
        new_input_tokens: array[int],
        *args: object,
        matched_prefix_tokens: array[int],
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **kwargs: object,
    ) -> None:
        """Look up whether the storage backend has more of a new request's prefix."""
        if self.storage is not None:
            key = self._key(matched_prefix_tokens + new_input_tokens, extra_key, cache_salt)
            self.storage.prefetch(request, self.nodes.digests(key, None), whole_pages(len(matched_prefix_tokens)))

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether the request need not wait for the storage backend any longer."""
        return self.storage is None or not self.storage.is_waiting(request)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget an aborted request; pages that are being read for it stay in host memory."""
        super().release_aborted_request(request)
        if self.storage is not None:
            self.storage.forget(request)

    def clear_storage_backend(self) -> bool:
        """Delete this server's records (`/clear_hicache_storage_backend`)."""
        if self.storage is None:
            return False
        self.storage.backend.clear()
        return True

    def release_host_resources(self) -> None:
        """Finish the queued writes: the server ends."""
        super().release_host_resources()
        if self.storage is not None:
            self.storage.shutdown()

    def flush_pending_backups(self) -> None:
        """Do nothing: saves are queued as soon as they are due."""


class HostUse(NamedTuple):
    """Host memory in tokens, under the names of SGLang's host pools."""

    pages: HostPages

    @property
    def logical_size(self) -> int:
        """Tokens that host memory can hold."""
        return self.pages.capacity * PAGE_TOKENS

    def available_size(self) -> int:
        """Tokens for which host memory is free."""
        return self.pages.free * PAGE_TOKENS


def create_tree_core(params: CacheInitParams, components: dict[ComponentType, TreeComponent]) -> tree_core.Dsv4TreeCore:
    """The tree core of SGLang's registry named "dsv4"."""
    return tree_core.Dsv4TreeCore(params, components, components[TAIL])


def create_prefix_cache(ctx: TreeCacheBuildContext) -> Dsv4PrefixCache:
    """Factory for SGLang's radix cache registry, name "dsv4".

    Raises:
        ValueError: `--enable-hierarchical-cache` was given, but there are no tail slots.
    """
    pool: Dsv4KVPool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    ledger, memory = pool.ledger, pool.tail_memory
    if ctx.enable_hierarchical_cache and ledger is None:
        raise ValueError(
            "sglang-dsv4 does not support --enable-hierarchical-cache without tails, at which a request continues a "
            "stored prefix: unset SGLANG_DSV4_TAIL_SLOTS, which is 0"
        )
    if not ctx.disable_radix_cache and get_disagg().disaggregation_mode == "decode":
        logger.info("Prefix reuse is on: requests arrive with their rings, so a stored prefix may end at any page.")
        return Dsv4PrefixCache(ctx.params, rings_arrive=True)
    if ctx.disable_radix_cache or ledger is None:
        why = "--disable-radix-cache" if ctx.disable_radix_cache else "SGLANG_DSV4_TAIL_SLOTS=0"
        logger.info("Prefix reuse is off (%s): every request is computed from its first token.", why)
        return Dsv4PrefixCache(dataclasses.replace(ctx.params, disable=True))
    logger.info(
        "Prefix reuse is on: tails of %s every %d tokens, %d on the device (%s), %d in host memory (%s).",
        format_bytes(memory.slot_bytes),
        ledger.placement.interval_tokens,
        memory.device_slots,
        format_bytes(memory.slot_bytes * memory.device_slots),
        memory.host.slots,
        format_bytes(memory.slot_bytes * memory.host.slots),
    )
    tier_bytes = {"device": memory.device.nbytes, "host": memory.host.nbytes}
    if not ctx.enable_hierarchical_cache:
        return Dsv4PrefixCache(ctx.params, ledger, tier_bytes=tier_bytes)
    log_host_memory(pool.page_copies)

    def storage_of(cache: Dsv4PrefixCache) -> StorageTier:
        return open_storage(ctx.tp_worker.model_runner, cache.host, cache.nodes, cache.least_of_ranks)

    has_storage = get_memory().hicache_storage_backend is not None
    return Dsv4PrefixCache(
        ctx.params,
        ledger,
        tier_bytes=tier_bytes,
        page_copies=pool.page_copies,
        policy=write_policy(),
        open_storage=storage_of if has_storage else None,
    )
