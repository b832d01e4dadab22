"""Quantisers, bit by bit, against enumeration of the formats (tests/lib/ops/number_formats.py).

Regimes: every bf16 number as its own block; every e4m3 / e2m1 value, every midpoint of neighbours and the floats next
to it at scale 1; blocks whose maximum sits on, just below and just above a power of two times 448 (6); amplitudes from
below the floor to 1e30; zeros of both signs; a last block that is short.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.number_formats import E2M1, E4M3, nearest_codes, quantise_e2m1, quantise_e4m3, same_bits

from dsv4_kernels import number_formats, quant

DTYPES = [torch.float32, torch.bfloat16]


def every_finite_bf16() -> torch.Tensor:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[values.isfinite()]


def around_midpoints(table: np.ndarray) -> torch.Tensor:
    """All values, midpoints and their fp32 neighbours, of both signs, as rows [maximum, x] so that the scale is 1."""
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    points = np.concatenate([points, up, np.maximum(down, 0)])
    points = np.minimum(np.concatenate([points, -points]), np.float32(table[-1])).astype(np.float32)
    return torch.from_numpy(np.stack([np.full_like(points, table[-1]), points], 1))


def around_powers_of_two(largest: float) -> torch.Tensor:
    """One-element blocks on, just below and just above 2**n · largest."""
    points = np.float32(largest) * np.exp2(np.arange(-30, 60)).astype(np.float32)
    return torch.from_numpy(
        np.concatenate([points, np.nextafter(points, np.float32(0)), points * np.float32(1.0000002)])
    )


CASES = {
    "every_bf16": lambda _, __: (every_finite_bf16().unsqueeze(1), 1),
    "midpoints": lambda table, _: (around_midpoints(table), 2),
    "scale_steps": lambda table, _: (around_powers_of_two(float(table[-1])).unsqueeze(1), 1),
    "gaussian": lambda _, block: (torch.randn(200, 4 * block, generator=torch.Generator().manual_seed(1)), block),
    "amplitudes": lambda _, block: (
        torch.randn(200, block, generator=torch.Generator().manual_seed(2)) * torch.logspace(-44, 30, 200).unsqueeze(1),
        block,
    ),
    "zeros": lambda _, block: (torch.tensor([[0.0, -0.0] * (block // 2)] * 3), block),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["fp8_block64", "fp8_block128", "fp4_block32"])
def test_rounds_as_the_enumeration_says(kind: str, case: str, dtype: torch.dtype) -> None:
    fp8 = kind.startswith("fp8")
    x, block = CASES[case](E4M3 if fp8 else E2M1, int(kind.rpartition("block")[2]))
    x = x.to(dtype)
    codes, exponents, values = (quantise_e4m3 if fp8 else quantise_e2m1)(x, block)

    rounded = (quant.fp8_qdq if fp8 else quant.fp4_qdq)(x, block)
    assert same_bits(rounded, torch.from_numpy(values).float().to(dtype))

    got_codes, got_scales = (number_formats.encode_fp8 if fp8 else number_formats.encode_fp4)(x, block)
    assert np.array_equal(got_codes.contiguous().view(torch.uint8).numpy(), codes)
    assert np.array_equal(np.log2(got_scales.double().numpy()), exponents)
    decoded = (number_formats.decode_fp8 if fp8 else number_formats.decode_fp4)(got_codes, got_scales, block)
    assert same_bits(decoded.to(dtype), rounded)


def test_rounding_is_a_fixed_point() -> None:
    """Values that were rounded once do not change again; so plain rows can hold the values of FP8 rows."""
    x = torch.randn(500, 448, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[:, 0] *= torch.logspace(-3, 3, 500).bfloat16()
    once = quant.fp8_qdq(x, 64)
    assert same_bits(quant.fp8_qdq(once, 64), once)
    keys = quant.fp4_qdq(x[:, :128])
    assert same_bits(quant.fp4_qdq(keys), keys)


def test_short_last_block_is_a_block_of_its_own() -> None:
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(4))
    x[:, 64:] *= 1e-3
    expected = torch.cat((quant.fp8_qdq(x[:, :64], 64), quant.fp8_qdq(x[:, 64:], 16)), 1)
    assert same_bits(quant.fp8_qdq(x, 64), expected)


def test_long_inputs_are_rounded_piece_by_piece_alike() -> None:
    """Above the size at which rows are processed in pieces, with a row count that no piece divides."""
    x = torch.randn(1031, 3, 128, generator=torch.Generator().manual_seed(5))
    for function in (lambda y: quant.fp8_qdq(y, 128), quant.fp4_qdq, quant.hadamard):
        assert same_bits(function(x), torch.stack([function(row) for row in x]))


@pytest.mark.parametrize("shift", range(-126, 127, 11))
def test_ue8m0_ceil(shift: int) -> None:
    power = torch.tensor([2.0**shift])
    above = torch.nextafter(power, torch.tensor([torch.inf]))
    assert number_formats.ue8m0_ceil(power).item() == 2.0**shift
    assert number_formats.ue8m0_ceil(above).item() == 2.0 ** (shift + 1)


def hadamard_matrix(d: int) -> torch.Tensor:
    sign = [[1.0 - 2 * ((i & j).bit_count() & 1) for j in range(d)] for i in range(d)]
    return torch.tensor(sign, dtype=torch.float64)


@pytest.mark.parametrize("d", [1, 2, 4, 16, 64, 128])
def test_hadamard_is_sylvesters_matrix(d: int) -> None:
    """On unit vectors the sums have no rounding error: the result is the matrix's column to the last bit."""
    expected = (hadamard_matrix(d).float() * torch.tensor(d**-0.5)).float()
    assert same_bits(quant.hadamard(torch.eye(d)), expected)
    integers = torch.randint(-8, 9, (50, d), generator=torch.Generator().manual_seed(6)).float()
    exact = (integers.double() @ hadamard_matrix(d)).float() * torch.tensor(d**-0.5)
    assert torch.equal(quant.hadamard(integers), exact)
    assert torch.equal(quant.hadamard(integers.bfloat16()), exact.bfloat16())


