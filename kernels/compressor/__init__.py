"""Compression of a group of tokens into one entry (DeepSeek-V4 specification, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_kernels.registry import select


def compress(
    state: Tensor,
    kv: Tensor,
    score: Tensor,
    sources: Tensor,
    ratio: int,
    head_dim: int,
    impl: str | None = None,
) -> Tensor:
    """The entries of M closed groups: a softmax over each group's rows, channel by channel.

    A group's rows come from the state (tokens of earlier forwards) or from this forward's tokens. With C = 1 (HCA) an
    entry covers its own `ratio` tokens. With C = 2 (CSA) a row holds two halves: the entry covers the previous group's
    tokens by their first half and its own by their second::

        rows_i  = source i:  -1 -> none (score -inf);  s < S -> state[s];  else token s - S
        half_i  = [0, D) for the first `ratio` sources, [D, 2D) for the others      (C = 1: [0, D))
        entry   = Σ_i softmax_i(score_i[half_i]) * kv_i[half_i]                      (softmax per channel)

    A group without any source gives zeros. Rows that no source names are never read into the result.

    Args:
        state: [S, 2, C * D] fp32, rows (kv, score).
        kv: [T, C * D] fp32.
        score: [T, C * D] fp32, the positional term ape[t % ratio] already added.
        sources: [M, C * ratio] int32; with C = 2 the previous group's tokens first (all -1 for a sequence's first).
        ratio: tokens a group.
        head_dim: D.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [M, D] fp32, before norm and rope.

    Raises:
        ValueError: shapes that do not fit each other, or dtypes other than fp32.
    """
    parts, rest = divmod(sources.shape[-1], ratio)
    if sources.dim() != 2 or rest or parts not in (1, 2):
        raise ValueError(
            f"compress: sources has shape {tuple(sources.shape)}; expected [M, {ratio}] or [M, {2 * ratio}]"
        )
    width = parts * head_dim
    if kv.shape != score.shape or kv.shape[1:] != (width,) or state.shape[1:] != (2, width):
        raise ValueError(
            f"compress: {parts} x {ratio} sources of head_dim {head_dim} need state [S, 2, {width}], kv and score "
            f"[T, {width}]; got {tuple(state.shape)}, {tuple(kv.shape)}, {tuple(score.shape)}"
        )
    if {state.dtype, kv.dtype, score.dtype} != {torch.float32}:
        raise ValueError(f"compress: state, kv and score are {state.dtype}, {kv.dtype}, {score.dtype}; expected fp32")
    return select("compress", kv.device, kv.dtype, impl)(state, kv, score, sources, ratio, head_dim)
