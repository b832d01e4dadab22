"""The lightning indexer: scores of compressed entries and the choice of the best (DeepSeek-V4 specification, 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from dsv4_kernels.registry import select

SCRATCH_BYTES = 256 << 20
"""Limit of the GPU kernels' buffer of scores, in bytes; only the scores of a single token may exceed it."""


def index_query(
    q: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    weight_scale: float,
    quantise: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The queries and head weights that `index_topk` takes, from the results of the indexer's products.

    Queries: `apply_rope`, and with `quantise` also `hadamard` and `fp4_qdq` in blocks of 32, each rounded to q's dtype.
    Head weights: rounded to q's dtype, as the release's layer rounds them, times `weight_scale` in fp32.

    Args:
        q: [T, Hi, Di] fp32 or bf16. It is not modified.
        head_weights: [T, Hi] fp32.
        positions: [T] int64.
        frequencies: [R / 2] fp32 (`rope_frequencies`), R <= Di.
        weight_scale: `Di**-0.5 * Hi**-0.5`.
        quantise: whether queries, like the keys, are Hadamard-transformed and quantised.
        impl: implementation by name; None lets the registry choose.

    Returns:
        q [T, Hi, Di] in its dtype, head_weights [T, Hi] fp32.

    Raises:
        ValueError: shapes that do not match, or head_weights are not fp32.
    """
    fits = q.dim() == 3 and positions.shape == q.shape[:1] and 2 * frequencies.shape[0] <= q.shape[2]
    if not fits or head_weights.shape != q.shape[:2] or head_weights.dtype != torch.float32:
        raise ValueError(
            f"index_query needs q [T, Hi, Di], head_weights [T, Hi] fp32, positions [T] and frequencies [R / 2], R at "
            f"most Di; got {tuple(q.shape)}, {tuple(head_weights.shape)} {head_weights.dtype}, "
            f"{tuple(positions.shape)} and {tuple(frequencies.shape)}"
        )
    query = select("index_query", q.device, q.dtype, impl)
    return query(q, head_weights, positions, frequencies, weight_scale, quantise)


def index_topk(
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    entries_per_page: int,
    token_to_request: Tensor,
    visible: Tensor,
    top_k: int,
    row_pages: Tensor | None = None,
    prefill: bool = False,
    impl: str | None = None,
) -> Tensor:
    """The rows of the `top_k` best visible entries of every token, by rising entry.

    Scores as in `index_scores`; of equal scores the lower entry wins; a token with at most `top_k` visible entries gets
    all of them. Entry j of request b has row `page_table[b, j // entries_per_page] * entries_per_page + j %
    entries_per_page` in the table of keys. The result names rows of the table of entries: a row has the number of its
    key's row, or the number that `row_pages` gives in place of `page_table`.

    Args:
        q: [T, Hi, Di] fp32 or bf16 (rotated, Hadamard-transformed and rounded as the model demands).
        head_weights: [T, Hi] fp32.
        keys: table of Di channels.
        page_table: [B, P] integer page numbers.
        entries_per_page: entries in a page.
        token_to_request: [T] integer row of page_table.
        visible: [T] integer, entries [0, visible) may be read; 0 is legal.
        top_k: at least 1.
        row_pages: [B, P] integer page numbers of the entries, if these are in other pages than the keys (unpacked).
        prefill: whether the tokens are chunks of prompts, so that neighbours belong to one request; a kernel may then
            compute several tokens together. The scores are the same.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [T, top_k] int32 rows, -1 after the last.

    Raises:
        ValueError: shapes that do not match, or top_k < 1.
    """
    _check("index_topk", q, head_weights, keys, page_table, token_to_request, visible)
    if top_k < 1:
        raise ValueError(f"index_topk: top_k is {top_k}; expected at least 1")
    if row_pages is None:
        row_pages = page_table
    elif row_pages.shape != page_table.shape:
        raise ValueError(
            f"index_topk: row_pages are {tuple(row_pages.shape)}; expected page_table's {tuple(page_table.shape)}"
        )
    function = select("index_topk", q.device, q.dtype, impl)
    lists = (page_table, entries_per_page, token_to_request, visible, top_k, row_pages)
    return function(q, head_weights, keys, *lists, prefill)


def index_scores(
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    entries_per_page: int,
    token_to_request: Tensor,
    visible: Tensor,
    impl: str | None = None,
) -> Tensor:
    """`score[t, j] = Σ_h relu(q[t, h] · key[j]) * head_weights[t, h]`, -inf for j >= visible[t].

    Args: as in `index_topk`.

    Returns:
        [T, max(visible)] fp32.

    Raises:
        ValueError: shapes that do not match.
    """
    _check("index_scores", q, head_weights, keys, page_table, token_to_request, visible)
    function = select("index_scores", q.device, q.dtype, impl)
    return function(q, head_weights, keys, page_table, entries_per_page, token_to_request, visible)


def _check(
    name: str,
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    token_to_request: Tensor,
    visible: Tensor,
) -> None:
    if q.dim() != 3 or head_weights.shape != q.shape[:2] or q.shape[2] != keys.row_dim:
        raise ValueError(
            f"{name} needs q [T, Hi, {keys.row_dim}] and head_weights [T, Hi]; got {tuple(q.shape)} and "
            f"{tuple(head_weights.shape)}"
        )
    if head_weights.dtype != torch.float32:
        raise ValueError(f"{name}: head_weights are {head_weights.dtype}; expected torch.float32")
    tokens = q.shape[:1]
    if page_table.dim() != 2 or token_to_request.shape != tokens or visible.shape != tokens:
        raise ValueError(
            f"{name} needs page_table [B, P], token_to_request and visible ({tokens[0]},); got "
            f"{tuple(page_table.shape)}, {tuple(token_to_request.shape)}, {tuple(visible.shape)}"
        )
