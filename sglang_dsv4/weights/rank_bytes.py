"""The bytes of a checkpoint's weights on each GPU, by the way in which the ranks share them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sglang_dsv4.model_config.config import FP4_WEIGHT_BLOCK, WEIGHT_BLOCK, Config
from sglang_dsv4.weights.tensor_table import Format, TensorSpec, main_model_tensors

BYTES = {Format.FLOAT: 2.0, Format.LINEAR: 1 + 4 / WEIGHT_BLOCK**2, Format.EXPERT: 0.5 + 1 / FP4_WEIGHT_BLOCK}
"""Bytes of a value on a GPU: bf16; FP8 with fp32 scales of blocks; MXFP4."""
FP32_PARTS = ("hc_", "attn_sink", "gate.bias", ".ape")
SHARED_BY_A_GROUP = ("attn.wq_b.", "attn.wo_a.", "attn.wo_b.", "attn.attn_sink", "embed.", "head.")
SHARED_BY_ALL = ("ffn.experts.", "ffn.shared_experts.")


@dataclass(frozen=True)
class Topology:
    """How ranks share a model: `groups` (`--attn-dp-size`) of `ranks // groups` ranks (`--tp-size` in all)."""

    ranks: int
    groups: int

    @property
    def group_size(self) -> int:
        """Ranks that share a request's attention."""
        return self.ranks // self.groups

    def sharers(self, name: str) -> int:
        """Number of ranks that share the tensor of this name in a checkpoint; 1 if every rank has all of it."""
        short = name.removeprefix("layers.").lstrip("0123456789.")
        if short.startswith(SHARED_BY_ALL):
            return self.ranks
        return self.group_size if short.startswith(SHARED_BY_A_GROUP) else 1


def topologies(config: Config, ranks: int) -> list[Topology]:
    """The topologies of this number of ranks that the model's sizes allow, by rising number of groups."""
    found = [Topology(ranks, groups) for groups in range(1, ranks + 1) if ranks % groups == 0]
    return [topology for topology in found if config.o_groups % topology.group_size == 0]


def bytes_of_a_rank(config: Config, topology: Topology, wo_a: str) -> float:
    """Bytes of the weights on one GPU, without a draft's.

    Args:
        config: the model's, quantised as released.
        topology: of the server.
        wo_a: formats in which the first half of the output projection is kept: "fp8", "bf16" or "both".
    """
    specs = main_model_tensors(config).specs.values()
    return sum(prod(spec.shape) * _bytes_of_a_value(spec, wo_a) / topology.sharers(spec.name) for spec in specs)


def _bytes_of_a_value(spec: TensorSpec, wo_a: str) -> float:
    if ".wo_a." in spec.name:
        return {"fp8": BYTES[Format.LINEAR], "bf16": 2.0, "both": BYTES[Format.LINEAR] + 2.0}[wo_a]
    if spec.format is Format.INDEX or any(part in spec.name for part in FP32_PARTS):
        return 4.0
    return BYTES[spec.format]
