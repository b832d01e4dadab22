"""The served model as `dsv4_kernels` describes it, to find the kernels that its forwards run."""

from __future__ import annotations

import torch
from sglang.srt.runtime_context import get_parallel

from dsv4_kernels.model_shapes import ModelShapes
from sglang_dsv4.attention.implementation import attention_shapes
from sglang_dsv4.attention.metadata import step_layout
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.determinism import flag
from sglang_dsv4.layers import (
    concurrent,
    data_parallel,
    fp8_linear,
    grouped_projection,
    packed_experts,
    peer_sums,
    row_exchange,
    sequence_parallel,
)
from sglang_dsv4.layers.linear import quantises_once_on
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO


def model_shapes(config: Config, geometry: PoolGeometry, heads: int, device: torch.device) -> ModelShapes:
    """Shapes and options of this rank's share of a model.

    Args:
        config: the model's.
        geometry: of the pools, the target's or a draft's.
        heads: query heads of this rank.
        device: of the model.

    Raises:
        ConfigError: an environment variable asks for a product that this model or GPU does not have.
    """
    on_gpu = device.type == "cuda"
    generation = torch.cuda.get_device_capability(device)[0] if on_gpu and torch.cuda.is_available() else None
    quantises = generation is not None and quantises_once_on(generation, config)
    is_draft = not geometry.compressed  # only drafts have no layer with entries
    entry_and_key = (geometry.row_dim, geometry.index_dim)
    wo_a = grouped_projection.kept(config, generation, geometry.dtype)
    packed = on_gpu and packed_experts.is_chosen()
    nvfp4 = config.nvfp4_experts and not is_draft  # a draft's experts stay MXFP4
    joins = on_gpu and concurrent.is_on()
    exchanges = row_exchange.is_on()
    ranks = get_parallel().tp_size
    shared_ranks = 1 if exchanges else ranks
    boundary_tokens = peer_sums.boundary_tokens(config.hidden_size, geometry.dtype, geometry.dtype)
    return ModelShapes(
        attention=attention_shapes(geometry, heads, device, _heads_of_own_rows(config, is_draft)),
        hidden_size=config.hidden_size,
        # A draft also norms the rows that it gets from the target.
        norm_dims=(config.q_lora_rank, config.hidden_size) if is_draft else (config.q_lora_rank,),
        quantises_inputs=quantises,
        fewest_own_rows=_fewest_own_rows(),
        entry_dims=tuple(
            (ratio, entry_and_key if ratio == CSA_RATIO else entry_and_key[:1]) for ratio in geometry.compressed
        ),
        index_heads=config.index_n_heads if CSA_RATIO in geometry.compressed else 0,
        index_fp4=config.qat.indexer_fp4,
        step_mappings=_step_mappings(config, geometry, is_draft),
        experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        routes_by_token_id=bool(config.num_hash_layers),
        fp8_wo_a_tokens=grouped_projection.most_tokens_in_fp8(wo_a),
        fp8_linear_tokens=fp8_linear.most_tokens(generation) if generation is not None and quantises else 0,
        packed_experts=packed and not nvfp4,
        nvfp4_experts=packed and nvfp4,
        exchanges_rows=exchanges,
        # Several ranks' parts of the sum are fp32 on a GPU under the flag only: `rank_sum.dtype_of_parts`.
        experts_sum_fp32=packed and not exchanges and ranks > 1 and flag.is_on(),
        shared_channels=config.moe_intermediate_size // shared_ranks if joins else 0,
        joins_launches=joins,
        leaves_expert_rows=joins and packed and not exchanges and (ranks == 1 or boundary_tokens > 0),
        peer_sum_ranks=peer_sums.ranks(),
        peer_boundary_tokens=boundary_tokens,
    )


def _heads_of_own_rows(config: Config, is_draft: bool) -> int | None:
    return config.num_attention_heads if sequence_parallel.shards_attention() and not is_draft else None


def _fewest_own_rows() -> int:
    if row_exchange.is_on():
        return 0
    if data_parallel.is_on():  # before the experts every forward's rows are gathered
        return 1
    return sequence_parallel.FEWEST_TOKENS // get_parallel().tp_size if sequence_parallel.may_be() else 0


def _step_mappings(config: Config, geometry: PoolGeometry, is_draft: bool) -> tuple:
    """(layout, tokens per request) of each step: 1 token, a verify step's tokens, and in a DSpark draft a block's."""
    widths = {1, max(1, geometry.draft_tokens)}
    found = [(step_layout(geometry), width) for width in sorted(widths)]
    if is_draft and config.dspark is not None:
        found.append((step_layout(geometry, blocks=True), config.dspark.block_size))
    return tuple(found)
