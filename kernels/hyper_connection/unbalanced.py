"""comb before softmax and Sinkhorn's iteration, which the boundary at the end of the sublayer computes.

Softmax and Sinkhorn's iteration are one chain of some 3,000 clocks, and nothing reads comb before the next boundary.
So a boundary of few tokens leaves comb unbalanced, and the next boundary balances it while it waits for the launch
before and for the parts of other ranks. Bits do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TOKENS = 128
"""The most tokens with which a GPU kernel takes or returns an `Unbalanced`."""


@dataclass(frozen=True)
class Unbalanced:
    """comb of a sublayer before softmax and Sinkhorn's iteration.

    The GPU kernel that balances `logits` reads them before the previous launch has ended. So another launch must lie
    between the launch that writes `logits` and the launch that reads them, as a sublayer's launches do: a launch of
    this package, or a launch without the attribute of dependent launches (`device.dependent_launch`, rule 1).
    """

    logits: Tensor  # [T, n, n] fp32
    hc_eps: float
    iterations: int

    @property
    def shape(self) -> torch.Size:
        """The shape [T, n, n] of comb."""
        return self.logits.shape
