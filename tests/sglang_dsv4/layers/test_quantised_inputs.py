"""Inputs of FP8 products that the op before them quantises, as on Hopper: the bits equal quantising in each product.

SGLang's FP8 products take such inputs as codes and scales. A CPU has no such products, so the reference product gets
the dequantised values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model.oracle import QUANTISABLE
from model.quantised_inputs import as_on_hopper
from model.served import Served
from torch import Tensor

PROMPT, CHUNK, DECODE_FROM = 150, 64, 140


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Served:
    return serve("flash-like", dtype="bfloat16", qat="full", **QUANTISABLE)


@pytest.fixture
def taken(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Build all modules as on Hopper; the list gets the products that were given codes and scales."""
    return as_on_hopper(served.harness.runner.model, monkeypatch)


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
