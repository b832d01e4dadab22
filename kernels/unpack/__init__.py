"""FP8 rows unpacked to bf16, for readers that would convert each row many times (DeepSeek-V4 specification, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import ROW_DIM, KVRows, RowFormat
from dsv4_kernels.registry import select

VECTOR_BYTES = 16
"""Rows of `out` begin at multiples of this, because the kernel writes 16 bytes at a time."""
MAX_PARTS = 2
"""Tables of a call at most: the window rows and the entries that an attention call reads."""


class Pages(NamedTuple):
    """Pages of an FP8 table."""

    table: KVRows
    numbers: Tensor  # [n] integer page numbers, in any order; with rows_per_page = 1 these are row numbers
    rows_per_page: (
        int  # of the caller's pages, not of the table's storage: 64 for CSA's entries of 256 tokens, 2 for HCA's
    )

    @property
    def num_rows(self) -> int:
        """Rows of all pages."""
        return len(self.numbers) * self.rows_per_page


def unpack_pages(parts: Sequence[Pages], out: Tensor, impl: str | None = None) -> list[KVRows]:
    """Copies pages of one or two FP8 tables into a plain bf16 table.

    ::

        out[i * rows_per_page + j] = table[numbers[i] * rows_per_page + j]     # 0 <= j < rows_per_page

    The rows of a second part follow those of the first. Values are unchanged: a code of four significant bits times a
    power of two is a bf16, except products below bf16's normal range, which are rounded to the nearest subnormal, ties
    to even. The GPU attention kernels convert FP8 rows to the same bits. A negative page leaves its rows of `out`
    unchanged; rows that no page names are not read. A row that was never written may hold any bytes: if its scale is
    NaN (byte 255), the kernel and the reference write different non-finite numbers.

    The host does not wait for the device, and nothing is allocated on a GPU if the page numbers are int32 and
    contiguous.

    Args:
        parts: one or two.
        out: [at least as many rows as all pages have, 512] bf16; rows contiguous, at multiples of 16 bytes; must not
            overlap the tables.
        impl: implementation by name; None lets the registry choose.

    Returns:
        A table for each part: its rows of `out`.

    Raises:
        ValueError: no part or too many parts, rows that are not FP8, page numbers that are not one-dimensional
            integers, or an `out` that cannot hold the rows.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"unpack_pages takes 1 to {MAX_PARTS} parts; got {len(parts)}")
    for table, numbers, rows_per_page in parts:
        if table.format is not RowFormat.FP8:
            raise ValueError(f"unpack_pages takes FP8 rows; got {table.format.value}")
        if numbers.dim() != 1 or numbers.is_floating_point() or rows_per_page < 1:
            raise ValueError(
                f"unpack_pages needs pages [n] of an integer dtype and rows_per_page >= 1; got {tuple(numbers.shape)} "
                f"{numbers.dtype} and {rows_per_page}"
            )
        if not table.device == numbers.device == out.device:
            raise ValueError(
                f"unpack_pages: a table is on {table.device}, its pages on {numbers.device} and out on {out.device}; "
                "move them to one device"
            )
    num_rows = sum(part.num_rows for part in parts)
    unit = VECTOR_BYTES // out.element_size()
    if (
        out.dtype != torch.bfloat16
        or out.dim() != 2
        or (out.shape[0] < num_rows or out.shape[1] != ROW_DIM)
        or (out.stride(1) != 1 or out.stride(0) % unit or out.data_ptr() % VECTOR_BYTES)
    ):
        raise ValueError(
            f"unpack_pages needs out [at least {num_rows}, {ROW_DIM}] torch.bfloat16 with contiguous rows at multiples "
            f"of {VECTOR_BYTES} bytes; got {tuple(out.shape)} {out.dtype} with strides {out.stride()} at address "
            f"{out.data_ptr():#x}"
        )
    out = out[:num_rows]
    if num_rows:
        select("unpack_pages", out.device, out.dtype, impl)(parts, out)
    pieces = out.split([part.num_rows for part in parts])
    return [
        KVRows(piece, RowFormat.PLAIN, len(piece), part.table.row_dim, part.table.rope_dim)
        for piece, part in zip(pieces, parts, strict=True)
    ]
