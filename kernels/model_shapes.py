"""Description of the model that a rank serves, as far as it decides which kernels its forwards run.

The caller fills it in; the functions that an implementation's `jobs` names in `dsv4_kernels.ops` read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dsv4_kernels.kv_layout import RowFormat
    from dsv4_kernels.step_mapping.layout import StepLayout


class Option(Enum):
    """Ways to store or multiply weights that a server may choose; each value is a field of `ModelShapes`."""

    FP8_WO_A = "fp8_wo_a_tokens"
    """The weight of the grouped output projection is kept in FP8."""
    FP8_LINEAR = "fp8_linear_tokens"
    """FP8 linear layers multiply few tokens by this package's product."""
    PACKED_EXPERTS = "packed_experts"
    """Routed experts multiply the checkpoint's own MXFP4 weights."""
    NVFP4_EXPERTS = "nvfp4_experts"
    """Routed experts multiply the checkpoint's own NVFP4 weights."""
    PEER_SUMS = "peer_sum_ranks"
    """Sums over ranks go through memory that all GPUs of the group can write."""


@dataclass(frozen=True)
class AttentionLayer:
    """One kind of attention layer: how a token names the compressed entries that it reads, if it reads any."""

    kind: str
    """Name for log lines ("CSA")."""
    lists_entries: bool = False
    """Whether a list names a token's entries, as in CSA layers."""
    entries_per_page: int = 0
    """Entries of a page, where a page table names all visible entries, as in HCA layers; else 0."""


@dataclass(frozen=True)
class AttentionShapes:
    """Arguments of the attention calls that a rank's forwards make."""

    layers: tuple[AttentionLayer, ...]
    heads: int
    """Query heads of this rank."""
    prefill_heads: tuple[int, ...]
    """Query heads in prefills: of this rank, and of all ranks where a rank attends for its own rows."""
    row_dim: int
    rope_dim: int
    """Channels of a row that RoPE rotates, its last ones."""
    window_tokens: int
    """Window rows that a token reads, its own included."""
    row_format: RowFormat
    dtype: torch.dtype
    device: torch.device
    impl: str | None = None
    """Implementation by name; None lets the registry choose."""


@dataclass(frozen=True)
class ModelShapes:
    """Shapes and options of one rank's share of a model."""

    attention: AttentionShapes
    hidden_size: int
    norm_dims: tuple[int, ...]
    """Row lengths of the RMSNorms that are kernels of their own."""
    quantises_inputs: bool
    """Whether the kernels before an FP8 product also write its quantised input."""
    fewest_own_rows: int
    """Rows of the smallest forward whose rows are gathered from the ranks, on one rank; 0 where none are gathered."""
    entry_dims: tuple[tuple[int, tuple[int, ...]], ...]
    """(compression ratio, channels of an entry and, where the layer has an indexer, of an indexer key)."""
    index_heads: int
    """Heads of the indexer; 0 for a model without CSA layers."""
    index_fp4: bool
    """Whether indexer queries are rounded to FP4."""
    step_mappings: tuple[tuple[StepLayout, int], ...]
    """(layout, tokens per request) of each mapping that a decode, verify or draft step computes."""
    experts: int
    """Routed experts of a layer, on all ranks."""
    experts_per_token: int
    routes_by_token_id: bool
    """Whether the first layers choose experts by token id."""
    fp8_wo_a_tokens: int = 0
    """Most tokens of a forward that multiplies wo_a in FP8; 0 if wo_a is not kept in FP8."""
    fp8_linear_tokens: int = 0
    """Most tokens of a forward whose FP8 linear layers use this package's product; 0 if none do."""
    packed_experts: bool = False
    nvfp4_experts: bool = False
    exchanges_rows: bool = False
    """Whether ranks exchange tokens between the choice of experts and the experts."""
    experts_sum_fp32: bool = False
    """Whether packed experts return a rank's part of the sum in fp32."""
    shared_channels: int = 0
    """Intermediate channels of the shared expert on this rank; 0 if no launches are joined."""
    joins_launches: bool = False
    """Whether forwards of few tokens join launches (`dsv4_kernels.host.joint_launch`)."""
    leaves_expert_rows: bool = False
    """Whether boundaries of few tokens sum over experts (`dsv4_kernels.host.expert_rows`)."""
    peer_sum_ranks: int = 0
    """Ranks that sum through each other's memory; 0 if another library sums."""
    peer_boundary_tokens: int = 0
    """Most tokens of a forward whose boundaries sum the ranks' parts; 0 if no boundary does."""

    @property
    def options(self) -> frozenset[Option]:
        """The options that are switched on."""
        return frozenset(option for option in Option if getattr(self, option.value))
