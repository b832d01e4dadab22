"""The compressor: closed groups of tokens become entries (specification, section 3.4)."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from dsv4_kernels.linear import linear_fp32
from sglang_dsv4.config import Config
from sglang_dsv4.layer_kinds import LayerKind
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.layers.rope import Rotation


class Compressor(nn.Module):
    """Turns each closed group of `ratio` tokens into one normed and rotated row of `dim` channels (section 3.4).

    All of it is fp32 up to the norm, weights too. A CSA layer's groups overlap, so its products are twice as wide.
    """

    def __init__(self, config: Config, layer_id: int, kind: LayerKind, dim: int, indexer: bool) -> None:
        super().__init__()
        width = dim * kind.groups
        self.layer_id = layer_id
        self.ratio = kind.ratio
        self.indexer = indexer
        self.wkv = nn.Parameter(torch.empty(width, config.hidden_size, dtype=torch.float32), requires_grad=False)
        self.wgate = nn.Parameter(torch.empty(width, config.hidden_size, dtype=torch.float32), requires_grad=False)
        self.ape = nn.Parameter(torch.empty(self.ratio, width, dtype=torch.float32), requires_grad=False)
        self.norm = RMSNorm(dim, config.rms_norm_eps)
        self.rope = Rotation(config, kind)

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
        return self.rope(entries, backend.entry_positions(self.ratio))
