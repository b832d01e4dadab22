"""The order in which batch-invariant products sum: inputs that reveal it, and the same sum written out.

On the hardware the 16 channels of an instruction have no order among themselves. The emulator adds them by their index
in K, which `linear.kernel` keeps, and which `linear.fp8_weight` permutes as `as_from_fp8` does.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

CHUNK, SEGMENTS, TOGETHER = 64, 4, 16
"""Channels of a segment's chunk, number of segments, channels of an instruction."""
CHANNELS = 512
HUGE = 2.0**40


def segments(channels: int) -> list[range]:
    """Return the channels of each segment."""
    chunks = -(-channels // CHUNK)
    ends = [min(channels, i * chunks // SEGMENTS * CHUNK) for i in range(SEGMENTS + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def channels_that_sum_together() -> tuple[Tensor, Tensor, Tensor]:
    """Return x [32, 1, 512] bf16, a weight [1, 512, 512] of 0, 1 and -1, and their product, exact in fp32 and bf16.

    Token t has a huge number in the first and in the last of the t-th 16 channels, which every row adds and subtracts.
    Row c adds 1 in channel c, unless c is one of these two channels. Within a segment the 1 remains if c is in a later
    instruction; in the same or an earlier one it is lost next to the huge number. In other segments it remains.
    """
    channel, sixteen = torch.arange(CHANNELS), torch.arange(CHANNELS // TOGETHER)
    first, last = channel % TOGETHER == 0, channel % TOGETHER == TOGETHER - 1
    ends = first | last
    own = channel // TOGETHER == sixteen[:, None]
    x = torch.where(ends, torch.where(own, HUGE, 0.0), 1.0)
    weight = first.float() - last.float() + torch.diag((~ends).float())
    segment = torch.tensor([i for i, part in enumerate(segments(CHANNELS)) for _ in part])
    later = channel // TOGETHER > sixteen[:, None]
    elsewhere = segment != segment[sixteen * TOGETHER][:, None]
    return x[:, None].bfloat16(), weight[None], ((later | elsewhere) & ~ends).float()[:, None]


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x [T, G, K]` times `weight [G, N, K]`, both bf16, in fp32 as the emulator sums: a segment's products,
    which are exact, one after the other; then the segments' sums."""
    total = torch.zeros(x.shape[0], *weight.shape[:2])
    for part in segments(x.shape[2]):
        sums = torch.zeros_like(total)
        for k in part:
            sums += x[:, :, k, None].float() * weight[:, :, k].float()
        total += sums
    return total


def as_from_fp8(x: Tensor) -> Tensor:
    """Return x [..., K] with every 16 channels in the order of `linear.fp8_weight`'s instructions: lane q of a quad has
    channels 4 q to 4 q + 3, at indices 2 q, 2 q + 1 and the same plus 8."""
    order = [4 * q + 2 * half + i for half in range(2) for q in range(4) for i in range(2)]
    assert sorted(order) == list(range(TOGETHER))
    return x.unflatten(-1, (-1, TOGETHER))[..., order].flatten(-2)
