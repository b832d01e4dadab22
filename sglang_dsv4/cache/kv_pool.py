"""The KV pools: entries and indexer keys by FULL slot, window and compressor rings by request slot; tails; host memory.

Bytes only: `sglang_dsv4.prefix` decides which request owns which rows.

The pool is a subclass of SGLang's (`RingWindowKVPool`) only to pass SGLang's isinstance checks: only this project's
code reads its window.

Rows are found by arithmetic alone, so nothing is allocated, freed or reset:

    entry j of ratio r   full_slot(j*r) // r                                    follows the FULL page
    window row of t      `dsv4_radix_cache.ring.ring_row`, of ring_rows rows    follows the request slot
    raw row of t         the same function, of state_rows rows                  follows the request slot

A new request in a used request slot reads only rows that were written or restored for it: there are no rows of
positions before the sequence's first token. Rejected drafts need no rollback either (`draft_rollback`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from dsv4_kernels.kv_layout import PAGE_ROWS, KVRows, RowFormat
from sglang_dsv4.cache import transfer
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.host_records import HostRecords
from sglang_dsv4.cache.page_copies import PageCopies
from sglang_dsv4.cache.page_records import PageRecords
from sglang_dsv4.cache.pool_plan import PACKED_PAGES, PoolPlan
from sglang_dsv4.cache.request_copy import RequestCopy
from sglang_dsv4.cache.tail_memory import TailMemory, TailRows
from sglang_dsv4.cache.tail_options import TailSizes
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS, LayerKind
from sglang_dsv4.seam.bases import RingWindowKVPool

if TYPE_CHECKING:
    from dsv4_radix_cache.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class DraftOf:
    """The connection of a draft worker's pool to its target."""

    target: Dsv4KVPool
    model: torch.nn.Module
    """Computes the draft's rows."""
    injected: bool
    """Whether SGLang's DSpark worker stores rows of the target's computation, in rings of `swa_req_ring_size` rows."""


