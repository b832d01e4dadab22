"""Definition of the attention, in plain PyTorch (DeepSeek-V4 specification, section 3.3).

All in fp32. Keys are reduced in tiles of KEY_TILE places of the window's list and then of the entries' list, in order,
and every product of a token has the same shape: so a token's bits depend on its own lists alone, not on the batch, and
trailing holes add exact zeros. Tokens are processed in chunks to bound the memory of gathered rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_kernels.invariant import at_least_as_many_as_threads, padded_to_full_rows
from dsv4_kernels.kv_layout import KVRows
from dsv4_kernels.kv_layout import entry_rows as rows_of_entries

KEY_TILE = 64
"""Keys of one product."""
GATHERED_BYTES = 4 * 2**20
"""Bound on the fp32 rows gathered at a time (at least one token's a thread); larger temporaries cost page faults."""


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
    split_keys: int | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dsv4_kernels.sparse_attention.sparse_attention`. `split_keys` changes nothing: all of it is in fp32."""
    tables = [(window, _padded_to_tiles(window_rows))]
    if entries is not None:
        if entry_rows is None:
            entry_rows = _dense_rows(page_table, token_to_request.long(), entries_per_page, visible)
        elif visible is not None:
            slot = torch.arange(entry_rows.shape[1], device=q.device)
            entry_rows = torch.where(slot < visible.unsqueeze(1), entry_rows, -1)
        tables.append((entries, _padded_to_tiles(entry_rows)))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype if normalised else torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    keys_per_token = sum(rows.shape[1] for _, rows in tables)
    step = max(1, GATHERED_BYTES // max(4 * keys_per_token * q.shape[2], 1))
    for tokens in torch.arange(q.shape[0], device=q.device).split(max(step, torch.get_num_threads())):
        computed = at_least_as_many_as_threads(tokens)
        partial = _attend(q[computed], [(table, rows[computed]) for table, rows in tables], scale)
        weighted, reference, total = (x[: len(tokens)] for x in partial)
        out[tokens] = _divided(weighted, reference, total, sink).to(out.dtype)
        lse[tokens] = reference + torch.log(total)
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
    return _divided(out, reference, total, sink), reference + torch.log(total)


def _attend(q: Tensor, tables: list[tuple[KVRows, Tensor]], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of t tokens to the rows [t, n * KEY_TILE] of each table, not yet divided.

    Returns:
        Σ exp(s - reference) * row [t, H, D], reference [t, H] (the largest score, 0 without rows), and
        Σ exp(s - reference) [t, H], all fp32.
    """
    q32 = padded_to_full_rows(q.float() * scale, 1)
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
    if not tiles:
        return torch.zeros_like(q, dtype=torch.float32), *q.new_zeros(2, *q.shape[:2], dtype=torch.float32)
    logit = torch.stack(logits)  # [tiles, t, H, KEY_TILE]
    largest = logit.amax((0, 3))
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = logit.sub_(largest.unsqueeze(-1)).exp_()
    out, total = torch.zeros_like(q32), torch.zeros_like(largest)
    for weight, tile_total, keys in zip(weights, weights.sum(-1), tiles, strict=True):
        out.baddbmm_(weight, keys)
        total += tile_total
    heads = q.shape[1]
    return out[:, :heads], largest[:, :heads], total[:, :heads]


def _divided(weighted: Tensor, reference: Tensor, total: Tensor, sink: Tensor | None) -> Tensor:
    """weighted / (total + exp(sink - reference)), where nothing at all gives zero. [t, H, D] fp32.

    exp overflows when the sink exceeds the largest score by 88: the rows' true share is then below fp32's range.
    """
    if sink is not None:
        total = total + torch.exp(sink - reference)
    return weighted / torch.where(total == 0, 1.0, total).unsqueeze(-1)


def _padded_to_tiles(rows: Tensor) -> Tensor:
    """[T, n] -> [T, a multiple of KEY_TILE] with holes; tiles in which no token has a row are left out at the end."""
    used = (rows >= 0).any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 0
    return torch.nn.functional.pad(rows[:, :length], (0, -length % KEY_TILE), value=-1)


def _dense_rows(page_table: Tensor, request: Tensor, entries_per_page: int, visible: Tensor) -> Tensor:
    """Page tables [B, P]; request and visible length of tokens [T] -> row lists [T, max(visible)], -1 from there on."""
    num_entries = int(visible.max()) if visible.numel() else 0
    entry = torch.arange(num_entries, device=visible.device).expand(len(visible), -1)
    readable = entry < visible.unsqueeze(1)
    rows = rows_of_entries(page_table, request[:, None], torch.where(readable, entry, 0), entries_per_page)
    return torch.where(readable, rows, -1)
