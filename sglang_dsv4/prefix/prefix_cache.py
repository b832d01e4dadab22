"""SGLang's prefix cache for DeepSeek-V4: its own radix tree over FULL pages, with tail checkpoints on it.

A stored prefix has its compressed entries, but neither the 128 window rows nor the compressor rows at its end. A hit is
therefore legal only where a tail checkpoint holds them (`tail_component`); which checkpoints exist, where and for how
long is decided by `dsv4_radix_cache`; they are taken and restored by `tails`, and `tail_storage` moves their bytes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)

from dsv4_radix_cache import invariants
from dsv4_radix_cache.requests import TailRequests
from sglang_dsv4.cache.pool_plan import format_bytes
from sglang_dsv4.compat import UnifiedRadixCache
from sglang_dsv4.prefix import tail_tree
from sglang_dsv4.prefix.metrics import PrefixMetrics
from sglang_dsv4.prefix.tail_component import TAIL, TailComponent

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_cache.components import TreeComponent

    from sglang_dsv4.cache.kv_pool import Dsv4KVPool

logger = logging.getLogger(__name__)


class Dsv4PrefixCache(UnifiedRadixCache):
    """SGLang's radix tree over FULL pages; a match ends where a tail checkpoint stands."""

    def __init__(
        self, params: CacheInitParams, tails: TailRequests | None = None, tier_bytes: dict[str, int] | None = None
    ) -> None:
        """Make an empty tree.

        Args:
            params: SGLang's.
            tails: the ledger of the worker's KV pool. It may be left out only when `params.disable` is set: then the
                tree matches and keeps nothing.
            tier_bytes: memory of each tier's checkpoints, for the metrics.
        """
        if tails is None and not params.disable:
            raise ValueError("a prefix cache without tail checkpoints must be disabled")
        self.tails = tails
        params.tree_components = (ComponentType.FULL,) if tails is None else (ComponentType.FULL, TAIL)
        params.component_registry_override = {TAIL: TailComponent}
        if tails is not None:
            if tail_tree.NAME not in registered_tree_core_backends():
                register_tree_core_backend(tail_tree.NAME, _create_tree_core)
            params.tree_core_backend = tail_tree.NAME
        super().__init__(params)
        self._metrics: PrefixMetrics | None = None
        if tails is not None and params.enable_metrics:
            self._metrics = PrefixMetrics(tails, tier_bytes or {}, self.metrics_collector.labels)

    def refresh_metrics(self) -> None:
        """Copy the counts of ledger and store to Prometheus, if metrics are on."""
        if self._metrics is not None:
            self._metrics.refresh()

    def reset(self) -> None:
        """Empty the tree (`/flush_cache`): every page, checkpoint and request's ledger goes."""
        super().reset()
        if self.tails is not None:
            self.components[TAIL].reset()

    def sanity_check(self) -> None:
        """SGLang calls it when idle: its tree's invariants, and those of the checkpoint store."""
        super().sanity_check()
        if self.tails is not None:
            invariants.check(self.tails.store)


def _create_tree_core(
    params: CacheInitParams, components: dict[ComponentType, TreeComponent]
) -> tail_tree.TailTreeCore:
    return tail_tree.TailTreeCore(params, components, components[TAIL])


def create_prefix_cache(ctx: TreeCacheBuildContext) -> Dsv4PrefixCache:
    """Factory for SGLang's radix cache registry, name "dsv4".

    Raises:
        ValueError: a feature was asked for that keeps prefixes where their tails are not.
    """
    if ctx.enable_hierarchical_cache:
        raise ValueError(
            "sglang-dsv4 does not support --enable-hierarchical-cache: it would move pages to the host without the "
            "window rows at their ends. Tail checkpoints have a host tier of their own (SGLANG_DSV4_TAIL_HOST_SLOTS)"
        )
    pool: Dsv4KVPool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    tails, storage = pool.tail_requests, pool.tail_storage
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
    return Dsv4PrefixCache(ctx.params, tails, {"device": storage.device.nbytes, "host": storage.host.nbytes})
