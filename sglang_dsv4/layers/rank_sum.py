"""Sums of the attention's and the experts' outputs over the ranks of tensor parallelism.

An all-reduce may add in an order that depends on a number's offset in the message (rings and trees cut it into pieces),
and so on a token's index in its batch. Under `--enable-deterministic-inference` every rank gathers all parts instead
and adds them in the order of the ranks: every rank gets the same numbers, whatever the token's index. With two ranks
that moves as many bytes as an all-reduce.

On a GPU ranks exchange parts of the experts' sum in the model's dtype, as for the attention: a rank adds its experts in
fp32 and rounds once without the shared expert and once with it, as a single rank does. bf16 halves the bytes of fp32,
and costs an error of some 0.3 % of a token's row; bf16 activations cost this sublayer 1.4 % (specification, section
11.1). On a CPU, and under the flag, the parts are fp32.

Unless `SGLANG_DSV4_ALL_REDUCE=sglang`, parts of up to a few MB are summed by our own kernel (`peer_sums`) on GPUs that
can map each other's memory, in the order of the ranks with and without the flag; with few tokens a sublayer leaves its
part to the next boundary, which sums it.

Where rows are sharded (`sequence_parallel`), a rank gets the sums of its own rows: by a reduce-scatter, or under the
flag by an all-to-all of the parts of its rows, which it adds in the order of the ranks: the bits are the same.

With attention data parallelism (`data_parallel`) the attention's parts are summed within a group of ranks, and the
experts' parts by the rows' owners.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import (
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from sglang.srt.distributed.utils import all_gather_single, reduce_scatter_single
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.reference.batch_invariant import sum_in_order
from sglang_dsv4.determinism import flag
from sglang_dsv4.layers import data_parallel, peer_sums
from sglang_dsv4.layers.data_parallel import RowsOfAllGroups
from sglang_dsv4.layers.peer_sums import Part
from sglang_dsv4.layers.sequence_parallel import RowShards


def dtype_of_parts(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Dtype in which several ranks' parts of the experts' sum are added, for a model on `device` in `dtype`."""
    return torch.float32 if flag.is_on() or device.type == "cpu" else dtype


def output_of_attention(part: Tensor, rows: RowShards) -> Tensor | Part:
    """The attention's output [T, d] for this rank's rows, or this rank's `part [T, d]` of it for the next boundary."""
    if rows.is_whole and (left := peer_sums.left_to_boundary(part, part.dtype)) is not None:
        return left
    return sum_attention(part, rows)


def output_of_experts(
    part: Tensor | ExpertRows, rows: RowShards | RowsOfAllGroups, dtype: torch.dtype
) -> Tensor | Part:
    """The experts' output [T, d] in `dtype` for this rank's rows, or this rank's `part [T, d]` of it for the next
    boundary; of `ExpertRows` the part is the sum."""
    if rows.is_whole and (left := peer_sums.left_to_boundary(part, dtype)) is not None:
        return left
    return sum_over_ranks(summed(part), rows).to(dtype)


def sum_attention(part: Tensor, rows: RowShards) -> Tensor:
    """The sum of the attention's parts over the ranks that share its heads; arguments as for `sum_over_ranks`."""
    if not data_parallel.is_on():
        return sum_over_ranks(part, rows)
    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return part
    if not flag.is_on():
        return parallel.attn_tp_group.all_reduce(part)
    parts = part.new_empty(parallel.attn_tp_size * part.shape[0], *part.shape[1:])
    all_gather_single(parts, part.contiguous(), group=parallel.attn_tp_group.device_group)
    return sum_in_order(parts.unflatten(0, (parallel.attn_tp_size, -1)))


def sum_over_ranks(part: Tensor, rows: RowShards | RowsOfAllGroups) -> Tensor:
    """The sum of all ranks' parts, in their dtype. Without the flag `part` may be overwritten.

    Args:
        part: [T, d], this rank's; of the rows of all groups with attention data parallelism.
        rows: this rank's share of the rows of the sum.

    Returns:
        [T, d], [rows.size, d] where rows are sharded, or the rows of this rank's group.
    """
    if isinstance(rows, RowsOfAllGroups):
        return rows.sum(part)
    ranks = get_parallel().tp_size
    if ranks == 1:
        return part
    if not rows.is_whole:
        return _sum_of_own_rows(part, rows)
    summed = peer_sums.total(part)
    if summed is not None:
        return summed
    if not flag.is_on():
        return tensor_model_parallel_all_reduce(part)
    return sum_in_order(tensor_model_parallel_all_gather(part.contiguous(), 0).unflatten(0, (ranks, -1)))


def _sum_of_own_rows(part: Tensor, rows: RowShards) -> Tensor:
    # These calls use the process group itself: one of SGLang's own functions is an all-reduce under the flag, others
    # may choose another library than NCCL, or memory with multicast.
    part, group = rows.pad(part), get_tp_group().device_group
    if flag.is_on():
        parts = torch.empty_like(part)  # [ranks * size, d]: all ranks' parts of this rank's rows, in the ranks' order
        torch.distributed.all_to_all_single(parts, part, group=group)
        return sum_in_order(parts.unflatten(0, (rows.count, rows.size)))
    summed = part.new_empty(rows.size, *part.shape[1:])
    reduce_scatter_single(summed, part, group=group)
    return summed
