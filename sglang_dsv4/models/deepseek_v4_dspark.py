"""DeepSeek-V4's DSpark draft as an SGLang draft model: it proposes a block of tokens at once.

The draft has no prefill of its own. For every token that the target has computed and accepted it stores one window row
a stage (`write_target_hidden_kv`), the context row, made from the means of three target layers' streams. A draft step
runs a block `[anchor, noise, noise, ...]` through the stages, where every row attends to the last window of context
rows and to the whole block. It then chooses one token after another; the Markov head corrects each row's logits by the
token before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.models.dspark import BaseDSparkMarkovHead, gather_and_crop_vocab
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode
from torch import Tensor, nn

from dsv4_kernels.linear import linear_fp32
from dsv4_kernels.norm_rope_store import Destination
from sglang_dsv4.determinism import checks
from sglang_dsv4.layers import data_parallel
from sglang_dsv4.layers.data_parallel import RowsOfExperts
from sglang_dsv4.layers.hyper_connection import HyperConnectionHead, Pending
from sglang_dsv4.layers.linear import Fp8Input, fp32_product_dtype, quantised_linear_config, quantises_once
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.model_config.layer_kinds import LayerKind
from sglang_dsv4.models.deepseek_v4 import Block, check_server_options
from sglang_dsv4.weights.tensor_table import TensorTable, dspark_tensors
from sglang_dsv4.weights.updates.staging import WeightUpdate, load_weights

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_dsv4.cache.kv_pool import Dsv4KVPool


class MarkovHead(BaseDSparkMarkovHead):
    """Correction of a row's logits by the token before it: `W2 @ W1[token]`, fp32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.vocab_size, config.dspark.markov_rank)
        self.vocab_size = config.vocab_size
        self.markov_w1 = nn.Parameter(torch.empty(*shape), requires_grad=False)
        self.markov_w2 = nn.Parameter(torch.empty(*shape, dtype=fp32_product_dtype()), requires_grad=False)

    def get_prev_embeddings(self, token_ids: Tensor) -> Tensor:
        """`W1[token_ids]`, [..., r] in the model's dtype."""
        return self.markov_w1[token_ids.long()]

    def step_bias(
        self, prev_tokens: Tensor, *, hidden_states: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The correction [B, V] fp32 for rows that follow `prev_tokens [B]`; and `state`, which is not used."""
        return linear_fp32(self.get_prev_embeddings(prev_tokens), self.markov_w2), state

    def step_logits_dtype(self, base_dtype: torch.dtype) -> torch.dtype:
        """fp32: the dtype of the sum of a row's logits and its correction."""
        return torch.float32


class DSparkModel(nn.Module):
    """The stages, the projection of the target's taps before the first, and head mixture and norm after the last."""

    def __init__(self, config: Config, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        d, eps, stages = config.hidden_size, config.rms_norm_eps, config.dspark.num_stages
        linear_config = quantised_linear_config(config, quant_config)
        self.main_proj = ReplicatedLinear(
            d * stages, d, bias=False, quant_config=linear_config, prefix=f"{prefix}.main_proj"
        )
        self.main_norm = RMSNorm(d, eps)
        # SGLang's quantisation methods recognise a draft's experts by the name "decoder", and by "stages." at its start
        # where the target's experts are NVFP4: a draft's stay MXFP4.
        self.stages = nn.ModuleList(
            Block(config, stage, LayerKind.SWA, False, quant_config, f"stages.{stage}.decoder")
            for stage in range(stages)
        )
        self.hc_head = HyperConnectionHead(config)
        self.norm = RMSNorm(d, eps)
        self._quantises = quantises_once(config)

    def forward(
        self, streams: Tensor, positions: Tensor, input_ids: Tensor, of_experts: RowsOfExperts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Streams [T, n, d] and normed rows [T, d] after the stages, from a block's `streams [T, n, d]`."""
        if of_experts is not None and not len(positions):
            no_rows = streams.flatten(1)[:, : streams.shape[-1]]
            for stage in self.stages:
                stage.serve_other_groups(no_rows, input_ids, of_experts)
            return streams, no_rows
        pending = Pending(streams)
        for stage in self.stages:
            pending = stage(pending, positions, input_ids, of_experts=of_experts)
        return self.hc_head(pending, self.norm)

    def store_context(self, taps: Tensor, rows: Tensor, positions: Tensor, pool: Dsv4KVPool) -> None:
        """Store the context rows of committed tokens, in every stage.

        Args:
            taps: [T, stages * d], of the target.
            rows: [T] int64, ring rows; -1 for a token whose row is not stored.
            positions: [T] int64.
            pool: the draft's.
        """
        main = self.main_proj(Fp8Input.of(taps) if self._quantises else taps)[0]
        x = self.main_norm.of_linear(main, self._quantises)
        for stage in self.stages:
            layer_id = stage.attn.layer_id
            destinations = [Destination(pool.window(layer_id), rows)]
            if pool.tail_rows is not None:  # these are a prefill's tokens
                destinations.append(Destination(pool.tail_windows(layer_id), pool.tail_rows.window[: len(rows)]))
            stage.attn.store_context(x, positions, destinations)


class DeepseekV4ForCausalLMDSpark(nn.Module):
    """The draft model that SGLang builds for `--speculative-algorithm DSPARK`; embedding and head are the target's.

    Args:
        config: the HF config as SGLang parsed it.
        quant_config: SGLang's config of the checkpoint.
        prefix: name of this module in a larger model.

    Raises:
        ConfigError: the checkpoint has no DSpark draft, or a server option can't be served.

    Attributes:
        gamma, block_size: rows of a block, each of which proposes a token.
        num_stages: layers of the draft's pool.
        confidence_head: None: every proposal is verified, so SGLang needs no estimate of its acceptance.
        weight_update, weights_are_lost: as in the target.
    """

    weight_update: WeightUpdate | None = None
    weights_are_lost = False

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)
    uses_own_vocab_modules = False
    sample_from_anchor = True
    confidence_head = None

    def __init__(self, config: object, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        self.dsv4_config = Config.from_hf(config)
        check_server_options(self.dsv4_config)
        dspark = self.dsv4_config.dspark
        if dspark is None:
            raise ConfigError("dspark_block_size", None, "a checkpoint with a DSpark draft; this one has none")
        if (mode := read_ragged_verify_mode()) is not RaggedVerifyMode.STATIC:
            raise ConfigError("SGLANG_RAGGED_VERIFY_MODE", mode.value, "static: all proposals of a block are verified")
        self.gamma = self.block_size = dspark.block_size
        self.num_stages = dspark.num_stages
        self.start_layer, self.end_layer = 0, dspark.num_stages
        self.model = DSparkModel(self.dsv4_config, quant_config, f"{prefix}.model".lstrip("."))
        self.markov_head = MarkovHead(self.dsv4_config)
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        checks.check_model(self)

    def attach_shared_modules(self, *, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Use the target's embedding and output matrix."""
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    def forward_embed(self, input_ids: Tensor) -> Tensor:
        """Each token's embedding in all streams, [T, n, d]."""
        assert self.embed_tokens is not None, "attach_shared_modules has not run"
        return self.embed_tokens(input_ids).unsqueeze(1).repeat(1, self.dsv4_config.hc_mult, 1)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - SGLang's, for pipelines and embeddings, which are not supported
    ) -> LogitsProcessorOutput:
        """Run the blocks of a batch.

        Args:
            input_ids: [T], the anchor and noise tokens of each request.
            positions: [T] int64.
            forward_batch: SGLang's.
            input_embeds: [T, n, d], in place of `forward_embed`.
            options: ignored.

        Returns:
            in `hidden_states` the rows [T, d] for `compute_base_logits`; no logits.
        """
        streams = self.forward_embed(input_ids) if input_embeds is None else input_embeds
        of_experts = data_parallel.of_forward(forward_batch, positions.shape[0])
        _, rows = self.model(streams, positions, input_ids, of_experts)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=rows)

    def compute_base_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] fp32 of a block's rows [T, d], without the Markov head's correction; and the rows."""
        assert self.lm_head is not None, "attach_shared_modules has not run"
        logits = linear_fp32(hidden_states, self.lm_head.weight)
        return gather_and_crop_vocab(logits, self.lm_head), hidden_states

    def write_target_hidden_kv(self, *, main_hidden: Tensor, swa_loc: Tensor, positions: Tensor, pool: Any) -> None:  # noqa: ANN401
        """Store the context rows of tokens that the target has accepted.

        Args:
            main_hidden: [T, stages * d], the target's taps.
            swa_loc: [T] integer ring rows; -1 for tokens that are older than a window or were rejected.
            positions: [T].
            pool: the draft's `Dsv4KVPool`.
        """
        self.model.store_context(main_hidden, swa_loc.long(), positions.long(), pool)

    def tensor_table(self) -> TensorTable:
        """The `mtp` tensors of an official checkpoint; the target model loads and checks all other tensors."""
        return dspark_tensors(self.dsv4_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all tensors of an official checkpoint that the draft has, or those of a weight update.

        Raises:
            CheckpointError: names the tensor that is missing, unknown, cut short or of the wrong shape or dtype.
        """
        load_weights(self, weights)


EntryClass = DeepseekV4ForCausalLMDSpark
