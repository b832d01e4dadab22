"""The layout of Hopper's MXFP4 weights, against an element-by-element definition; scales that a row cannot hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.experts_cases import packed_experts
from torch import Tensor

from dsv4_kernels.moe import Mxfp4Experts
from dsv4_kernels.moe.sm90 import weights as arrangement
from dsv4_kernels.number_formats import dequantise_fp4_weight

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def decoded(matrix: arrangement.HopperMatrix, row: int, k: int) -> float:
    """The weight in row `row` of the layout and column `k` of expert 0, by the description in weights.py."""
    tile, unit, within = row // 128, row % 128 // 16, row % 16
    half, g = within // 8, within % 8
    step, group, channel = k // 128, k % 128 // 32, k % 32
    words = matrix.codes[0, tile, step].view(torch.int32)
    lane = g * 4 + channel % 16 // 4
    word = int(words[unit * 256 + group // 2 * 128 + lane * 4 + group % 2 * 2 + half]) & 0xFFFFFFFF
    i, second = channel % 4, channel // 16
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[word >> (16 * second + 4 * i) & 7]
    sign = word >> (8 * i + (3 if second else 7)) & 1
    shifts = int(matrix.shifts[0, tile, step].view(torch.int32)[unit * 8 + g]) & 0xFFFFFFFF
    shift = shifts >> (4 * (2 * group + half)) & 15
    return (-1) ** sign * magnitude * 2.0 ** (shift - 5) * float(matrix.factors[0, row])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("gate_up", [False, True])
def test_an_arrangement_can_be_undone(gate_up: bool, wide: bool) -> None:
    """Codes come back, and scales of groups that are not zero; arranged again they give the same bytes.

    `wide`: also rows of zeros, groups of zeros, and scales so far below their row's largest that codes are rounded.
    """
    packed = packed_experts(3, 512, 256)
    codes, scale = (packed.w13, packed.w13_scale) if gate_up else (packed.w2, packed.w2_scale)
    codes, bytes_ = codes.clone(), scale.view(torch.uint8).clone()
    if wide:
        codes[0, 0] = 0
        codes[1, :, :16] = 0
        bytes_[2, 5:9, 1] = 3
        bytes_[2, 9] = torch.randint(1, 8, bytes_[2, 9].shape, generator=torch.Generator().manual_seed(1))
    given = codes.clone().view(torch.uint8), bytes_.clone()
    arrangement.arrange(codes, bytes_, gate_up=gate_up, in_place=True)
    back = arrangement.in_checkpoint_order(codes, bytes_, gate_up=gate_up)
    if not wide:
        assert torch.equal(back[0], given[0]) and torch.equal(back[1], given[1])
    again = back[0].clone().view(torch.int8), back[1].clone()
    assert arrangement.arrange(*again, gate_up=gate_up, in_place=True).rounded == 0
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(again[1], bytes_)


@pytest.mark.parametrize("in_place", [False, True])
def test_every_weight_lies_where_a_lane_looks(in_place: bool) -> None:
    packed = packed_experts(2, 256, 256)
    matrices = {
        "w13": (packed.w13.clone(), packed.w13_scale.clone(), True),
        "w2": (packed.w2.clone(), packed.w2_scale.clone(), False),
    }
    for name, (codes, scale, gate_up) in matrices.items():
        plain = dequantise_fp4_weight(codes[0].clone(), scale[0].clone(), torch.float64)
        found = arrangement.arrange(codes, scale, gate_up=gate_up, in_place=in_place)
        assert found.rounded == 0
        if in_place:
            assert found.codes.data_ptr() == codes.data_ptr() and found.shifts.data_ptr() == scale.data_ptr()
        for row in range(0, plain.shape[0], 5):
            unit, within = divmod(row, 16)
            if gate_up:  # 8 channels of the gate, and the same of up
                origin = unit * 8 + within % 8 + (plain.shape[0] // 2 if within >= 8 else 0)
            else:
                origin = unit * 16 + within % 8 * 2 + within // 8
            for k in (*range(0, 40, 3), 127, 128, 255):
                assert decoded(found, row, k) == plain[origin, k], (name, row, k)


def scales_apart(by: int) -> Mxfp4Experts:
    """Two scale groups of row 3 of w2 are `by` powers of two below the others of that row."""
    packed = packed_experts(1, 256, 256)
    scale = torch.full_like(packed.w2_scale.view(torch.uint8), 130)
    scale[0, 3, 1:3] -= by
    return replace(packed, w2_scale=scale.view(torch.float8_e8m0fnu))


def test_scales_of_a_row_may_differ_by_2_to_the_11() -> None:
    packed = scales_apart(11)
    found = packed.for_hopper().w2
    assert found.rounded == 0
    plain = dequantise_fp4_weight(packed.w2[0], packed.w2_scale[0], torch.float64)
    row = 8 + 1  # the second of the odd rows
    assert [decoded(found, row, k) for k in range(256)] == plain[3].tolist()


@pytest.mark.parametrize("by", [12, 13, 30])
def test_what_lies_lower_is_rounded_and_counted(by: int) -> None:
    """Codes are rounded to nearest, ties to even, on the grid that the row's largest scale leaves."""
    packed = scales_apart(by)
    found = packed.for_hopper().w2
    plain = dequantise_fp4_weight(packed.w2[0], packed.w2_scale[0], torch.float64)[3]
    values = torch.tensor([decoded(found, 9, k) for k in range(256)], dtype=torch.float64)
    small = torch.zeros(256, dtype=torch.bool)
    small[32:96] = True
    assert torch.equal(values[~small], plain[~small])
    assert found.rounded == int((values != plain).sum()) > 0
    unit = 2.0 ** (130 - 127 - 11)
    wanted = dequantise_fp4_weight(
        *moe_quantised((plain[small] / unit).float()), torch.float64
    ).flatten() * unit  # fmt: skip
    assert torch.equal(values[small].abs(), wanted.abs())
    assert (values[small] - plain[small]).abs().max() <= 2.0**-12 * 2 * 2.0 ** (130 - 127)


def moe_quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 of values that need no scale, rounded to nearest, ties to even, by arithmetic on its grid."""
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    rounded = (values / step).round() * step  # torch rounds ties to even
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.tensor([grid.index(abs(float(v))) | (8 if v < 0 else 0) for v in rounded])
    packed = (codes[0::2] | (codes[1::2] << 4)).to(torch.uint8).view(torch.int8)
    return packed[None], torch.full((1, len(values) // 32), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_a_group_of_zeros_has_no_say() -> None:
    packed = packed_experts(1, 256, 256)
    scale = torch.full_like(packed.w2_scale.view(torch.uint8), 110)
    codes = packed.w2.clone().view(torch.uint8)
    scale[0, 3, 2], codes[0, 3, 32:48] = 250, 0x80  # +0 and -0
    found = replace(packed, w2=codes.view(packed.w2.dtype), w2_scale=scale.view(torch.float8_e8m0fnu)).for_hopper().w2
    assert found.rounded == 0 and found.factors.unique().numel() == 1
