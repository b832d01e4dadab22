"""The mixture-of-experts sublayer (DeepSeek-V4 specification, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from dsv4_kernels.linear import linear_fp32
from dsv4_kernels.moe import expert_rows, experts_forward, fused_swiglu, sum_expert_rows, swiglu_fp8
from dsv4_kernels.router import route_hash_logits, route_topk_logits
from sglang_dsv4.layers import packed_experts, row_exchange, simulated_routing
from sglang_dsv4.layers.concurrent import in_order, joins, side_by_side, together
from sglang_dsv4.layers.data_parallel import RowsOfExperts
from sglang_dsv4.layers.linear import Fp8Input, SublayerInput, builds_on_cpu, fp32_product_dtype, quantises_once
from sglang_dsv4.layers.local_experts import LocalExperts
from sglang_dsv4.layers.nvfp4_experts import Nvfp4PackedExperts, packed_experts_of
from sglang_dsv4.layers.packed_experts import PackedExperts
from sglang_dsv4.layers.peer_sums import Part
from sglang_dsv4.layers.rank_sum import dtype_of_parts, output_of_experts
from sglang_dsv4.layers.row_exchange import ExchangedRows
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS, RowShards
from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.seam.moe_runner import NVFP4_RUNNERS_WITH_CLAMP, RUNNER, RUNNERS_WITH_CLAMP
from sglang_dsv4.weights.updates.host_part import HostPart

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

    from dsv4_kernels.host.expert_rows import ExpertRows
    from sglang_dsv4.layers.packed_experts import Work
    from sglang_dsv4.layers.simulated_routing import Deal


class Gate(nn.Module):
    """Chooses and weighs a token's experts in fp32: by a learned score, in the first layers by token id, or in a
    benchmark by the row (`simulated_routing`)."""

    def __init__(self, config: Config, layer_id: int, hashed: bool) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.weight = nn.Parameter(
            torch.empty(config.n_routed_experts, config.hidden_size, dtype=fp32_product_dtype()), requires_grad=False
        )
        self.deal: Deal | None = None
        self.bias = self.tid2eid = None
        if hashed:
            # SGLang's dummy loader does not fill integers: these ids give all experts equally many tokens.
            ids = torch.arange(config.vocab_size, dtype=torch.int32)[:, None] + torch.arange(
                self.top_k, dtype=torch.int32
            )
            self.tid2eid = nn.Parameter(ids % config.n_routed_experts, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32), requires_grad=False)
            self.deal = simulated_routing.deal(config.n_routed_experts, self.top_k, layer_id)

    def logits(self, x: Tensor) -> Tensor:
        """Every expert's logit [T, E] fp32; `x [T, d]` in the model's dtype."""
        return linear_fp32(x, self.weight)

    def forward(self, logits: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, k] fp32, which sum to `routed_scaling_factor`, and experts [T, k] int32.

        Args:
            logits: the result of `logits`.
            input_ids: [T] integer token ids, in [0, vocab_size).
        """
        if self.tid2eid is not None:
            return route_hash_logits(logits, self.tid2eid, input_ids, self.scale)
        if self.deal is not None:
            return route_hash_logits(logits, self.deal.table, self.deal.rows(len(logits)), self.scale)
        return route_topk_logits(logits, self.bias, self.top_k, self.scale)


class ReferenceExperts(LocalExperts):
    """Routed experts over dequantised weights, for a CPU.

    Parameters: `w13_weight [E_local, 2 * I_local, d]` and `w2_weight [E_local, d, I_local]`, model dtype.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.swiglu_limit = config.swiglu_limit
        self.activation_block = config.activation_block
        experts, channels, d = self.num_local_experts, self.num_local_channels, config.hidden_size
        self.add_parameter("w13_weight", torch.empty(experts, 2 * channels, d))
        self.add_parameter("w2_weight", torch.empty(experts, d, channels))

    def _new_part(self, param: nn.Parameter, matrix: str, local_expert: int) -> HostPart:
        return HostPart(param.data[local_expert])

    def _put(self, part: HostPart, param: nn.Parameter, rows: slice, values: Tensor) -> None:
        part.value[rows].copy_(values)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """This rank's part of the routed experts' sum: [T, d] fp32."""
        return experts_forward(
            x,
            weights,
            experts,
            self.w13_weight,
            self.w2_weight,
            self.swiglu_limit,
            act_qdq_block=self.activation_block,
            expert_offset=self.first_local_expert,
        )

    def rows_of_pairs(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T * k, d] in x's dtype of the pairs of token and expert, and the row of each pair [T, k] int32.

        A pair whose expert is another rank's has a negative row. Arguments as for `forward`.
        """
        rows = expert_rows(
            x,
            weights,
            experts,
            self.w13_weight,
            self.w2_weight,
            self.swiglu_limit,
            act_qdq_block=self.activation_block,
            expert_offset=self.first_local_expert,
        )
        local = experts - self.first_local_expert
        places = torch.arange(experts.numel(), dtype=torch.int32, device=experts.device).view_as(experts)
        return rows.flatten(0, 1), places.where((local >= 0) & (local < self.num_local_experts), -1)

    def sum_of_pairs(self, rows: Tensor, row_of_pair: Tensor, experts: Tensor, shared: Tensor) -> Tensor:
        """The sum over experts, the shared expert included: [T, d] in the dtype of `shared`.

        Args:
            rows: [R, d], the weighted outputs of the experts of all ranks (`rows_of_pairs`).
            row_of_pair: [T, k] int32.
            experts: [T, k] int32, numbers among the experts of all ranks; rows are summed by rising number.
            shared: [T, d] in the model's dtype, the shared expert's output.
        """
        return torch.add(sum_expert_rows(rows, row_of_pair, experts), shared).to(shared.dtype)


