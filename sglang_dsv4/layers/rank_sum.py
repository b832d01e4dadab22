"""Sums over the ranks of tensor parallelism: of each layer's attention and of its experts.

An all-reduce adds in an order that may depend on where a number lies in the message (rings and trees cut it into
pieces), and so on a token's place in its batch. Under `--enable-deterministic-inference` every rank gathers all parts
instead and adds them in the order of the ranks: the same numbers on every rank, for a token anywhere. With two ranks
that moves as many bytes as an all-reduce.
"""

from __future__ import annotations

from sglang.srt.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.invariant import sum_in_order
from sglang_dsv4 import exact


def sum_over_ranks(part: Tensor) -> Tensor:
    """The sum of all ranks' parts, [T, d] in their dtype. Without the flag `part` may be overwritten."""
    ranks = get_parallel().tp_size
    if ranks == 1:
        return part
    if not exact.is_on():
        return tensor_model_parallel_all_reduce(part)
    return sum_in_order(tensor_model_parallel_all_gather(part.contiguous(), 0).unflatten(0, (ranks, -1)))
