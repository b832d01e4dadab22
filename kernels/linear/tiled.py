"""The products on a CPU, in row tiles of few fixed heights, so that a row's bits do not depend on the other rows.

A BLAS chooses its kernel by the number of rows m and of threads. Measured with PyTorch 2.13 (MKL 2024.2, oneDNN 3.12)
on an AVX-512 CPU, 1 to 4 threads, k from 24 to 4,096, n from 8 to 4,096, m from 1 to 300 against the rows of m = 512:

    fp32, MKL       m = 1, 2, 3 differ; with two threads m = 5, 7, 9 too; with three, a product of one row block and
                    large k differs from the same product with one thread
    fp32, oneDNN    m = 1 differs (a vector kernel); all other m are bit-identical, with any number of threads; from 8
                    rows on it is 1.5 to 2 times as fast as MKL here
    bf16, oneDNN    every m is bit-identical, with any number of threads; but not with AMX, nor without instructions for
                    bf16: many products then change with the number of threads, and rows of tall tiles with the height

So products go to oneDNN (`torch.nn.functional.linear` sends fp32 to MKL), in tiles of TILE_ROWS rows, the last tile
padded with zeros: few heights also mean few kernels to generate. Equal bits for all heights are a property of the
library and the machine, not a guarantee: the first time that a weight's shape is used with a tile above the smallest,
the products of both tiles are computed from random rows and compared. If they differ, the larger height is not used for
that shape, which is slower and logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_kernels.quant import fp8_qdq

# Without AMX: see above. oneDNN reads this once, before its first product. A user's own setting is kept.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

logger = logging.getLogger(__name__)

SMALLEST_TILE = 8

TILE_ROWS = {256: 256, 32: SMALLEST_TILE + 1, SMALLEST_TILE: 1}
"""Height of a tile -> the fewest remaining rows for which it is used; tallest first. SMALLEST_TILE divides all
heights."""

_proven_heights: dict[tuple[torch.dtype, int, int, int, int], bool] = {}
"""(dtype, n, k, threads, height) -> whether a tile of this height gives the bits of the smallest."""


def linear(x: Tensor, weight: Tensor, act_qdq_block: int | None) -> Tensor:
    """See `dsv4_kernels.linear.linear`."""
    if act_qdq_block is not None:
        x = fp8_qdq(x, act_qdq_block)
    return _multiply(x, weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.linear_fp32`."""
    return _multiply(x.float(), weight.float())


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `dsv4_kernels.linear.grouped_linear`."""
    return torch.stack([_multiply(x[:, g], weight[g]) for g in range(weight.shape[0])], 1)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] == 0 or x.shape[1] == 0:
        return x.new_zeros(x.shape[0], weight.shape[0])
    products = [_tile_product(x[begin:end], weight, rows) for begin, end, rows in _tiles(x.shape[0], weight)]
    return products[0] if len(products) == 1 else torch.cat(products)


def _tile_product(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x [m, k] @ weight.T with m <= rows, computed with exactly `rows` rows."""
    if x.shape[0] == rows:
        return _product(x.contiguous(), weight)
    padded = x.new_zeros(rows, x.shape[1])
    padded[: x.shape[0]] = x
    return _product(padded, weight)[: x.shape[0]]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return torch.nn.functional.linear(x, weight)


def _tiles(num_rows: int, weight: Tensor) -> Iterator[tuple[int, int, int]]:
    """(begin, end, tile height) of the tiles that cover rows [0, num_rows)."""
    begin = 0
    while begin < num_rows:
        height = next(
            height
            for height, fewest in TILE_ROWS.items()
            if num_rows - begin >= fewest and _gives_the_bits_of_the_smallest(height, weight)
        )
        yield begin, min(begin + height, num_rows), height
        begin += height


def _gives_the_bits_of_the_smallest(height: int, weight: Tensor) -> bool:
    if height == SMALLEST_TILE:
        return True
    n, k = weight.shape
    key = (weight.dtype, n, k, torch.get_num_threads(), height)
    verdict = _proven_heights.get(key)
    if verdict is None:
        x = torch.randn(height, k, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        large = _tile_product(x, weight, height)
        small = [_tile_product(part, weight, SMALLEST_TILE) for part in x.split(SMALLEST_TILE)]
        verdict = torch.equal(large, torch.cat(small))
        if not verdict:
            logger.warning(
                "tiles of %d rows are not used for a %s weight of %dx%d: on this machine their rows differ from "
                "those of %d-row tiles; long prompts will be slower",
                *(height, weight.dtype, n, k, SMALLEST_TILE),
            )
        _proven_heights[key] = verdict
    return verdict
