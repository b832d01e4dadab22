"""Products: the tiled implementation against float64 and against the definition, and the proof of its tile heights.

test_batch_invariance.py tests for all ops that a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import logging

import pytest
import torch

from dsv4_kernels.linear import grouped_linear, linear, linear_fp32, tiled
from dsv4_kernels.quant import fp8_qdq

ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", list(ULP), ids=["fp32", "bf16"])
IMPLS = pytest.mark.parametrize("impl", ["ref", "tiled"])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Every element within the bound of an fp32 dot product in any order, plus one rounding to the output's dtype."""
    exact = x.double() @ weight.double().T
    k = x.shape[1]
    bound = k * 2.0**-24 * (x.double().abs() @ weight.double().abs().T) + ULP[out_dtype] * exact.abs()
    assert got.dtype == out_dtype and got.shape == exact.shape
    assert ((got.double() - exact).abs() <= bound).all()


@IMPLS
@DTYPES
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 33, 255, 256, 300])
def test_linear(rows: int, dtype: torch.dtype, impl: str) -> None:
    x, weight = normal(rows, 48, seed=0, dtype=dtype), normal(20, 48, seed=1, dtype=dtype)
    assert_product(linear(x, weight, impl=impl), x, weight, dtype)
    assert_product(linear_fp32(x, weight, impl=impl), x, weight, torch.float32)


@IMPLS
@pytest.mark.parametrize("block", [128, 32])
def test_linear_rounds_its_input_first(block: int, impl: str) -> None:
    x, weight = normal(11, 256, seed=2, dtype=torch.bfloat16), normal(20, 256, seed=3, dtype=torch.bfloat16)
    rounded = fp8_qdq(x, block)
    assert not torch.equal(rounded, x)
    assert torch.equal(linear(x, weight, act_qdq_block=block, impl=impl), linear(rounded, weight, impl=impl))


@IMPLS
@DTYPES
def test_grouped_linear(dtype: torch.dtype, impl: str) -> None:
    x, weight = normal(21, 3, 32, seed=4, dtype=dtype), normal(3, 10, 32, seed=5, dtype=dtype)
    got = grouped_linear(x, weight, impl=impl)
    assert got.shape == (21, 3, 10)
    for group in range(3):
        assert_product(got[:, group], x[:, group], weight[group], dtype)


@DTYPES
def test_strided_rows(dtype: torch.dtype) -> None:
    x, weight = normal(50, 96, seed=6, dtype=dtype)[:, 7:55], normal(20, 48, seed=7, dtype=dtype)
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))


@pytest.mark.parametrize(
    ("rows", "heights"),
    [
        (1, [8]),
        (8, [8]),
        (9, [32]),
        (33, [32, 8]),
        (100, [32, 32, 32, 8]),
        (256, [256]),
        (520, [256, 256, 8]),
        (255, [32] * 8),
    ],
)
def test_tile_heights(rows: int, heights: list[int]) -> None:
    tiles = list(tiled._tiles(rows, torch.ones(16, 16)))
    assert [height for _, _, height in tiles] == heights
    assert [begin for begin, _, _ in tiles] == [0, *(end for _, end, _ in tiles[:-1])] and tiles[-1][1] == rows


def test_a_height_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A BLAS whose 32-row kernel is off by an ulp: the shape is computed in tiles of 8, and the log says so once."""
    genuine = tiled._product

    def off_by_an_ulp_at_32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = genuine(x, weight)
        return torch.nextafter(y, torch.tensor(torch.inf)) if len(x) == 32 else y

    monkeypatch.setattr(tiled, "_product", off_by_an_ulp_at_32)
    monkeypatch.setattr(tiled, "_proven_heights", {})
    x, weight = normal(40, 24, seed=8), normal(12, 24, seed=9)
    with caplog.at_level(logging.WARNING, logger=tiled.__name__):
        whole = linear(x, weight)
        alone = torch.cat([linear(row, weight) for row in x.split(1)])
        linear(x, weight)
    assert torch.equal(whole, alone)
    assert len(caplog.records) == 1 and "tiles of 32 rows are not used" in caplog.text and "12x24" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(torch.zeros(2, 3), torch.zeros(4, 5)), "do not fit"),
        (lambda: linear(torch.zeros(2, 3), torch.zeros(4, 3).bfloat16()), "expected the same dtype"),
        (lambda: linear_fp32(torch.zeros(2, 3), torch.zeros(4, 5)), "do not fit"),
        (lambda: grouped_linear(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)), "do not fit"),
    ],
    ids=["shapes", "dtypes", "fp32_shapes", "groups"],
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_cublas_on_a_gpu(rows: int) -> None:
    x, weight = (normal(n, 4096, seed=seed, dtype=torch.bfloat16) for n, seed in ((rows, 8), (264, 9)))
    for operand in (weight.cuda(), weight.cuda().float()):
        assert_product(linear_fp32(x.cuda(), operand, impl="cublas").cpu(), x, weight, torch.float32)
    x, weight = (
        normal(*n, seed=seed, dtype=torch.bfloat16) for n, seed in (((rows, 3, 4096), 10), ((3, 72, 4096), 11))
    )
    got = grouped_linear(x.cuda(), weight.cuda(), impl="cublas").cpu()
    for group in range(3):
        assert_product(got[:, group], x[:, group], weight[group], torch.bfloat16)