class FusedExperts(FusedMoE):
    """Routed experts in SGLang's fused kernels and quantisation methods, for a GPU.

    The routing weights already contain `routed_scaling_factor`, so SGLang is given none to apply.

    Raises:
        ConfigError: the MoE runner would leave out the clamp of gate and up.
    """

    def __init__(self, config: Config, layer_id: int, quant_config: QuantizationConfig | None, prefix: str) -> None:
        runner = get_moe_runner_backend().value
        accepted = NVFP4_RUNNERS_WITH_CLAMP if config.nvfp4_experts else RUNNERS_WITH_CLAMP
        if runner not in accepted:
            raise ConfigError("moe_runner_backend", runner, " or ".join(map(repr, accepted)))
        super().__init__(
            num_experts=config.n_routed_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            layer_id=layer_id,
            top_k=config.num_experts_per_tok,
            quant_config=quant_config,
            prefix=prefix,
            inplace=False,  # x is also the shared expert's input
            routed_scaling_factor=None,
            swiglu_limit=config.swiglu_limit,
            uses_expert_location=False,  # the router's ids are the experts' own: no expert is moved or doubled
        )

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """This rank's part of the routed experts' sum: [T, d] in x's dtype."""
        no_logits = x.new_empty(x.shape[0], 0)  # only kernels that route by themselves read logits
        return super().forward(x, StandardTopKOutput(weights, experts, no_logits))


