"""The KV pools: entries and indexer keys by FULL slot, window and compressor rings by request slot.

A subclass of SGLang's pool only for its isinstance checks (`RingWindowKVPool`): nobody but us knows of a window.

Rows are found by arithmetic alone, so there is nothing to allocate, free or reset:

    entry j of ratio r   full_slot(j*r) // r                             follows the FULL page
    window row of t      request_slot * ring_rows + t % ring_rows        follows the request slot
    raw row of t         request_slot * state_rows + t % state_rows      follows the request slot

A new request in an old slot reads only rows that it has written itself: positions before its first one are holes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.distributed import get_tp_group
from sglang.srt.runtime_context import get_context, get_exec, get_memory

from dsv4_kernels.kv_layout import PAGE_ROWS, KVRows, RowFormat
from dsv4_radix_cache.placement import Placement
from dsv4_radix_cache.requests import TailRequests
from dsv4_radix_cache.store import CheckpointStore
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.pool_configurator import geometry_of, tail_slots
from sglang_dsv4.cache.pool_plan import PoolPlan
from sglang_dsv4.cache.tail_options import HostOptions, TailOptions, TailSizes, least_of_ranks
from sglang_dsv4.cache.tail_storage import TailRows, TailStorage
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, LayerKind
from sglang_dsv4.seam.bases import RingWindowKVPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang_dsv4.prefix.tiers import PrefixTiers

logger = logging.getLogger(__name__)


class Dsv4KVPool(RingWindowKVPool):
    """All cache tensors of one worker (target or draft).

    Attributes:
        geometry: dimensions.
        plan: what was allocated, to the byte. A draft worker's tensors are also in its target's plan.
        ring_generation: [request_slots] int64 on the host: `ReqToTokenPool.req_generation` of the request whose rows
            are in a slot's rings, 0 if none. A request that continues a prefix must find its own number there.
        tail_storage: bytes of the tail checkpoints, a draft's in its target's; None without prefix reuse.
        tail_requests: which request takes and gets which checkpoint; None without prefix reuse.
        host_pages: pages of prefixes in host memory; 0 without `--enable-hierarchical-cache`.
        prefix_tiers: what is to be copied before a forward; set with `--enable-hierarchical-cache`.
        draft: of a target, the draft worker's pool. Tail checkpoints hold its window rows as well.
        model: of a draft, what computes its rows.
        tail_rows: of a draft, where the tokens of the prefill in progress go in the target's checkpoints.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        full_tokens: int,
        request_slots: int,
        device: str,
        tails: TailSizes | None = None,
        is_draft: bool = False,
        enable_memory_saver: bool = False,
    ) -> None:
        """Allocate everything.

        Args:
            geometry: dimensions.
            full_tokens: tokens that SGLang may hand out, a multiple of 256.
            request_slots: running requests + 1.
            device: where the tensors are.
            tails: how many tail checkpoints; None for no prefix reuse.
            is_draft: the pool is a draft worker's.
            enable_memory_saver: SGLang's.
        """
        layers = geometry.layers()
        super().__init__(
            request_slots,
            geometry.window_tokens,
            geometry.compressed,
            size=full_tokens,
            page_size=FULL_PAGE_TOKENS,
            dtype=geometry.dtype,
            layer_num=len(layers),
            device=device,
            enable_memory_saver=enable_memory_saver,
            start_layer=geometry.first_layer,
            end_layer=geometry.first_layer + len(layers),
        )
        self.geometry = geometry
        self.plan = PoolPlan.of(geometry, full_tokens, request_slots, tails.device_slots if tails else 0)
        self.is_draft = is_draft
        self.ring_generation = torch.zeros(request_slots, dtype=torch.int64)
        self.host_pages = tails.host_pages if tails else 0
        self.prefix_tiers: PrefixTiers | None = None
        self.draft: Dsv4KVPool | None = None
        self.model: torch.nn.Module | None = None
        self.tail_rows: TailRows | None = None
        self._tensors: dict[str, dict[int, KVRows | torch.Tensor]] = {}
        # [layers, ...] of all request slots: what a tail checkpoint copies at once
        self.rings: dict[str, torch.Tensor] = {}
        # [layers, ...] of all that follows FULL pages: what a page's record copies at once
        self.tables: dict[str, torch.Tensor] = {}
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            for spec in self.plan.pools:
                # The draft worker allocates its own rings; checkpoints are laid out slot by slot (tail_storage).
                if spec.name != "draft window rings" and spec.per != "checkpoint":
                    stack, rows = spec.allocate_stack(device)
                    self._tensors[spec.name] = dict(zip(spec.layers, rows, strict=True))
                    (self.rings if spec.per == "request" else self.tables)[spec.name] = stack
            self.tail_storage = self.tail_requests = None
            if tails is not None:
                slots = (tails.device_slots, tails.host_slots)
                self.tail_storage = TailStorage(geometry, self.rings, device, *slots)
                self.tail_requests = TailRequests(
                    CheckpointStore(*slots),
                    Placement(tails.interval_tokens),
                    geometry.ring_rows,
                    geometry.state_rows(CSA_RATIO),
                    geometry.draft_tokens,
                    tails.strict,
                )
        self.mem_usage = self.get_kv_size_bytes() / (1 << 30)

    # -- what attention reads and writes -----------------------------------------------------------------------------

    def window(self, layer_id: int) -> KVRows:
        """Window rings of a layer: request_slots * ring_rows rows of row_dim."""
        return self._of("window rings", layer_id)

    def entries(self, layer_id: int) -> KVRows:
        """Compressed entries of a CSA or HCA layer; row = full_slot // ratio."""
        return self._of(f"{self._kind(layer_id)} entries", layer_id)

    def index_keys(self, layer_id: int) -> KVRows:
        """Indexer keys of a CSA layer; row = full_slot // 4."""
        return self._of("indexer keys", layer_id)

    def compressor_state(self, layer_id: int) -> torch.Tensor:
        """Raw (kv, score) rows of a layer's compressor: [request_slots * state_rows, 2, C * row_dim] fp32."""
        return self._of(f"{self._kind(layer_id)} compressor state", layer_id)

    def indexer_state(self, layer_id: int) -> torch.Tensor:
        """Raw rows of a CSA layer's indexer compressor: [request_slots * state_rows, 2, 2 * index_dim] fp32."""
        return self._of("indexer compressor state", layer_id)

    def tail_windows(self, layer_id: int) -> KVRows:
        """A layer's windows in the tail checkpoints; a draft's are in its target's. Slot s has rows [128 s, ...)."""
        return self.tail_storage.window_rows(layer_id, draft=self.is_draft)

    def attach_draft(self, draft: Dsv4KVPool, *, injected: bool) -> None:
        """Let the tail checkpoints hold the rows of a draft.

        Args:
            draft: the draft worker's pool.
            injected: SGLang's DSpark worker stores the rows of what the target has computed. A ring is all that it
                knows of the pool: row = request_slot * ring_rows + position % ring_rows.
        """
        self.draft = draft
        if injected:
            draft.swa_req_ring_size = draft.geometry.ring_rows
        if self.tail_storage is not None:
            draft.tail_storage = self.tail_storage
            self.tail_storage.attach_draft(draft.rings["window rings"])

    def table(self, name: str) -> tuple[KVRows, int]:
        """All layers of a table that follows FULL pages ("CSA entries", "HCA entries", "indexer keys") as one.

        Returns:
            The rows, those of a layer behind those of the one before it, with the padding of a byte format between;
            and the number of layers.
        """
        stack, one = self.tables[name], next(iter(self._tensors[name].values()))
        block = 1 if one.format is RowFormat.PLAIN else PAGE_ROWS
        rows = dataclasses.replace(one, storage=stack.flatten(0, 1), num_rows=stack.shape[0] * stack.shape[1] * block)
        return rows, stack.shape[0]

    def _kind(self, layer_id: int) -> str:
        return LayerKind(self.geometry.layer_ratio(layer_id)).name

    def _of(self, name: str, layer_id: int) -> Any:  # noqa: ANN401 - KVRows or raw rows, by name
        try:
            return self._tensors[name][layer_id]
        except KeyError:
            ratio = self.geometry.layer_ratio(layer_id)
            raise KeyError(f"layer {layer_id} has no {name}: its ratio is {ratio}") from None

    def tensors(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Every allocated tensor: (pool name, layer id, storage)."""
        for name, layers in self._tensors.items():
            for layer_id, rows in layers.items():
                yield name, layer_id, rows.storage if isinstance(rows, KVRows) else rows
        if self.tail_requests is not None:
            for name, storage in self.tail_storage.tensors():
                yield name, self.geometry.first_layer, storage  # all layers in one

    # -- what the scheduler asks -------------------------------------------------------------------------------------

    def get_kv_size_bytes(self) -> int:
        """Bytes of all tensors of this worker."""
        return sum(storage.nbytes for _, _, storage in self.tensors())

    def clear_unaccepted_c128_draft_states(self, *args: object, **kwargs: object) -> None:
        """Nothing to clear after a speculative step: rows of rejected tokens are overwritten before they are read."""

    # -- what these pools do not do ----------------------------------------------------------------------------------

    def _unsupported(self, what: str) -> NoReturn:
        raise NotImplementedError(f"sglang-dsv4's KV pools do not support {what}")

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Window rows are rings; there is no full -> SWA slot mapping."""
        self._unsupported("SGLang's paged sliding-window pool")

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Window rows are rings; there is no full -> SWA slot mapping."""
        self._unsupported("SGLang's paged sliding-window pool")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows are reached through `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows are reached through `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows are reached through `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def set_kv_buffer(self, *args: object, **kwargs: object) -> None:
        """Rows are reached through `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Prefill/decode disaggregation is not supported."""
        self._unsupported("prefill/decode disaggregation")

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Prefill/decode disaggregation is not supported."""
        self._unsupported("prefill/decode disaggregation")

    def get_request_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Prefill/decode disaggregation is not supported."""
        self._unsupported("prefill/decode disaggregation")

    def host_pool_decls(self) -> tuple[object, ...]:
        """Host memory is `prefix.tiers`', not SGLang's host pools."""
        self._unsupported("SGLang's host pools (they serve --disaggregation-mode)")

    def get_cpu_copy(self, indices: object, mamba_indices: object = None, req_pool_index: object = None) -> object:
        """A retracted request is computed again; no host copy of its rows is made."""
        self._unsupported("host copies of a request's KV")

    def load_cpu_copy(
        self, kv_cache_cpu: object, indices: object, mamba_indices: object = None, req_pool_index: object = None
    ) -> None:
        """A retracted request is computed again; no host copy of its rows is made."""
        self._unsupported("host copies of a request's KV")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Entries cover several tokens and cannot follow one; only draft trees would need it."""
        self._unsupported("moving single tokens (--speculative-eagle-topk above 1)")


def build_kv_pool(
    kvc: KVCacheConfigurator,
    *,
    max_running_requests: int,
    full_max_total_num_tokens: int,
    req_to_token_pool: ReqToTokenPool,
    **in_tree_sizes: object,
) -> Dsv4KVPool:
    """Build the worker's pool; takes the place of `KVCacheConfigurator._build_dsv4_kv_pool`.

    Args:
        max_running_requests: not used: the request slots are counted where they are handed out.
        in_tree_sizes: sizes of SGLang's own pools.
    """
    request_slots = req_to_token_pool.req_to_token.shape[0]
    geometry = geometry_of(kvc)
    pool = Dsv4KVPool(
        geometry,
        full_tokens=full_max_total_num_tokens,
        request_slots=request_slots,
        tails=None if kvc.is_draft_worker else _tail_sizes(geometry, full_max_total_num_tokens, request_slots),
        is_draft=kvc.is_draft_worker,
        device=kvc.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
    )
    if kvc.is_draft_worker:
        pool.model = kvc.model
        target = kvc.token_to_kv_pool_allocator.get_kvcache()
        target.attach_draft(pool, injected=kvc.spec_algorithm.is_dspark())
    logger.info("%s\n%s", "Draft worker" if kvc.is_draft_worker else "Target worker", pool.plan.table())
    return pool


def _tail_sizes(geometry: PoolGeometry, full_tokens: int, request_slots: int) -> TailSizes | None:
    """Tail checkpoints of a target worker, the same on all ranks; None without prefix reuse."""
    device_slots = tail_slots(full_tokens, request_slots)
    if not device_slots:
        return None
    options = TailOptions.from_environment()
    plan, group = PoolPlan.of(geometry, full_tokens, request_slots, device_slots), get_tp_group().cpu_group
    slot_bytes = int(plan.bytes_per_checkpoint)
    host_slots, host_pages = options.slots_on_host(device_slots, slot_bytes), 0
    memory = get_memory()
    if memory.enable_hierarchical_cache:
        host = HostOptions(memory.hicache_ratio, memory.hicache_size, memory.hicache_host_memory_fraction is not None)
        host_pages, tails = host.sizes(full_tokens, plan.bytes_per_token, slot_bytes)
        # That limit is taken into account; SGLang would ask for the bytes of a pool of its own.
        get_context().override("sglang_dsv4.host_pages", hicache_host_memory_fraction=None)
        if options.host_slots is None:
            host_slots = max(host_slots, tails)
    host_slots, host_pages = least_of_ranks(host_slots, group), least_of_ranks(host_pages, group)
    return TailSizes(device_slots, host_slots, options.interval_tokens, options.strict, host_pages)
