"""The operations between an attention layer's projections and its attention, in one launch (specification, 3.1, 3.2).

Queries are normed and rotated; the layer's new window rows are normed, rotated, quantised once and stored in every
table that needs them: the ring, the workspace of a prefill chunk, tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.registry import select

MAX_DESTINATIONS = 3
"""Ring, workspace, tails."""


class Destination(NamedTuple):
    """A table in which window rows of a forward are stored."""

    table: KVRows
    rows: Tensor  # [T] int64: the token's row of the table, each at most once; -1: the token is not stored


def norm_rope_store(
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    eps: float,
    destinations: Sequence[Destination] = (),
    qat: bool = False,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Norms and rotates queries and window rows, and stores the rows.

    ::

        out = apply_rope(rms_norm(q, None, eps), positions, frequencies)
        row = apply_rope(rms_norm(kv, kv_weight, eps), positions, frequencies)
        for table, rows in destinations:
            table[rows] = fp8_qdq(row[:448], 64) | row[448:] if qat and table is plain else row

    Norm and rotation each round to the dtype of q and kv. FP8 tables get the bytes that `KVRows.scatter` writes for
    `row`. A prefill chunk whose workspace begins with rows of the ring must copy them before this call: the chunk's
    last rows may overwrite the ring rows of its prefix. If a row is named twice, a table may hold a mixture of both
    values.

    On a GPU a row's bits do not depend on the batch, and the host never waits for the device.

    Args:
        q: [T, H, D] fp32 or bf16, any strides of tokens and heads.
        kv: [T, D] in q's dtype.
        kv_weight: [D] fp32.
        positions: [T] int64.
        frequencies: [R / 2] fp32 (`rope_frequencies`), R <= D.
        eps: of both norms.
        destinations: up to three, none of which overlaps another one, q or out.
        qat: plain tables store the values that an FP8 row would hold.
        out: result tensor like q; may be q itself. None: a new tensor.
        impl: implementation by name; None lets the registry choose.

    Returns:
        out.

    Raises:
        ValueError: shapes or dtypes that do not match, or too many destinations; on a GPU also D other than 512, R
            other than 64, or rows that cannot be read in units of 16 bytes.
    """
    tokens = q.shape[0]
    if q.dim() != 3 or kv.shape != (tokens, q.shape[2]) or kv.dtype != q.dtype or kv_weight.shape != q.shape[2:]:
        raise ValueError(
            f"norm_rope_store needs q [T, H, D], kv [T, D] in q's dtype and kv_weight [D]; got {tuple(q.shape)} "
            f"{q.dtype}, {tuple(kv.shape)} {kv.dtype} and {tuple(kv_weight.shape)}"
        )
    if frequencies.dim() != 1 or 2 * frequencies.shape[0] > q.shape[2]:
        raise ValueError(
            f"norm_rope_store: frequencies have shape {tuple(frequencies.shape)}; expected [R / 2], R at most "
            f"{q.shape[2]}"
        )
    if len(destinations) > MAX_DESTINATIONS:
        raise ValueError(f"norm_rope_store takes up to {MAX_DESTINATIONS} destinations; got {len(destinations)}")
    lists = [("positions", positions)] + [("the rows of a destination", rows) for _, rows in destinations]
    for name, values in lists:
        if values.shape != (tokens,) or values.dtype != torch.int64:
            raise ValueError(
                f"norm_rope_store: {name} must be [{tokens}] torch.int64; got {tuple(values.shape)} {values.dtype}"
            )
    for table, _ in destinations:
        if table.format not in (RowFormat.PLAIN, RowFormat.FP8) or table.row_dim != q.shape[2]:
            raise ValueError(
                f"norm_rope_store stores plain and FP8 rows of {q.shape[2]}; got {table.format.value} rows of "
                f"{table.row_dim}"
            )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"norm_rope_store: out is {tuple(out.shape)} {out.dtype}; q needs {tuple(q.shape)} {q.dtype}")
    if tokens:
        function = select("norm_rope_store", q.device, q.dtype, impl)
        function(q, kv, kv_weight, positions, frequencies, eps, destinations, qat, out)
    return out