def test_hadamard_is_its_own_inverse() -> None:
    x = torch.randint(-8, 9, (50, 64), generator=torch.Generator().manual_seed(7)).float()
    assert torch.equal(quant.hadamard(quant.hadamard(x)), x)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 136), (8, 40)], ids=str)
def test_fp8_weight(shape: tuple[int, int]) -> None:
    n, k = shape
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(8)) * torch.logspace(-4, 4, n).unsqueeze(1)
    codes, scale = number_formats.quantise_fp8_weight(w)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    assert scale.shape == (-(-n // 128), -(-k // 128))
    expected = torch.empty_like(w)
    for i in range(0, n, 128):
        for j in range(0, k, 128):
            block = w[i : i + 128, j : j + 128]
            _, exponent, values = quantise_e4m3(block.reshape(1, -1), block.numel())
            assert scale[i // 128, j // 128].float().log2().item() == exponent.item()
            expected[i : i + 128, j : j + 128] = torch.from_numpy(values).float().view(block.shape)
    assert same_bits(number_formats.dequantise_fp8_weight(codes, scale, torch.float32), expected)
    assert same_bits(number_formats.dequantise_fp8_weight(codes, scale, torch.bfloat16).float(), expected)


def test_fp4_weight_bytes() -> None:
    """Every byte, every scale: low nibble = even column, sign in bit 3."""
    weight = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.int8)
    scale = torch.arange(120, 136, dtype=torch.uint8).view(16, 1).view(torch.float8_e8m0fnu)
    expected = torch.empty(16, 32)
    signed = [*E2M1, *(-E2M1)]
    for byte in range(256):
        row, place = divmod(byte, 16)
        expected[row, 2 * place] = signed[byte & 15] * 2.0 ** (row - 7)
        expected[row, 2 * place + 1] = signed[byte >> 4] * 2.0 ** (row - 7)
    assert same_bits(number_formats.dequantise_fp4_weight(weight, scale, torch.float32), expected)
    assert same_bits(number_formats.dequantise_fp4_weight(weight, scale, torch.bfloat16), expected.bfloat16())


def test_fp4_weight_rounding() -> None:
    w = torch.randn(7, 96, generator=torch.Generator().manual_seed(9)) * torch.logspace(-4, 4, 7).unsqueeze(1)
    weight, scale = number_formats.quantise_fp4_weight(w)
    codes, exponents, values = quantise_e2m1(w, 32)
    assert np.array_equal(weight.view(torch.uint8).numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)
    assert np.array_equal(scale.float().log2().numpy(), exponents)
    expected = torch.from_numpy(values).float()
    assert same_bits(number_formats.dequantise_fp4_weight(weight, scale, torch.float32), expected)


@pytest.mark.parametrize("global_scale", [1.0, 3.7e-5, 0.0])
def test_nvfp4_weight_bytes(global_scale: float) -> None:
    """Every byte under every scale of e4m3: the product rounded once to fp32."""
    weight = torch.arange(256, dtype=torch.uint8).repeat(127).view(-1, 8)  # 127 scales, 256 bytes each
    scale = torch.arange(127, dtype=torch.uint8).repeat_interleave(32).view(-1, 1).view(torch.float8_e4m3fn)
    signed = np.array([*E2M1, *(-E2M1)])
    codes = np.stack((weight.numpy() & 15, weight.numpy() >> 4), -1).reshape(-1, 16)
    exact = signed[codes] * np.repeat(E4M3, 32)[:, None] * float(np.float32(global_scale))
    expected = torch.from_numpy(exact.astype(np.float32))
    for shape in ((), (1,)):
        got = number_formats.dequantise_nvfp4_weight(weight, scale, torch.full(shape, global_scale), torch.float32)
        assert same_bits(got, expected)
    got = number_formats.dequantise_nvfp4_weight(weight, scale, torch.tensor(global_scale), torch.bfloat16)
    assert same_bits(got, expected.bfloat16())


@pytest.mark.parametrize("amax", [None, 2000.0], ids=["own-amax", "shared-amax"])
def test_nvfp4_weight_rounding(amax: float | None) -> None:
    """Codes and scales are the nearest possible; a row of zeros, and rows whose scale e4m3 would round to 0."""
    w = torch.randn(9, 96, generator=torch.Generator().manual_seed(9)) * torch.logspace(-8, 2.5, 9).unsqueeze(1)
    w[4] = 0
    weight, scale, global_scale = number_formats.quantise_nvfp4_weight(w, amax)
    assert global_scale == np.float32(amax or w.abs().max()) / np.float32(6 * 448)
    blocks = w.numpy().reshape(9, 6, 16)
    wanted = np.abs(blocks).max(-1) / (np.float32(6) * global_scale.numpy())
    of_block = np.maximum(nearest_codes(wanted.astype(np.float64), E4M3, 0x80), 1)
    assert np.array_equal(scale.view(torch.uint8).numpy(), of_block)
    unit = E4M3[of_block].astype(np.float32) * global_scale.numpy()
    codes = nearest_codes((blocks / unit[..., None]).astype(np.float64), E2M1, 0x8).reshape(9, 96)
    assert np.array_equal(weight.numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)
    back = number_formats.dequantise_nvfp4_weight(weight, scale, global_scale, torch.float32)
    step = torch.from_numpy(np.repeat(unit.reshape(9, 6), 16, 1))
    assert ((back - w).abs() <= step * (1 + 2.0**-3)).all()  # half of 6 - 4, and the rounding error of the e4m3 scale


def test_nvfp4_weight_of_zeros() -> None:
    weight, scale, global_scale = number_formats.quantise_nvfp4_weight(torch.zeros(2, 32))
    assert (
        global_scale == 0
        and not number_formats.dequantise_nvfp4_weight(weight, scale, global_scale, torch.float32).any()
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quant.hadamard(torch.zeros(2, 96)), "power of two"),
        (lambda: number_formats.quantise_nvfp4_weight(torch.zeros(2, 40)), "multiple of 16"),
        (
            lambda: number_formats.dequantise_nvfp4_weight(
                torch.zeros(2, 16, dtype=torch.uint8),
                torch.ones(2, 1).to(torch.float8_e4m3fn),
                torch.ones(()),
                torch.float32,
            ),
            r"NVFP4 weight of 2x16 bytes has shape \(2, 1\); expected \(2, 2\)",
        ),
        (
            lambda: number_formats.dequantise_nvfp4_weight(
                torch.zeros(2, 16, dtype=torch.uint8),
                torch.ones(2, 2).to(torch.float8_e4m3fn),
                torch.ones(2),
                torch.float32,
            ),
            "expected one number",
        ),
        (lambda: quant.fp8_qdq(torch.zeros(2, 96), 0), "at least 1"),
        (lambda: quant.fp4_qdq(torch.zeros(2, 96), -32), "at least 1"),
        (lambda: number_formats.quantise_fp4_weight(torch.zeros(2, 40)), "multiple of 32"),
        (
            lambda: number_formats.dequantise_fp8_weight(
                torch.zeros(129, 128, dtype=torch.float8_e4m3fn), torch.ones(1, 1), torch.float32
            ),
            r"\(1, 1\); expected \(2, 1\)",
        ),
        (
            lambda: number_formats.dequantise_fp4_weight(
                torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 4), torch.float32
            ),
            r"\(4, 4\); expected \(4, 2\)",
        ),
    ],
    ids="hadamard nvfp4_columns nvfp4_scale nvfp4_global fp8_block fp4_block fp4_columns fp8_scale fp4_scale".split(),
)
def test_errors_say_what_is_expected(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()


def test_the_oracle_rounds_ties_to_even() -> None:
    """The enumeration itself: 2.5 lies between the e2m1 codes 4 and 5 (2 and 3), 5 between 6 and 7, 464 saturates."""
    assert nearest_codes(np.array([0.25, 0.75, 2.5, 3.5, 5.0, -0.0, -2.5, 9.0]), E2M1, 8).tolist() == [
        *(0, 2, 4, 6, 6, 8, 12, 7)
    ]
    assert E4M3[-1] == 448 and E4M3[1] == 2.0**-9
    assert nearest_codes(np.array([464.0, 2.0**-10, 3 * 2.0**-10]), E4M3, 0x80).tolist() == [126, 0, 2]
