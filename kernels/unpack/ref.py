"""Definition of unpacking, in plain PyTorch (DeepSeek-V4 specification, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_kernels.unpack import Pages

PIECE_ROWS = 1024
"""Rows dequantised at a time: 2 MB in fp32, so that temporaries stay in the cache."""


def unpack_pages(parts: Sequence[Pages], out: Tensor) -> None:
    """See `dsv4_kernels.unpack.unpack_pages`; writes all of `out` [rows of all parts, 512]."""
    for part, rows in zip(parts, out.split([part.num_rows for part in parts]), strict=True):
        _unpack(part, rows)


def _unpack(part: Pages, out: Tensor) -> None:
    within = torch.arange(part.rows_per_page, device=out.device)
    rows = (part.numbers.long()[:, None] * part.rows_per_page + within).flatten()
    for piece, target in zip(rows.split(PIECE_ROWS), out.split(PIECE_ROWS), strict=True):
        values = part.table.gather(piece.clamp(min=0)).to(out.dtype)
        target.copy_(torch.where((piece >= 0)[:, None], values, target))
