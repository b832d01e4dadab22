"""The compressor: makes an entry from each closed compression group of tokens (specification, section 3.4)."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from dsv4_kernels.compressor import Compression
from dsv4_kernels.kv_layout import RowFormat
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.layers.rope import Rotation
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import LayerKind


class Compressor(nn.Module):
    """Turns each closed group of `ratio` tokens into one normed and rotated row of `dim` channels (section 3.4).

    Everything up to the norm is fp32. A CSA layer's compression groups overlap, so its products are twice as wide.

    Args:
        config: the model's.
        layer_id: number of the layer in the caches.
        kind: CSA or HCA.
        dim: channels of an entry.
        wkv, wgate: [width(kind, dim), d]; the caller computes their products (`StackedProjection`).
        indexer: whether this is the indexer's compressor.
    """

    def __init__(
        self,
        config: Config,
        layer_id: int,
        kind: LayerKind,
        dim: int,
        wkv: nn.Parameter,
        wgate: nn.Parameter,
        indexer: bool,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.ratio = kind.ratio
        self.indexer = indexer
        # Without quantisation indexer keys are not rotated by the Hadamard matrix either: it cancels in q.k.
        self.hadamard = indexer and config.qat.indexer_fp4
        quantised = config.qat.indexer_fp4 if indexer else config.qat.kv_fp8
        stored_as = RowFormat.INDEX_FP4 if indexer else RowFormat.FP8
        self.values_of = stored_as if quantised else RowFormat.PLAIN
        self.wkv = wkv
        self.wgate = wgate
        self.ape = nn.Parameter(torch.empty(self.ratio, len(wkv), dtype=torch.float32), requires_grad=False)
        self.norm = RMSNorm(dim, config.rms_norm_eps)
        self.rope = Rotation(config, kind)

    @staticmethod
    def width(kind: LayerKind, dim: int) -> int:
        """Rows of `wkv` and of `wgate`."""
        return dim * kind.groups

    def compression(self, kv: Tensor, score: Tensor) -> Compression:
        """This compressor's argument of `compress_store`.

        Args:
            kv, score: [T, width] fp32, the sublayer's normed input times `wkv` and `wgate`.
        """
        state, table, overlap = get_attn_backend().compressor_storage(self.layer_id, indexer=self.indexer)
        return Compression(
            kv=kv,
            score=score,
            ape=self.ape,
            state=state,
            norm_weight=self.norm.weight,
            eps=self.norm.eps,
            frequencies=self.rope.frequencies,
            table=table,
            hadamard=self.hadamard,
            values_of=self.values_of,
            overlap=overlap,
        )
