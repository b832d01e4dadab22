"""Inputs of hyper-connections, their formulas in float64, and how far results may be from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from ops.memory_layout import strided
from torch import Tensor

from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.hyper_connection import ref
from dsv4_kernels.moe.ref import sum_expert_rows

NORM_EPS, HC_EPS = 0.25, 0.03  # far larger than the model's 1e-6: a misplaced one must change the result in bf16, too
U32, U16 = 2.0**-24, 2.0**-8
"""Relative rounding errors of fp32 and of bf16: half a unit in the last place."""

ITERATIONS = 20


class Inputs(NamedTuple):
    """Inputs of `hc_boundary`; the first four rows of fn, base and scale serve as a head's."""

    y: Tensor | ExpertRows
    streams: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    weight: Tensor

    def boundary(self) -> tuple:
        return (*self, NORM_EPS, HC_EPS, ITERATIONS)

    def head(self) -> tuple:
        return (self.fn[:4], self.base[:4], self.scale[:1])

    def of(self, tokens: list[int] | Tensor) -> Inputs:
        return self._replace(**{name: getattr(self, name)[tokens] for name in ("y", "streams", "post", "comb")})

    def to(self, device: str) -> Inputs:
        return Inputs(*(moved(x, device) for x in self))


def moved(x: Tensor | ExpertRows, device: str) -> Tensor | ExpertRows:
    """The same values on another device."""
    if isinstance(x, Tensor):
        return x.to(device)
    names = ("rows", "experts", "slot_of_pair", "shared")
    on_device = {name: tensor.to(device) for name, tensor in zip(names, x.tensors, strict=True)}
    return replace(x, **on_device, total=lambda: x.total().to(device))


def inputs(num_tokens: int, d: int, seed: int = 0, weight: torch.dtype = torch.float32) -> Inputs:
    """Random inputs with a model's magnitudes: coefficients around those of a doubly stochastic mixture, fn's products
    around 1."""
    g = torch.Generator().manual_seed(seed)
    return Inputs(
        torch.randn(num_tokens, d, generator=g).bfloat16(),
        torch.randn(num_tokens, 4, d, generator=g).bfloat16(),
        2 * torch.rand(num_tokens, 4, generator=g),
        torch.rand(num_tokens, 4, 4, generator=g) / 2,
        torch.randn(24, 4 * d, generator=g) / math.sqrt(4 * d),
        torch.randn(24, generator=g),
        1 + 0.3 * torch.randn(3, generator=g),
        (1 + 0.1 * torch.randn(d, generator=g)).to(weight),
    )


def expert_rows(
    num_tokens: int, d: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, chosen: int = 4
) -> ExpertRows:
    """Random rows of experts in every order, some of them on other ranks. In every third column the first two of a
    token cancel, so that another order of adding gives other bits. Rows that no list names are NaN, as are the gaps
    between the rows of `shared`."""
    g = torch.Generator().manual_seed(100 + seed)
    pairs = num_tokens * chosen
    places = torch.randperm(pairs + 5, generator=g)[:pairs]
    rows = torch.full((pairs + 5, d), math.nan, dtype=torch.bfloat16)
    values = torch.randn(num_tokens, chosen, d, generator=g)
    values[:, 0, ::3] *= 2.0**18
    values[:, 1, ::3] = -values[:, 0, ::3]
    rows[places] = values.flatten(0, 1).bfloat16()
    slots = places.int().view(num_tokens, chosen)
    slots[:, 2:][torch.rand(num_tokens, chosen - 2, generator=g) < 0.3] = -1
    experts = torch.stack([torch.randperm(9, generator=g)[:chosen] for _ in range(num_tokens)]).int()
    shared = strided(torch.randn(num_tokens, d, generator=g).bfloat16(), 0, 8)

    def total() -> Tensor:
        with_zeros = torch.cat([rows, torch.zeros(1, d, dtype=rows.dtype)])  # a slot of -1 is the last row
        sums = sum_expert_rows(with_zeros, slots, experts)
        return sums + shared if dtype == torch.float32 else sums.bfloat16() + shared

    return ExpertRows(rows, experts, slots, shared, dtype, total)


def exact_streams(i: Inputs) -> tuple[Tensor, Tensor]:
    """`hc_post` in float64, and the sum of the magnitudes of its terms."""
    y, x, post, comb = (v.double() for v in (i.y, i.streams, i.post, i.comb))
    terms = torch.cat([post[:, None, :, None] * y[:, None, None], comb[..., None] * x[:, :, None]], 1)
    return terms.sum(1), terms.abs().sum(1)


