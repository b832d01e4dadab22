"""Sums over the ranks of tensor parallelism: of each layer's attention and of its experts.

An all-reduce adds in an order that may depend on where a number lies in the message (rings and trees cut it into
pieces), and so on a token's place in its batch. Under `--enable-deterministic-inference` every rank gathers all parts
instead and adds them in the order of the ranks: the same numbers on every rank, for a token anywhere. With two ranks
that moves as many bytes as an all-reduce.

Parts of the experts' sum travel in the model's dtype on a GPU, as the attention's do: a rank adds its experts in fp32
and rounds, once without the shared expert and once with it, as one rank alone does. In bf16 that is half the bytes of
fp32, for some 0.3 % of a token's row, where the specification (section 11.1) gives bf16 activations 1.4 % of this
sublayer. A CPU's parts are fp32, and so are those under the flag.

Where rows are sharded (`sequence_parallel`) a rank gets the sums of its own rows: by a reduce-scatter, and under the
flag by an exchange, in which it gets all parts of its rows and adds them in the order of the ranks: the same bits.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import (
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from sglang.srt.distributed.utils import reduce_scatter_single
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.host.invariant import sum_in_order
from sglang_dsv4.determinism import flag
from sglang_dsv4.layers.sequence_parallel import RowShards


def dtype_of_parts(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which dtype several ranks' parts of the experts' sum are summed, of a model on `device` in `dtype`."""
    return torch.float32 if flag.is_on() or device.type == "cpu" else dtype


def sum_over_ranks(part: Tensor, rows: RowShards) -> Tensor:
    """The sum of all ranks' parts, in their dtype. Without the flag `part` may be overwritten.

    Args:
        part: [T, d], this rank's.
        rows: which ones this rank needs of the sum.

    Returns:
        [T, d], or [rows.size, d] where rows are sharded.
    """
    ranks = get_parallel().tp_size
    if ranks == 1:
        return part
    if not rows.is_whole:
        return _sum_of_own_rows(part, rows)
    if not flag.is_on():
        return tensor_model_parallel_all_reduce(part)
    return sum_in_order(tensor_model_parallel_all_gather(part.contiguous(), 0).unflatten(0, (ranks, -1)))


def _sum_of_own_rows(part: Tensor, rows: RowShards) -> Tensor:
    # By the group itself: of SGLang's own calls one is an all-reduce under the flag, others may choose another library
    # than NCCL, or memory with multicast.
    part, group = rows.pad(part), get_tp_group().device_group
    if flag.is_on():
        parts = torch.empty_like(part)  # [ranks * size, d]: of this rank's rows, by the rank that they come from
        torch.distributed.all_to_all_single(parts, part, group=group)
        return sum_in_order(parts.unflatten(0, (rows.count, rows.size)))
    summed = part.new_empty(rows.size, *part.shape[1:])
    reduce_scatter_single(summed, part, group=group)
    return summed
