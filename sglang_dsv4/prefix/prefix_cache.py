"""SGLang's prefix cache for DeepSeek-V4: its own radix tree over FULL pages, with tail checkpoints on it.

A stored prefix has its compressed entries, but neither the 128 window rows nor the compressor rows at its end. A hit is
therefore legal only where a tail checkpoint holds them (`tail_component`); which checkpoints exist, where and for how
long is decided by `dsv4_radix_cache`; they are taken and restored by `tails`, and `tail_storage` moves their bytes.

With `--enable-hierarchical-cache` pages outlive the tree in host memory (`tiers`) and in a storage (`storage`). What
SGLang's scheduler asks of its own hierarchical cache is answered here; SGLang's controller and host pools are not used.
"""

from __future__ import annotations

import logging
from array import array
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
from sglang.srt.runtime_context import get_memory

from dsv4_radix_cache import invariants
from dsv4_radix_cache.host_pages import HostPages
from dsv4_radix_cache.requests import TailRequests
from sglang_dsv4.cache.pool_plan import format_bytes
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS
from sglang_dsv4.prefix import tail_tree
from sglang_dsv4.prefix.metrics import PrefixMetrics
from sglang_dsv4.prefix.tail_component import TAIL, TailComponent
from sglang_dsv4.prefix.tier_setup import create_tiers, open_storage
from sglang_dsv4.prefix.tiers import PrefixTiers
from sglang_dsv4.seam.bases import RankedRadixCache
from sglang_dsv4.seam.hooks import NAME, TREE_CORE
from sglang_dsv4.seam.install import install_once

