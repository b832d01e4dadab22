"""Inputs of FP8 products, quantised by the operation before them as on Hopper: the bits of quantising in each product.

SGLang's FP8 products take such inputs as codes and scales. On a CPU there are none, so the reference product is given
what codes and scales stand for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model.oracle import QUANTISABLE
from model.served import Served
from torch import Tensor, nn

from dsv4_kernels.linear import linear
from sglang_dsv4.layers.linear import Fp8Input, ReferenceLinearMethod

PROMPT, CHUNK, DECODE_FROM = 150, 64, 140


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Served:
    return serve("flash-like", dtype="bfloat16", qat="full", **QUANTISABLE)


@pytest.fixture
def taken(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All modules as on Hopper; the products that took codes and scales."""
    model, names = served.harness.runner.model, []
    quantising = [module for module in model.modules() if hasattr(module, "quantises")]
    assert {type(module).__name__ for module in quantising} == {"Attention", "HyperConnection", "SharedExpert"}
    for module in quantising:
        monkeypatch.setattr(module, "quantises", True)
    of = {id(module): name for name, module in model.named_modules()}

    def apply(method: ReferenceLinearMethod, layer: nn.Module, x: Fp8Input, bias: None = None) -> Tensor:
        assert isinstance(x, tuple), f"{of[id(layer)]} quantises by itself"
        names.append(of[id(layer)])
        codes, scales = x
        blocks = codes.unflatten(1, (-1, 128)) if codes.shape[1] % 128 == 0 else codes.unsqueeze(1)
        rows = (blocks.float() * scales.unsqueeze(2)).flatten(1).bfloat16()
        return linear(rows, layer.weight)

    monkeypatch.setattr(ReferenceLinearMethod, "apply", apply)
    return names


def run(served: Served) -> Tensor:
    return served.harness.run(served.corpus[0][:PROMPT], CHUNK, decode_from=DECODE_FROM)


def test_the_same_bits(served: Served, request: pytest.FixtureRequest) -> None:
    expected = run(served)
    names = request.getfixturevalue("taken")
    assert torch.equal(run(served), expected)
    kinds = {name.split(".", 3)[-1] for name in names}
    assert kinds == {"attn.wqkv_a", "attn.wq_b", "attn.wo_b", "attn.indexer.wq_b"} | {
        f"ffn.shared_experts.{matrix}" for matrix in ("w13", "w2")
    }