class Dsv4KVPool(RingWindowKVPool):
    """All cache tensors of one worker (target or draft).

    Attributes:
        geometry: dimensions.
        plan: the allocation, to the byte. A draft worker's tensors are also in its target's plan.
        ring_generation: [request_slots] int64 on the host: `ReqToTokenPool.req_generation` of the request whose rows
            are in a request slot's rings, 0 if none. A request that continues a prefix must find its own number there.
        tail_memory: bytes of the tails; a draft shares its target's. None without prefix reuse.
        page_copies: copies between pages and host memory; None without `--enable-hierarchical-cache`.
        ledger: which request writes and restores which tail. The pool only carries it, from the code that builds the
            pool to the hooks that find it there. None without prefix reuse.
        draft: the pool of this target's draft worker, whose window rows are in the tails too.
        model: a draft's model, which computes its rows.
        tail_rows: in a draft's pool, the rows of the target's tails that the tokens of the prefill in progress write.
        packed_pages: HCA pages in the form in which they travel to another server; None where they need no packing.
        layout: description of the rows and pages; two servers exchange pages and rings only if theirs are equal.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        full_tokens: int,
        request_slots: int,
        device: str,
        tails: TailSizes | None = None,
        ledger: Ledger | None = None,
        draft_of: DraftOf | None = None,
        enable_memory_saver: bool = False,
        layout: str = "",
    ) -> None:
        """Allocate everything.

        Args:
            geometry: dimensions.
            full_tokens: tokens that SGLang may hand out, a multiple of 256.
            request_slots: running requests + 1.
            device: of the tensors.
            tails: tail slots and host pages; None for no prefix reuse.
            ledger: carried along, see above.
            draft_of: the target of a draft worker's pool; None for a target's pool.
            enable_memory_saver: SGLang's.
            layout: see above.
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
        self.is_draft = draft_of is not None
        self.ring_generation = torch.zeros(request_slots, dtype=torch.int64)
        self.ledger = ledger
        self.draft: Dsv4KVPool | None = None
        self.model: torch.nn.Module | None = None
        self.tail_rows: TailRows | None = None
        self.layout = layout
        self.packed_pages: transfer.PackedPages | None = None
        self._packed: torch.Tensor | None = None
        self.tail_memory: TailMemory | None = None
        self._tensors: dict[str, dict[int, KVRows | torch.Tensor]] = {}
        # [layers, ...] of all request slots: the tensors that a tail copies at once
        self.rings: dict[str, torch.Tensor] = {}
        # [layers, ...] of all rows that follow FULL pages: the tensors that a page record copies at once
        self.tables: dict[str, torch.Tensor] = {}
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            for spec in self.plan.pools:
                # The draft worker allocates its own rings; tails are laid out slot by slot (`tail_memory`).
                if spec.name == PACKED_PAGES:
                    self._packed, _ = spec.allocate_stack(device)
                elif spec.name != "draft window rings" and spec.per != "tail":
                    stack, rows = spec.allocate_stack(device)
                    self._tensors[spec.name] = dict(zip(spec.layers, rows, strict=True))
                    (self.rings if spec.per == "request" else self.tables)[spec.name] = stack
            if tails is not None:
                self.tail_memory = TailMemory(geometry, self.rings, device, tails.device_slots, tails.host_slots)
        if self._packed is not None:
            self.packed_pages = transfer.PackedPages(*self.table(transfer.HCA_ENTRIES), self._packed)
        self.mem_usage = self.get_kv_size_bytes() / (1 << 30)
        self.page_copies = self._make_page_copies(tails.host_pages) if tails and tails.host_pages else None
        if draft_of is not None:
            self._join(draft_of)

    def _make_page_copies(self, host_pages: int) -> PageCopies:
        records = HostRecords(self.page_records(), host_pages)
        return PageCopies(records, self.tail_memory, on_gpu=records.records.device.type == "cuda")

    def _join(self, draft_of: DraftOf) -> None:
        self.model = draft_of.model
        if draft_of.injected:
            self.swa_req_ring_size = self.geometry.ring_rows
        self.tail_memory = draft_of.target.tail_memory
        draft_of.target.attach_draft(self)

    def attach_draft(self, draft: Dsv4KVPool) -> None:
        """Let the tails hold the window rows of this draft too."""
        self.draft = draft
        if self.tail_memory is not None:
            self.tail_memory.attach_draft(draft.rings["window rings"])

    def set_tail_rows(self, rows: TailRows | None) -> None:
        """Set the rows of the target's tails that the tokens of this draft's next prefill write; None for none."""
        self.tail_rows = rows

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
        """Windows of a layer in the tails; a draft's are in its target's. Tail slot s has rows [128 s, 128 s + 128)."""
        return self.tail_memory.window_rows(layer_id, draft=self.is_draft)

    def page_records(self) -> PageRecords:
        """The layout of this pool's page records."""
        tables = {name: self.table(name) for name in self.tables}
        return PageRecords(self.geometry.ratios, tables, self.device, self.packed_pages)

    def table(self, name: str) -> tuple[KVRows, int]:
        """All layers of a table that follows FULL pages ("CSA entries", "HCA entries", "indexer keys") as one table.

        Returns:
            The rows, layer after layer, with the padding of a byte format between the layers; and the number of layers.
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
        """(pool name, layer id, tensor) of every allocated tensor."""
        for name, layers in self._tensors.items():
            for layer_id, rows in layers.items():
                yield name, layer_id, rows.storage if isinstance(rows, KVRows) else rows
        if self._packed is not None:
            yield PACKED_PAGES, self.geometry.first_layer, self._packed  # all layers in one
        if self.tail_memory is not None and not self.is_draft:
            for name, tensor in self.tail_memory.tensors():
                yield name, self.geometry.first_layer, tensor  # all layers in one

    # -- methods that the scheduler calls ----------------------------------------------------------------------------

    def get_kv_size_bytes(self) -> int:
        """Bytes of all tensors of this worker."""
        return sum(storage.nbytes for _, _, storage in self.tensors())

    def clear_unaccepted_c128_draft_states(self, *args: object, **kwargs: object) -> None:
        """Nothing to clear after a speculative step (`draft_rollback`)."""

    # -- transfers to another server, and of a retracted request to the host and back --------------------------------

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """The buffers whose items are FULL pages: addresses, bytes, bytes of an item. Empty for a draft."""
        return transfer.page_buffers({name: self._tensors[name].values() for name in self.tables}, self._packed)

    def ring_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """The buffers whose items are request slots: addresses, bytes, bytes of an item."""
        return transfer.ring_buffers(self.rings, self.plan.request_slots)

    def pd_kv_layout(self) -> str:
        """The layout in which another server must agree; SGLang compares it before the first transfer."""
        return self.layout

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: object = None, req_pool_index: int | None = None
    ) -> RequestCopy:
        """A copy in host memory of a request's pages and rings, a draft's too.

        Args:
            indices: [tokens] full slots of the request's tokens.
            mamba_indices: not used; SGLang's.
            req_pool_index: its request slot.
        """
        return RequestCopy.save(self.page_records(), self._rings_with_draft(), indices, req_pool_index)

    def load_cpu_copy(
        self,
        kv_cache_cpu: RequestCopy,
        indices: torch.Tensor,
        mamba_indices: object = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Copy a request's pages and rings back, to other full slots and another request slot (see `get_cpu_copy`)."""
        kv_cache_cpu.load(self.page_records(), self._rings_with_draft(), indices, req_pool_index)

    def _rings_with_draft(self) -> list[torch.Tensor]:
        """Every ring as [layers, request_slots, bytes] uint8."""
        pools = (self,) if self.draft is None else (self, self.draft)
        slots = self.plan.request_slots
        return [ring.view(torch.uint8).view(len(ring), slots, -1) for pool in pools for ring in pool.rings.values()]

    # -- what these pools do not do ----------------------------------------------------------------------------------

    def _unsupported(self, what: str) -> NoReturn:
        raise NotImplementedError(f"sglang-dsv4's KV pools do not support {what}")

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Not supported: window rows are rings, without a full -> SWA slot mapping."""
        self._unsupported("SGLang's paged sliding-window pool")

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Not supported: window rows are rings, without a full -> SWA slot mapping."""
        self._unsupported("SGLang's paged sliding-window pool")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Not supported: attention reads `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Not supported: attention reads `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Not supported: attention reads `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def set_kv_buffer(self, *args: object, **kwargs: object) -> None:
        """Not supported: attention reads `window` and `entries`."""
        self._unsupported("attention backends other than dsv4 of sglang-dsv4")

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Not supported: rings travel by request slot, as `sglang_dsv4.disaggregation.buffers` lists them."""
        self._unsupported("transfers of SGLang's paged sliding-window pool")

    def get_request_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Not supported: rings travel by request slot, as `sglang_dsv4.disaggregation.buffers` lists them."""
        self._unsupported("transfers of SGLang's compressor states")

    def host_pool_decls(self) -> tuple[object, ...]:
        """Host memory belongs to `page_copies`, not to SGLang's host pools."""
        self._unsupported("SGLang's host pools")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Not supported: an entry covers several tokens, so no token moves alone. Only draft trees would need it."""
        self._unsupported("moving single tokens (--speculative-eagle-topk above 1)")
