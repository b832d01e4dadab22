"""The bytes of a checkpoint's weights on each GPU, by the way in which the ranks share them."""

from __future__ import annotations

import functools
import re
from math import prod

from sglang_dsv4.model_config.config import FP4_WEIGHT_BLOCK, WEIGHT_BLOCK, Config
from sglang_dsv4.model_config.stages import Stage
from sglang_dsv4.model_config.topology import Topology
from sglang_dsv4.weights.tensor_table import Format, TensorSpec, draft_tensors, main_model_tensors

BYTES = {Format.FLOAT: 2.0, Format.LINEAR: 1 + 4 / WEIGHT_BLOCK**2, Format.EXPERT: 0.5 + 1 / FP4_WEIGHT_BLOCK}
"""Bytes of a value on a GPU: bf16; FP8 with fp32 scales of blocks; MXFP4."""
FP32_PARTS = ("hc_", "attn_sink", "gate.bias", ".ape")
SHARED_BY_A_GROUP = ("attn.wq_b.", "attn.wo_a.", "attn.wo_b.", "attn.attn_sink", "embed.", "head.")
SHARED_BY_ALL = ("ffn.experts.", "ffn.shared_experts.")


def sharing(name: str) -> str:
    """The ranks that share the tensor of this name in a checkpoint: "all", those of a "group", or "none"."""
    short = re.sub(r"^(layers|mtp)\.\d+\.", "", name)
    if short.startswith(SHARED_BY_ALL):
        return "all"
    return "group" if short.startswith(SHARED_BY_A_GROUP) else "none"


def topologies(config: Config, ranks: int) -> list[Topology]:
    """The topologies of this number of ranks that the model's sizes allow, by rising number of groups."""
    found = [Topology(ranks, groups) for groups in range(1, ranks + 1) if ranks % groups == 0]
    return [topology for topology in found if topology.problem(config) is None]


def bytes_of_a_rank(
    config: Config, topology: Topology, wo_a: str, stage: Stage | None = None, *, draft: bool = False
) -> float:
    """Bytes of the weights on one GPU.

    Args:
        config: the model's, quantised as released.
        topology: of the server.
        wo_a: formats in which the first half of the output projection is kept: "fp8", "bf16" or "both".
        stage: of a pipeline, with ranks of this topology; None: the whole model.
        draft: whether the weights of the checkpoint's draft are loaded, too.
    """
    sharers = {"all": topology.ranks, "group": topology.group_size, "none": 1}
    return sum(count / sharers[shared] for shared, count in _bytes_by_sharing(config, wo_a, stage, draft).items())


@functools.cache
def _bytes_by_sharing(config: Config, wo_a: str, stage: Stage | None, draft: bool) -> dict[str, float]:
    """Bytes of all tensors by the ranks that share them, see `sharing`."""
    found = dict.fromkeys(("all", "group", "none"), 0.0)
    drafts = draft_tensors(config).specs.values() if draft else ()
    for spec in (*main_model_tensors(config, stage).specs.values(), *drafts):
        found[sharing(spec.name)] += prod(spec.shape) * _bytes_of_a_value(spec, wo_a)
    return found


def _bytes_of_a_value(spec: TensorSpec, wo_a: str) -> float:
    if ".wo_a." in spec.name:
        return {"fp8": BYTES[Format.LINEAR], "bf16": 2.0, "both": BYTES[Format.LINEAR] + 2.0}[wo_a]
    if spec.format is Format.INDEX or any(part in spec.name for part in FP32_PARTS):
        return 4.0
    return BYTES[spec.format]
