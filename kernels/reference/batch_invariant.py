"""Batch-invariant arithmetic in PyTorch: the result for one element does not depend on its position in the tensor.

Serving promises the same bits for a token in any batch or chunk. Not all of PyTorch's CPU kernels give them:
`torch.sigmoid`, `silu`, `softplus` and `exp2` use a vector routine for most elements and a scalar routine for the last
few of a thread's share, and the two differ by an ulp. `exp`, `log1p`, `sin` and `cos` (MKL's vector library, masked
tails) and IEEE operations (+ - * / sqrt) do give them, so the functions here are built from these. The same holds for
sums: here the order depends on the index in the reduced dimension only. (Products of rows with weights are in
`dsv4_kernels.linear.tiled`.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MATRIX_ROWS = 8
"""Rows of the matrices in a batched product come in multiples of this (see `at_least_as_many_as_threads`)."""


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), fp32."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), fp32."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow, fp32."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def at_least_as_many_as_threads(tokens: Tensor) -> Tensor:
    """Token indices for use as a batch of matrix products; on a CPU repeated until there are as many as threads.

    MKL gives each matrix of a batch to one thread, and then a matrix's bits do not depend on the batch. With fewer
    matrices than threads it splits single matrices, and their bits change (measured with matrices of 5 x 24 on two
    threads and of 24 x 100 on seven).
    """
    fewest = torch.get_num_threads() if tokens.device.type == "cpu" else 1
    if not 0 < len(tokens) < fewest:
        return tokens
    return tokens[torch.arange(fewest) % len(tokens)]


def padded_to_full_rows(x: Tensor, dim: int) -> Tensor:
    """x with zeros appended to `dim` up to a multiple of MATRIX_ROWS, for use as the rows of a matrix product."""
    missing = -x.shape[dim] % MATRIX_ROWS
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim` by halving: element i is first added to element i + n/2; an odd last element joins in a later
    round."""
    while (n := x.shape[dim]) > 1:
        half = n // 2
        paired = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = paired if n % 2 == 0 else torch.cat([paired, x.narrow(dim, n - 1, 1)], dim)
    return x.squeeze(dim)


def sum_in_order(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """`((parts[0] + parts[1]) + parts[2]) + ...` in fp32, rounded once: n parts [...] -> [...] in their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)
