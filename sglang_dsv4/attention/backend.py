"""SGLang's attention backend "dsv4": it decides which rows a forward reads and writes; kernels compute with them.

SGLang calls `init_forward_metadata*` once a forward. The layers then ask `window`, `groups` and `compressor_storage`
where their new rows go, write them, and call `select` and `attend`. Kernels come from `dsv4_kernels`, addresses from
`metadata`, storage from `sglang_dsv4.cache.kv_pool`. Before a forward `sglang_dsv4.prefix.restore_and_save` restores
tails and decides which ones the forward keeps. RadixAttention's `forward` is not used.

A forward's metadata is derived in one of two ways:

* eager: `init_forward_metadata(batch)`, in every mode;
* CUDA graph: `init_forward_metadata_in_graph` derives it with fixed shapes from the batch's lengths and request slots,
  and is captured. It reads them from the buffers that SGLang's runners fill before every replay. Decode, verify and
  draft-extend steps are such batches: every request appends the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.compressor import Groups
from dsv4_kernels.indexer import index_topk
from dsv4_kernels.kv_layout import KVRows, RowPlaces
from dsv4_kernels.norm_rope_store import Destination
from dsv4_kernels.sparse_attention import sparse_attention, unpacking
from dsv4_kernels.unpack import Pages, unpack_pages
from dsv4_radix_cache.pages import pages_for
from sglang_dsv4.attention.implementation import chosen_implementation, required_implementation
from sglang_dsv4.attention.metadata import (
    AttentionReader,
    ForwardMetadata,
    block_metadata,
    extend_metadata,
    uniform_metadata,
)
from sglang_dsv4.cache.geometry import entries_per_page
from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.cache.tail_memory import ChunkWrites, TailRows
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO
from sglang_dsv4.prefix.restore_and_save import HostBatch, TailLifecycle
from sglang_dsv4.seam.bases import SnapshotAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


ALL_TOKENS = slice(None)


class Window(NamedTuple):
    """Window rows that this forward's queries read, and destinations of its own rows."""

    rows: KVRows  # the layer's ring, or the workspace of a prefill chunk
    index: Tensor  # [T, W] int32 into `rows`, -1 = before the start of the sequence
    destinations: tuple[Destination, ...]  # written before any query reads them


class CompressorStorage(NamedTuple):
    """Storage of a compressor's raw rows and entries."""

    state: Tensor  # [S, 2, C * D] fp32: raw rows of the open compression groups
    table: KVRows  # entries, or indexer keys
    overlap: Tensor | None  # [N, 2, D] fp32: half rows of tails, if this forward writes any


@dataclass(frozen=True)
class UniformInputs:
    """Inputs of `uniform_metadata` that come from the batch."""

    first_positions: Tensor  # [B] int64
    req_slots: Tensor  # [B] int64
    tokens_per_request: int


