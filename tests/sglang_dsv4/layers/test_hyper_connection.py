"""Sublayers of few tokens leave comb to the next boundary, and bits do not change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsv4_kernels.hyper_connection.unbalanced import MOST_TOKENS, Unbalanced
from sglang_dsv4.layers import hyper_connection
from sglang_dsv4.layers.hyper_connection import HyperConnection, HyperConnectionHead, Pending
from sglang_dsv4.layers.sequence_parallel import ALL_ROWS

CONFIG = SimpleNamespace(hc_mult=4, hidden_size=1024, hc_eps=1e-6, hc_sinkhorn_iters=20)
NORM = SimpleNamespace(weight=torch.ones(1024), eps=1e-6)


@pytest.mark.parametrize("tokens", [1, MOST_TOKENS, MOST_TOKENS + 1])
def test_few_tokens_leave_comb(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two boundaries, the streams of a stage and the head read the comb that the sublayer before has left."""
    sublayers, head = [HyperConnection(CONFIG) for _ in range(3)], HyperConnectionHead(CONFIG)
    generator = torch.Generator().manual_seed(tokens)
    for parameter in (parameter for module in (*sublayers, head) for parameter in module.parameters()):
        torch.nn.init.normal_(parameter, generator=generator)
    streams = torch.randn(tokens, 4, 1024, generator=generator).bfloat16()

    def forward(leaves: bool) -> list[Tensor]:
        pending, found = Pending(streams), []
        for sublayer in sublayers:
            made, pending = sublayer(pending, NORM, ALL_ROWS)
            assert isinstance(pending.comb, Unbalanced) == leaves
            found += [made.rows, pending.streams, pending.post]
            pending = pending.with_output(made.rows.flip(1))
        return [*found, sublayers[0].written_back(pending, NORM), *head(pending, NORM)]

    found = forward(tokens <= MOST_TOKENS)
    monkeypatch.setattr(hyper_connection, "MOST_TOKENS", 0)
    assert all(map(torch.equal, found, forward(False)))