if TYPE_CHECKING:
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
    """SGLang's radix tree over FULL pages; a match ends where a tail checkpoint stands."""

    def __init__(
        self,
        params: CacheInitParams,
        tails: TailRequests | None = None,
        tier_bytes: dict[str, int] | None = None,
        tiers: PrefixTiers | None = None,
    ) -> None:
        """Make an empty tree.

        Args:
            params: SGLang's.
            tails: the ledger of the worker's KV pool. It may be left out only when `params.disable` is set: then the
                tree matches and keeps nothing.
            tier_bytes: memory of each tier's checkpoints, for the metrics.
            tiers: where pages go that the tree loses; None without `--enable-hierarchical-cache`.
        """
        if tails is None and not params.disable:
            raise ValueError("a prefix cache without tail checkpoints must be disabled")
        self.tails = tails
        params.tree_components = (ComponentType.FULL,) if tails is None else (ComponentType.FULL, TAIL)
        params.component_registry_override = {TAIL: TailComponent}
        if tails is not None:
            install_once(TREE_CORE)
            params.tree_core_backend = NAME
        self.tiers: PrefixTiers | None = None  # `super().__init__` resets the tree
        super().__init__(params)
        if tiers is not None:
            self.attach_tiers(tiers)
        self._metrics: PrefixMetrics | None = None
        if tails is not None and params.enable_metrics:
            self._metrics = PrefixMetrics(tails, tier_bytes or {}, self.metrics_collector.labels, tiers)

    def attach_tiers(self, tiers: PrefixTiers) -> None:
        """From now on pages that the tree loses go there. The tree must be empty."""
        component: TailComponent = self.components[TAIL]
        self.tiers = component.tiers = tiers
        tiers.drop_tail = component.drop_parked

    def refresh_metrics(self) -> None:
        """Copy the counts of ledger and store to Prometheus, if metrics are on."""
        if self._metrics is not None:
            self._metrics.refresh()

    def reset(self) -> None:
        """Empty the tree (`/flush_cache`): every page, checkpoint and request's ledger goes."""
        if self.tiers is not None:
            self.tiers.reset()
        super().reset()
        if self.tails is not None:
            self.components[TAIL].reset()

    def sanity_check(self) -> None:
        """SGLang calls it when idle: its tree's invariants, and those of the checkpoint store."""
        super().sanity_check()
        if self.tails is not None:
            invariants.check(self.tails.store)
        if self.tiers is not None:
            self.tiers.check()

    # -- the tree and the tiers --------------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """The tree takes a prefix; its pages are saved to host memory, now or when the policy says so."""
        result = super().insert(params)
        if self.tiers is not None and params.key is not None:
            component = self.components[TAIL]
            digests = component.digests(params.key, component.inserting)
            match = getattr(component.inserting, "tail_match", None)
            hit_pages = 0 if match is None else match.position // FULL_PAGE_TOKENS
            component.note_ends(result.last_device_node, digests)
            self.tiers.inserted(digests, page_numbers(params.value[: len(digests) * FULL_PAGE_TOKENS]), hit_pages)
        return result

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int]:
        """Bring the pages of a request's host hit back: into the tree now, filled before the next forward.

        Returns:
            Tokens that came, all of `params.host_hit_length` or none; and the node at which the prefix ends now.
        """
        req, tokens = params.req, params.host_hit_length
        if self.tiers is None or tokens <= 0:
            return 0, req.last_node
        component: TailComponent = self.components[TAIL]
        begin, end = req.prefix_len, req.prefix_len + tokens
        key = self._key(req.full_untruncated_fill_ids[: end + self._boundary_tokens], req.extra_key, req.cache_salt)
        digests, first = component.digests(key, req), begin // FULL_PAGE_TOKENS
        if component.host_hit_tokens(key, req, begin) != tokens:  # it went while the request waited for its turn
            return 0, req.last_node
        wanted = digests[first:]
        self.tiers.pin(wanted)
        slots = self._slots_for(tokens)
        if slots is None:
            self.tiers.unpin(wanted)
            return 0, req.last_node
        value = torch.cat([self.path_device_indices(req.last_node)[:begin], slots])
        result = super().insert(InsertParams(key=key, value=value, prev_prefix_len=begin))
        component.note_ends(result.last_device_node, digests)
        new = self.tiers.inserted(digests, page_numbers(value))  # what it had behind `begin` it keeps, and frees ours
        from_storage = self.tiers.load(wanted, [digests[i] for i in new])
        component.unpark(result.last_device_node, digests, first)
        checkpoint_id = component.checkpoint_at(result.last_device_node)
        component.note_load(req, checkpoint_id, tokens, from_storage * FULL_PAGE_TOKENS)
        return tokens, result.last_device_node

    @property
    def _boundary_tokens(self) -> int:
        """Tokens that a key has beyond the positions it names: an MTP module's row is made of the next token, too."""
        return int(self.tree_core.is_eagle)

    def _key(self, tokens: array[int], extra_key: str | None, cache_salt: str | None) -> RadixKey:
        """As SGLang makes keys of this tree."""
        return RadixKey(tokens, extra_key, is_bigram=self.tree_core.is_eagle, cache_salt=cache_salt)

    def _slots_for(self, tokens: int) -> torch.Tensor | None:
        """Slots of whole pages, for which the tree gives up what nobody uses; None if that is not enough."""
        allocator = self.token_to_kv_pool_allocator
        missing = tokens - allocator.available_size()
        if missing > 0:
            self.evict_for_alloc(EvictParams(num_tokens=missing))
        return allocator.alloc(tokens) if allocator.available_size() >= tokens else None

    # -- what the scheduler asks of a hierarchical cache --------------------------------------------------------------

    def inc_host_lock_ref(self, node_id: int) -> IncLockRefResult:
        """Nothing on the host is tied to a node; `init_load_back` pins what it uses."""
        return super().inc_host_lock_ref(node_id) if self.tiers is None else IncLockRefResult()

    def dec_host_lock_ref(self, node_id: int, params: DecLockRefParams) -> DecLockRefResult:
        """See `inc_host_lock_ref`."""
        return super().dec_host_lock_ref(node_id, params) if self.tiers is None else DecLockRefResult()

    def ready_to_load_host_cache(self) -> int:
        """No load of SGLang's controller: the forward waits for ours by the order of its stream."""
        return -1

    def check_hicache_events(self) -> None:
        """Called in every round of the scheduler: copies for which no forward has come yet are issued if none runs."""
        if self.tiers is not None:
            with self.tiers.between_forwards():
                self.tiers.issue()
                over = {} if self.tiers.storage is None else self.tiers.storage.poll()
            for handle, (begin, tokens) in over.items():
                if tokens:
                    self.prefetch_loaded_tokens_by_reqid[handle] = tokens
                    self.prefetch_loaded_storage_start_by_reqid[handle] = begin

    @property
    def full_kv_pool_host(self) -> HostUse | None:
        """What SGLang's metrics ask."""
        return None if self.tiers is None else HostUse(self.tiers.pages)

    def is_backuped(self, node_id: int) -> bool:
        """Whether to look for more of a prefix behind this node: always."""
        return super().is_backuped(node_id) if self.tiers is None else True

    def get_last_hash_value(self, node_id: int) -> str | None:
        """Digests are ours, from the prompt's first token on."""
        return super().get_last_hash_value(node_id) if self.tiers is None else None

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
        """A request arrived: see whether the storage knows more of its prefix."""
        if self.tiers is not None and self.tiers.storage is not None:
            key = self._key(matched_prefix_tokens + new_input_tokens, extra_key, cache_salt)
            digests = self.components[TAIL].digests(key, None)
            self.tiers.storage.prefetch(request, digests, len(matched_prefix_tokens) // FULL_PAGE_TOKENS)

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether the request need not wait for the storage any longer."""
        return self.tiers is None or self.tiers.storage is None or not self.tiers.storage.is_waiting(request)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """The request is gone; what is read for it stays in host memory."""
        super().release_aborted_request(request)
        if self.tiers is not None and self.tiers.storage is not None:
            self.tiers.storage.forget(request)

    def clear_storage_backend(self) -> bool:
        """Delete this server's records (`/clear_hicache_storage_backend`)."""
        if self.tiers is None or self.tiers.storage is None:
            return False
        self.tiers.storage.backend.clear()
        return True

    def release_host_resources(self) -> None:
        """The server ends: finish what is being written."""
        super().release_host_resources()
        if self.tiers is not None and self.tiers.storage is not None:
            self.tiers.storage.shutdown()

    def flush_pending_backups(self) -> None:
        """Saves are queued already."""


class HostUse(NamedTuple):
    """Host memory in tokens, under the names of SGLang's host pools."""

    pages: HostPages

    @property
    def logical_size(self) -> int:
        """All of it."""
        return self.pages.capacity * FULL_PAGE_TOKENS

    def available_size(self) -> int:
        """What is free."""
        return self.pages.free * FULL_PAGE_TOKENS


def page_numbers(slots: torch.Tensor) -> torch.Tensor:
    """[N * 256] slots of whole pages -> [N] int64, the pages of the pool; on their device, which nobody waits for."""
    return slots[::FULL_PAGE_TOKENS].long() // FULL_PAGE_TOKENS


def create_tree_core(params: CacheInitParams, components: dict[ComponentType, TreeComponent]) -> tail_tree.TailTreeCore:
    """The tree core of SGLang's registry named "dsv4"."""
    return tail_tree.TailTreeCore(params, components, components[TAIL])


def create_prefix_cache(ctx: TreeCacheBuildContext) -> Dsv4PrefixCache:
    """Factory for SGLang's radix cache registry, name "dsv4".

    Raises:
        ValueError: whole prefixes were asked for, and no checkpoints at their ends.
    """
    pool: Dsv4KVPool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    tails, storage = pool.tail_requests, pool.tail_storage
    if ctx.enable_hierarchical_cache and tails is None:
        raise ValueError(
            "sglang-dsv4 does not support --enable-hierarchical-cache without tail checkpoints, at which a prefix is "
            "taken up again: unset SGLANG_DSV4_TAIL_SLOTS, which is 0"
        )
    if ctx.disable_radix_cache or tails is None:
        why = "--disable-radix-cache" if ctx.disable_radix_cache else "SGLANG_DSV4_TAIL_SLOTS=0"
        ctx.params.disable = True
        logger.info("Prefix reuse is off (%s): every request is computed from its first token.", why)
        return Dsv4PrefixCache(ctx.params)
    logger.info(
        "Prefix reuse is on: tail checkpoints of %s every %d tokens, %d on the device (%s), %d in host memory (%s).",
        format_bytes(storage.slot_bytes),
        tails.placement.interval_tokens,
        storage.device_slots,
        format_bytes(storage.slot_bytes * storage.device_slots),
        storage.host.slots,
        format_bytes(storage.slot_bytes * storage.host.slots),
    )
    tiers = create_tiers(pool) if ctx.enable_hierarchical_cache else None
    tier_bytes = {"device": storage.device.nbytes, "host": storage.host.nbytes}
    cache = Dsv4PrefixCache(ctx.params, tails, tier_bytes, tiers)
    if tiers is not None and get_memory().hicache_storage_backend is not None:
        tiers.storage = open_storage(ctx.tp_worker.model_runner, tiers, cache.components[TAIL], cache.least_of_ranks)
    return cache
