"""The estimate of a call of Hopper's experts (benchmarks/lib), against their work list and measured times."""

from __future__ import annotations

import pytest
import torch
from ops.experts_cases import Case
from ops.hopper_experts import CASES, PAIRED, arranged, listed_widths, shape_names, shapes

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.mark.parametrize("shape", shape_names())
def test_the_estimate_counts_what_is_listed(shape: str) -> None:
    from lib import experts_sm90_static as static

    from dsv4_kernels.moe.sm90 import launch

    for case in (*PAIRED.values(), CASES["several-tiles-of-one-expert"], Case(300, chosen=2, experts=3, d=512)):
        slots = torch.bincount(case.inputs()[2].flatten(), minlength=case.experts).tolist()
        packed = arranged(case.experts, case.d, case.channels)
        found = static.widths(slots, shapes()[shape], launch.least_paired_tiles(packed, case.multiprocessors))
        assert [width for of_expert in found for width in of_expert] == listed_widths(case, shape)


def test_the_estimate_is_near_what_was_measured() -> None:
    """Estimates for an H200 with all tokens at six experts are near the measured times; paired tiles pay for them."""
    from lib import experts_sm90_static as static
    from lib.experts_inputs import MODELS

    measured, model = static.measured_us(), MODELS["flash"]
    for tokens in (16, 64, 128, 256, 1024):
        slots = [tokens] * 6 + [0] * (model.experts - 6)
        by_shape = {name: static.estimate(slots, model, shapes()[name]).us for name in ("narrow", "paired")}
        for shape, least in (("narrow", 0.94), ("paired", 0.88)):
            assert least < by_shape[shape] / measured[f"flash-six-t{tokens}", shape] < 1.05
        assert by_shape["paired"] <= by_shape["narrow"] * (0.85 if tokens > 32 else 1.0)
