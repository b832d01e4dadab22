"""The references of boundaries: equal to their parts, bit for bit, and their errors."""

from __future__ import annotations

import pytest
import torch
from ops.hyper_connection_cases import (
    HC_EPS,
    ITERATIONS,
    NORM_EPS,
    inputs,
)

from dsv4_kernels.hyper_connection import hc_boundary, hc_enter, hc_finish, hc_head, hc_post, hc_pre
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.quant import fp8_quantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_references_are_their_parts(dtype: torch.dtype) -> None:
    i = inputs(5, 32)
    i = i._replace(y=i.y.to(dtype), streams=i.streams.to(dtype))
    made = hc_boundary(*i.boundary(), fp8=True)
    assert all(map(torch.equal, made[:4], hc_boundary(*i.boundary())))
    codes, scales = fp8_quantise(made[1], 128, column_major=True)
    assert torch.equal(made[4].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(made[5], scales) and made[5].stride() == scales.stride()
    streams = hc_post(i.y, i.streams, i.post, i.comb)
    row, post, comb = hc_pre(streams, i.fn, i.base, i.scale, NORM_EPS, HC_EPS, ITERATIONS)
    expected = (streams, rms_norm(row, i.weight, NORM_EPS), post, comb)
    assert all(map(torch.equal, hc_boundary(*i.boundary()), expected))
    entered = hc_enter(streams, i.fn, i.base, i.scale, i.weight, NORM_EPS, HC_EPS, ITERATIONS)
    assert all(map(torch.equal, entered, expected[1:]))
    finished = hc_finish(i.y, i.streams, i.post, i.comb, *i.head(), i.weight, NORM_EPS, HC_EPS)
    assert torch.equal(finished[0], streams)
    assert torch.equal(finished[1], rms_norm(hc_head(streams, *i.head(), NORM_EPS, HC_EPS), i.weight, NORM_EPS))


def test_errors_say_what_is_expected() -> None:
    i = inputs(2, 32)
    for wrong, message in (
        ({"weight": i.weight[1:]}, r"hc_boundary: x \(2, 4, 32\) needs norm_weight \(32,\); got \(31,\)"),
        ({"y": i.y.float()}, r"need y \(2, 32\) torch.bfloat16"),
        ({"comb": i.comb[:1]}, r"comb \(2, 4, 4\)"),
        ({"fn": i.fn[:8]}, r"fn \(24, 128\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hc_boundary(*i._replace(**wrong).boundary())
    with pytest.raises(ValueError, match="hc_enter: iterations is 0"):
        hc_enter(i.streams, i.fn, i.base, i.scale, i.weight, NORM_EPS, HC_EPS, 0)
    with pytest.raises(ValueError, match=r"hc_finish: x .* needs fn \(4, 128\)"):
        hc_finish(i.y, i.streams, i.post, i.comb, i.fn, i.base, i.scale, i.weight, NORM_EPS, HC_EPS)
