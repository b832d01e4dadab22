"""SGLang's operators in a forward: which of their implementations are batch-invariant, and why.

No MoE runner of SGLang's is batch-invariant: they choose tiles by the number of tokens, and add in the order of
atomics. Our runner (`layers.packed_experts`) adds in an order that K alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from sglang_dsv4.seam import compat

if TYPE_CHECKING:
    from torch import nn

DEEP_GEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"
OURS = "linear_fp8"
BATCH_INVARIANT: dict[str, dict[str, str]] = {
    "FP8 linear layer": {
        DEEP_GEMM: "on Hopper: blocks of 128 channels, in order, for any number of rows",
        OURS: "this package's product, in `layers.fp8_linear.AllTokensProduct`",
    },
    "linear layer": {"UnquantizedLinearMethod": "aten::mm as SGLang replaces it under the flag: one tile, all of K"},
    "routed experts": {},
}
"""Operator of SGLang -> its batch-invariant implementations -> why they are."""

WHAT_TO_DO = {
    "FP8 linear layer": "leave --fp8-gemm-backend out, or choose deep_gemm, with DeepGEMM installed",
    "linear layer": "serve the release's FP8 checkpoint",
    "routed experts": "none of its runners keeps a row's bits; --moe-runner-backend dsv4 does, the default here",
}


def is_deep_gemm(product: Callable[..., object]) -> bool:
    """Whether a product of SGLang's FP8 linear layers is DeepGEMM's, by itself or with arguments bound to it."""
    return _name_of(product) == DEEP_GEMM


def _name_of(product: Callable[..., object]) -> str:
    return getattr(product, "func", product).__name__


def problems_of_modules(model: nn.Module) -> list[str]:
    """A sentence for each operator of SGLang's that is not batch-invariant, with the name of one module that has it."""
    found: dict[tuple[str, str], str] = {}
    for name, module in model.named_modules():
        for operator, implementation in operators_of(module):
            found.setdefault((operator, implementation), name)
    return [
        f"the {operator} {place!r} is SGLang's {implementation}, whose bits depend on the batch: {WHAT_TO_DO[operator]}"
        for (operator, implementation), place in found.items()
        if implementation not in BATCH_INVARIANT[operator]
    ]


def operators_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(operator of :data:`BATCH_INVARIANT`, its implementation) of a module; nothing for another module.

    A layer of SGLang's whose quantisation method is of this package computes by the registry, as our own layers do: the
    registry refuses an implementation that is not batch-invariant when the layer asks for it.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    method = getattr(module, "quant_method", None)
    if compat.is_our_class(type(method)):
        return
    if isinstance(module, FusedMoE):
        yield "routed experts", f"MoE runner {get_moe_runner_backend().value!r} ({type(method).__name__})"
    elif isinstance(module, LinearBase):
        product = getattr(method, "w8a8_block_fp8_linear", None)
        if product is None:
            yield "linear layer", type(method).__name__
            return
        name = _name_of(product)
        if name == DEEP_GEMM and not compat.deep_gemm_serves(
            tuple(module.weight.shape), method.weight_block_size, torch.get_default_dtype()
        ):
            name = f"Triton product ({tuple(module.weight.shape)} in blocks of {method.weight_block_size})"
        yield "FP8 linear layer", name
