"""Definition of unpacking, in plain PyTorch (DeepSeek-V4 specification, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows

PIECE_ROWS = 1024
"""Rows dequantised at a time: 2 MB in fp32, so that temporaries stay in a cache."""


def unpack_pages(table: KVRows, pages: Tensor, rows_per_page: int, out: Tensor) -> None:
    """See `dsv4_kernels.unpack.unpack_pages`; writes all of `out` [n * rows_per_page, 512]."""
    within = torch.arange(rows_per_page, device=pages.device)
    rows = (pages.long()[:, None] * rows_per_page + within).flatten()
    for piece, target in zip(rows.split(PIECE_ROWS), out.split(PIECE_ROWS), strict=True):
        values = table.gather(piece.clamp(min=0)).to(out.dtype)
        target.copy_(torch.where((piece >= 0)[:, None], values, target))
