"""Definition of the attention, in plain PyTorch (DeepSeek-V4 specification, section 3.3).

All arithmetic is fp32. Keys are reduced in tiles of KEY_TILE slots of the window's list and then of the entries' list,
in order, and every product of a token has the same shape: so a token's bits depend on its own lists alone, not on the
batch, and trailing holes add zeros. Tokens are processed in chunks to bound the memory of gathered rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat, entry_rows
from dsv4_kernels.reference.batch_invariant import at_least_as_many_as_threads, padded_to_full_rows

KEY_TILE = 64
"""Keys of one product."""
GATHERED_BYTES = 4 * 2**20
"""Bytes of fp32 rows gathered at a time (for at least one token a thread); larger temporaries cost page faults."""
UNPACKED_BYTES = 64 * 2**20
"""Bytes of fp32 rows kept for all tokens of a call at most; otherwise each token unpacks the rows that it reads."""


def sparse_attention(
    q: Tensor,
    window: KVRows,
    window_rows: Tensor,
    entries: KVRows | None,
    entry_indices: Tensor | None,
    page_table: Tensor | None,
    entries_per_page: int,
    token_to_request: Tensor | None,
    visible: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    out: Tensor | None,
    split_keys: int | None,
) -> Tensor:
    """See `dsv4_kernels.sparse_attention.sparse_attention`. `split_keys` has no effect: all sums are in fp32."""
    tables = [(window, _padded_to_tiles(window_rows))]
    if entries is not None:
        if entry_indices is None:
            entry_indices = _dense_rows(page_table, token_to_request.long(), entries_per_page, visible)
        elif visible is not None:
            slot = torch.arange(entry_indices.shape[1], device=q.device)
            entry_indices = torch.where(slot < visible.unsqueeze(1), entry_indices, -1)
        tables.append((entries, _padded_to_tiles(entry_indices)))
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)

    tables = [_unpacked_once(table, rows) for table, rows in tables]
    keys_per_token = sum(rows.shape[1] for _, rows in tables)
    step = max(1, GATHERED_BYTES // max(4 * keys_per_token * q.shape[2], 1))
    for tokens in torch.arange(q.shape[0], device=q.device).split(max(step, torch.get_num_threads())):
        computed = at_least_as_many_as_threads(tokens)
        partial = _attend(q[computed], [(table, rows[computed]) for table, rows in tables], scale)
        weighted, row_max, row_sum = (x[: len(tokens)] for x in partial)
        out[tokens] = _divided(weighted, row_max, row_sum, sink).to(out.dtype)
    return out


def _attend(q: Tensor, tables: list[tuple[KVRows, Tensor]], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of t tokens to the rows [t, n * KEY_TILE] of each table, not yet divided.

    Returns:
        Σ exp(s - row max) * row [t, H, D], the row max [t, H] (0 without rows), and the row sum Σ exp(s - row max)
        [t, H], all fp32.
    """
    q32 = padded_to_full_rows(q.float() * scale, 1)
    tiles, logits = [], []
    for table, rows in tables:
        hole = rows < 0
        keys = table.gather(rows.clamp(min=0)).float()
        if hole.any():
            keys.masked_fill_(hole.unsqueeze(-1), 0.0)  # the row that stands for a hole may be NaN, and 0 * NaN is NaN
        for begin in range(0, rows.shape[1], KEY_TILE):
            tile = slice(begin, begin + KEY_TILE)
            tiles.append(keys[:, tile])
            logits.append(torch.bmm(q32, keys[:, tile].mT).masked_fill_(hole[:, None, tile], -torch.inf))
    if not tiles:
        return torch.zeros_like(q, dtype=torch.float32), *q.new_zeros(2, *q.shape[:2], dtype=torch.float32)
    logit = torch.stack(logits)  # [tiles, t, H, KEY_TILE]
    row_max = logit.amax((0, 3))
    row_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = logit.sub_(row_max.unsqueeze(-1)).exp_()
    out, row_sum = torch.zeros_like(q32), torch.zeros_like(row_max)
    for weight, tile_sum, keys in zip(weights, weights.sum(-1), tiles, strict=True):
        out.baddbmm_(weight, keys)
        row_sum += tile_sum
    heads = q.shape[1]
    return out[:, :heads], row_max[:, :heads], row_sum[:, :heads]


def _divided(weighted: Tensor, row_max: Tensor, row_sum: Tensor, sink: Tensor | None) -> Tensor:
    """weighted / (row_sum + exp(sink - row_max)) [t, H, D] fp32; zero where the denominator is zero.

    exp overflows when the sink exceeds the row max by 88: the rows' true weight is then below fp32's range.
    """
    if sink is not None:
        row_sum = row_sum + torch.exp(sink - row_max)
    return weighted / torch.where(row_sum == 0, 1.0, row_sum).unsqueeze(-1)


def _unpacked_once(table: KVRows, rows: Tensor) -> tuple[KVRows, Tensor]:
    """A table of the named rows only, unpacked, and `rows` renumbered for it; or the arguments unchanged.

    Tokens of a prefill read nearly the same rows, and unpacking takes longer than the products. In decode, where few
    rows are read by two tokens, the arguments are returned unchanged.
    """
    if table.format is RowFormat.PLAIN or rows.numel() < table.num_rows:
        return table, rows
    is_named = torch.zeros(table.num_rows, dtype=torch.bool, device=rows.device)
    is_named[rows[rows >= 0].long()] = True
    named = is_named.nonzero().squeeze(1)
    if 2 * len(named) >= rows.numel() or 4 * len(named) * table.row_dim > UNPACKED_BYTES:
        return table, rows
    number = is_named.cumsum(0) - 1
    renamed = torch.where(rows < 0, -1, number[rows.clamp(min=0).long()])
    return KVRows(table.gather(named), RowFormat.PLAIN, len(named), table.row_dim, table.rope_dim), renamed


def _padded_to_tiles(rows: Tensor) -> Tensor:
    """[T, n] -> [T, a multiple of KEY_TILE], padded with holes; trailing tiles without any row are dropped."""
    used = (rows >= 0).any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 0
    return torch.nn.functional.pad(rows[:, :length], (0, -length % KEY_TILE), value=-1)


def _dense_rows(page_table: Tensor, request: Tensor, entries_per_page: int, visible: Tensor) -> Tensor:
    """Row lists [T, max(visible)], -1 from visible[t] on, from page tables [B, P], requests [T] and visible [T]."""
    num_entries = int(visible.max()) if visible.numel() else 0
    entry = torch.arange(num_entries, device=visible.device).expand(len(visible), -1)
    readable = entry < visible.unsqueeze(1)
    rows = entry_rows(page_table, request[:, None], torch.where(readable, entry, 0), entries_per_page)
    return torch.where(readable, rows, -1)