def exact_logits(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments of the sigmoids and of softmax in float64, and a bound on fp32's error.

    At most three units of fn's 24 bits are lost (6 halves of one). In a warp and stream 32 products of tensor cores
    follow one another, of eight terms each; one may align them and the sum to the largest, and truncate bits below 24:
    9 units of at most the sum of the magnitudes. Then a sum goes over 4 streams, at most 7 warps and 7 CTAs. The sum of
    squares has 16 terms in a unit, 5 steps over units and threads, and the same warps and CTAs; half of its relative
    error counts. Eight roundings more for the norm (2**-22.9 for the reciprocal root), scale and base.
    """
    x = streams.double().flatten(1)
    inverse = torch.rsqrt(x.square().mean(1, keepdim=True) + NORM_EPS)
    factor = scale.double()[(torch.arange(len(base)) // 4).clamp(max=len(scale) - 1).to(fn.device)] * inverse
    logits = x @ fn.double().T * factor + base.double()
    magnitude = x.abs() @ fn.double().abs().T * factor.abs()
    products = 6 + 32 * 9 * 2 + 18
    return logits, (products + 18 + 8) * U32 * magnitude + 2 * U32 * logits.abs()


def exact_comb(logits: Tensor) -> Tensor:
    comb = logits.unflatten(1, (4, 4)).softmax(2) + HC_EPS
    comb = comb / (comb.sum(1, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(2, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(1, keepdim=True) + HC_EPS)
    return comb


def check_streams(found: Tensor, i: Inputs) -> None:
    """Bound: five products, each rounded into the sum, and the rounding to bf16."""
    exact, magnitude = exact_streams(i)
    assert ((found.double() - exact).abs() <= 6 * U32 * magnitude + 1.01 * U16 * exact.abs()).all()


def check_coefficients(found: list[Tensor], reference: list[Tensor], exact: list[Tensor]) -> None:
    """Bound, in the Frobenius norm: twice the reference's distance from float64, plus eight roundings of fp32 at this
    magnitude, plus 32 truncated sums (one unit each), of which sigmoids and softmax pass on a quarter."""
    for f, r, e in zip(found, reference, exact, strict=True):
        error, others = (f.double() - e).norm(), (r.double() - e).norm()
        assert f.isfinite().all() and error <= 2 * others + (8 + 32 * 2 / 4) * U32 * e.norm(), (
            f"{error:.3e} from float64, the reference {others:.3e}, of {e.norm():.3e}"
        )


def check_mixture(found: Tensor, streams: Tensor, parameters: tuple, weight: Tensor) -> None:
    """Check the normed mixture element by element.

    The bound: the mixture and the norm's result are each rounded to bf16. The argument of a sigmoid has the error of
    `exact_logits`, of which the slope, at most 1/4, is left. The sigmoid itself, in halves of fp32's last unit: less
    than 1/2 for the argument in powers of two, 1 for the exponential (2**-22, times the slope), 1 for the sum, 2 for
    the reciprocal, 1 for hc_eps. The sum over four streams rounds 4 times: 10 together. The norm rounds 20 times.
    """
    (logits, off), x = exact_logits(streams, *parameters), streams.double()
    pre = logits[:, :4].sigmoid() + HC_EPS
    exact = (pre[:, :, None] * x).sum(1)
    slack = ((off[:, :4] / 4 + 10 * U32)[:, :, None] * x.abs()).sum(1)
    inverse = torch.rsqrt(exact.square().mean(1, keepdim=True) + NORM_EPS) * weight.double()
    slack = slack * inverse.abs() + 20 * U32 * (exact * inverse).abs()
    exact = exact * inverse
    bound = 2.02 * U16 * exact.abs() + slack
    error = (found.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} of the bound"


def check_boundary(out: tuple[Tensor, ...], i: Inputs) -> None:
    """Checks all four results of hc_boundary."""
    streams, x, post, comb = out
    check_streams(streams, i)
    parameters = (i.fn, i.base, i.scale)
    logits, _ = exact_logits(streams, *parameters)
    _, *reference = ref.hc_pre(streams, *parameters, NORM_EPS, HC_EPS, ITERATIONS)
    check_coefficients([post, comb], reference, [2 * logits[:, 4:8].sigmoid(), exact_comb(logits[:, 8:])])
    check_mixture(x, streams, parameters, i.weight)
