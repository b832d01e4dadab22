"""Fake-quantisation of the rows that attention and indexer read: FP8 of KV rows, FP4 of indexer rows (section 4.3).

Rows that are *stored* as FP8 or FP4 are quantised by what writes them (`dsv4_kernels.kv_layout`), once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.quant import fp4_qdq, fp8_qdq, hadamard
from sglang_dsv4.config import INDEX_BLOCK, KV_BLOCK, Config


def quantise_kv_row(row: Tensor, config: Config, stored_as: RowFormat) -> Tensor:
    """FP8 round trip of the channels that are not rotated, [..., head_dim] (section 3.1).

    Not for rows stored as FP8: they quantise what is written, and from this round trip's result the same values would
    in rare cases get other bytes.
    """
    if not config.qat.kv_fp8 or stored_as is RowFormat.FP8:
        return row
    nope, rope = row.split((config.nope_head_dim, config.qk_rope_head_dim), dim=-1)
    return torch.cat((fp8_qdq(nope, KV_BLOCK), rope), dim=-1)


def quantise_index_row(row: Tensor, config: Config, stored_as: RowFormat = RowFormat.PLAIN) -> Tensor:
    """Hadamard and FP4 round trip, [..., index_head_dim]. Switched off, neither: the rotation cancels in q.k.

    Rows stored as FP4 quantise what is written, so they get the rotation only.
    """
    if not config.qat.indexer_fp4:
        return row
    rotated = hadamard(row)
    return rotated if stored_as is RowFormat.INDEX_FP4 else fp4_qdq(rotated, INDEX_BLOCK)
