"""Gathered FP8 weights with their scales; whole models with all heads are compared in `test_sequence_parallel.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_dsv4.layers import all_heads
from sglang_dsv4.layers.all_heads import AllHeads
from sglang_dsv4.model_config.config import ConfigError

RANKS, LATENT, DIM, HEAD_CHANNELS = 3, 256, 384, 128
BLOCK = 128


class Fp8Method:
    """The product of SGLang's FP8 method, in fp32, without a quantiser for its input; reads an attribute of the layer,
    as SGLang's does."""

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        scale = layer.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return layer.factor * (x @ (layer.weight.float() * scale).T)


def fp8_layer(rows: int, channels: int, seed: int) -> nn.Module:
    """Return a layer with random weights and scales, different in each block."""
    torch.manual_seed(seed)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(rows, channels).to(torch.float8_e4m3fn), requires_grad=False)
    scale = torch.randint(-3, 4, (rows // BLOCK, channels // BLOCK)).float().exp2()
    layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    layer.quant_method, layer.factor = Fp8Method(), 0.5
    return layer


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[AllHeads]:
    """The gathered weights of all ranks, each of which has one head and one output group."""
    monkeypatch.setattr(all_heads, "get_parallel", lambda: SimpleNamespace(tp_size=RANKS))
    monkeypatch.setattr(all_heads, "get_tp_group", lambda: SimpleNamespace(device_group=None))
    made = []
    for rank in range(RANKS):
        of_group = torch.randn(1, HEAD_CHANNELS, HEAD_CHANNELS)
        wo_a = SimpleNamespace(
            in_model_dtype=lambda of_group=of_group: of_group,
            multiply=lambda o, positions, rope, weight: torch.einsum("tgk,gnk->tgn", o, weight).flatten(1),
        )
        wq_b, wo_b = fp8_layer(HEAD_CHANNELS, LATENT, rank), fp8_layer(DIM, HEAD_CHANNELS, 10 + rank)
        made.append(AllHeads(wq_b, wo_a, wo_b, nn.Parameter(torch.randn(1), requires_grad=False), quantises=False))
    shards: list[list[Tensor]] = [[] for _ in made]
    for of_rank, layer in zip(shards, made, strict=True):

        def keep(whole: Tensor, shard: Tensor, group: None, kept: list[Tensor] = of_rank) -> None:
            kept.append(shard.clone())

        monkeypatch.setattr(all_heads, "all_gather_single", keep)
        layer.gather()
    for layer in made:
        in_order = iter(list(zip(*shards, strict=True)))

        def gather(whole: Tensor, shard: Tensor, group: None, of_ranks: Iterator[Any] = in_order) -> None:
            whole.copy_(torch.cat(next(of_ranks)))

        monkeypatch.setattr(all_heads, "all_gather_single", gather)
        layer.gather()
    return made


def test_queries_are_those_of_all_ranks_one_after_the_other(ranks: list[AllHeads]) -> None:
    latent = torch.randn(5, LATENT)
    expected = torch.cat([Fp8Method().apply(layer._own["wq_b"], latent) for layer in ranks], 1)
    for layer in ranks:
        assert torch.equal(layer.queries(latent), expected)
        assert torch.equal(layer.sink, torch.cat([other._own["sink"] for other in ranks]))


def test_the_output_is_the_sum_of_the_ranks_parts_in_their_order(ranks: list[AllHeads]) -> None:
    o = torch.randn(5, RANKS, HEAD_CHANNELS)
    parts = []
    for rank, layer in enumerate(ranks):
        own = layer._own
        middle = own["wo_a"].multiply(o[:, rank : rank + 1], None, None, own["wo_a"].in_model_dtype())
        parts.append(Fp8Method().apply(own["wo_b"], middle))
    for layer in ranks:
        torch.testing.assert_close(layer.project(o, None, None), (parts[0] + parts[1]) + parts[2])


@pytest.mark.parametrize(
    "scale", [torch.ones(1, 2, dtype=torch.int32), torch.ones(2, 1), torch.ones(HEAD_CHANNELS, LATENT)], ids=str
)
def test_rearranged_scales_are_refused(ranks: list[AllHeads], scale: Tensor) -> None:
    ranks[0]._own["wq_b"].weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    with pytest.raises(ConfigError, match=r"SGLANG_DSV4_SEQUENCE_PARALLEL.*weight_scale_inv of wq_b is \("):
        ranks[0].gather()


def test_no_other_tensor_of_the_own_shard_is_read(ranks: list[AllHeads], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps weights in another form for some GPUs; its methods ask whether the layer has it."""
    layer, latent = ranks[0], torch.randn(5, LATENT)
    expected = layer.queries(latent)
    layer._own["wq_b"].cached = torch.zeros(HEAD_CHANNELS, LATENT)
    monkeypatch.setattr(
        Fp8Method,
        "apply",
        lambda method, layer, x, plain=Fp8Method.apply: (
            plain(method, layer, x) if getattr(layer, "cached", None) is None else x @ layer.cached.T
        ),
    )
    assert torch.equal(layer.queries(latent), expected)
    monkeypatch.setattr(Fp8Method, "apply", lambda method, layer, x: x @ layer.cached.T)
    with pytest.raises(AttributeError, match="cached is of this rank's heads"):
        layer.queries(latent)
