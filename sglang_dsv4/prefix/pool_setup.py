"""Builds a worker's KV pool, with the ledger of its requests when prefixes are reused."""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING

from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.runtime_context import get_context, get_exec, get_memory

from dsv4_radix_cache.ledger import Ledger
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.tail_store import TailStore
from sglang_dsv4.cache import transfer
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.kv_pool import DraftOf, Dsv4KVPool
from sglang_dsv4.cache.pool_configurator import geometry_of, tail_slots
from sglang_dsv4.cache.pool_plan import PoolPlan
from sglang_dsv4.cache.tail_options import HostOptions, TailOptions, TailSizes, least_of_ranks
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO
from sglang_dsv4.seam import compat

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

logger = logging.getLogger(__name__)


def build_kv_pool(
    kvc: KVCacheConfigurator,
    *,
    max_running_requests: int,
    full_max_total_num_tokens: int,
    req_to_token_pool: ReqToTokenPool,
    **in_tree_sizes: object,
) -> Dsv4KVPool:
    """The worker's pool; replaces `KVCacheConfigurator._build_dsv4_kv_pool`.

    Args:
        kvc: SGLang's configurator of the worker.
        max_running_requests: not used: the rows of `req_to_token_pool` are the request slots.
        full_max_total_num_tokens: tokens that SGLang may hand out.
        req_to_token_pool: SGLang's table of request slots.
        in_tree_sizes: sizes of SGLang's own pools.
    """
    request_slots = req_to_token_pool.req_to_token.shape[0]
    geometry, draft_of, tails = geometry_of(kvc), None, None
    if kvc.is_draft_worker:
        target = kvc.token_to_kv_pool_allocator.get_kvcache()
        draft_of = DraftOf(target, kvc.model, injected=kvc.spec_algorithm.is_dspark())
    else:
        tails = tail_sizes(geometry, full_max_total_num_tokens, request_slots)
    pool = Dsv4KVPool(
        geometry,
        full_tokens=full_max_total_num_tokens,
        request_slots=request_slots,
        tails=tails,
        ledger=None if tails is None else new_ledger(geometry, tails),
        draft_of=draft_of,
        device=kvc.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
        layout=layout_of(kvc, geometry),
    )
    logger.info("%s\n%s", "Draft worker" if kvc.is_draft_worker else "Target worker", pool.plan.table())
    return pool


def layout_of(kvc: KVCacheConfigurator, geometry: PoolGeometry) -> str:
    """The layout in which the pool of another server must agree to exchange pages and rings with the worker's."""
    model = blake2b(repr(Config.from_hf(kvc.model_config.hf_config)).encode(), digest_size=8).hexdigest()
    return transfer.describe(geometry, compat.our_version(), model)


def new_ledger(geometry: PoolGeometry, tails: TailSizes) -> Ledger:
    """An empty ledger for a pool of this geometry. Bookkeeping errors are counted, not raised."""
    return Ledger(
        TailStore(tails.device_slots, tails.host_slots),
        Placement(tails.interval_tokens),
        geometry.ring_rows,
        geometry.state_rows(CSA_RATIO),
        geometry.draft_tokens,
    )


def tail_sizes(geometry: PoolGeometry, full_tokens: int, request_slots: int) -> TailSizes | None:
    """Tail slots and host pages of a target worker, equal on all ranks of all stages; None without prefix reuse."""
    device_slots = tail_slots(full_tokens, request_slots)
    if not device_slots:
        return None
    options = TailOptions.from_environment()
    plan, group = PoolPlan.of(geometry, full_tokens, request_slots, device_slots), get_world_group().cpu_group
    slot_bytes = int(plan.bytes_per_tail)
    host_slots, host_pages = options.slots_on_host(device_slots, slot_bytes), 0
    memory = get_memory()
    if memory.enable_hierarchical_cache:
        host = HostOptions(memory.hicache_ratio, memory.hicache_size, memory.hicache_host_memory_fraction is not None)
        host_pages, tails = host.sizes(full_tokens, plan.bytes_per_token, slot_bytes)
        # `HostOptions` has applied this limit; SGLang would apply it to the bytes of a host pool of its own.
        get_context().override("sglang_dsv4.host_pages", hicache_host_memory_fraction=None)
        if options.host_slots is None:
            host_slots = max(host_slots, tails)
    host_slots, host_pages = least_of_ranks(host_slots, group), least_of_ranks(host_pages, group)
    return TailSizes(device_slots, host_slots, options.interval_tokens, host_pages)
