"""Attention over window rows and compressed entries, one softmax, a sink (DeepSeek-V4 specification, section 3.3)."""

from __future__ import annotations

from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from dsv4_kernels.registry import select
from dsv4_kernels.sparse_attention.split import check_split_keys


def sparse_attention(
    q: Tensor,
    window: KVRows,
    window_rows: Tensor,
    entries: KVRows | None = None,
    entry_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    entries_per_page: int = 0,
    token_to_request: Tensor | None = None,
    visible: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    scale: float,
    out: Tensor | None = None,
    split_keys: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """One softmax over a token's window rows, its entries and a sink; K and V are the same row.

    ::

        rows = concat(window[window_rows[t]], entries[entry_indices[t]])  # index -1: a hole, left out
        s    = q[t] @ rows.T * scale                                      # [H, rows], fp32
        out  = (exp(s - m) @ rows) / (exp(s - m).sum() + exp(sink - m))   # any m

    Entries are named by a list (CSA: `entry_indices`, of which only the slots before `visible[t]` are looked at) or
    densely (HCA: `page_table`, `entries_per_page`, `token_to_request`, `visible`): entry j < visible[t] of request b
    has the row `page_table[b, j // entries_per_page] * entries_per_page + j % entries_per_page`. A row that is named
    twice counts twice. A row that is not named is not read and may hold any bytes, NaN included. With all holes and no
    sink the output is zero.

    A token's bits depend on its own lists, their widths and `split_keys`, not on the other tokens of the call. The GPU
    kernels ("sm90", "sm100") require bf16, head_dim 512, at most 128 heads, and rows all FP8 or all PLAIN bf16.

    Args:
        q: [T, H, D] fp32 or bf16, any strides.
        window: table of D channels.
        window_rows: [T, W] int32; slot i of the list is the position t - W + 1 + i, a hole before the sequence begins.
        entries: table of D channels, or None for a layer without compression.
        entry_indices: [T, K] int32 rows of `entries`, CSA's list.
        page_table: [B, P] integer page numbers, HCA's addressing.
        entries_per_page: entries of one page.
        token_to_request: [T] integer row of page_table.
        visible: [T] integer number of entries, at most as many as the page table holds; 0 is legal. With
            `entry_indices` it is optional, and may be any number: from slot visible[t] on, the list may hold any
            values.
        sink: [H] fp32, or None; ±inf are legal (+inf: all weight goes to the sink, the output is zero).
        scale: factor of the scores.
        out: [T, H, D] in q's dtype to write into.
        split_keys: a multiple of 128, or None. A GPU kernel divides a token's keys into KV splits of at most this many
            keys, which it computes in parallel and combines in fp32 within the call (`split.py`). Meant for few tokens
            with many keys.
        impl: implementation by name; None lets the registry choose.

    Returns:
        out [T, H, D] in q's dtype.

    Raises:
        ValueError: shapes that do not fit each other, entries that are named both ways or neither way, or a
            `split_keys` that is not a multiple of 128.
        NotImplementedError: no implementation for the device and dtype, or the chosen implementation does not compute
            the call (other dimensions, row formats that differ). No other implementation is tried: name one with
            `impl`.
    """
    _check_shapes(q, window, window_rows, sink, out)
    _check_entries(q, entries, entry_indices, page_table, entries_per_page, token_to_request, visible)
    check_split_keys(split_keys)
    function = select("sparse_attention", q.device, q.dtype, impl)
    return function(
        *(q, window, window_rows, entries, entry_indices),
        *(page_table, entries_per_page, token_to_request, visible, sink),
        scale=scale,
        out=out,
        split_keys=split_keys,
    )


def _check_shapes(q: Tensor, window: KVRows, window_rows: Tensor, sink: Tensor | None, out: Tensor | None) -> None:
    if q.dim() != 3 or q.shape[2] != window.row_dim:
        raise ValueError(f"sparse_attention: q has shape {tuple(q.shape)}; expected [T, H, {window.row_dim}]")
    if window_rows.dim() != 2 or window_rows.shape[0] != q.shape[0]:
        raise ValueError(
            f"sparse_attention: window_rows have shape {tuple(window_rows.shape)}; expected [{q.shape[0]}, W]"
        )
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ValueError(f"sparse_attention: sink has shape {tuple(sink.shape)}; expected ({q.shape[1]},)")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(
            f"sparse_attention: out is {tuple(out.shape)} {out.dtype}; expected q's {tuple(q.shape)} {q.dtype}"
        )


def _check_entries(
    q: Tensor,
    entries: KVRows | None,
    entry_indices: Tensor | None,
    page_table: Tensor | None,
    entries_per_page: int,
    token_to_request: Tensor | None,
    visible: Tensor | None,
) -> None:
    dense = [x is not None for x in (page_table, token_to_request)]
    if entries is None:
        if entry_indices is not None or visible is not None or any(dense):
            raise ValueError("sparse_attention: rows of entries are named, but entries is None")
        return
    if entries.row_dim != q.shape[2]:
        raise ValueError(f"sparse_attention: entries have {entries.row_dim} channels and q {q.shape[2]}")
    listed = entry_indices is not None
    if listed == any(dense) or any(dense) != all(dense) or not (listed or visible is not None):
        raise ValueError(
            "sparse_attention: name the entries either by entry_indices or by all of page_table, entries_per_page, "
            "token_to_request and visible"
        )
    tokens = q.shape[:1]
    if listed:
        if entry_indices.dim() != 2 or entry_indices.shape[:1] != tokens:
            raise ValueError(
                f"sparse_attention: entry_indices have shape {tuple(entry_indices.shape)}; expected [{tokens[0]}, K]"
            )
        if visible is not None and visible.shape != tokens:
            raise ValueError(f"sparse_attention: visible has shape {tuple(visible.shape)}; expected ({tokens[0]},)")
    elif entries_per_page < 1 or page_table.dim() != 2 or token_to_request.shape != tokens or visible.shape != tokens:
        raise ValueError(
            f"sparse_attention: dense entries need page_table [B, P], entries_per_page >= 1, token_to_request and "
            f"visible ({tokens[0]},); got {tuple(page_table.shape)}, {entries_per_page}, "
            f"{tuple(token_to_request.shape)}, {tuple(visible.shape)}"
        )
