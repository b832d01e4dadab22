"""Compression of a group of tokens into one entry (DeepSeek-V4 specification, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.registry import select

MAX_COMPRESSIONS = 2
"""The main compressor and the indexer's."""


@dataclass(frozen=True)
class Groups:
    """The compression groups that a forward may close and the raw rows that it keeps; the same for all compressors of
    one ratio.

    T tokens, M groups; C = 2 for CSA, whose entries also cover the previous group, else 1.
    """

    ratio: int
    positions: Tensor  # [T] int64: of the forward's tokens
    sources: Tensor  # [M, C * ratio] int32: -1: none; s < S: row of the states; S + i: token i. All -1: an open group
    entry_positions: Tensor  # [M] int64: of a closed group's first own token, a multiple of ratio
    slots: Tensor  # [M] int64: row of the tables for a closed group's entry
    state_rows: Tensor  # [T] int64: row of the states that keeps the token's raw row; -1: none
    overlap_rows: Tensor | None = None  # [T] int64: the same for the compressions' `overlap`
    tokens_per_request: int | None = None
    """k, if every request of the batch appends k tokens: token b * k + i is request b's i-th, and its groups are [b *
    G, b * G + G) with G = ceil(k / ratio), the earliest first. None for all other batches."""


@dataclass(frozen=True)
class Compression:
    """One compressor of a layer: its inputs, parameters and destinations. An entry has D channels, R of them
    rotated."""

    kv: Tensor  # [T, C * D] fp32, any stride of tokens
    score: Tensor  # [T, C * D] fp32, any stride of tokens, without the positional term
    ape: Tensor  # [ratio, C * D] fp32: the positional term
    state: Tensor  # [S, 2, C * D] fp32: raw rows (kv, score with the positional term)
    norm_weight: Tensor  # [D] fp32
    eps: float
    frequencies: Tensor  # [R / 2] fp32 (`rope_frequencies`)
    table: KVRows  # of D channels
    hadamard: bool = False
    """Whether entries are multiplied by the Hadamard matrix before they are stored, as indexer keys are."""
    values_of: RowFormat = RowFormat.PLAIN
    """A plain table stores the values that this format would hold: FP8 rounds the D - R unrotated channels in blocks of
    64, INDEX_FP4 all channels in blocks of 32."""
    overlap: Tensor | None = None  # [N, 2, D] fp32: first channel halves of raw rows (tails of CSA layers)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.norm_weight.shape[0]


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
    entry covers its own `ratio` tokens. With C = 2 (CSA) a row has two halves: the entry covers the previous group's
    tokens by their first half and its own tokens by their second half.

    ::

        rows_i  = source i:  -1 -> none (score -inf);  s < S -> state[s];  else token s - S
        half_i  = [0, D) for the first `ratio` sources, [D, 2D) for the others      (C = 1: [0, D))
        entry   = Σ_i softmax_i(score_i[half_i]) * kv_i[half_i]                      (softmax per channel)

    A group without any source gives zeros. Rows that no source names never influence the result.

    Args:
        state: [S, 2, C * D] fp32, rows (kv, score).
        kv: [T, C * D] fp32.
        score: [T, C * D] fp32, the positional term ape[t % ratio] already added.
        sources: [M, C * ratio] int32; with C = 2 the previous group's tokens first (all -1 for a sequence's first).
        ratio: tokens of a group.
        head_dim: D.
        impl: implementation by name; None lets the registry choose.

    Returns:
        [M, D] fp32, before norm and rope.

    Raises:
        ValueError: shapes that do not match, or dtypes other than fp32.
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


