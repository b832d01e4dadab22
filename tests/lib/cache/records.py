"""Random bytes of stored records."""

from __future__ import annotations

import torch
from torch import Tensor


def random_record(seed: int, nbytes: int) -> Tensor:
    """`nbytes` random bytes, uint8; the same for the same seed."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
