"""Operands of FP8 products, the kernel in the emulator, and how far a result may be from the exact product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.memory_layout import strided, use_in_place
from torch import Tensor

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""codes, scales, weight, weight_scale"""

E4M3 = torch.float8_e4m3fn


def operands(tokens: int, rows: int, channels: int, seed: int = 0) -> Operands:
    """Codes of all sizes; no two neighbouring scales are equal."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-channels // 128)

    def codes(count: int) -> Tensor:
        found = torch.randint(0, 127, (count, channels), generator=generator, dtype=torch.uint8)
        signs = torch.randint(0, 2, (count, channels), generator=generator, dtype=torch.uint8)
        return (found | signs << 7).view(E4M3)

    def scales(count: int) -> Tensor:
        first = torch.arange(count)[:, None] + 2 * torch.arange(blocks)
        return torch.exp2(((first * 5) % 7 - 12).float())

    return codes(tokens), scales(tokens), codes(rows), scales(-(-rows // 128)) * 1.25


def with_gaps(o: Operands) -> Operands:
    """Rows of codes at multiples of 16 bytes; scales of tokens laid out as by `fp8_quantise`, and with larger
    strides."""
    codes, scales, weight, weight_scale = o
    by_column = strided(scales.T.contiguous(), 1, 3).T
    return strided(codes, 1, 32), by_column, strided(weight, 2, 48), strided(weight_scale, 1, 5)


def plan_of(rows: int, tokens: int, **changes: int) -> Any:
    """The chosen plan for a tile of `rows` rows, with some fields changed."""
    from dataclasses import replace

    from dsv4_kernels.linear.fp8_plan import TOKENS, planned

    return replace(planned(rows, next(width for width in TOKENS if tokens <= width)), **changes)


def product(
    o: Operands, plan: Any = None, multiprocessors: int = 132, in_place: tuple[Tensor, ...] = (), **options: Any
) -> tuple[Tensor, Any]:
    """The kernel's result, with all checks of the emulator on, and the emulated device. Weights are constant memory."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.linear import fp8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "multiprocessors", lambda device: multiprocessors)
        arguments = {"schedule": "late", **options}
        with emulated(arch="sm_90a", checks=Checks.strict(), multiprocessors=multiprocessors, **arguments) as device:
            use_in_place(device, *in_place)
            for constant in o[2:]:
                device.memory.constant(constant)
            out = fp8.sm90(*o, plan=plan)
    assert len(device.reports) == 1 and not device.reports[0].warnings
    return out, device


def assert_products(got: Tensor, o: Operands) -> None:
    """Within the bound of an fp32 dot product in any order, and one rounding to bf16."""
    codes, scales, weight, weight_scale = o
    x = codes.double() * scales.double().repeat_interleave(128, 1)[:, : codes.shape[1]]
    scale = weight_scale.double().repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    w = weight.double() * scale[:, : codes.shape[1]]
    exact, magnitude = x @ w.T, x.abs() @ w.abs().T
    assert got.dtype == torch.bfloat16 and got.shape == exact.shape
    assert ((got.double() - exact).abs() <= codes.shape[1] * 2.0**-23 * magnitude + 2.0**-8 * exact.abs()).all()