def compress_store(
    groups: Groups, compressions: Sequence[Compression], dtype: torch.dtype, impl: str | None = None
) -> None:
    """Stores the entries of the groups that a forward closes, and keeps the raw rows that later entries need.

    For each compression::

        score = score + ape[positions % ratio]
        entry = compress(state, kv, score, sources).to(dtype)         # of the groups that have a source
        entry = apply_rope(rms_norm(entry, norm_weight, eps), entry_positions, frequencies)
        table[slots] = hadamard(entry) if hadamard else entry         # quantised as the table, or values_of, says
        state[state_rows] = (kv, score)                               # after all reads of it
        overlap[overlap_rows] = (kv, score)[:D]

    A group without sources writes nothing, and neither does a token whose row is -1. `source j` must be a token whose
    position is j modulo ratio, as in every group.

    With `tokens_per_request` the GPU kernels do everything in one launch, on one condition: a request's rows in the
    state form a ring, indexed by position modulo its length, of at least `C * ratio - 2 + tokens_per_request` rows
    (compressor/rows.py says why that is enough). Otherwise there are two launches, the entries first, and no condition
    on the state's rows. If a row is named twice, a table or a state may hold a mixture of both values. On a GPU an
    entry's bits depend neither on the batch nor on whether its rows lie in the state, and the host never waits for the
    device.

    Args:
        groups: the groups to close and the raw rows to keep.
        compressions: one, or the two of a CSA layer, which then share a launch. Their destinations must not overlap.
        dtype: of the model; entries are rounded to it before the norm and after norm, RoPE and Hadamard transform.
        impl: implementation by name; None lets the registry choose.

    Raises:
        ValueError: shapes or dtypes that do not match; on a GPU also dimensions other than the release's, or rows that
            cannot be read in units of 16 bytes.
    """
    if not 1 <= len(compressions) <= MAX_COMPRESSIONS:
        raise ValueError(f"compress_store takes 1 to {MAX_COMPRESSIONS} compressions; got {len(compressions)}")
    parts = _check_groups(groups)
    for compression in compressions:
        _check_compression(compression, groups, parts)
    if len({compression.state.shape[0] for compression in compressions}) > 1:
        found = [compression.state.shape[0] for compression in compressions]
        raise ValueError(f"compress_store: sources are rows of all states, but the states have {found} rows")
    if len(groups.positions) or len(groups.sources):
        select("compress_store", groups.positions.device, dtype, impl)(groups, compressions, dtype)


def _check_groups(groups: Groups) -> int:
    """Checks the groups; returns C, the number of halves of a raw row."""
    ratio, sources, (tokens,) = groups.ratio, groups.sources, groups.positions.shape
    parts, rest = divmod(sources.shape[-1], ratio)
    if sources.dim() != 2 or rest or parts not in (1, 2) or sources.dtype != torch.int32:
        raise ValueError(
            f"compress_store: sources are {tuple(sources.shape)} {sources.dtype}; expected [M, {ratio}] or "
            f"[M, {2 * ratio}] torch.int32"
        )
    lists = {
        "positions": (groups.positions, tokens),
        "entry_positions": (groups.entry_positions, len(sources)),
        "slots": (groups.slots, len(sources)),
        "state_rows": (groups.state_rows, tokens),
        "overlap_rows": (groups.overlap_rows, tokens),
    }
    for name, (values, length) in lists.items():
        if values is not None and (values.shape != (length,) or values.dtype != torch.int64):
            raise ValueError(
                f"compress_store: {name} must be [{length}] torch.int64; got {tuple(values.shape)} {values.dtype}"
            )
    k = groups.tokens_per_request
    if k is not None and (k < 1 or tokens % k or len(sources) != tokens // k * -(-k // ratio)):
        raise ValueError(
            f"compress_store: requests of {k} tokens have ceil({k} / {ratio}) groups each; got {tokens} tokens and "
            f"{len(sources)} groups"
        )
    return parts


def _check_compression(c: Compression, groups: Groups, parts: int) -> None:
    tokens, width = len(groups.positions), parts * c.head_dim
    expected = {
        "kv": (c.kv, (tokens, width)),
        "score": (c.score, (tokens, width)),
        "ape": (c.ape, (groups.ratio, width)),
        "state": (c.state, (c.state.shape[0], 2, width)),
        "norm_weight": (c.norm_weight, (c.head_dim,)),
        "frequencies": (c.frequencies, (c.frequencies.shape[0],)),
    }
    if c.overlap is not None:
        expected["overlap"] = (c.overlap, (c.overlap.shape[0], 2, c.head_dim))
    for name, (values, shape) in expected.items():
        if values.shape != shape or values.dtype != torch.float32:
            raise ValueError(
                f"compress_store: {name} must be {list(shape)} torch.float32 ({parts} x {groups.ratio} sources, "
                f"{tokens} tokens, head_dim {c.head_dim}); got {tuple(values.shape)} {values.dtype}"
            )
    if (c.overlap is None) != (groups.overlap_rows is None):
        raise ValueError("compress_store: overlap_rows of the groups and overlap of a compression come together")
    rotated = 2 * c.frequencies.shape[0]
    if c.table.row_dim != c.head_dim or rotated > c.head_dim or (c.values_of is RowFormat.FP8 and c.hadamard):
        raise ValueError(
            f"compress_store: entries of {c.head_dim} channels, {rotated} of them rotated, do not fit rows of "
            f"{c.table.row_dim} (values_of {c.values_of.value}, hadamard {c.hadamard})"
        )
