"""SGLang's attention backend "dsv4": which rows, not what is computed with them.

SGLang calls `init_forward_metadata*` once a forward. The layers then ask `window`, `groups` and `compressor_storage`
where their new rows go, write them, and call `select` and `attend`. Kernels come from `dsv4_kernels`, addresses from
`metadata`, storage from `sglang_dsv4.cache.kv_pool`. What prefix reuse restores and keeps around a forward is done in
one place before either of the two ways through it, by `sglang_dsv4.prefix.tails`. RadixAttention's `forward` is not
used.

Two ways through a forward:

* eager: `init_forward_metadata(batch)`, every mode;
* CUDA graph: `init_forward_metadata_in_graph` derives everything with fixed shapes from the lengths and request slots
  of the batch, and is recorded. It reads them in the buffers that SGLang's runners fill before every replay. Decode,
  verify and draft-extend steps are such batches: every request appends the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.compressor import Groups
from dsv4_kernels.indexer import index_topk
from dsv4_kernels.kv_layout import KVRows, RowPlaces
from dsv4_kernels.norm_rope_store import Destination
from dsv4_kernels.sparse_attention import sparse_attention, unpacking
from dsv4_kernels.unpack import Pages, unpack_pages
from sglang_dsv4.attention.implementation import chosen_implementation, required_implementation
from sglang_dsv4.attention.metadata import ForwardMetadata, block_metadata, extend_metadata, uniform_metadata
from sglang_dsv4.cache.geometry import entries_per_page
from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.cache.tail_storage import ChunkWrites, TailRows
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, HCA_RATIO, SWA_RATIO
from sglang_dsv4.prefix.tails import HostBatch, Tails
from sglang_dsv4.seam.bases import SnapshotAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


ALL_TOKENS = slice(None)


class Window(NamedTuple):
    """Window rows of this forward's queries."""

    rows: KVRows  # the layer's ring, or the workspace of a prefill chunk
    index: Tensor  # [T, W] int32 into `rows`, -1 = before the start of the sequence
    destinations: tuple[Destination, ...]  # where this forward's rows go before any query reads them


class CompressorStorage(NamedTuple):
    """Where a compressor's raw rows and entries are kept."""

    state: Tensor  # [S, 2, C * D] fp32: raw rows of the open groups
    table: KVRows  # of the entries, or indexer keys
    overlap: Tensor | None  # [N, 2, D] fp32: half rows of tail checkpoints, if this forward writes any


@dataclass(frozen=True)
class UniformInputs:
    """What `uniform_metadata` is computed from."""

    first_positions: Tensor  # [B] int64
    req_slots: Tensor  # [B] int64
    tokens_per_request: int


