"""The sum over the experts of a token, for some of its channels: the rows of its experts by rising expert, in fp32.

All loads of a thread are issued before the first sum: they are one latency.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from dsv4_kernels.device import bf16_rows, ptx
from dsv4_kernels.device.bf16_rows import add
from dsv4_kernels.host.addresses import address
from dsv4_kernels.host.strides import stride_bytes


class Rows(NamedTuple):
    """Dynamic arguments; addresses are Int64."""

    rows: Int64  # bf16 [slots, d]
    row_bytes: Int64
    experts: Int64  # int32 [tokens, chosen]
    slot_of_pair: Int64  # int32 [tokens, chosen]; negative: the expert is on another rank
    shared: Int64  # bf16 [tokens, d], added to the sum; 0: none
    shared_row_bytes: Int64


def arguments(rows: Tensor, experts: Tensor, slot_of_pair: Tensor, shared: Tensor | None) -> Rows:
    """The arguments of a launch, as Python's numbers."""
    return Rows(
        rows=rows.data_ptr(),
        row_bytes=stride_bytes(rows, 0),
        experts=experts.data_ptr(),
        slot_of_pair=slot_of_pair.data_ptr(),
        shared=address(shared),
        shared_row_bytes=stride_bytes(shared, 0),
    )


def listed(args: Rows, token: Int32, chosen: int, exists: Int32) -> tuple:
    """The experts of a token and their slots, as they are listed; slots of -1 unless `exists` is positive.

    They are read from L2, because L1 may hold an earlier layer's list until this thread has waited.
    """
    pairs = Int64(token) * chosen * 4
    return tuple(
        [
            ptx.load_or_zeros(Int32, 1, of_all + pairs + i * 4, exists, "gt.s32", cache=".cg", otherwise=-1)
            for i in range(chosen)
        ]
        for of_all in (args.experts, args.slot_of_pair)
    )


def in_order(experts: list, slots: list) -> list:
    """The slots of a token's experts by rising expert; equal experts keep their order."""
    ranks, ordered = [_rank_of(experts, i) for i in range(len(experts))], []
    for rank in range(len(experts)):
        slot = Int32(0)
        for i in range(len(experts)):
            slot = cutlass.select_(ranks[i] == rank, slots[i], slot)
        ordered.append(slot)
    return ordered


def _rank_of(experts: list, i: int) -> Int32:
    rank = Int32(0)
    for j, other in enumerate(experts):
        if j != i:
            before = other <= experts[i] if j < i else other < experts[i]
            rank = rank + cutlass.select_(before, Int32(1), Int32(0))
    return rank


def load(args: Rows, slots: list, token: Int32, channel: Int32, words: int, exists: Int32, adds_shared: bool) -> tuple:
    """Words of a token's rows from a channel on, the shared expert's last; zeros for rows that are missing.

    Args:
        args: of the launch.
        slots: the result of `in_order`.
        token: of the launch.
        channel: the first.
        words: 2 or 4.
        exists: positive if the token exists.
        adds_shared: whether the shared expert has a row.
    """
    first = Int64(channel) * 2
    rows = [
        ptx.load_or_zeros(Uint32, words, args.rows + Int64(slot) * args.row_bytes + first, slot, "ge.s32")
        for slot in slots
    ]
    if adds_shared:
        shared = args.shared + Int64(token) * args.shared_row_bytes + first
        rows.append(ptx.load_or_zeros(Uint32, words, shared, exists, "gt.s32"))
    return tuple(rows)


def total(rows: tuple, fp32: bool, adds_shared: bool) -> list:
    """The sums of the result of `load`, a number for each channel; if they are to be bf16, `shared` is added to the
    rounded sum, and the caller rounds again."""
    sums = [Float32(0.0)] * (2 * len(rows[0]))
    of_experts = rows[:-1] if adds_shared else rows
    for words in of_experts:
        sums = [add(a, b) for a, b in zip(sums, bf16_rows.channels(words), strict=True)]
    if adds_shared:
        if not fp32:
            sums = bf16_rows.channels(bf16_rows.packed(sums))
        sums = [add(a, b) for a, b in zip(sums, bf16_rows.channels(rows[-1]), strict=True)]
    return sums
