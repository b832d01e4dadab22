"""comb of a sublayer before its iteration, which the boundary at the sublayer's end computes.

Softmax and Sinkhorn's iteration are one chain of some 3,000 clocks, and nothing reads comb before the next boundary.
So a boundary of few tokens leaves comb as it is, and the next one balances it while it waits for the launch before it
and for the parts of other ranks. The bits are those of a balanced comb.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TOKENS = 128
"""Most tokens of a GPU kernel's call that takes or returns an `Unbalanced`."""


@dataclass(frozen=True)
class Unbalanced:
    """comb of a sublayer before softmax and Sinkhorn's iteration.

    A GPU kernel reads `logits` before the launch before it has ended. So a launch of ours, or one without the attribute
    of dependent launches, must lie between the one that writes them and the one that reads them
    (`device.dependent_launch`, rule 1), as a sublayer's launches do.
    """

    logits: Tensor  # [T, n, n] fp32
    hc_eps: float
    iterations: int

    @property
    def shape(self) -> torch.Size:
        """The shape [T, n, n] of comb."""
        return self.logits.shape
