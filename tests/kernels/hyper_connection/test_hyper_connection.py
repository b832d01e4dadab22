"""Hyper-connections against scalar loops in float64 (DeepSeek-V4 specification, sections 2.2 to 2.4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dsv4_kernels.hyper_connection import hc_head, hc_post, hc_pre

NORM_EPS, HC_EPS = 1e-3, 1e-2  # far larger than the model's 1e-6: a misplaced eps must change the result
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = pytest.mark.parametrize(("streams", "d"), [(4, 16), (2, 24), (4, 512)], ids=str)


def parameters(streams: int, d: int, rows: int, num_scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(streams * d)
    fn = torch.randn(rows, streams * d, generator=generator) / math.sqrt(streams * d)
    return fn, torch.randn(rows, generator=generator), 1 + 0.3 * torch.randn(num_scales, generator=generator)


def naive_mix(x: torch.Tensor, fn: torch.Tensor) -> list[float]:
    flat = [float(x[s, c]) for s in range(x.shape[0]) for c in range(x.shape[1])]
    rms = math.sqrt(sum(v * v for v in flat) / len(flat) + NORM_EPS)
    return [float(np.dot(row, flat)) / rms for row in fn.double().numpy()]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def naive_sinkhorn(entries: list[float], n: int, iterations: int) -> list[list[float]]:
    c = [[math.exp(entries[n * j + k]) for k in range(n)] for j in range(n)]
    c = [[v / sum(row) + HC_EPS for v in row] for row in c]
    for iteration in range(iterations):
        if iteration:
            c = [[v / (sum(row) + HC_EPS) for v in row] for row in c]
        columns = [sum(c[j][k] for j in range(n)) for k in range(n)]
        c = [[c[j][k] / (columns[k] + HC_EPS) for k in range(n)] for j in range(n)]
    return c


def cast_bound(dtype: torch.dtype) -> float:
    return 2.0**-8 if dtype == torch.bfloat16 else 0.0


@DTYPES
@SHAPES
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_hc_pre(streams: int, d: int, iterations: int, dtype: torch.dtype) -> None:
    n = streams
    fn, base, scale = parameters(n, d, (2 + n) * n, 3)
    x = torch.randn(3, n, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1] *= 1e-2
    y, post, comb = hc_pre(x, fn, base, scale, NORM_EPS, HC_EPS, iterations)
    assert (y.dtype, post.dtype, comb.dtype) == (dtype, torch.float32, torch.float32)
    for t in range(3):
        mix = naive_mix(x[t], fn)
        part = [0] * n + [1] * n + [2] * n * n
        z = [m * float(scale[p]) + float(b) for m, p, b in zip(mix, part, base, strict=True)]
        pre = [sigmoid(v) + HC_EPS for v in z[:n]]
        expected = sum(p * x[t, s].double() for s, p in enumerate(pre))
        assert post[t].tolist() == pytest.approx([2 * sigmoid(v) for v in z[n : 2 * n]], abs=1e-6)
        assert np.allclose(comb[t].numpy(), naive_sinkhorn(z[2 * n :], n, iterations), atol=2e-6, rtol=0)
        error = (y[t].double() - expected).abs()
        assert (error <= 2e-6 * x[t].double().abs().sum(0) + cast_bound(dtype) * expected.abs()).all()


def test_twenty_iterations_balance_rows_and_columns_with_the_model_s_eps() -> None:
    fn, base, scale = parameters(4, 16, 24, 3)
    x = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(2))
    _, _, comb = hc_pre(x, fn, base, scale, 1e-6, 1e-6, 20)
    assert (comb.sum(1) - 1).abs().max() < 1e-5  # the last step is on columns
    assert (comb.sum(2) - 1).abs().max() < 1e-3


@DTYPES
@SHAPES
def test_hc_post_sums_over_the_first_index(streams: int, d: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    y, x = torch.randn(3, d, generator=generator).to(dtype), torch.randn(3, streams, d, generator=generator).to(dtype)
    post, comb = torch.rand(3, streams, generator=generator), torch.rand(3, streams, streams, generator=generator)
    out = hc_post(y, x, post, comb)
    assert out.dtype == dtype
    for t in range(3):
        for k in range(streams):
            terms = [post[t, k].double() * y[t].double()]
            terms += [comb[t, j, k].double() * x[t, j].double() for j in range(streams)]
            expected = sum(terms)
            bound = 8 * 2.0**-24 * sum(term.abs() for term in terms) + cast_bound(dtype) * expected.abs()
            assert ((out[t, k].double() - expected).abs() <= bound).all()


@DTYPES
@SHAPES
def test_hc_head(streams: int, d: int, dtype: torch.dtype) -> None:
    fn, base, scale = parameters(streams, d, streams, 1)
    x = torch.randn(3, streams, d, generator=torch.Generator().manual_seed(4)).to(dtype)
    out = hc_head(x, fn, base, scale, NORM_EPS, HC_EPS)
    assert out.dtype == dtype
    for t in range(3):
        mix = naive_mix(x[t], fn)
        pre = [sigmoid(m * float(scale[0]) + float(b)) + HC_EPS for m, b in zip(mix, base, strict=True)]
        expected = sum(p * x[t, s].double() for s, p in enumerate(pre))
        error = (out[t].double() - expected).abs()
        assert (error <= 2e-6 * x[t].double().abs().sum(0) + cast_bound(dtype) * expected.abs()).all()


def test_large_coefficients_saturate() -> None:
    fn, base, scale = parameters(4, 16, 24, 3)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(5))
    for sign in (1, -1):
        y, post, comb = hc_pre(x, fn, base + 200.0 * sign, scale, 1e-6, 1e-6, 20)
        assert y.isfinite().all() and comb.isfinite().all()
        assert torch.equal(post, torch.full_like(post, 2.0 if sign > 0 else 0.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hc_pre(torch.zeros(2, 4, 8), torch.zeros(24, 16), torch.zeros(24), torch.zeros(3), 0.0, 0.0, 20),
            r"fn \(24, 32\)",
        ),
        (
            lambda: hc_pre(torch.zeros(2, 4, 8), torch.zeros(24, 32), torch.zeros(24), torch.zeros(3), 0.0, 0.0, 0),
            "iterations is 0",
        ),
        (
            lambda: hc_head(torch.zeros(2, 4, 8), torch.zeros(4, 32), torch.zeros(4), torch.zeros(3), 0.0, 0.0),
            r"scale \(1,\)",
        ),
        (
            lambda: hc_post(torch.zeros(2, 8), torch.zeros(2, 4, 8), torch.zeros(2, 3), torch.zeros(2, 4, 4)),
            r"post \(2, 4\)",
        ),
        (
            lambda: hc_head(torch.zeros(2, 8), torch.zeros(4, 32), torch.zeros(4), torch.zeros(1), 0.0, 0.0),
            r"expected \[T, streams, d\]",
        ),
    ],
    ids=["fn", "iterations", "scale", "post", "x"],
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()
