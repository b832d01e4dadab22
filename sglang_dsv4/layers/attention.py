"""The attention sublayer with sharded heads; forward() follows the specification, section 3, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import set_weight_attrs
from torch import Tensor, nn

from dsv4_kernels.compressor import compress_store
from dsv4_kernels.norm_rope_store import Destination, norm_rope_store
from sglang_dsv4.attention.backend import ALL_TOKENS
from sglang_dsv4.layers import graph_breaks
from sglang_dsv4.layers.all_heads import AllHeads
from sglang_dsv4.layers.compressor import Compressor
from sglang_dsv4.layers.concurrent import together
from sglang_dsv4.layers.grouped_projection import GroupedProjection
from sglang_dsv4.layers.indexer import Indexer
from sglang_dsv4.layers.linear import (
    Fp8Input,
    StackedProjection,
    SublayerInput,
    load_row_shard,
    quantises_once,
    some_tokens,
)
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.layers.peer_sums import Part
from sglang_dsv4.layers.rank_sum import output_of_attention
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, RowShards
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import LayerKind

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig


class Attention(nn.Module):
    """Multi-query attention over a window and, depending on the kind of layer, compressed entries.

    Query heads, sinks and output groups are sharded over the ranks that share a request (all ranks of tensor
    parallelism, or a group of them, see `data_parallel`); the single KV row, the compressor, the indexer and all caches
    are replicated.

    Args:
        config: the model's.
        layer_id: number of the layer in the caches.
        kind: of the layer; decides which entries it attends to.
        quant_config: for its FP8 linear layers, see `quantised_linear_config`.
        prefix: name of this module in the model, for SGLang's quantisation methods.
    """

    def __init__(
        self, config: Config, layer_id: int, kind: LayerKind, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        ranks = get_parallel().attn_tp_size  # a divisor of o_groups, see `model_config.topology`
        self.config = config
        self.layer_id = layer_id
        self.num_local_heads = config.num_attention_heads // ranks
        heads, dim = config.num_attention_heads, config.head_dim

        # Rows of wq_a, then rows of wkv: one product and one quantisation of the input for both.
        self.wqkv_a = MergedColumnParallelLinear(
            config.hidden_size,
            [config.q_lora_rank, dim],
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wqkv_a",
            parallel_group="replicated",
        )
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = ColumnParallelLinear(
            config.q_lora_rank,
            heads * dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
            parallel_group="attn_tp",
        )
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.empty(self.num_local_heads, dtype=torch.float32), requires_grad=False)
        self.wo_a = GroupedProjection(config)
        set_weight_attrs(self.attn_sink, {"weight_loader": load_row_shard(get_parallel().attn_tp_rank)})
        self.wo_b = RowParallelLinear(
            config.o_groups * config.o_lora_rank,
            config.hidden_size,
            bias=False,
            reduce_results=False,  # `project` sums over the ranks
            quant_config=quant_config,
            prefix=f"{prefix}.wo_b",
            parallel_group="attn_tp",
        )
        self.quantises = quantises_once(config)
        self.projection = self.compressor = self.indexer = None
        if kind is not LayerKind.SWA:
            widths = [Compressor.width(kind, dim)] * 2 + (list(Indexer.widths(config)) if kind is LayerKind.CSA else [])
            self.projection = StackedProjection(config.hidden_size, widths)
            wkv, wgate, *of_indexer = self.projection.parameters_of()
            self.compressor = Compressor(config, layer_id, kind, dim, wkv, wgate, indexer=False)
            if of_indexer:
                self.indexer = Indexer(config, layer_id, *of_indexer, quant_config, f"{prefix}.indexer")
        self.rope = Rotation(config, kind)
        self.all_heads: AllHeads | None = None

    def share_rows(self) -> None:
        """Let a rank attend for its own rows only where rows are sharded."""
        self.all_heads = AllHeads(self.wq_b, self.wo_a, self.wo_b, self.attn_sink, self.quantises)

    def forward(self, x: SublayerInput, positions: Tensor, rows: RowShards = ALL_ROWS) -> Tensor | Part:
        """The sublayer's output [T, d] in the model's dtype, for this rank's rows, or this rank's part of it for the
        next boundary; `positions [T]` int64."""
        tokens, indexer, all_heads = len(positions), self.indexer, self._all_heads(rows)
        attends = rows.own if all_heads else ALL_TOKENS
        latents, projected = together(
            tokens,
            lambda: self.wqkv_a(x.of_linear)[0],
            self.projection and (lambda: self.projection(x.rows)),
            products=True,
        )
        q_latent, kv = latents.split((self.config.q_lora_rank, self.config.head_dim), -1)
        q_latent = self.q_norm.of_linear(q_latent[attends], self.quantises)
        index_latent = q_latent if all_heads or rows.is_whole else some_tokens(q_latent, rows.own)
        q, index_q = together(
            tokens,
            lambda: all_heads.queries(q_latent) if all_heads else self.wq_b(q_latent)[0],
            indexer and (lambda: indexer.query(index_latent)),
            products=True,
        )
        q = q.unflatten(-1, (-1, self.config.head_dim))
        if not graph_breaks.has_breaks():
            return self.project(self.attend(q, kv, positions, projected, index_q, rows), positions, rows)
        o = torch.empty_like(q)
        self._attend_into(o, q, kv, positions, projected, index_q, rows)
        return self.project(o, positions, rows)

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        projected: tuple[Tensor, ...] | None,
        index_q: Tensor | None,
        rows: RowShards,
        out: Tensor | None = None,
    ) -> Tensor:
        """Store this forward's rows, entries and keys, and attend: the part of the sublayer that reads the batch.

        Args:
            q: [T, local heads, head_dim] before RoPE; [own tokens, heads, head_dim] where the rank attends for its own
                rows.
            kv: [T, head_dim] before the norm.
            positions: [T] int64.
            projected: products of the sublayer's input with the matrices of the compressor and the indexer, [T, ...].
            index_q: [own tokens, index heads, index_head_dim] in a CSA layer.
            rows: this rank's share of the rows.
            out: where to write the result, or None for new memory.

        Returns:
            like q.
        """
        backend, indexer, all_heads = get_attn_backend(), self.indexer, self._all_heads(rows)
        attends = rows.own if all_heads else ALL_TOKENS
        window = backend.window(self.layer_id)

        def rotate_and_store() -> Tensor:
            if all_heads is None:
                return self.norm_rope_store(q, kv, positions, window.destinations)
            self.store_rows(kv, positions, window.destinations)
            return self.norm_rope_store(q, kv[attends], positions[attends], ())

        rotated, _, index_query = together(
            len(positions),
            rotate_and_store,
            projected and (lambda: self.store_entries(projected, kv.dtype)),
            indexer and (lambda: indexer.rotated(index_q, projected[2], positions, rows)),
        )
        selected = indexer.select(*index_query, rows) if indexer else None
        if selected is not None and all_heads is None:
            selected = rows.gather(selected)
        sink = all_heads.sink if all_heads else self.attn_sink
        scale = self.config.softmax_scale
        return backend.attend(self.layer_id, rotated, window, selected, sink, scale, attends, out)

    @graph_breaks.break_into
    def _attend_into(
        self,
        o: Tensor,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        projected: tuple[Tensor, ...] | None,
        index_q: Tensor | None,
        rows: RowShards,
    ) -> None:
        """Write the result of `attend` for the batch's tokens, and zeros into the rows of padding tokens."""
        tokens = get_attn_backend().num_tokens
        shards = rows.of_first(tokens)
        own_tokens = tokens if shards.is_whole else shards.own.stop - shards.own.start
        queries = own_tokens if self._all_heads(rows) else tokens
        self.attend(
            q[:queries],
            kv[:tokens],
            positions[:tokens],
            projected and tuple(product[:tokens] for product in projected),
            None if index_q is None else index_q[:own_tokens],
            shards,
            o[:queries],
        )
        o[queries:].zero_()

    def _all_heads(self, rows: RowShards) -> AllHeads | None:
        """The weights with which a rank attends for its own rows; None where it attends for all with its own heads."""
        return None if rows.is_whole else self.all_heads

    def norm_rope_store(self, q: Tensor, kv: Tensor, positions: Tensor, destinations: Sequence[Destination]) -> Tensor:
        """The op of this name with this layer's weight and angles: the queries `q [T, heads, head_dim]`, rotated."""
        return norm_rope_store(
            q,
            kv,
            self.kv_norm.weight,
            positions,
            self.rope.frequencies,
            self.config.rms_norm_eps,
            destinations,
            qat=self.config.qat.kv_fp8,
        )

    def store_rows(self, kv: Tensor, positions: Tensor, destinations: Sequence[Destination]) -> None:
        """Store window rows of tokens without queries here; `kv [T, head_dim]` before the norm."""
        # The op needs a query: one head, whose result is not read.
        self.norm_rope_store(kv.unsqueeze(1), kv, positions, destinations)

    def store_entries(self, projected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        """Store the entries, and in a CSA layer the indexer's keys, of the compression groups that this forward closes.

        Args:
            projected: the products of the sublayer's input with the matrices of the compressor and the indexer.
            dtype: of the model.
        """
        compressions = [self.compressor.compression(*projected[:2])]
        if self.indexer is not None:
            compressions.append(self.indexer.compressor.compression(*projected[3:]))
        compress_store(get_attn_backend().groups(self.layer_id), compressions, dtype)

    def store_context(self, x: Tensor | Fp8Input, positions: Tensor, destinations: Sequence[Destination]) -> None:
        """Store window rows of a DSpark draft's context, tokens that do not pass through this layer.

        Args:
            x: [T, d], in place of the sublayer's input; quantised already if `quantises` is set.
            positions: [T] int64.
            destinations: tables and rows to write to.
        """
        kv = self.wqkv_a(x)[0].split((self.config.q_lora_rank, self.config.head_dim), -1)[1]
        self.store_rows(kv, positions, destinations)

    def project(self, o: Tensor, positions: Tensor, rows: RowShards) -> Tensor | Part:
        """The sublayer's output as `forward` returns it, from the attention's `o [T, local heads, head_dim]`, or from
        [own tokens, heads, head_dim] where the rank attends for its own rows."""
        all_heads = self._all_heads(rows)
        if all_heads is not None:
            return rows.pad_own(all_heads.project(o, positions[rows.own], self.rope))
        return output_of_attention(self.wo_b(self.wo_a(o, positions, self.rope, self.quantises))[0], rows)
