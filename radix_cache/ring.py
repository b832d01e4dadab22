"""Ring arithmetic: the ring row of a position, which rows a tail holds, and how long rings keep them.

A request slot owns a ring of sliding-window rows and, for every CSA compressor, a shorter ring of raw rows; `ring_row`
is the one formula of both. A tail at position p (the first position that it does *not* cover) holds the window rows of
[p - 128, p) and, for every CSA compressor, the first channel half of the raw rows of [p - 4, p): the compression group
that the next group overlaps (DeepSeek-V4 specification, section 3.6). p is a multiple of the page and the page is a
multiple of every ring, so these rows are one contiguous run, in the ring and in the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_radix_cache.pages import PAGE_TOKENS, Position

WINDOW_TOKENS = 128
OVERLAP_TOKENS = 4


def ring_row(request_slot: Position, position: Position, rows: int) -> Position:
    """The row of `position` in the ring of `request_slot`, where each request slot owns `rows` consecutive rows.

    The arguments are integers, or integer tensors whose shapes broadcast. `dsv4_kernels.step_mapping` computes the same
    on the device.
    """
    return request_slot * rows + position % rows


@dataclass(frozen=True)
class RingSpan:
    """Rows [begin, begin + rows) of one ring, which hold positions [first_position, first_position + rows)."""

    begin: int
    rows: int
    first_position: int


def check_position(position: int) -> None:
    """Raise ValueError unless `position` can carry a tail: a positive multiple of the page."""
    if position <= 0 or position % PAGE_TOKENS:
        raise ValueError(f"a tail stands at a positive multiple of {PAGE_TOKENS} tokens, got {position}")


def window_span(position: int, ring_rows: int) -> RingSpan:
    """The rows of a window ring, `ring_rows` long, that belong to a tail at `position`.

    Raises:
        ValueError: `position` is no page boundary, or `ring_rows` is no multiple of the window or no divisor of the
            page.
    """
    check_position(position)
    if ring_rows % WINDOW_TOKENS or PAGE_TOKENS % ring_rows:
        raise ValueError(
            f"ring_rows must be a multiple of {WINDOW_TOKENS} that divides {PAGE_TOKENS} (128 or 256), got {ring_rows}"
        )
    first = position - WINDOW_TOKENS
    return RingSpan(begin=ring_row(0, first, ring_rows), rows=WINDOW_TOKENS, first_position=first)


def overlap_span(position: int, state_rows: int) -> RingSpan:
    """The rows of a compressor state, `state_rows` long, with the raw rows of the compression group before `position`.

    Raises:
        ValueError: `position` is no page boundary, or `state_rows` is no multiple of the compression group or no
            divisor of the page.
    """
    check_position(position)
    if state_rows % OVERLAP_TOKENS or PAGE_TOKENS % state_rows:
        raise ValueError(
            f"state_rows must be a multiple of {OVERLAP_TOKENS} that divides {PAGE_TOKENS} (8 or 16), got {state_rows}"
        )
    first = position - OVERLAP_TOKENS
    return RingSpan(begin=ring_row(0, first, state_rows), rows=OVERLAP_TOKENS, first_position=first)


def still_intact(position: int, written_end: int, ring_rows: int, state_rows: int) -> bool:
    """Whether both rings, after positions [0, written_end) were written, still hold the tail at `position`.

    A ring of R rows holds the last R positions, so the oldest position needed must be among them. Plain decode (128
    and 8 rows) leaves exactly one moment: `written_end == position`. Rings widened for speculation leave some slack.
    """
    return (
        position <= written_end
        and written_end - (position - WINDOW_TOKENS) <= ring_rows
        and written_end - (position - OVERLAP_TOKENS) <= state_rows
    )


def chunk_rows(position: int, rows: int, chunk_begin: int, chunk_end: int) -> range | None:
    """Indices, within the chunk [chunk_begin, chunk_end), of the last `rows` positions before `position`.

    None when some of them precede the chunk, which then writes no tail at `position`. This cannot happen to a chunk
    that begins at a page boundary, where SGLang cuts prefills.

    Raises:
        ValueError: `position` is outside of the chunk.
    """
    check_position(position)
    if not chunk_begin < position <= chunk_end:
        raise ValueError(f"position {position} is not in (begin, end] of the chunk ({chunk_begin}, {chunk_end}]")
    first = position - rows - chunk_begin
    return range(first, first + rows) if first >= 0 else None
