"""The lightning indexer of a CSA layer (specification, section 3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from dsv4_kernels.indexer import index_query
from sglang_dsv4.layers.compressor import Compressor
from sglang_dsv4.layers.linear import Fp8Input
from sglang_dsv4.layers.sequence_parallel import RowShards
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import LayerKind

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig


class Indexer(nn.Module):
    """Scores every visible entry of a CSA layer and selects the best `index_topk` (section 3.5).

    It is replicated under tensor parallelism; where rows are sharded, a rank selects for its own tokens.
    """

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights_proj: nn.Parameter,
        wkv: nn.Parameter,
        wgate: nn.Parameter,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_id = layer_id
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank, heads * dim, bias=False, quant_config=quant_config, prefix=f"{prefix}.wq_b"
        )
        self.weights_proj = weights_proj
        self.compressor = Compressor(config, layer_id, LayerKind.CSA, dim, wkv, wgate, indexer=True)
        self.weight_scale = dim**-0.5 * heads**-0.5

    @staticmethod
    def widths(config: Config) -> tuple[int, int, int]:
        """Rows of `weights_proj` and of the compressor's `wkv` and `wgate`."""
        width = Compressor.width(LayerKind.CSA, config.index_head_dim)
        return config.index_n_heads, width, width

    def query(self, q_latent: Tensor | Fp8Input) -> Tensor:
        """The queries [own tokens, index heads, index_head_dim] of this rank's share of the tokens, before RoPE.

        Args:
            q_latent: [own tokens, q_lora_rank], the normed query latent of the main attention.
        """
        return self.wq_b(q_latent)[0].unflatten(-1, (self.config.index_n_heads, self.config.index_head_dim))

    def rotated(self, q: Tensor, head_weights: Tensor, positions: Tensor, rows: RowShards) -> tuple[Tensor, Tensor]:
        """`query` after RoPE and quantiser, and the weights [own tokens, index heads] fp32 of the heads' scores.

        Args:
            q: the result of `query`.
            head_weights: [T, index heads] fp32, the sublayer's normed input times `weights_proj`.
            positions: [T] int64.
            rows: this rank's share of the tokens.
        """
        frequencies, quantise = self.compressor.rope.frequencies, self.config.qat.indexer_fp4
        return index_query(q, head_weights[rows.own], positions[rows.own], frequencies, self.weight_scale, quantise)

    def select(self, q: Tensor, weights: Tensor, rows: RowShards) -> Tensor:
        """Rows of the selected entries, [own tokens, index_topk] int32, -1 = hole. This forward's keys must be written
        before.

        Args:
            q, weights: the results of `rotated`.
            rows: this rank's share of the tokens.
        """
        return get_attn_backend().select(self.layer_id, q, weights, self.config.index_topk, rows.own)
