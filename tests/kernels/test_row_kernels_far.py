"""Rows at distances whose bytes and elements exceed 32 bits, in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.memory_layout import far_apart
from ops.number_formats import same_bits
from ops.row_kernels import emulated_row_kernel
from torch import Tensor

from dsv4_kernels.rope import rope_frequencies

POSITIONS, FREQUENCIES = torch.tensor([3, 2**20 - 1, 0, 70000]), rope_frequencies(64, 10000.0, None)


def in_fp32(rows: Tensor) -> Tensor:
    """A view of rows of bf16 as rows of fp32 in the same memory."""
    return rows.view(torch.float32)


def norm_rope_store(x: Tensor) -> list[Tensor]:
    """In place; the window rows lie after the queries."""
    from dsv4_kernels.norm_rope_store import gpu

    q, kv = x[:, :1024].unflatten(1, (2, 512)), x[:, 1024:1536]
    gpu.sm90(q, kv, torch.ones(512), POSITIONS, FREQUENCIES, 1e-6, [], False, q)
    return [q]


def rotation(x: Tensor) -> list[Tensor]:
    from dsv4_kernels.rope import gpu

    new = gpu.sm90(x.unflatten(1, (3, 512)), POSITIONS, FREQUENCIES, True)
    gpu.sm90_in_place(x, POSITIONS, FREQUENCIES, True)
    return [new, x]


def norm(x: Tensor) -> list[Tensor]:
    from dsv4_kernels.norm import gpu

    return [gpu.sm90(x, torch.ones(1536), 1e-6), *gpu.sm90_fp8(x, torch.ones(1536), 1e-6, False)]


def routers(x: Tensor) -> list[Tensor]:
    from dsv4_kernels.router import gpu

    logits, table = in_fp32(x)[:, :256], torch.arange(30).view(5, 6)
    by_score = gpu.sm90_topk(logits, torch.zeros(256), 6, 1.0)
    return [*by_score, *gpu.sm90_hash(logits, table, torch.tensor([1, 4, 0, 2]), 1.0)]


def swiglu(x: Tensor) -> list[Tensor]:
    from dsv4_kernels.moe import gpu

    return [gpu.sm90(x, 10.0), *gpu.sm90_fp8(x, 10.0, True)]


def quantiser(x: Tensor) -> list[Tensor]:
    from dsv4_kernels.quant import gpu

    return [*gpu.sm90(x, 128, False)]


def index_queries(x: Tensor) -> list[Tensor]:
    from dsv4_kernels.indexer import query

    head_weights = in_fp32(x)[:, 700:712]
    return list(query.sm90(x.unflatten(1, (12, 128)), head_weights, POSITIONS, FREQUENCIES, 0.25, True))


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("function", [norm_rope_store, rotation, norm, routers, swiglu, quantiser, index_queries])
def test_rows_beyond_32_bits(function: Callable[[Tensor], list[Tensor]]) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    rows = torch.randn(4, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    apart = far_apart(rows)
    with emulated_row_kernel("sm90"):
        expected = [x.contiguous().clone() for x in function(rows)]
    with emulated_row_kernel("sm90", in_place=[apart]):
        found = [x.contiguous() for x in function(apart)]
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a.view(torch.uint8), b.view(torch.uint8))
