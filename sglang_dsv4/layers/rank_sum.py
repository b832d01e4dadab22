"""Sums over the ranks of tensor parallelism: of each layer's attention and of its experts.

An all-reduce adds in an order that may depend on where a number lies in the message (rings and trees cut it into
pieces), and so on a token's place in its batch. Under `--enable-deterministic-inference` every rank gathers all parts
instead and adds them in the order of the ranks: the same numbers on every rank, for a token anywhere. With two ranks
that moves as many bytes as an all-reduce.

Parts of the experts' sum travel in the model's dtype on a GPU, as the attention's do: a rank adds its experts in fp32
and rounds, once without the shared expert and once with it, as one rank alone does. In bf16 that is half the bytes of
fp32, for some 0.3 % of a token's row, where the specification (section 11.1) gives bf16 activations 1.4 % of this
sublayer. A CPU's parts are fp32, and so are those under the flag.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.invariant import sum_in_order
from sglang_dsv4 import exact


def dtype_of_parts(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which dtype several ranks' parts of the experts' sum are summed, of a model on `device` in `dtype`."""
    return torch.float32 if exact.is_on() or device.type == "cpu" else dtype


def sum_over_ranks(part: Tensor) -> Tensor:
    """The sum of all ranks' parts, [T, d] in their dtype. Without the flag `part` may be overwritten."""
    ranks = get_parallel().tp_size
    if ranks == 1:
        return part
    if not exact.is_on():
        return tensor_model_parallel_all_reduce(part)
    return sum_in_order(tensor_model_parallel_all_gather(part.contiguous(), 0).unflatten(0, (ranks, -1)))
