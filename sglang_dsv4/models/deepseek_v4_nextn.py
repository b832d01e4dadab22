"""DeepSeek-V4's multi-token prediction module as an SGLang draft model (DeepSeek-V4 specification, section 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from sglang_dsv4.determinism import checks
from sglang_dsv4.layers import data_parallel
from sglang_dsv4.layers.data_parallel import RowsOfExperts
from sglang_dsv4.layers.hyper_connection import HyperConnectionHead, Pending
from sglang_dsv4.layers.linear import quantised_linear_config, quantises_once
from sglang_dsv4.layers.logits import Fp32LogitsProcessor, build_lm_head
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import LayerKind
from sglang_dsv4.models.deepseek_v4 import Block, DeepseekV4ForCausalLM, build_embedding, check_server_options
from sglang_dsv4.weights.tensor_table import TensorTable, mtp_tensors

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DeepseekV4ModelNextN(nn.Module):
    """Computes streams that predict token t+2 from the streams of token t and the embedding of token t+1.

    The block has window attention only, and a learned router. It is layer 0 of the draft worker's cache.
    """

    def __init__(self, config: Config, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        linear_config = quantised_linear_config(config, quant_config)
        self.hc_mult = config.hc_mult
        self.embed = build_embedding(config, f"{prefix}.embed")
        self.enorm = RMSNorm(d, eps)
        self.hnorm = RMSNorm(d, eps)
        self.e_proj = ReplicatedLinear(d, d, bias=False, quant_config=linear_config, prefix=f"{prefix}.e_proj")
        self.h_proj = ReplicatedLinear(d, d, bias=False, quant_config=linear_config, prefix=f"{prefix}.h_proj")
        # SGLang's quantisation methods tell a draft's experts from the target's by the name "decoder".
        self.decoder = Block(config, 0, LayerKind.SWA, False, quant_config, f"{prefix}.decoder")
        self.hc_head = HyperConnectionHead(config)
        self.norm = RMSNorm(d, eps)
        self._quantises = quantises_once(config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        streams: Tensor,
        input_embeds: Tensor | None = None,
        of_experts: RowsOfExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The normed rows [T, d] from which the logits are made, and their streams [T, n * d].

        Args:
            input_ids: [T], token t+1.
            positions: [T] int64, t.
            streams: [T, n * d], of token t: the target's or, later in a chain, this module's own.
            input_embeds: [T, d], in place of the embedding's rows.
            of_experts: the rows that the experts get, with attention data parallelism.
        """
        if of_experts is not None and not len(positions):
            no_rows = self.embed.weight[:0]
            self.decoder.serve_other_groups(no_rows, input_ids, of_experts)
            return no_rows, no_rows.repeat(1, self.hc_mult)
        embedded = self.embed(input_ids) if input_embeds is None else input_embeds
        streams = streams.unflatten(-1, (self.hc_mult, -1))
        e = self.e_proj(self.enorm.of_linear(embedded, self._quantises))[0]
        h = self.h_proj(self.hnorm.of_linear(streams.flatten(0, 1), self._quantises))[0].view_as(streams)
        pending = self.decoder(Pending(e.unsqueeze(1) + h), positions, input_ids, of_experts=of_experts)
        streams, row = self.hc_head(pending, self.norm)
        return row, streams.flatten(1)


class DeepseekV4ForCausalLMNextN(DeepseekV4ForCausalLM):
    """The draft model that SGLang builds for `--speculative-algorithm EAGLE`; embedding and head are the target's.

    Args:
        config: the HF config as SGLang parsed it.
        quant_config: SGLang's config of the checkpoint.
        prefix: name of this module in a larger model.

    Raises:
        ConfigError: a value in the config or a server option can't be served.
    """

    def __init__(self, config: object, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = config
        self.quant_config = quant_config
        self.dsv4_config = Config.from_hf(config)
        check_server_options(self.dsv4_config)
        self.model = DeepseekV4ModelNextN(self.dsv4_config, quant_config, f"{prefix}.model".lstrip("."))
        self.lm_head = build_lm_head(self.dsv4_config, f"{prefix}.lm_head".lstrip("."))
        self.logits_processor = Fp32LogitsProcessor(config)
        checks.check_model(self)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """Logits of a batch, as in the target. Token t's streams [T, n * d] are `spec_info.hidden_states`."""
        streams = forward_batch.spec_info.hidden_states
        of_experts = data_parallel.of_forward(forward_batch, positions.shape[0])
        hidden_states, streams = self.model(input_ids, positions, streams, input_embeds, of_experts)
        return self.logits_processor(
            input_ids, hidden_states, self.lm_head, forward_batch, hidden_states_before_norm=streams
        )

    def tensor_table(self) -> TensorTable:
        """The `mtp.0` tensors of an official checkpoint; the target model loads and checks all other tensors."""
        return mtp_tensors(self.dsv4_config)


EntryClass = DeepseekV4ForCausalLMNextN