class SharedExpert(nn.Module):
    """The expert of every token: clamped SwiGLU between FP8 products.

    It is sharded over the intermediate axis, unless experts' rows are exchanged (`row_exchange`): then a rank has the
    whole of it for its own tokens.
    """

    def __init__(self, config: Config, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        d, channels = config.hidden_size, config.moe_intermediate_size
        self.swiglu_limit = config.swiglu_limit
        self.quantises = quantises_once(config)
        ranks = "replicated" if row_exchange.is_on() else None
        self.w13 = MergedColumnParallelLinear(
            d,
            [channels, channels],
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.w13",
            parallel_group=ranks,
        )
        self.w2 = RowParallelLinear(
            channels,
            d,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            prefix=f"{prefix}.w2",
            parallel_group=ranks,
        )

    def gate_up(self, x: SublayerInput) -> Tensor:
        """The first product: [T, 2 * this rank's channels] in the model's dtype, the gate first."""
        return self.w13(x.of_linear)[0]

    def hidden(self, gate_up: Tensor) -> Tensor | Fp8Input:
        """The clamped SwiGLU of `gate_up`, as `down` takes it."""
        if self.quantises:
            return Fp8Input(*swiglu_fp8(gate_up, self.swiglu_limit, column_major=True))
        return fused_swiglu(gate_up, self.swiglu_limit)

    def down(self, hidden: Tensor | Fp8Input) -> Tensor:
        """This rank's part of the shared expert's output: [T, d] in the model's dtype."""
        return self.w2(hidden)[0]


def check_exchange(experts: nn.Module) -> None:
    """Refuse routed experts whose rows can't be exchanged with the bits of one GPU.

    Raises:
        ConfigError: names what to choose.
    """
    if isinstance(experts, Nvfp4PackedExperts):
        raise ConfigError(
            row_exchange.VARIABLE,
            "exchange",
            "'gather' with NVFP4 experts: their inputs are rounded by the largest input scale of a rank's experts",
        )
    if not isinstance(experts, ReferenceExperts | PackedExperts):
        runner = get_moe_runner_backend().value
        raise ConfigError(
            row_exchange.VARIABLE,
            "exchange",
            f"'gather' with --moe-runner-backend {runner}, which returns sums: only {RUNNER} returns a row a pair",
        )


class MoE(nn.Module):
    """Routed experts and the shared expert.

    Args:
        config: the model's.
        layer_id: number of the decoder layer.
        hashed: whether experts are chosen by token id.
        quant_config: for FP8 linear layers, see `quantised_linear_config`.
        expert_quant_config: SGLang's config for the experts on a GPU.
        prefix: name of this module in the model.

    Raises:
        ConfigError: an all-to-all expert backend is switched on; this layer sums over the tensor-parallel ranks.
    """

    def __init__(
        self,
        config: Config,
        layer_id: int,
        hashed: bool,
        quant_config: QuantizationConfig | None,
        expert_quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        if not get_moe_a2a_backend().is_none():
            raise ConfigError("moe_a2a_backend", get_moe_a2a_backend().value, "'none'")
        self.gate = Gate(config, layer_id, hashed)
        self.experts: ReferenceExperts | PackedExperts | FusedExperts
        if builds_on_cpu():
            self.experts = ReferenceExperts(config)
        elif packed_experts.is_chosen():
            self.experts = packed_experts_of(config, f"{prefix}.experts")
        else:
            self.experts = FusedExperts(config, layer_id, expert_quant_config, f"{prefix}.experts")
        if row_exchange.is_on():
            check_exchange(self.experts)
        self.shared_experts = SharedExpert(config, quant_config, f"{prefix}.shared_experts")
        self.tp_size = get_parallel().tp_size

    def forward(
        self, given: SublayerInput, input_ids: Tensor, rows: RowShards | RowsOfExperts = ALL_ROWS
    ) -> Tensor | ExpertRows | Part:
        """The sublayer's output [T, d] in the model's dtype, for this rank's rows, or this rank's part of it for the
        next boundary; `input_ids [T]`. With few tokens the boundary also sums over experts.

        `given` and `input_ids` are of the rows of all groups with attention data parallelism. The sum over experts is
        fp32, see `rank_sum`.
        """
        if isinstance(rows, ExchangedRows):
            return self.exchanged(given, input_ids, rows)
        x = given.rows
        if not len(x):
            return x
        tokens, shared_expert = len(x), self.shared_experts
        logits, gate_up = together(
            tokens, lambda: self.gate.logits(x), lambda: shared_expert.gate_up(given), products=True
        )
        (weights, experts, work), hidden = together(
            tokens, lambda: self.choose(logits, input_ids), lambda: shared_expert.hidden(gate_up)
        )
        dtype = dtype_of_parts(x.device, x.dtype) if self.tp_size > 1 else x.dtype
        if isinstance(self.experts, PackedExperts):
            quantised = given.fp8 if self.experts.takes_codes(joins(tokens)) else None
            slot_rows, shared = side_by_side(
                lambda: self.experts.multiply(x, work, quantised), lambda: shared_expert.down(hidden), tokens
            )
            both = self.experts.rows_to_sum(slot_rows, work, shared, dtype)
            both = both if joins(tokens) else both.total()
        else:
            shared = shared_expert.down(hidden)
            # PyTorch adds two bf16 rows in fp32 and rounds once, if the result is bf16.
            both = torch.add(self.experts(x, weights, experts), shared.to(dtype)).to(dtype)
        return output_of_experts(both, rows, x.dtype) if self.tp_size > 1 else both

    def exchanged(self, given: SublayerInput, input_ids: Tensor, rows: ExchangedRows) -> Tensor:
        """The sublayer's output [T, d] in the model's dtype for this rank's own tokens, T = 0 included."""
        x, shared_expert = given.rows, self.shared_experts
        if not rows.total:
            return x
        if not (tokens := len(x)):
            nothing = x.new_empty(0, self.gate.top_k, dtype=torch.float32)
            self.rows_of_pairs(x, nothing, nothing.int(), rows)
            return x
        logits, gate_up = together(
            tokens, lambda: self.gate.logits(x), lambda: shared_expert.gate_up(given), products=True
        )
        (weights, experts), hidden = together(
            tokens, lambda: self.gate(logits, input_ids), lambda: shared_expert.hidden(gate_up)
        )
        (of_pairs, row_of_pair), shared = side_by_side(
            lambda: self.rows_of_pairs(x, weights, experts, rows), lambda: shared_expert.down(hidden), tokens
        )
        return self.experts.sum_of_pairs(of_pairs, row_of_pair, experts, shared)

    def rows_of_pairs(self, x: Tensor, weights: Tensor, experts: Tensor, rows: ExchangedRows) -> tuple[Tensor, Tensor]:
        """The rows [P, d] of this rank's own pairs, from all ranks' experts, and each pair's row [T, k] int32; computes
        the other ranks' pairs of this rank's experts meanwhile."""
        arrived = rows.send(x, weights, experts, self.experts.num_local_experts)
        of_this_rank = self.experts.rows_of_pairs(arrived.x, arrived.weights, arrived.experts)
        return arrived.back(*of_this_rank), arrived.row_of_pair

    def choose(self, logits: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Work | None]:
        """The gate's weights and experts, and the packed experts' work; None for experts of another kind."""
        with in_order():
            weights, experts = self.gate(logits, input_ids)
            work = self.experts.plan(weights, experts) if isinstance(self.experts, PackedExperts) else None
        return weights, experts, work
