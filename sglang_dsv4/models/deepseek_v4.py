"""DeepSeek-V4 for SGLang, whose model registry finds it under the name `DeepseekV4ForCausalLM`.

The module tree follows the names of the official checkpoint (`layers.3.attn.wq_b`). A forward follows section 2.1 of
the DeepSeek-V4 specification; the attention backend knows caches and batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_dsv4.determinism import checks
from sglang_dsv4.layers import concurrent, data_parallel, peer_sums, row_exchange, sequence_parallel
from sglang_dsv4.layers.attention import Attention
from sglang_dsv4.layers.data_parallel import RowsOfExperts
from sglang_dsv4.layers.hyper_connection import HyperConnection, HyperConnectionHead, Pending
from sglang_dsv4.layers.linear import quantised_linear_config
from sglang_dsv4.layers.logits import Fp32LogitsProcessor, build_lm_head
from sglang_dsv4.layers.moe import MoE
from sglang_dsv4.layers.norm import RMSNorm
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, RowShards
from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.model_config.layer_kinds import LayerKind
from sglang_dsv4.model_config.stages import Stage
from sglang_dsv4.model_config.topology import Topology
from sglang_dsv4.pipeline.this_stage import stage_of_this_process
from sglang_dsv4.weights.tensor_table import TensorTable, main_model_tensors
from sglang_dsv4.weights.updates.staging import WeightUpdate, load_weights

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sglang_dsv4.warmup.prefill_graphs import PrefillGraphs


def check_server_options(config: Config) -> None:
    """Refuse a dtype and kinds of parallelism that this model has no code for, and ranks that can't share it.

    Raises:
        ConfigError: names the option.
        ValueError: an environment variable has an invalid value.
    """
    sequence_parallel.is_on()
    peer_sums.choice()
    concurrent.is_on()
    dtype = torch.get_default_dtype()  # SGLang's loader builds a model under its dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError("dtype", str(dtype), "bfloat16 or float32 (--dtype; auto makes float16 of float32 weights)")
    parallel = get_parallel()
    exchanges = row_exchange.is_chosen()
    problem = Topology(parallel.tp_size, parallel.attn_dp_size, parallel.moe_ep_size, exchanges).problem(config)
    if problem is not None:
        raise ConfigError("tp_size", parallel.tp_size, f"another one: {problem}")


def build_embedding(config: Config, prefix: str) -> VocabParallelEmbedding:
    """The embedding, sharded over the ranks that compute the same rows."""
    return VocabParallelEmbedding(
        config.vocab_size, config.hidden_size, prefix=prefix, use_attn_tp_group=data_parallel.is_on()
    )


def mean_of_streams(streams: Tensor) -> Tensor:
    """The mean [T, d] of `streams [T, n, d]`, summed in fp32 in a fixed order: no row depends on other rows."""
    total = streams[:, 0].float()
    for stream in range(1, streams.shape[1]):
        total = total + streams[:, stream]
    return (total / streams.shape[1]).to(streams.dtype)


class Block(nn.Module):
    """One decoder layer: an attention and a mixture-of-experts sublayer, each with its hyper-connection."""

    def __init__(
        self,
        config: Config,
        layer_id: int,
        kind: LayerKind,
        hashed: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        linear_config = quantised_linear_config(config, quant_config)
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer_id, kind, linear_config, f"{prefix}.attn")
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, layer_id, hashed, linear_config, quant_config, f"{prefix}.ffn")

    def forward(
        self,
        pending: Pending,
        positions: Tensor,
        input_ids: Tensor,
        rows: RowShards = ALL_ROWS,
        of_experts: RowsOfExperts | None = None,
        taps: list[Tensor] | None = None,
    ) -> Pending:
        """Run both sublayers.

        Args:
            pending: streams and output of the layer before, for this rank's rows.
            positions: [T] int64.
            input_ids: [T]; of the rows of all groups, if `of_experts` is given.
            rows: this rank's share of the rows.
            of_experts: the rows that the experts get, with attention data parallelism.
            taps: list to which the mean over the complete streams of the layer before is appended, for `rows`.

        Returns:
            streams and output of this layer, for this rank's rows.
        """
        x, pending = self.hc_attn(pending, self.attn_norm, rows)
        if taps is not None:
            taps.append(mean_of_streams(pending.streams))
        pending = pending.with_output(self.attn(x, positions, rows))
        x, pending = self.hc_ffn(pending, self.ffn_norm, of_experts or rows)
        return pending.with_output(self.ffn(x, input_ids, of_experts or rows))

    def serve_other_groups(self, no_rows: Tensor, input_ids: Tensor, of_experts: RowsOfExperts) -> None:
        """Compute this rank's part of the experts' sums in a forward in which it has no rows; `no_rows` is [0, d]."""
        self.ffn(self.hc_ffn.gathered(no_rows, of_experts), input_ids, of_experts)


class DeepseekV4Model(nn.Module):
    """Embedding, decoder layers and the final mixture and norm; of a pipeline the parts that `stage` has.

    A stage's other layers are placeholders without parameters, so that each layer has the same name on every stage.
    """

    def __init__(self, config: Config, stage: Stage, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.hc_mult, self.hidden_size = config.hc_mult, config.hidden_size
        self.stage = stage
        self.tapped_layers: tuple[int, ...] = ()
        """Layers whose complete streams a DSpark draft reads, in rising order."""
        self.embed = build_embedding(config, f"{prefix}.embed") if stage.is_first else PPMissingLayer()
        self.layers = nn.ModuleList(
            PPMissingLayer()
            if layer_id not in stage.layers
            else Block(
                config,
                layer_id,
                config.schedule.kind(layer_id),
                config.uses_hash_routing(layer_id),
                quant_config,
                f"{prefix}.layers.{layer_id}",
            )
            for layer_id in range(config.num_hidden_layers)
        )
        if sequence_parallel.shards_attention():
            for layer_id in stage.layers:
                self.layers[layer_id].attn.share_rows()
        self.hc_head = HyperConnectionHead(config) if stage.is_last else PPMissingLayer()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if stage.is_last else PPMissingLayer()

    def first_streams(self, input_ids: Tensor, input_embeds: Tensor | None, rows: RowShards) -> Tensor:
        """The streams [T, n, d] before the first layer, all in the same memory: the embedding's rows, or
        `input_embeds`."""
        embedded = rows.take(self.embed(input_ids) if input_embeds is None else input_embeds)
        return embedded.unsqueeze(1).expand(-1, self.hc_mult, -1)

    def received_streams(self, received: Tensor, rows: RowShards) -> Tensor:
        """The streams [T, n, d] for this rank's rows, from those that the stage before sent, [all T, n * d]."""
        return rows.take(received).unflatten(1, (self.hc_mult, self.hidden_size))

    def run_part(self, streams: Tensor, positions: Tensor, input_ids: Tensor, rows: RowShards) -> Tensor:
        """The streams [all T, n * d] that the next stage begins with: all rows, after this stage's layers."""
        pending = Pending(streams)
        for layer_id in self.stage.layers:
            pending = self.layers[layer_id](pending, positions, input_ids, rows)
        last = self.layers[self.stage.layers[-1]]
        return rows.gather(last.hc_ffn.written_back(pending, last.ffn_norm).flatten(1))

    def forward(
        self,
        streams: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        rows: RowShards,
        of_experts: RowsOfExperts | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the layers of the last stage, which are all layers where the model is not divided into stages.

        Args:
            streams: [T, n, d], for this rank's rows.
            positions: [T] int64.
            input_ids: [T]; of the rows of all groups, if `of_experts` is given.
            rows: this rank's share of the rows.
            of_experts: the rows that the experts get, with attention data parallelism.

        Returns:
            the normed rows [T, d] from which the logits are made; the streams from which they were mixed, for an MTP
            draft, [T, n * d] for this rank's rows; and the means [T, d] of the tapped layers' streams, for a DSpark
            draft.
        """
        pending, taps = Pending(streams), []
        for layer_id in self.stage.layers:
            # A layer's output is written back at the start of the next layer.
            tapped = taps if layer_id - 1 in self.tapped_layers else None
            pending = self.layers[layer_id](pending, positions, input_ids, rows, of_experts, tapped)
        streams, row = self.hc_head(pending, self.norm)
        if len(self.layers) - 1 in self.tapped_layers:
            taps.append(mean_of_streams(streams))
        return rows.gather(row), streams.flatten(1), [rows.gather(tap) for tap in taps]

    def serve_other_groups(self, input_ids: Tensor, of_experts: RowsOfExperts) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The results of `forward` for a rank without tokens, which only computes its part of the experts' sums."""
        no_rows = self.embed.weight[:0]
        for layer in self.layers:
            layer.serve_other_groups(no_rows, input_ids, of_experts)
        return no_rows, no_rows.repeat(1, self.hc_mult), [no_rows for _ in self.tapped_layers]


class DeepseekV4ForCausalLM(nn.Module):
    """DeepSeek-V4-Flash and -Pro, and any legal schedule of their layers.

    Args:
        config: the HF config as SGLang parsed it.
        quant_config: SGLang's config of the checkpoint.
        prefix: name of this module in a larger model.

    Raises:
        ConfigError: a value in the config or a server option can't be served.

    Attributes:
        weight_update: the update that is open, see `weights.updates.staging`.
        weights_are_lost: whether the memory of the weights was released and has no values now.
        prefill_graphs: CUDA graphs of prefills, if they were recorded.
    """

    prefill_graphs: PrefillGraphs | None = None
    weight_update: WeightUpdate | None = None
    weights_are_lost = False

    def __init__(self, config: object, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        self.dsv4_config = Config.from_hf(config)
        check_server_options(self.dsv4_config)
        self.stage = stage_of_this_process(self.dsv4_config)
        self.model = DeepseekV4Model(self.dsv4_config, self.stage, quant_config, f"{prefix}.model".lstrip("."))
        self.lm_head = PPMissingLayer()
        if self.stage.is_last:
            self.lm_head = build_lm_head(self.dsv4_config, f"{prefix}.lm_head".lstrip("."))
        self.logits_processor = Fp32LogitsProcessor(config)
        self.start_layer, self.end_layer = self.stage.layers.start, self.stage.layers.stop
        checks.check_model(self)
        peer_sums.set_up(next(self.parameters()).device)
        row_exchange.log_choice()

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> LogitsProcessorOutput | PPProxyTensors:
        """Logits of a batch, or the streams that the next stage begins with; SGLang's model runner calls this.

        Args:
            input_ids: [T] integer.
            positions: [T] int64, each token's position in its sequence.
            forward_batch: SGLang's; its logits processor reads it, and we read its mode.
            input_embeds: [T, d], in place of the embedding's rows; hash-routed layers still read `input_ids`.
            pp_proxy_tensors: on any stage but the first, the stage before's: `hidden_states` [T, n * d].

        Returns:
            on the last stage, logits; on any other, `hidden_states` [T, n * d] for the next stage.
        """
        for_mtp = not self.model.tapped_layers and forward_batch.capture_hidden_mode.need_capture()
        rows = sequence_parallel.of_forward(forward_batch.forward_mode, positions.shape[0])
        of_experts = data_parallel.of_forward(forward_batch, positions.shape[0])
        ids_of_experts = input_ids if of_experts is None else of_experts.gather(input_ids)
        if self._has_graphs(forward_batch.forward_mode, len(positions), for_mtp, input_embeds):
            hidden_states, streams, taps = self.prefill_graphs.replay(input_ids, positions)
        elif of_experts is not None and not len(positions):
            hidden_states, streams, taps = self.model.serve_other_groups(ids_of_experts, of_experts)
        else:
            if self.stage.is_first:
                streams = self.model.first_streams(input_ids, input_embeds, rows)
            else:
                streams = self.model.received_streams(pp_proxy_tensors["hidden_states"], rows)
            if not self.stage.is_last:
                return PPProxyTensors({"hidden_states": self.model.run_part(streams, positions, input_ids, rows)})
            hidden_states, streams, taps = self.model(streams, positions, ids_of_experts, rows, of_experts)
            streams = rows.gather(streams) if for_mtp else None
        for_draft = {}
        if taps:
            for_draft["aux_hidden_states"] = taps
        elif for_mtp:
            for_draft["hidden_states_before_norm"] = streams
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch, **for_draft)

    def _has_graphs(self, mode: ForwardMode, tokens: int, with_streams: bool, input_embeds: Tensor | None) -> bool:
        """Whether a forward replays CUDA graphs of prefills; all ranks decide alike."""
        graphs = self.prefill_graphs
        if graphs is None or not mode.is_extend_without_speculative() or input_embeds is not None:
            return False
        return (graphs.with_streams or not with_streams) and graphs.size_of(tokens) is not None

    def set_dspark_layers_to_capture(self, layer_ids: list[int]) -> None:
        """Give the draft the means of these layers' streams, [T, layers * d]; SGLang calls this for DSPARK.

        Raises:
            ConfigError: the checkpoint's draft was trained with other layers.
        """
        trained = self.dsv4_config.dspark
        if trained is None or tuple(layer_ids) != trained.target_layer_ids:
            accepted = "a checkpoint with dspark fields" if trained is None else f"{list(trained.target_layer_ids)}"
            raise ConfigError("dspark_target_layer_ids", list(layer_ids), accepted)
        self.model.tapped_layers = trained.target_layer_ids

    def tensor_table(self) -> TensorTable:
        """The tensors of an official checkpoint that the model loads, or that this stage of it loads."""
        return main_model_tensors(self.dsv4_config, self.stage)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all tensors of an official checkpoint, one at a time, or tensors of a weight update.

        Raises:
            CheckpointError: names the tensor that is missing, unknown, cut short or of the wrong shape or dtype.
        """
        load_weights(self, weights)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embed

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """The weights that a draft model shares: embedding and output matrix."""
        return self.model.embed.weight, self.lm_head.weight

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Replace embedding and output matrix by another model's."""
        self.model.embed.weight = embed
        self.lm_head.weight = head


EntryClass = DeepseekV4ForCausalLM
