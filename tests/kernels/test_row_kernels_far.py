"""Rows at distances whose bytes and elements exceed 32 bits, and results of as many rows, in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.memory_layout import BEYOND_BYTES, far_apart, last_of_many
from ops.number_formats import same_bits
from ops.row_kernels import emulated_row_kernel
from torch import Tensor

from dsv4_kernels.rope import rope_frequencies

POSITIONS, FREQUENCIES = torch.tensor([3, 2**20 - 1, 0, 70000]), rope_frequencies(64, 10000.0, None)
Function = Callable[[Tensor, Tensor], list[Tensor]]
"""(rows [T, 1536] bf16, positions [T] int64) -> results, each with one row for each input row."""


def in_fp32(rows: Tensor) -> Tensor:
    """A view of rows of bf16 as rows of fp32 in the same memory."""
    return rows.view(torch.float32)


def norm_rope_store(x: Tensor, positions: Tensor) -> list[Tensor]:
    """In place; the window rows lie after the queries."""
    from dsv4_kernels.norm_rope_store import gpu

    q, kv = x[:, :1024].unflatten(1, (2, 512)), x[:, 1024:1536]
    gpu.sm90(q, kv, torch.ones(512), positions, FREQUENCIES, 1e-6, [], False, q)
    return [q]


def rotation(x: Tensor, positions: Tensor) -> list[Tensor]:
    from dsv4_kernels.rope import gpu

    gpu.sm90_in_place(x.unflatten(1, (3, 512)), positions, FREQUENCIES, True)
    gpu.sm90_in_place(x, positions, FREQUENCIES, True)
    return [x]


def norm(x: Tensor, positions: Tensor) -> list[Tensor]:
    from dsv4_kernels.norm import gpu

    return [gpu.sm90(x, torch.ones(1536), 1e-6), *gpu.sm90_fp8(x, torch.ones(1536), 1e-6, False)]


def routers(x: Tensor, positions: Tensor) -> list[Tensor]:
    from dsv4_kernels.router import gpu

    logits, table = in_fp32(x)[:, :256], torch.arange(30).view(5, 6)
    by_score = gpu.sm90_topk(logits, torch.zeros(256), 6, 1.0)
    return [*by_score, *gpu.sm90_hash(logits, table, positions, 1.0)]


def swiglu(x: Tensor, positions: Tensor) -> list[Tensor]:
    from dsv4_kernels.moe import gpu

    return [gpu.sm90(x, 10.0), *gpu.sm90_fp8(x, 10.0, True)]


def quantiser(x: Tensor, positions: Tensor) -> list[Tensor]:
    from dsv4_kernels.quant import gpu

    return [*gpu.sm90(x, 128, False)]


def index_queries(x: Tensor, positions: Tensor) -> list[Tensor]:
    from dsv4_kernels.indexer import query

    head_weights = in_fp32(x)[:, 700:712]
    return list(query.sm90(x.unflatten(1, (12, 128)), head_weights, positions, FREQUENCIES, 0.25, True))


def some_rows() -> Tensor:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return torch.randn(4, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()


def run(function: Function, rows: Tensor, positions: Tensor, **options: object) -> list[Tensor]:
    """The last four rows of each result, as bytes."""
    with emulated_row_kernel("sm90", in_place=[rows, positions], **options):
        return [x[-4:].contiguous().clone().view(torch.uint8) for x in function(rows, positions)]


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("function", [norm_rope_store, rotation, norm, routers, swiglu, quantiser, index_queries])
def test_rows_beyond_32_bits(function: Function) -> None:
    rows = some_rows()
    apart = far_apart(rows)  # before the call, which may be in place
    expected = run(function, rows, POSITIONS)
    assert all(map(same_bits, run(function, apart, POSITIONS), expected))


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("function", [norm, routers, swiglu, quantiser, index_queries])
def test_results_beyond_32_bits(function: Function) -> None:
    """So many rows that the bytes of every result exceed 32 bits, except for scales and head weights: they have a
    32nd of the bytes, and the number of chunks, which is 32 bits, would overflow first. Only the last CTAs run."""
    rows = some_rows()
    expected = run(function, rows, POSITIONS)
    count = BEYOND_BYTES // max(x.nbytes // 4 for x in expected) + 5
    found = run(function, last_of_many(rows, count), last_of_many(POSITIONS, count), ends=(0, 16))
    assert all(map(same_bits, found, expected))
