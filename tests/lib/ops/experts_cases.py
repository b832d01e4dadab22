"""Calls of packed experts: sizes, random inputs and weights, and an emulated device for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsv4_kernels.moe import Mxfp4Experts, Nvfp4Experts
from dsv4_kernels.number_formats import quantise_fp4_weight, quantise_nvfp4_weight

LIMIT = 10.0
D, CHANNELS, EXPERTS, CHOSEN = 256, 512, 4, 2
LAYER = SimpleNamespace(
    hidden_size=D,
    moe_intermediate_size=CHANNELS,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    swiglu_limit=LIMIT,
    nvfp4_experts=False,
)
"""The configuration of a small layer of packed experts."""


@dataclass(frozen=True)
class Case:
    """One call. Weights are of `experts` experts, of which the first is expert `offset` of `all_experts`."""

    tokens: int
    chosen: int = 2
    experts: int = 3
    d: int = 256
    channels: int = 128
    offset: int = 0
    all_experts: int | None = None
    one_expert: bool = False
    multiprocessors: int = 4

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Mxfp4Experts]:
        """Return x, routing weights, expert ids, and the packed weights."""
        generator = torch.Generator().manual_seed(self.tokens + 7 * self.d)
        x = torch.randn(self.tokens, self.d, generator=generator)
        spread = torch.exp2(torch.randint(-4, 5, (self.tokens, self.d // 128), generator=generator))
        x *= spread.repeat_interleave(128, 1)
        x[0] = 0
        of_all = self.all_experts or self.experts
        ids = torch.rand(self.tokens, of_all, generator=generator).topk(self.chosen).indices
        if self.one_expert:
            ids[:] = torch.arange(self.chosen)
        weights = torch.rand(self.tokens, self.chosen, generator=generator)
        return x.bfloat16(), weights, ids.int(), packed_experts(self.experts, self.d, self.channels)


@functools.cache
def packed_experts(experts: int, d: int, channels: int) -> Mxfp4Experts:
    generator = torch.Generator().manual_seed(d + channels)

    def matrix(rows: int, columns: int, gain: float) -> tuple[Tensor, Tensor]:
        codes, scales = [], []
        for _ in range(experts):
            spread = torch.exp2(torch.randint(-4, 5, (rows, columns // 32), generator=generator))
            weight = torch.randn(rows, columns, generator=generator) * spread.repeat_interleave(32, 1)
            code, scale = quantise_fp4_weight(weight * (gain / math.sqrt(columns)))
            codes.append(code)
            scales.append(scale.view(torch.uint8))
        return torch.stack(codes), torch.stack(scales).view(torch.float8_e8m0fnu)

    return Mxfp4Experts(*matrix(2 * channels, d, 2.0), *matrix(d, channels, 1.0))


@functools.cache
def packed_nvfp4_experts(experts: int, d: int, channels: int) -> Nvfp4Experts:
    generator = torch.Generator().manual_seed(d + channels)

    def matrix(rows: int, columns: int, gain: float) -> list[Tensor]:
        spread = torch.exp2(torch.randint(-3, 4, (experts, rows, columns // 16), generator=generator))
        weights = torch.randn(experts, rows, columns, generator=generator) * spread.repeat_interleave(16, 2)
        made = [quantise_nvfp4_weight(weight * (gain * (1 + i) / columns**0.5)) for i, weight in enumerate(weights)]
        return [torch.stack([parts[i] for parts in made]) for i in range(3)]

    w1, w1_scale, w1_global = matrix(channels, d, 1.0)
    w3, w3_scale, w3_global = matrix(channels, d, 2.0)  # another global scale than w1's
    w2, w2_scale, w2_global = matrix(d, channels, 1.0)
    w13, w13_scale = torch.cat((w1, w3), 1), torch.cat((w1_scale.view(torch.uint8), w3_scale.view(torch.uint8)), 1)
    w13_global = torch.stack((w1_global, w3_global), 1)
    inputs = torch.tensor(5.0) / 2688, torch.tensor(90.0) / 2688
    return Nvfp4Experts(
        w13, w13_scale.view(torch.float8_e4m3fn), w13_global, inputs[0], w2, w2_scale, w2_global, inputs[1]
    )


@contextmanager
def emulated_on(multiprocessors: int, **options: object) -> Iterator[Any]:
    """Enter `emulated` with this number of multiprocessors, which the kernel reads once and caches."""
    from ptx_emulator import emulated

    from dsv4_kernels.host.arch import hardware_multiprocessors

    hardware_multiprocessors.cache_clear()
    try:
        with emulated(multiprocessors=multiprocessors, **options) as device:
            yield device
    finally:
        hardware_multiprocessors.cache_clear()
