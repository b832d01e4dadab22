"""Rotary embedding against complex multiplication in float64, YaRN against the specification's fixture; the norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4_kernels.norm import rms_norm
from dsv4_kernels.rope import YarnScaling, apply_rope, rope_frequencies

YARN = YarnScaling(factor=16, original_max_positions=65536, beta_fast=32, beta_slow=1)
ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", list(ULP), ids=["fp32", "bf16"])


def test_yarn_frequencies_of_the_specification() -> None:
    """DeepSeek-V4 specification, section 3.2: theta 160000, dim 64, factor 16 over 65536, ramp from pair 15 to 25."""
    fixture = {
        0: 1.0,
        1: 6.876560450e-01,
        14: 5.286856554e-03,
        15: 3.635538509e-03,
        16: 2.265624935e-03,
        20: 2.969777852e-04,
        24: 1.953125320e-05,
        25: 5.372312444e-06,
        31: 5.680528830e-07,
    }
    frequencies = rope_frequencies(64, 160000.0, YARN)
    assert frequencies.dtype == torch.float32 and frequencies.shape == (32,)
    for pair, expected in fixture.items():
        assert frequencies[pair].item() == pytest.approx(expected, rel=2e-7)
    ratio = (frequencies / rope_frequencies(64, 160000.0, None))[[0, 14, 15, 16, 20, 24, 25, 31]]
    assert ratio.tolist() == pytest.approx([1, 1, 1, 0.90625, 0.53125, 0.15625, 0.0625, 0.0625], rel=1e-6)


@pytest.mark.parametrize("dim", [4, 8, 64])
def test_plain_frequencies(dim: int) -> None:
    expected = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    assert np.allclose(rope_frequencies(dim, 10000.0, None).double().numpy(), expected, rtol=3e-7, atol=0)


@DTYPES
@pytest.mark.parametrize("heads", [None, 3], ids=["no_head_axis", "heads"])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (24, 8), (8, 8)], ids=str)
def test_rotates_interleaved_pairs(head_dim: int, rope_dim: int, heads: int | None, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 127, 128, 65535, 65536, 1_000_003])
    frequencies = rope_frequencies(rope_dim, 160000.0, YARN)
    shape = (8, head_dim) if heads is None else (8, heads, head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()

    # The angle is defined as a product of fp32 numbers; everything after it is float64 here.
    angle = (positions.float()[:, None] * frequencies).double().numpy()
    turn = np.exp(1j * angle).reshape(8, *(1,) * (len(shape) - 2), rope_dim // 2)
    pairs = x[..., head_dim - rope_dim :].double().numpy().reshape(*shape[:-1], rope_dim // 2, 2)
    for inverse in (False, True):
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * (turn.conj() if inverse else turn)
        expected = np.stack([z.real, z.imag], -1).reshape(*shape[:-1], rope_dim)
        got = apply_rope(x, positions, frequencies, inverse)
        assert got.dtype == dtype and torch.equal(x, before)
        assert torch.equal(got[..., : head_dim - rope_dim], x[..., : head_dim - rope_dim])
        # cos, sin: 2 ulp; products and sum: 3 roundings; the cast
        bound = (5 * 2.0**-23) * np.abs(pairs).sum(-1).repeat(2, -1) + ULP[dtype] * np.abs(expected)
        assert (np.abs(got[..., head_dim - rope_dim :].double().numpy() - expected) <= bound).all()


def test_inverse_undoes_the_rotation() -> None:
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1))
    positions, frequencies = torch.arange(5) * 1000, rope_frequencies(8, 1e4, None)
    back = apply_rope(apply_rope(x, positions, frequencies), positions, frequencies, inverse=True)
    assert (back - x).abs().max() < 1e-6


@DTYPES
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("shape", [(3, 7), (5, 2, 64), (1, 4096), (600, 512)], ids=str)
def test_rms_norm(shape: tuple[int, ...], weighted: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    x[0] *= 1e-4  # so small that eps matters
    weight = torch.randn(shape[-1], generator=generator).to(dtype) if weighted else None
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if weight is not None:
        exact = exact * weight.double()
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    # fp32: mean (pairwise, well under d / 8 roundings), rsqrt, two products; then one cast
    bound = ((shape[-1] / 8 + 6) * 2.0**-24 + (ULP[dtype] if dtype != torch.float32 else 0)) * exact.abs()
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rope_frequencies(7, 1e4, None), "rope dim is 7"),
        (lambda: apply_rope(torch.zeros(3, 8), torch.zeros(2), torch.ones(2)), r"positions have shape \(2,\)"),
        (lambda: apply_rope(torch.zeros(3, 8), torch.zeros(3), torch.ones(5)), "R at most 8"),
        (lambda: rms_norm(torch.zeros(3, 8), torch.ones(4), 1e-6), r"needs \(8,\)"),
    ],
    ids=["odd_dim", "positions", "frequencies", "norm_weight"],
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()