class Dsv4AttentionBackend(SnapshotAttentionBackend):
    """Addresses and storage of one worker's attention.

    Args:
        runner: SGLang's model runner, its pools allocated.
        draft_step: for one step of a multi-step draft, its number; a step-i token stands i after the committed ones.

    Attributes:
        attention_impl: the attention's implementation by name; None leaves it to the registry.

    Raises:
        TypeError: the runner's pool is not ours (the plugin's hooks did not run).
    """

    def __init__(self, runner: ModelRunner, draft_step: int | None = None) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, Dsv4KVPool):
            raise TypeError(
                f"the dsv4 attention backend needs sglang-dsv4's KV pool, found {type(pool).__module__}."
                f"{type(pool).__name__}: is the sglang-dsv4 plugin loaded in this process?"
            )
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.device = torch.device(runner.device)
        self.draft_step = draft_step
        self.drafts_blocks = pool.is_draft and runner.spec_algorithm.is_dspark()
        self.attention_impl = required_implementation(self.device, pool.geometry.row_dim)
        chosen = chosen_implementation(self.device, pool.geometry.dtype, pool.geometry.row_dim)
        self._unpacking_helps = unpacking.helps(chosen.name)
        self.tails = Tails(pool, runner.req_to_token_pool.req_generation)
        # Only speculation asks: without it SGLang's host copies of the lengths are always exact. With it they depend on
        # what was accepted, and a GPU's scheduler would wait for that before it prepares the next step.
        self.needs_cpu_seq_lens = self.device.type == "cpu"
        self.forward_metadata: ForwardMetadata | None = None
        self._max_pages = -(-self.req_to_token.shape[1] // FULL_PAGE_TOKENS)
        self._workspace: KVRows | None = None
        self._workspace_rows: Tensor | None = None  # [rows] int64: 0, 1, 2, ...
        self._unpacked_rows: Tensor | None = None  # [rows, row_dim] bf16
        self._tail_rows: TailRows | None = None

    # -- once a forward ----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> ForwardMetadata:
        """Metadata of the forward in progress."""
        assert self.forward_metadata is not None, "init_forward_metadata has not run for this forward"
        return self.forward_metadata

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Derive the metadata of an eager forward.

        Raises:
            RuntimeError: a request continues a prefix whose window rows are not in its slot's rings.
            NotImplementedError: a forward mode of a feature that is not supported.
        """
        self._workspace = self._unpacked_rows = None
        tail_writes = self._before_forward(forward_batch)
        self._tail_rows = None if tail_writes is None else tail_writes.by_token(forward_batch.positions.shape[0])
        mode, pool = forward_batch.forward_mode, self.token_to_kv_pool
        if pool.draft is not None:
            pool.draft.tail_rows = self._tail_rows
        elif pool.tail_rows is not None and mode.is_extend_without_speculative():
            self._tail_rows = pool.tail_rows  # a draft's prefill, of the same tokens as the target's before it
        if mode.is_idle():
            self.forward_metadata = self._extend([], [], forward_batch)
        elif self._is_uniform(forward_batch):
            inputs = self._uniform_inputs(forward_batch)
            self.forward_metadata = self._uniform(inputs, self._num_pages(forward_batch))
        elif mode.is_extend_or_draft_extend_or_mixed() and not mode.is_split_prefill():
            prefix_lens, extend_lens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
            assert prefix_lens is not None and extend_lens is not None, "extend batches carry their lengths on the host"
            self.forward_metadata = self._extend(prefix_lens, extend_lens, forward_batch)
        else:
            raise NotImplementedError(f"sglang-dsv4 does not support forward mode {mode.name}")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Note how many requests and draft tokens captured graphs have at most."""
        self.describe_drafts(max_bs, max(1, max_num_tokens // max_bs), self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding request: one token, at position 0 of the null slot."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """What the host does before a graph's replay. The graph reads what SGLang's runner has filled, so nothing is
        launched here, but for tail checkpoints.

        Args:
            forward_batch: in a replay, SGLang's view of the batch. Its tensors need not be those that the graph reads:
                EAGLE's draft runner fills its buffers and hands over the batch's own.
            in_capture: the graph is being recorded, of requests that do not exist.
        """
        self._tail_rows = None  # of a prefill before it; these steps save rings
        if self.token_to_kv_pool.draft is not None:
            self.token_to_kv_pool.draft.tail_rows = None
        if not in_capture:
            self._before_forward(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Derive the metadata from the batch's lengths and slots: fixed shapes, no host synchronisation."""
        self._workspace = self._unpacked_rows = None
        self.forward_metadata = self._uniform(self._uniform_inputs(forward_batch), self._max_pages)

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """The out-graph half has the host's part, so a replay may not skip it."""
        return False

    def _is_uniform(self, batch: ForwardBatch) -> bool:
        mode = batch.forward_mode
        return mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()

    def _uniform_inputs(self, batch: ForwardBatch) -> UniformInputs:
        """First new position of each request, by what SGLang means by `seq_lens` in each mode."""
        mode, seq_lens = batch.forward_mode, batch.seq_lens.long()
        if mode.is_target_verify():  # seq_lens: committed tokens
            k, first = batch.spec_info.draft_token_num, seq_lens
        elif mode.is_draft_extend_v2():  # seq_lens: after the k tokens
            k = batch.spec_info.num_tokens_per_req  # the view of a replay has no positions to count
            # A padding request of a graph may be shorter than the tokens it is given.
            first = (seq_lens - k).clamp(min=0)
        elif self.draft_step is not None:  # seq_lens: committed tokens; `_uniform` adds the steps between
            k, first = 1, seq_lens
        elif mode.is_decode():  # seq_lens: with the new token
            k, first = 1, seq_lens - 1
        else:
            raise NotImplementedError(f"forward mode {mode.name} cannot be replayed as a CUDA graph")
        return UniformInputs(first, batch.req_pool_indices.long(), k)

    def _before_forward(self, batch: ForwardBatch) -> ChunkWrites | None:
        """The one call of `Tails.before_forward`; batches without request slots on the host are nobody's requests."""
        mode, slots = batch.forward_mode, getattr(batch, "req_pool_indices_cpu", None)
        if slots is None or mode.is_idle() or self.draft_step is not None:
            return None
        slots = slots.tolist()
        if not self._is_uniform(batch):
            prefix_lens, extend_lens = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
            if prefix_lens is None or extend_lens is None:
                return None  # a mode that `init_forward_metadata` refuses
            return self.tails.before_forward(HostBatch(slots, list(prefix_lens), list(extend_lens), is_prefill=True))
        if self.tails.keeps_nothing or mode.is_draft_extend_v2():
            return None
        lengths, k, new = batch.seq_lens_cpu, 1, 1  # new: tokens of this forward that the lengths count
        if mode.is_target_verify():
            k, new = batch.spec_info.draft_token_num, 0
            # With DSpark SGLang counts the block in `seq_lens_cpu`, and keeps the committed lengths here.
            lengths = getattr(batch.spec_info, "live_seq_lens_cpu", lengths)
        if lengths is None:
            assert not new, "SGLang knows the lengths of decoding requests on the host"
            return self.tails.before_forward(HostBatch(slots, batch.seq_lens, [k] * len(slots), is_prefill=False))
        begins = [length - new for length in lengths[: len(slots)].tolist()]
        return self.tails.before_forward(HostBatch(slots, begins, [k] * len(slots), is_prefill=False))

    def _num_pages(self, batch: ForwardBatch) -> int:
        """Columns of an eager batch's page table: all that the context could need, or fewer if the host knows."""
        lengths = None
        if self.device.type == "cpu":
            lengths = batch.seq_lens
        elif batch.forward_mode.is_decode() and self.draft_step is None:
            lengths = batch.seq_lens_cpu  # of a speculative step the host may know an older state
        if lengths is None or not lengths.numel():
            return self._max_pages
        tokens = int(lengths.max()) + max(1, self.token_to_kv_pool.geometry.draft_tokens)
        return min(self._max_pages, -(-tokens // FULL_PAGE_TOKENS))

    def _uniform(self, inputs: UniformInputs, num_pages: int) -> ForwardMetadata:
        pool, first_positions = self.token_to_kv_pool, inputs.first_positions
        if self.draft_step:
            first_positions = first_positions + self.draft_step
        if self.drafts_blocks:
            return block_metadata(
                first_positions,
                inputs.req_slots,
                inputs.tokens_per_request,
                self.req_to_token,
                pool.geometry,
                pool.plan.request_slots,
            )
        return uniform_metadata(
            first_positions,
            inputs.req_slots,
            inputs.tokens_per_request,
            self.req_to_token,
            num_pages,
            pool.geometry,
            pool.plan.request_slots,
        )

    def _extend(self, prefix_lens: list[int], extend_lens: list[int], batch: ForwardBatch) -> ForwardMetadata:
        pool, slots = self.token_to_kv_pool, getattr(batch, "req_pool_indices_cpu", None)
        return extend_metadata(
            prefix_lens,
            extend_lens,
            batch.req_pool_indices[: len(extend_lens)].long(),
            self.req_to_token,
            pool.geometry,
            pool.plan.request_slots,
            num_tokens=batch.positions.shape[0],
            host_slots=None if slots is None else slots[: len(extend_lens)].tolist(),
        )

    # -- once a layer ------------------------------------------------------------------------------------------------

    def window(self, layer_id: int) -> Window:
        """The window rows that this forward's queries read, and where its own go.

        In a prefill the workspace gets the rows of the prefixes here, before the ring is written: a chunk's last rows
        may take the places of its prefix's.
        """
        pool, meta = self.token_to_kv_pool, self.metadata
        ring = rows = pool.window(layer_id)
        destinations = [Destination(ring, meta.ring_rows)]
        if not meta.window_in_ring:
            gathered = meta.window_gather.shape[0]
            if self._workspace is None:
                size = gathered + meta.num_tokens
                self._workspace = KVRows.allocate(
                    size, ring.format, ring.row_dim, ring.rope_dim, ring.storage.dtype, self.device
                )
                self._workspace_rows = torch.arange(size, device=self.device)
                self._gathered = RowPlaces.of(self._workspace_rows[:gathered]), RowPlaces.of(meta.window_gather)
            rows = self._workspace
            if gathered:
                to, origin = self._gathered
                rows.copy_rows(to, ring, origin)
            destinations.append(Destination(rows, self._workspace_rows[gathered:]))
        if self._tail_rows is not None:
            destinations.append(Destination(pool.tail_windows(layer_id), self._tail_rows.window))
        return Window(rows, meta.window_rows, tuple(destinations))

    def groups(self, layer_id: int) -> Groups:
        """The groups that this forward may close in a layer with entries, and which raw rows it keeps."""
        groups = self.metadata.compress[self.token_to_kv_pool.geometry.layer_ratio(layer_id)]
        if self._tail_rows is None or groups.ratio != CSA_RATIO:
            return groups
        return replace(groups, overlap_rows=self._tail_rows.overlap)

    def compressor_storage(self, layer_id: int, *, indexer: bool = False) -> CompressorStorage:
        """Storage of the layer's main compressor, or of its indexer's."""
        pool = self.token_to_kv_pool
        overlap = None
        if self._tail_rows is not None and pool.geometry.layer_ratio(layer_id) == CSA_RATIO:
            overlap = pool.tail_storage.overlap_rows(layer_id, indexer=indexer)
        if indexer:
            return CompressorStorage(pool.indexer_state(layer_id), pool.index_keys(layer_id), overlap)
        return CompressorStorage(pool.compressor_state(layer_id), pool.entries(layer_id), overlap)

    def select(
        self,
        layer_id: int,
        q: Tensor,
        head_weights: Tensor,
        top_k: int,
        num_heads: int,
        tokens: slice = ALL_TOKENS,
    ) -> Tensor:
        """The entry rows [T, top_k] int32 that the lightning indexer picks, -1 padded, as `attend` takes them.

        Args:
            q: [T, index_heads, index_dim].
            head_weights: [T, index_heads] fp32.
            num_heads: of the queries that `attend` will get: whether rows are unpacked depends on it.
            tokens: those of the forward that q has.
        """
        meta = self.metadata
        return index_topk(
            q,
            head_weights,
            self.token_to_kv_pool.index_keys(layer_id),
            meta.page_table,
            entries_per_page(CSA_RATIO),
            meta.token_to_request[tokens],
            meta.visible[CSA_RATIO][tokens],
            top_k,
            row_pages=meta.unpack.page_table if self._unpacks(CSA_RATIO, top_k, num_heads) else None,
            prefill=not meta.window_in_ring,
        )

    def attend(
        self, layer_id: int, q: Tensor, window: Window, selected: Tensor | None, sink: Tensor, scale: float
    ) -> Tensor:
        """One softmax over window rows, entries and sink: [T, H, row_dim] in q's dtype.

        Args:
            q: [T, H, row_dim].
            window: what `window` returned for this layer.
            selected: `select`'s rows on a CSA layer, the visible ones first; None on others (HCA reads all visible
                entries).
            sink: [H] fp32.
        """
        meta, pool = self.metadata, self.token_to_kv_pool
        ratio = pool.geometry.layer_ratio(layer_id)
        assert (selected is not None) == (ratio == CSA_RATIO), f"layer {layer_id} has ratio {ratio}"
        dense = ratio == HCA_RATIO
        window_rows, entries, page_table = window.rows, pool.entries(layer_id) if ratio else None, meta.page_table
        if self._unpacks(ratio, None if selected is None else selected.shape[1], q.shape[1]):
            window_rows, entries = self._unpacked(ratio, window_rows, entries)
            page_table = meta.unpack.page_table
        return sparse_attention(
            q,
            window_rows,
            window.index,
            entries=entries,
            entry_indices=selected,
            page_table=page_table if dense else None,
            entries_per_page=entries_per_page(HCA_RATIO) if dense else 0,
            token_to_request=meta.token_to_request if dense else None,
            visible=meta.visible[ratio] if ratio else None,
            sink=sink,
            scale=scale,
            split_keys=meta.split_keys,
            impl=self.attention_impl,
        )

    def _unpacks(self, ratio: int, top_k: int | None, num_heads: int) -> bool:
        """Whether the attention of such a layer reads bf16 rows that this forward unpacks from its FP8 rows.

        Args:
            ratio: of the layer.
            top_k: the most entries that a token reads, None for all.
            num_heads: of the attention, on this rank.
        """
        plan = self.metadata.unpack
        if plan is None or not self._unpacking_helps:
            return False
        rows, keys = len(plan.window_rows), plan.keys(1, self.token_to_kv_pool.geometry.window_tokens)
        if ratio == SWA_RATIO:
            return unpacking.pays(rows, keys, num_heads)
        longest = max((end for _, end in plan.spans), default=0)
        keys += plan.keys(ratio, longest if top_k is None else top_k)
        return unpacking.pays(rows + len(plan.pages) * entries_per_page(ratio), keys, num_heads)

    def _unpacked(self, ratio: int, window: KVRows, entries: KVRows | None) -> tuple[KVRows, KVRows | None]:
        """Window rows and the requests' entries as bf16 rows, in memory that the forward's layers take turns in.

        For the attention's reference by its reference: so what is compared with it has both kernels in it.
        """
        impl = "ref" if self.attention_impl == "ref" else None
        plan, per_page = self.metadata.unpack, entries_per_page(ratio) if ratio else 0
        needed = window.num_rows + len(plan.pages) * per_page
        if self._unpacked_rows is None or len(self._unpacked_rows) < needed:
            self._unpacked_rows = None  # given back first: the larger one may take its place
            self._unpacked_rows = torch.empty(needed, window.row_dim, dtype=torch.bfloat16, device=self.device)
        parts = [Pages(window, plan.window_rows, 1)]
        if entries is not None:
            parts.append(Pages(entries, plan.pages, per_page))
        window, *others = unpack_pages(parts, self._unpacked_rows, impl)
        return window, others[0] if others else None
