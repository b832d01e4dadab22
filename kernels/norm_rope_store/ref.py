"""Definition of `norm_rope_store`, in plain PyTorch: the definitions of its parts, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import SCALE_GROUP, RowFormat
from dsv4_kernels.norm.ref import rms_norm
from dsv4_kernels.norm_rope_store import Destination
from dsv4_kernels.quant.ref import fp8_qdq
from dsv4_kernels.rope.ref import apply_rope


def norm_rope_store(
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    eps: float,
    destinations: Sequence[Destination],
    qat: bool,
    out: Tensor,
) -> None:
    """See `dsv4_kernels.norm_rope_store.norm_rope_store`; writes all of `out`."""
    row = apply_rope(rms_norm(kv, kv_weight, eps), positions, frequencies, False)
    for table, rows in destinations:
        kept = rows >= 0
        values = row[kept]
        if qat and table.format is RowFormat.PLAIN:
            # Not for FP8 tables: they quantise the rows themselves, and quantising values that were already rounded
            # gives other bytes in rare cases.
            nope, rope = values.split((table.row_dim - table.rope_dim, table.rope_dim), -1)
            values = torch.cat((fp8_qdq(nope, SCALE_GROUP), rope), -1)
        table.scatter(rows[kept], values)
    out.copy_(apply_rope(rms_norm(q, None, eps), positions, frequencies, False))
