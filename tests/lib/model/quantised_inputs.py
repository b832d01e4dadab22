"""A model on a CPU whose inputs of FP8 products are quantised before the products, as on Hopper."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from dsv4_kernels.linear import linear
from sglang_dsv4.layers.linear import Fp8Input, ReferenceLinearMethod


def as_on_hopper(model: nn.Module, patch: pytest.MonkeyPatch) -> list[str]:
    """Change all modules of a bf16 model as on Hopper; return the names of the products that got codes and scales."""
    names: list[str] = []
    quantising = [module for module in model.modules() if hasattr(module, "quantises")]
    types = {type(module).__name__ for module in quantising} - {"AllHeads"}  # a prefill by rows has it, too
    assert types == {"Attention", "HyperConnection", "SharedExpert"}
    for module in quantising:
        patch.setattr(module, "quantises", True)
    of = {id(module): name for name, module in model.named_modules()}

    def apply(method: ReferenceLinearMethod, layer: nn.Module, x: Fp8Input, bias: None = None) -> Tensor:
        name = of[id(getattr(layer, "layer", layer))]  # a product with all ranks' heads has other tensors only
        assert isinstance(x, tuple), f"{name} quantises by itself"
        names.append(name)
        codes, scales = x
        blocks = codes.unflatten(1, (-1, 128)) if codes.shape[1] % 128 == 0 else codes.unsqueeze(1)
        rows = (blocks.float() * scales.unsqueeze(2)).flatten(1).bfloat16()
        return linear(rows, layer.weight)

    patch.setattr(ReferenceLinearMethod, "apply", apply)
    return names
