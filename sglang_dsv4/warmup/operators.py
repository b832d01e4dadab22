"""Operators of a model's forwards: this package's by implementation, and SGLang's by module."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch import nn

from dsv4_kernels import registry
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.ops import OPS, forward_ops
from sglang_dsv4.determinism import sglang_operators

logger = logging.getLogger(__name__)

OF_SGLANG = "sglang."
MOVES_ROWS = {"VocabParallelEmbedding": "embedding: a gather of rows"}
"""Classes of SGLang that compute in a forward without a method of `sglang_operators` -> what they do. `ParallelLMHead`
holds a weight, which our logits processor multiplies."""


class Operators(NamedTuple):
    """The operators between token ids and logits."""

    ours: dict[str, str]
    """Op of `dsv4_kernels.ops` -> implementation."""
    of_sglang: dict[str, str]
    """Operator and implementation -> the name of one module that has it."""


def operators_of(model: nn.Module, shapes: ModelShapes) -> Operators:
    """The operators of a built model.

    Args:
        model: with its modules; its weights are not read.
        shapes: of the model, see `warmup.model_shapes`.

    Raises:
        NotImplementedError: an op has no implementation for the model's device and dtype.
    """
    device, dtype = shapes.attention.device, shapes.attention.dtype
    ours = {}
    for op in forward_ops(device.type, shapes.options):
        named = shapes.attention.impl if op == "sparse_attention" else OPS[op].named(device, dtype)
        ours[op] = registry.chosen(op, device, dtype, named).name
    return Operators(ours, operators_of_sglang(model))


def operators_of_sglang(model: nn.Module) -> dict[str, str]:
    """Operator and implementation -> the name of one module that has it, for all that SGLang computes in a forward."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if (what := MOVES_ROWS.get(type(module).__name__)) and type(module).__module__.startswith(OF_SGLANG):
            found.setdefault(what, name)
        for operator, implementation in sglang_operators.operators_of(module):
            if implementation != sglang_operators.OURS:
                found.setdefault(f"{operator}: {implementation}", name)
    return found


def log_operators_of_sglang(model: nn.Module) -> None:
    """Log what SGLang computes in a model's forwards."""
    listed = ", ".join(f"{what} ({name})" for what, name in operators_of_sglang(model).items())
    logger.info("operators of SGLang's in a forward: %s", listed or "none")
