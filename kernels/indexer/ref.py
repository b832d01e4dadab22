"""Definition of the indexer, in plain PyTorch (DeepSeek-V4 specification, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import FP4_SCALE_GROUP, KVRows, entry_rows
from dsv4_kernels.quant import fp4_qdq, hadamard
from dsv4_kernels.reference.batch_invariant import at_least_as_many_as_threads, padded_to_full_rows, tree_sum
from dsv4_kernels.rope import apply_rope

KEY_TILE = 64
"""Entries of one product. Every product of a token has the same shape, so its bits do not depend on the batch."""
TILE_PRODUCTS = 2**18
"""Limit of heads times keys times tokens that are multiplied at a time, at least one token: 1 MB of results in fp32."""


def index_query(
    q: Tensor, head_weights: Tensor, positions: Tensor, frequencies: Tensor, weight_scale: float, quantise: bool
) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.indexer.index_query`."""
    head_weights = head_weights.to(q.dtype).float() * weight_scale
    q = apply_rope(q, positions, frequencies)
    return fp4_qdq(hadamard(q), FP4_SCALE_GROUP) if quantise else q, head_weights


def index_topk(
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    entries_per_page: int,
    token_to_request: Tensor,
    visible: Tensor,
    top_k: int,
    row_pages: Tensor,
    prefill: bool,
) -> Tensor:
    """See `dsv4_kernels.indexer.index_topk`; `prefill` makes no difference."""
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
        within = entry.clamp(max=num_entries - 1)
        chosen = entry_rows(row_pages, token_to_request.long().unsqueeze(1), within, entries_per_page)
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
        of_request = (token_to_request == request).nonzero().squeeze(1)
        last = int(visible[of_request].max()) - 1
        if last < 0:
            continue
        entry = torch.arange(0, last + 1 + -(last + 1) % KEY_TILE, device=q.device)
        # Positions after the last entry repeat it and are masked below.
        key = keys.gather(entry_rows(page_table, request, entry.clamp(max=last), entries_per_page)).float()
        for tokens in of_request.split(max(1, TILE_PRODUCTS // (q.shape[1] * KEY_TILE))):
            computed = at_least_as_many_as_threads(tokens)
            q32 = padded_to_full_rows(q[computed].float(), 1)
            weights = padded_to_full_rows(head_weights[computed], 1).unsqueeze(2)
            tiles = [_tile_scores(q32, weights, tile) for tile in key.split(KEY_TILE)]
            masked = torch.cat(tiles, 1)[: len(tokens)].masked_fill_(entry >= visible[tokens].unsqueeze(1), -torch.inf)
            scores[tokens, : last + 1] = masked[:, : last + 1]
    return scores


def _tile_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores [t, KEY_TILE] of q [t, Hi, Di], weights [t, Hi, 1] and keys [KEY_TILE, Di], all fp32."""
    products = torch.bmm(q, keys.T.expand(len(q), -1, -1)).relu_()
    return tree_sum(products.mul_(weights), 1)
