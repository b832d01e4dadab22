"""Compressed entries, and the indexer that picks among them (specification, sections 3.4 and 3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.linear import linear_fp32
from dsv4_kernels.quant import fp4_qdq, fp8_qdq, hadamard
from dsv4_kernels.rope import apply_rope
from sglang_dsv4.config import INDEX_BLOCK, KV_BLOCK, Config, LayerKind
from sglang_dsv4.layers.linear import plain_linear_config
from sglang_dsv4.layers.norm import RMSNorm

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig


def quantise_kv_row(row: Tensor, config: Config, stored_as: RowFormat) -> Tensor:
    """FP8 round trip of the channels that are not rotated, [..., head_dim] (section 3.1).

    Not for rows stored as FP8: they quantise what is written, and from this round trip's result the same values would
    in rare cases get other bytes.
    """
    if not config.qat.kv_fp8 or stored_as is RowFormat.FP8:
        return row
    nope, rope = row.split((config.nope_head_dim, config.qk_rope_head_dim), dim=-1)
    return torch.cat((fp8_qdq(nope, KV_BLOCK), rope), dim=-1)


def quantise_index_row(row: Tensor, config: Config, stored_as: RowFormat = RowFormat.PLAIN) -> Tensor:
    """Hadamard and FP4 round trip, [..., index_head_dim]. Switched off, neither: the rotation cancels in q.k.

    Rows stored as FP4 quantise what is written, so they get the rotation only.
    """
    if not config.qat.indexer_fp4:
        return row
    rotated = hadamard(row)
    return rotated if stored_as is RowFormat.INDEX_FP4 else fp4_qdq(rotated, INDEX_BLOCK)


class Compressor(nn.Module):
    """Turns each closed group of `ratio` tokens into one normed and rotated row of `dim` channels (section 3.4).

    All of it is fp32 up to the norm, weights too. A CSA layer's groups overlap, so its products are twice as wide.
    """

    def __init__(self, config: Config, layer_id: int, kind: LayerKind, dim: int, indexer: bool) -> None:
        super().__init__()
        width = dim * (2 if kind is LayerKind.CSA else 1)
        self.layer_id = layer_id
        self.ratio = kind.ratio
        self.indexer = indexer
        self.wkv = nn.Parameter(torch.empty(width, config.hidden_size, dtype=torch.float32), requires_grad=False)
        self.wgate = nn.Parameter(torch.empty(width, config.hidden_size, dtype=torch.float32), requires_grad=False)
        self.ape = nn.Parameter(torch.empty(self.ratio, width, dtype=torch.float32), requires_grad=False)
        self.norm = RMSNorm(dim, config.rms_norm_eps)
        self.register_buffer("frequencies", config.rope(kind).frequencies(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows of the groups that this forward closes.

        Args:
            x: [T, d] model dtype, the sublayer's normed input.
            positions: [T] int64.

        Returns:
            [M, dim] model dtype, one row a closed group, in the backend's order.
        """
        backend = get_attn_backend()
        kv = linear_fp32(x, self.wkv)
        score = linear_fp32(x, self.wgate) + self.ape[positions % self.ratio]
        entries = backend.compress(self.layer_id, kv, score, indexer=self.indexer)
        entries = self.norm(entries.to(x.dtype))
        return apply_rope(entries, backend.entry_positions(self.ratio), self.frequencies)


class Indexer(nn.Module):
    """Scores every visible entry of a CSA layer and keeps the best `index_topk` (section 3.5). Replicated under TP."""

    def __init__(self, config: Config, layer_id: int, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.layer_id = layer_id
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank, heads * dim, bias=False, quant_config=quant_config, prefix=f"{prefix}.wq_b"
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size, heads, bias=False, quant_config=plain_linear_config(), prefix=f"{prefix}.weights_proj"
        )
        self.compressor = Compressor(config, layer_id, LayerKind.CSA, dim, indexer=True)
        self.weight_scale = dim**-0.5 * heads**-0.5

    def forward(self, x: Tensor, q_latent: Tensor, positions: Tensor, num_heads: int) -> Tensor:
        """Write this forward's keys, then select.

        Args:
            x: [T, d], the sublayer's normed input.
            q_latent: [T, q_lora_rank], the normed query latent of the main attention.
            positions: [T] int64.
            num_heads: of the main attention, on this rank.

        Returns:
            [T, index_topk] int32 rows of the layer's entries, -1 = hole.
        """
        backend = get_attn_backend()
        keys = self.compressor(x, positions)
        backend.write_index_keys(self.layer_id, quantise_index_row(keys, self.config, backend.index_row_format))

        q = self.wq_b(q_latent)[0].unflatten(-1, (self.config.index_n_heads, self.config.index_head_dim))
        q = apply_rope(q, positions, self.compressor.frequencies)
        q = quantise_index_row(q, self.config)
        head_weights = self.weights_proj(x)[0].float() * self.weight_scale
        return backend.select(self.layer_id, q, head_weights, self.config.index_topk, num_heads)
