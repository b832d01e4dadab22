"""FP8 rows as bf16 rows, for readers that would convert each of them many times (DeepSeek-V4 specification, 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import ROW_DIM, KVRows, RowFormat
from dsv4_kernels.registry import select

VECTOR_BYTES = 16
"""Rows of `out` begin at multiples of this: the kernel writes 16 bytes at a time."""


def unpack_pages(table: KVRows, pages: Tensor, rows_per_page: int, out: Tensor, impl: str | None = None) -> KVRows:
    """Copies pages of an FP8 table side by side into a plain one.

    ::

        out[i * rows_per_page + j] = table[pages[i] * rows_per_page + j]     # 0 <= j < rows_per_page

    Every value is that of the row: a code of four significant bits times a power of two is a bf16, but for products
    below bf16's normal range, which are rounded to its subnormals, to the nearest even one. The GPU attention kernels
    convert FP8 rows to the same bits. A negative page leaves its rows of `out` as they are; what no page names is not
    read. A row that was never written may hold anything: of one whose scale is NaN (the byte 255), the kernel makes
    other numbers that are not finite than the reference.

    Nothing waits for the device, and nothing is allocated on a GPU if `pages` is int32 and contiguous.

    Args:
        table: FP8 rows.
        pages: [n] integer page numbers, in any order; with rows_per_page = 1 these are row numbers.
        rows_per_page: of the caller's pages, not of the storage's: 64 for CSA's entries of 256 tokens, 2 for HCA's.
        out: [at least n * rows_per_page, 512] bf16; rows contiguous, at multiples of 16 bytes, apart from the table.
        impl: implementation by name; None lets the registry choose.

    Returns:
        The first n * rows_per_page rows of `out` as a table.

    Raises:
        ValueError: rows that are not FP8, pages that are no list, or an `out` that cannot hold them.
    """
    if table.format is not RowFormat.FP8:
        raise ValueError(f"unpack_pages takes FP8 rows; got {table.format.value}")
    if pages.dim() != 1 or pages.is_floating_point() or rows_per_page < 1:
        raise ValueError(
            f"unpack_pages needs pages [n] of an integer dtype and rows_per_page >= 1; got {tuple(pages.shape)} "
            f"{pages.dtype} and {rows_per_page}"
        )
    num_rows = len(pages) * rows_per_page
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
    if not table.device == pages.device == out.device:
        raise ValueError(
            f"unpack_pages: the table is on {table.device}, pages on {pages.device} and out on {out.device}; move them "
            "to one device"
        )
    out = out[:num_rows]
    if num_rows:
        select("unpack_pages", out.device, out.dtype, impl)(table, pages, rows_per_page, out)
    return KVRows(out, RowFormat.PLAIN, num_rows, table.row_dim, table.rope_dim)
