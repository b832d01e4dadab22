"""Definition of the indexer, in plain PyTorch (DeepSeek-V4 specification, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows

KEY_TILE = 64
"""Entries of one product. Every product of a token has the same shape, so its bits do not depend on the batch."""


def index_topk(
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    entries_per_page: int,
    token_to_request: Tensor,
    visible: Tensor,
    top_k: int,
) -> Tensor:
    """See `dsv4_kernels.indexer.index_topk`."""
    scores = index_scores(q, head_weights, keys, page_table, entries_per_page, token_to_request, visible)
    num_tokens, num_entries = scores.shape
    if num_entries > top_k:
        # A stable sort keeps equals in entry order; torch.topk promises no order among equals.
        entry = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :top_k]
        entry = torch.where(entry < visible.unsqueeze(1), entry, num_entries).sort(1).values
    else:
        entry = torch.arange(num_entries, device=q.device).expand(num_tokens, -1)
    rows = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=q.device)
    if num_entries:
        chosen = entry_rows(page_table[token_to_request.long()], entry.clamp(max=num_entries - 1), entries_per_page)
        rows[:, : entry.shape[1]] = torch.where(entry < visible.unsqueeze(1), chosen, -1)
    return rows


def index_scores(
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    entries_per_page: int,
    token_to_request: Tensor,
    visible: Tensor,
) -> Tensor:
    """See `dsv4_kernels.indexer.index_scores`."""
    num_entries = int(visible.max()) if visible.numel() else 0
    scores = torch.full((q.shape[0], num_entries), -torch.inf, device=q.device)
    for request in token_to_request.unique().tolist() if num_entries else ():
        tokens = (token_to_request == request).nonzero().squeeze(1)
        limit = visible[tokens]
        q32, weights = q[tokens].float(), head_weights[tokens].unsqueeze(1)
        for begin in range(0, int(limit.max()), KEY_TILE):
            entry = torch.arange(begin, begin + KEY_TILE, device=q.device)
            rows = entry_rows(page_table[request], entry.clamp(max=int(limit.max()) - 1), entries_per_page)
            key = keys.gather(rows).float()  # [KEY_TILE, Di]; places after the last entry repeat it and are masked
            products = torch.bmm(q32, key.T.expand(len(tokens), -1, -1)).relu_()
            tile = torch.bmm(weights, products).squeeze(1)
            end = min(begin + KEY_TILE, num_entries)
            masked = tile.masked_fill_(entry >= limit.unsqueeze(1), -torch.inf)
            scores[tokens, begin:end] = masked[:, : end - begin]
    return scores


def entry_rows(page_table: Tensor, entry: Tensor, entries_per_page: int) -> Tensor:
    """Rows of entries.

    Args:
        page_table: [..., P] integer page numbers.
        entry: [..., N] int64, each below P * entries_per_page.
        entries_per_page: entries of one page.

    Returns:
        [..., N] int64.
    """
    page = page_table.long().gather(-1, entry // entries_per_page)
    return page * entries_per_page + entry % entries_per_page
