"""The dimensions of a step's mapping, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class GroupLayout:
    """How the compression groups and raw compressor rows of one ratio are laid out."""

    ratio: int
    """Tokens of a compression group."""
    overlap_groups: int
    """C: compression groups whose raw rows an entry covers."""
    state_rows: int
    """S: raw rows kept of a request."""


@dataclass(frozen=True)
class StepLayout:
    """Dimensions of rings and pages."""

    page_tokens: int
    window_tokens: int
    """W: window rows that a query reads, its own included."""
    ring_rows: int
    """Window rows kept of a request."""
    groups: tuple[GroupLayout, ...]
    blocks: bool = False
    """Whether a request's k tokens are one block, whose tokens all read the W rows before it and the whole block."""


class GroupMapping(NamedTuple):
    """The mapping of one ratio r: M = B * ceil(k / r) compression groups that the step may close; N' is the number of
    request slots."""

    sources: Tensor  # [M, C * r] int32: -1: no row (all of them in an open group); s < N' * S: state row; else token
    slots: Tensor  # [M] int64: row of the entry pools; 0, the null row, in an open group
    positions: Tensor  # [M] int64: of a compression group's first token
    state_rows: Tensor  # [T] int64: where a token's raw row is kept
    visible: Tensor  # [T] int32: entries that a token may read


class StepMapping(NamedTuple):
    """Addresses of a step of T = B * k tokens; token b * k + i is request b's i-th."""

    positions: Tensor  # [T] int64
    token_to_request: Tensor  # [T] int32
    page_table: Tensor  # [B, P] int32: page numbers of the requests' first P pages; 0 for the null slot
    window_rows: Tensor
    """[T, W] int32 ring rows: column c is position t - W + 1 + c; -1 before the start. With blocks [T, W + k]: column c
    is position first - W + c, the same for all tokens of a request."""
    ring_rows: Tensor  # [T] int64: where a token's window row is kept
    groups: tuple[GroupMapping, ...]
