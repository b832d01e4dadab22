"""Definition of the compressor, in plain PyTorch (DeepSeek-V4 specification, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_kernels.compressor import Compression, Groups
from dsv4_kernels.kv_layout import FP4_SCALE_GROUP, SCALE_GROUP, RowFormat
from dsv4_kernels.norm.ref import rms_norm
from dsv4_kernels.quant.ref import fp4_qdq, fp8_qdq, hadamard
from dsv4_kernels.reference.batch_invariant import tree_sum
from dsv4_kernels.rope.ref import apply_rope


def compress(state: Tensor, kv: Tensor, score: Tensor, sources: Tensor, ratio: int, head_dim: int) -> Tensor:
    """See `dsv4_kernels.compressor.compress`."""
    if sources.device.type == "cpu":
        # A decode batch has a group for every request, but few are closed: on a CPU the open ones are skipped.
        closed = (sources >= 0).any(1).nonzero().squeeze(1)
        if len(closed) < len(sources):
            entries = kv.new_zeros(len(sources), head_dim)
            entries[closed] = _entries(state, kv, score, sources[closed], ratio, head_dim)
            return entries
    return _entries(state, kv, score, sources, ratio, head_dim)


def _entries(state: Tensor, kv: Tensor, score: Tensor, sources: Tensor, ratio: int, head_dim: int) -> Tensor:
    values, scores = [], []
    for part, part_sources in enumerate(sources.long().split(ratio, 1)):
        half = slice(part * head_dim, (part + 1) * head_dim)
        values.append(_rows(state[:, 0, half], kv[:, half], part_sources, 0.0))
        scores.append(_rows(state[:, 1, half], score[:, half], part_sources, -torch.inf))
    value, logit = torch.cat(values, 1), torch.cat(scores, 1)  # [M, C * ratio, D]
    largest = logit.amax(1, keepdim=True)
    weight = torch.exp(logit - torch.where(largest == -torch.inf, 0.0, largest))
    total = tree_sum(weight, 1)
    return tree_sum(weight * value, 1) / torch.where(total == 0, 1.0, total)


def _rows(state: Tensor, tokens: Tensor, sources: Tensor, missing: float) -> Tensor:
    """Rows [M, n, D] of [M, n] sources, from the state [S, D] and from this forward's tokens [T, D]."""
    num_state = state.shape[0]
    rows = torch.full((*sources.shape, state.shape[1]), missing, dtype=state.dtype, device=state.device)
    for table, index, mine in (
        (state, sources, (sources >= 0) & (sources < num_state)),
        (tokens, sources - num_state, sources >= num_state),
    ):
        if table.shape[0]:
            gathered = table[index.clamp(0, table.shape[0] - 1)]
            rows = torch.where(mine.unsqueeze(-1), gathered, rows)
    return rows


def compress_store(groups: Groups, compressions: Sequence[Compression], dtype: torch.dtype) -> None:
    """See `dsv4_kernels.compressor.compress_store`."""
    closed = (groups.sources >= 0).any(1).nonzero().squeeze(1)
    sources, positions = groups.sources[closed], groups.entry_positions[closed]
    for c in compressions:
        score = c.score + c.ape[groups.positions % groups.ratio]
        if len(closed):
            entries = compress(c.state, c.kv, score, sources, groups.ratio, c.head_dim).to(dtype)
            rows = apply_rope(rms_norm(entries, c.norm_weight, c.eps), positions, c.frequencies, False)
            c.table.scatter(groups.slots[closed], _stored(rows, c))
        _keep(c.state, groups.state_rows, c.kv, score)
        if c.overlap is not None:
            _keep(c.overlap, groups.overlap_rows, c.kv[:, : c.head_dim], score[:, : c.head_dim])


def _stored(rows: Tensor, c: Compression) -> Tensor:
    """The values to scatter for entries. Byte formats quantise the entries themselves: quantising values that were
    already rounded gives other bytes in rare cases, so the round trip is for plain rows only."""
    if c.hadamard:
        rows = hadamard(rows)
    if c.table.format is not RowFormat.PLAIN or c.values_of is RowFormat.PLAIN:
        return rows
    if c.values_of is RowFormat.INDEX_FP4:
        return fp4_qdq(rows, FP4_SCALE_GROUP)
    rotated = 2 * c.frequencies.shape[0]
    nope, rope = rows.split((c.head_dim - rotated, rotated), -1)
    return torch.cat((fp8_qdq(nope, SCALE_GROUP), rope), -1)


def _keep(table: Tensor, rows: Tensor, kv: Tensor, score: Tensor) -> None:
    kept = (rows >= 0).nonzero().squeeze(1)
    raw = torch.stack([kv[kept], score[kept]], 1)
    table.index_copy_(0, rows[kept], raw)
