"""`--enable-layerwise-nvtx-marker`: SGLang's hooks on every module of the model, with a stand-in for NVTX."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model.harness import Harness
from sglang.srt.utils import nvtx_pytorch_hooks


@pytest.mark.slow
def test_markers_of_layers_change_no_bit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sublayers get and return tuples of tensors, which the hooks describe."""
    harness = Harness(checkpoint, max_total_tokens=1024, max_requests=2)
    prompt = torch.randint(2, 1000, (140,), generator=torch.Generator().manual_seed(1))
    plain = harness.run(prompt)
    begun: list[str] = []
    ended: list[None] = []
    monkeypatch.setattr(nvtx_pytorch_hooks.nvtx, "range_push", begun.append)
    monkeypatch.setattr(nvtx_pytorch_hooks.nvtx, "range_pop", lambda: ended.append(None))
    nvtx_pytorch_hooks.PytHooks().register_hooks(harness.model, module_prefix="model")
    assert torch.equal(harness.run(prompt), plain)
    assert len(begun) == len(ended) > 20
    assert any("layers.1" in text and "140" in text for text in begun)
