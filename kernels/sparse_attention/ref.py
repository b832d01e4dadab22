"""Definition of the attention, in plain PyTorch (DeepSeek-V4 specification, section 3.3).

All in fp32. Keys are reduced in tiles of KEY_TILE places of the window's list and then of the entries' list, in order,
and every product of a token has the same shape: so a token's bits depend on its own lists alone, not on the batch, and
trailing holes add exact zeros. Tokens are processed in chunks to bound the memory of gathered rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_kernels.indexer.ref import entry_rows as rows_of_entries
from dsv4_kernels.kv_layout import KVRows

KEY_TILE = 64
"""Keys of one product."""
GATHERED_BYTES = 16 * 2**20
"""Bound on the fp32 rows gathered at a time (at least one token's)."""


def sparse_attention(
    q: Tensor,
    window: KVRows,
    window_rows: Tensor,
    entries: KVRows | None,
    entry_rows: Tensor | None,
    page_table: Tensor | None,
    entries_per_page: int,
    token_to_request: Tensor | None,
    visible: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    out: Tensor | None,
    return_lse: bool,
    normalised: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dsv4_kernels.sparse_attention.sparse_attention`."""
    tables = [(window, _padded_to_tiles(window_rows))]
    if entries is not None:
        if entry_rows is None:
            entry_rows = _dense_rows(page_table[token_to_request.long()], entries_per_page, visible)
        tables.append((entries, _padded_to_tiles(entry_rows)))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype if normalised else torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    keys_per_token = sum(rows.shape[1] for _, rows in tables)
    step = max(1, GATHERED_BYTES // max(4 * keys_per_token * q.shape[2], 1))
    for begin in range(0, q.shape[0], step):
        tokens = slice(begin, begin + step)
        partial, lse[tokens] = _attend(q[tokens], [(table, rows[tokens]) for table, rows in tables], scale)
        if sink is not None:
            partial *= _kept_from_sink(lse[tokens], sink).unsqueeze(-1)
        out[tokens] = partial.to(out.dtype)
    return (out, lse) if return_lse or not normalised else out


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `dsv4_kernels.sparse_attention.merge_partials`."""
    largest = torch.stack(list(lses)).amax(0)
    reference = torch.where(largest == -torch.inf, 0.0, largest)
    out, total = torch.zeros_like(outs[0]), torch.zeros_like(largest)
    for part, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - reference)
        out += weight.unsqueeze(-1) * part
        total += weight
    out /= torch.where(total == 0, 1.0, total).unsqueeze(-1)
    lse = reference + torch.log(total)
    if sink is not None:
        out *= _kept_from_sink(lse, sink).unsqueeze(-1)
    return out, lse


def _attend(q: Tensor, tables: list[tuple[KVRows, Tensor]], scale: float) -> tuple[Tensor, Tensor]:
    """Attention of t tokens to rows [t, n * KEY_TILE] of each table -> out [t, H, D] fp32 without sink, lse [t, H]."""
    q32 = q.float().contiguous() * scale
    tiles, logits = [], []
    for table, rows in tables:
        hole = rows < 0
        keys = table.gather(rows.clamp(min=0)).float()
        if hole.any():
            keys.masked_fill_(hole.unsqueeze(-1), 0.0)  # what lies under a hole may be NaN, and 0 * NaN is NaN
        for begin in range(0, rows.shape[1], KEY_TILE):
            tile = slice(begin, begin + KEY_TILE)
            tiles.append(keys[:, tile])
            logits.append(torch.bmm(q32, keys[:, tile].mT).masked_fill_(hole[:, None, tile], -torch.inf))
    out = torch.zeros_like(q32)
    total = q32.new_zeros(q32.shape[:2])
    if not tiles:
        return out, total - torch.inf
    logit = torch.stack(logits)  # [tiles, t, H, KEY_TILE]
    largest = logit.amax((0, 3))
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = logit.sub_(largest.unsqueeze(-1)).exp_()
    for weight, tile_total, keys in zip(weights, weights.sum(-1), tiles, strict=True):
        out.baddbmm_(weight, keys)
        total += tile_total
    out /= torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, largest + torch.log(total)


def _kept_from_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """exp(lse) / (exp(lse) + exp(sink)): the share of the softmax that the sink leaves to the rows. [t, H]."""
    kept = 1.0 / (1.0 + torch.exp(sink - lse))
    # Both infinite: no rows and an empty sink, or the like; nothing is kept either way.
    return torch.where(torch.isnan(kept), 0.0, kept)


def _padded_to_tiles(rows: Tensor) -> Tensor:
    """[T, n] -> [T, a multiple of KEY_TILE] with holes; tiles in which no token has a row are left out at the end."""
    used = (rows >= 0).any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 0
    return torch.nn.functional.pad(rows[:, :length], (0, -length % KEY_TILE), value=-1)


def _dense_rows(page_table: Tensor, entries_per_page: int, visible: Tensor) -> Tensor:
    """Page tables [T, P] and visible lengths [T] -> row lists [T, max(visible)], -1 from visible on."""
    num_entries = int(visible.max()) if visible.numel() else 0
    entry = torch.arange(num_entries, device=visible.device).expand(len(visible), -1)
    readable = entry < visible.unsqueeze(1)
    return torch.where(readable, rows_of_entries(page_table, torch.where(readable, entry, 0), entries_per_page), -1)
