"""A rank's share of the routed experts: of all ranks together every row and channel once, loaded or staged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_dsv4.layers import local_experts
from sglang_dsv4.layers.moe import ReferenceExperts

EXPERTS, CHANNELS, D = 4, 12, 5
CONFIG = SimpleNamespace(
    n_routed_experts=EXPERTS, moe_intermediate_size=CHANNELS, hidden_size=D, swiglu_limit=10.0, activation_block=None
)


def rank_of(monkeypatch: pytest.MonkeyPatch, tp: int, tp_rank: int, ep: int, ep_rank: int, **change: int) -> object:
    parallel = SimpleNamespace(moe_tp_size=tp, moe_tp_rank=tp_rank, moe_ep_size=ep, moe_ep_rank=ep_rank)
    monkeypatch.setattr(local_experts, "get_parallel", lambda: parallel)
    return ReferenceExperts(SimpleNamespace(**(vars(CONFIG) | change)))


def tensors() -> dict[tuple[int, str], Tensor]:
    """Every expert's matrices, by expert and shard."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"w1": (CHANNELS, D), "w2": (D, CHANNELS), "w3": (CHANNELS, D)}
    return {(e, s): torch.randn(shape, generator=generator) for e in range(EXPERTS) for s, shape in shapes.items()}


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (3, 4), (2, 2)])
def test_the_ranks_hold_every_expert_once(tp: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    of_rank = CHANNELS // tp
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            layer = rank_of(monkeypatch, tp, tp_rank, ep, ep_rank)
            parts: dict = {}
            for parameter in (layer.w13_weight, layer.w2_weight):
                parameter.data.fill_(torch.nan)
            for (expert, shard), tensor in given.items():
                parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
                layer.stage(parts, parameter, tensor, "", shard, expert)
                layer.weight_loader(parameter, tensor, "", shard, expert)
            channels = slice(tp_rank * of_rank, (tp_rank + 1) * of_rank)
            for local in range(EXPERTS // ep):
                expert = ep_rank * (EXPERTS // ep) + local
                w13 = torch.cat([given[expert, "w1"][channels], given[expert, "w3"][channels]])
                assert torch.equal(layer.w13_weight[local], w13)
                assert torch.equal(layer.w2_weight[local], given[expert, "w2"][:, channels])
                assert torch.equal(parts[f"w13.{local}"].value, w13)
                assert torch.equal(parts[f"w2.{local}"].value, layer.w2_weight[local])
            assert len(parts) == 2 * EXPERTS // ep
