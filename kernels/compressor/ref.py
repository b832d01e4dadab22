"""Definition of the compressor, in plain PyTorch (DeepSeek-V4 specification, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.invariant import tree_sum


def compress(state: Tensor, kv: Tensor, score: Tensor, sources: Tensor, ratio: int, head_dim: int) -> Tensor:
    """See `dsv4_kernels.compressor.compress`."""
    if sources.device.type == "cpu":
        # A decoding batch has a row for every request, of which few close a group: on a CPU the others are skipped.
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
    """[M, n] sources into [S, D] state rows and [T, D] tokens -> [M, n, D]."""
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
