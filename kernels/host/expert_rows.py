"""A sublayer's output before the sum over the experts, which the boundary that follows computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertRows:
    """The rows of this rank's experts and of the shared expert, whose sum is a sublayer's output or a part of it.

    The sum of a token has the rows of its experts by rising expert, in fp32, and `shared`. If it is bf16, `shared` is
    added to the rounded sum, which is rounded again.
    """

    rows: Tensor  # [slots, d] bf16, contiguous
    experts: Tensor  # [T, k] int32, contiguous, among the experts of all ranks
    slot_of_pair: Tensor  # [T, k] int32, contiguous: rows of `rows`; negative: another rank's, which adds nothing
    shared: Tensor  # [T, d] bf16, rows of any stride at multiples of 16 bytes
    dtype: torch.dtype  # of the sum: bf16 or fp32
    total: Callable[[], Tensor]
    """Computes the sum [T, d] in `dtype` by a launch of its own, for a reader that is no boundary; the same bits."""
    reads_ahead: bool = False
    """Whether `experts` and `slot_of_pair` may be read before the launch before has ended (`moe.sums.Sum`)."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that a kernel reads."""
        return self.rows, self.experts, self.slot_of_pair, self.shared

    @property
    def shape(self) -> torch.Size:
        """The shape [T, d] of the sum."""
        return self.shared.shape


def summed(y: Tensor | ExpertRows) -> Tensor:
    """The output [T, d] itself, for a reader that takes no rows of experts."""
    return y.total() if isinstance(y, ExpertRows) else y
