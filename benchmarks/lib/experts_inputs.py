"""Sizes of the released models' experts, random packed weights, and random rows with their routing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.moe import Mxfp4Experts

CHOSEN = 6
LIMIT = 10.0
BYTES_A_WEIGHT = 17 / 32


@dataclass(frozen=True)
class Model:
    """Dimensions of a model's experts on a rank."""

    experts: int
    d: int
    channels: int


MODELS = {"flash": Model(256, 4096, 2048), "pro": Model(384, 7168, 3072)}


@dataclass(frozen=True)
class Inputs:
    """Inputs of one experts call."""

    x: Tensor  # [T, d] bf16
    weights: Tensor  # [T, k] fp32
    experts: Tensor  # [T, k] int32


def random_experts(model: Model, device: torch.device) -> Mxfp4Experts:
    """Return weights with codes of every kind and scales of a row within 2^6, so that outputs are around 1."""
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(
            0, 256, (model.experts, rows, k // 2), generator=generator, dtype=torch.uint8, device=device
        )
        centre = 127 - round(math.log2(3 * math.sqrt(k)))
        shape = model.experts, rows, k // 32
        scale = torch.randint(centre - 5, centre + 2, shape, generator=generator, dtype=torch.uint8, device=device)
        return codes, scale.view(torch.float8_e8m0fnu)

    return Mxfp4Experts(*matrix(2 * model.channels, model.d), *matrix(model.d, model.channels))


def inputs(model: Model, tokens: int, routing: str, seed: int, device: torch.device) -> Inputs:
    """Return random rows, routed uniformly, by Zipf's law, or all to the same six experts."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, model.d, generator=generator, device=device).bfloat16()
    order = torch.randperm(model.experts, generator=generator, device=device)
    if routing == "six":
        ids = order[:CHOSEN].expand(tokens, CHOSEN)
    else:
        # Top-k of log-probability plus Gumbel noise draws without replacement.
        noise = torch.rand(tokens, model.experts, generator=generator, device=device)
        scores = -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
        if routing == "zipf":
            scores -= torch.log(torch.arange(1, model.experts + 1, device=device).float())
        ids = order[scores.topk(CHOSEN).indices]
    weights = torch.rand(tokens, CHOSEN, generator=generator, device=device) + 0.1
    weights = 1.5 * weights / weights.sum(1, keepdim=True)
    return Inputs(x, weights, ids.int().contiguous())