def reader_of(runner: ModelRunner) -> AttentionReader:
    """Query heads and `index_topk` of this rank's attention, by the runner's model config."""
    config = runner.model_config
    return AttentionReader(config.num_attention_heads // get_parallel().attn_tp_size, config.hf_config.index_topk)


class Dsv4AttentionBackend(SnapshotAttentionBackend):
    """Addresses and storage of one worker's attention.

    Args:
        runner: SGLang's model runner, its pools allocated.
        draft_step: number i of one step of a multi-step draft, whose token is i positions after the committed ones;
            None: not such a step.

    Attributes:
        attention_impl: name of the attention's implementation; None lets the registry choose.

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
        self._reader = reader_of(runner) if unpacking.helps(chosen.name) else None
        self.tails = TailLifecycle(pool, runner.req_to_token_pool.req_generation)
        # SGLang reads this only with speculation; without speculation its host copies of the lengths are always right.
        # With it they depend on the accepted drafts, for which a GPU's scheduler would wait before it prepares the next
        # step.
        self.needs_cpu_seq_lens = self.device.type == "cpu"
        self.forward_metadata: ForwardMetadata | None = None
        self._max_pages = pages_for(self.req_to_token.shape[1])
        self._workspace: KVRows | None = None
        self._workspace_rows: Tensor | None = None  # [rows] int64: 0, 1, 2, ...
        self._gathered: tuple[RowPlaces, RowPlaces] | None = None  # prefixes' rows: in the workspace, and in a ring
        self._unpacked_rows: Tensor | None = None  # [rows, row_dim] bf16
        self._tail_rows: TailRows | None = None

    # -- once a forward ----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> ForwardMetadata:
        """Metadata of the current forward."""
        assert self.forward_metadata is not None, "init_forward_metadata has not run for this forward"
        return self.forward_metadata

    @property
    def num_tokens(self) -> int:
        """Tokens of the current forward."""
        return len(self.metadata.token_to_request)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Derive the metadata of an eager forward.

        Raises:
            RuntimeError: a request continues a prefix whose window rows are not in the rings of its request slot.
            NotImplementedError: the forward mode belongs to a feature that is not supported.
        """
        self._workspace = self._unpacked_rows = None
        tail_writes = self._before_forward(forward_batch)
        self._tail_rows = None if tail_writes is None else tail_writes.by_token(forward_batch.positions.shape[0])
        mode, pool = forward_batch.forward_mode, self.token_to_kv_pool
        if pool.draft is not None:
            pool.draft.set_tail_rows(self._tail_rows)
        elif pool.tail_rows is not None and mode.is_extend_without_speculative():
            self._tail_rows = pool.tail_rows  # a draft's prefill runs after the target's, over the same tokens
        if mode.is_idle():
            # Rows that pad a group without requests: as in a graph, each is position 0 of the null slot.
            null = torch.zeros_like(forward_batch.positions)
            self.forward_metadata = self._uniform(UniformInputs(null, null, 1), 1)
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
        """Store the largest numbers of requests and draft tokens of captured graphs."""
        self.describe_drafts(max_bs, max(1, max_num_tokens // max_bs), self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """1, the length of a padding request: its one token is at position 0 of the null slot."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The same; SGLang asks for it where it pads batches on a CPU."""
        return self.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Do the host's work before a graph's replay: only tails, since the graph reads the runner's buffers itself.

        Args:
            forward_batch: in a replay, SGLang's view of the batch. Its tensors need not be the graph's buffers: EAGLE's
                draft runner fills its buffers and hands over the batch's own tensors.
            in_capture: whether the graph is being captured, with requests that do not exist.
        """
        self._tail_rows = None  # set by a prefill before; decode steps copy tails from the rings
        if self.token_to_kv_pool.draft is not None:
            self.token_to_kv_pool.draft.set_tail_rows(None)
        if not in_capture:
            self._before_forward(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Derive the metadata from the batch's lengths and request slots: fixed shapes, no host synchronisation."""
        self._workspace = self._unpacked_rows = None
        self.forward_metadata = self._uniform(self._uniform_inputs(forward_batch), self._max_pages)

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """False: a replay must call the out-of-graph half, which does the host's work."""
        return False

    def _is_uniform(self, batch: ForwardBatch) -> bool:
        mode = batch.forward_mode
        return mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()

    def _uniform_inputs(self, batch: ForwardBatch) -> UniformInputs:
        """Inputs of `uniform_metadata`, from `seq_lens`, which counts different tokens in each mode."""
        mode, seq_lens = batch.forward_mode, batch.seq_lens.long()
        if mode.is_target_verify():  # seq_lens: committed tokens
            k, first = batch.spec_info.draft_token_num, seq_lens
        elif mode.is_draft_extend_v2():  # seq_lens: after the k tokens
            k = batch.spec_info.num_tokens_per_req  # a replay's view of the batch has no positions to count
            # A graph's padding request may be shorter than the k tokens that it appends.
            first = (seq_lens - k).clamp(min=0)
        elif self.draft_step is not None:  # seq_lens: committed tokens; `_uniform` adds the steps between
            k, first = 1, seq_lens
        elif mode.is_decode():  # seq_lens: with the new token
            k, first = 1, seq_lens - 1
        else:
            raise NotImplementedError(f"forward mode {mode.name} cannot be replayed as a CUDA graph")
        return UniformInputs(first, batch.req_pool_indices.long(), k)

    def _before_forward(self, batch: ForwardBatch) -> ChunkWrites | None:
        """Call `TailLifecycle.before_forward`, unless the batch has no requests (no request slots on the host)."""
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
        lengths, k, new = batch.seq_lens_cpu, 1, 1  # new: tokens of this forward that are counted in the lengths
        if mode.is_target_verify():
            k, new = batch.spec_info.draft_token_num, 0
            # With DSpark SGLang counts the block in `seq_lens_cpu`, and keeps the committed lengths here.
            lengths = getattr(batch.spec_info, "live_seq_lens_cpu", lengths)
        if lengths is None:
            assert not new, "SGLang knows the lengths of decoding requests on the host"
            return self.tails.before_forward(HostBatch(slots, batch.seq_lens, [k] * len(slots), is_prefill=False))
        # A group's padding requests, which have the null slot, have none of DSpark's committed lengths.
        begins = [length - new for length in lengths[: len(slots)].tolist()]
        return self.tails.before_forward(HostBatch(slots[: len(begins)], begins, [k] * len(begins), is_prefill=False))

    def _num_pages(self, batch: ForwardBatch) -> int:
        """Columns of an eager batch's page table: enough for its longest request, or all if lengths are unknown."""
        lengths = None
        if self.device.type == "cpu":
            lengths = batch.seq_lens
        elif batch.forward_mode.is_decode() and self.draft_step is None:
            lengths = batch.seq_lens_cpu  # in a speculative step they may be older than the device's
        if lengths is None or not lengths.numel():
            return self._max_pages
        tokens = int(lengths.max()) + max(1, self.token_to_kv_pool.geometry.draft_tokens)
        return min(self._max_pages, pages_for(tokens))

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
            reader=self._reader,
        )

    # -- once a layer ------------------------------------------------------------------------------------------------

    def window(self, layer_id: int) -> Window:
        """Window rows that this forward's queries read, and the destinations of its own rows.

        In a prefill the rows of the prefixes are copied into the workspace here, before the ring is written: a chunk's
        last rows may overwrite ring rows of its prefix.
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
        """Compression groups that this forward may close in a layer with entries, and the raw rows that it keeps."""
        groups = self.metadata.compress[self.token_to_kv_pool.geometry.layer_ratio(layer_id)]
        if self._tail_rows is None or groups.ratio != CSA_RATIO:
            return groups
        return replace(groups, overlap_rows=self._tail_rows.overlap)

    def compressor_storage(self, layer_id: int, *, indexer: bool = False) -> CompressorStorage:
        """Storage of the layer's main compressor, or of its indexer's compressor."""
        pool = self.token_to_kv_pool
        overlap = None
        if self._tail_rows is not None and pool.geometry.layer_ratio(layer_id) == CSA_RATIO:
            overlap = pool.tail_memory.overlap_rows(layer_id, indexer=indexer)
        if indexer:
            return CompressorStorage(pool.indexer_state(layer_id), pool.index_keys(layer_id), overlap)
        return CompressorStorage(pool.compressor_state(layer_id), pool.entries(layer_id), overlap)

    def select(
        self,
        layer_id: int,
        q: Tensor,
        head_weights: Tensor,
        top_k: int,
        tokens: slice = ALL_TOKENS,
    ) -> Tensor:
        """The entry rows that the lightning indexer selects, [T, top_k] int32, padded with -1, as `attend` takes them.

        Args:
            layer_id: a CSA layer.
            q: [T, index_heads, index_dim].
            head_weights: [T, index_heads] fp32.
            top_k: most entries of a token.
            tokens: the slice of the forward's tokens that are in q.
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
            row_pages=meta.unpack.page_table if CSA_RATIO in meta.unpacked_ratios else None,
            prefill=not meta.window_in_ring,
        )

    def attend(
        self,
        layer_id: int,
        q: Tensor,
        window: Window,
        selected: Tensor | None,
        sink: Tensor,
        scale: float,
        tokens: slice = ALL_TOKENS,
        out: Tensor | None = None,
    ) -> Tensor:
        """One softmax over window rows, entries and sink: [T, H, row_dim] in q's dtype.

        Args:
            layer_id: the layer.
            q: [T, H, row_dim].
            window: the result of `window` for this layer.
            selected: rows from `select` in a CSA layer, visible ones first; else None (HCA reads all visible entries).
            sink: [H] fp32.
            scale: factor of the scores.
            tokens: the slice of the forward's tokens that are in q and `selected`.
            out: where to write the result, or None for new memory.
        """
        meta, pool = self.metadata, self.token_to_kv_pool
        ratio = pool.geometry.layer_ratio(layer_id)
        assert (selected is not None) == (ratio == CSA_RATIO), f"layer {layer_id} has ratio {ratio}"
        dense = ratio == HCA_RATIO
        window_rows, entries, page_table = window.rows, pool.entries(layer_id) if ratio else None, meta.page_table
        if ratio in meta.unpacked_ratios:
            window_rows, entries = self._unpacked(ratio, window_rows, entries)
            page_table = meta.unpack.page_table
        return sparse_attention(
            q,
            window_rows,
            window.index[tokens],
            entries=entries,
            entry_indices=selected,
            page_table=page_table if dense else None,
            entries_per_page=entries_per_page(HCA_RATIO) if dense else 0,
            token_to_request=meta.token_to_request[tokens] if dense else None,
            visible=meta.visible[ratio][tokens] if ratio else None,
            sink=sink,
            scale=scale,
            split_keys=meta.split_keys,
            out=out,
            impl=self.attention_impl,
        )

    def _unpacked(self, ratio: int, window: KVRows, entries: KVRows | None) -> tuple[KVRows, KVRows | None]:
        """Window rows and the requests' entries as bf16 rows, in a buffer that the forward's layers share.

        If the attention is the reference, the unpacking is its reference too: a comparison then tests both kernels.
        """
        impl = "ref" if self.attention_impl == "ref" else None
        plan, per_page = self.metadata.unpack, entries_per_page(ratio) if ratio else 0
        needed = window.num_rows + len(plan.pages) * per_page
        if self._unpacked_rows is None or len(self._unpacked_rows) < needed:
            self._unpacked_rows = None  # freed first, so that the larger buffer may reuse its memory
            self._unpacked_rows = torch.empty(needed, window.row_dim, dtype=torch.bfloat16, device=self.device)
        parts = [Pages(window, plan.window_rows, 1)]
        if entries is not None:
            parts.append(Pages(entries, plan.pages, per_page))
        window, *others = unpack_pages(parts, self._unpacked_rows, impl)
        return window, others[0] if others else None
