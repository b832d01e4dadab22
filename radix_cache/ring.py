"""Ring arithmetic of a tail checkpoint: which rows it holds, where they lie in a request's rings, how long they live.

A request's sliding-window rows lie in a ring: position p at row `p % ring_rows`. Its CSA compressor states lie in a
smaller ring: position p at row `p % state_rows`. A checkpoint at position p (the first position that is *not* covered)
holds the window rows of [p - window, p) and, for every CSA compressor, the first channel half of the raw rows of
[p - ratio, p): the group that the next group overlaps (DeepSeek-V4 specification, section 3.6). p is a multiple of the
page, the page is a multiple of every ring, and so the image is one contiguous run of rows on either side.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_TOKENS = 256
WINDOW_TOKENS = 128
OVERLAP_TOKENS = 4


@dataclass(frozen=True)
class RingSpan:
    """Rows [begin, begin + rows) of a ring, which hold positions [first_position, first_position + rows)."""

    begin: int
    rows: int
    first_position: int


def check_position(position: int) -> None:
    """Raise ValueError unless `position` can carry a checkpoint: a positive multiple of the page."""
    if position <= 0 or position % PAGE_TOKENS:
        raise ValueError(f"a checkpoint stands at a positive multiple of {PAGE_TOKENS} tokens, got {position}")


def window_span(position: int, ring_rows: int) -> RingSpan:
    """Where a ring of `ring_rows` rows holds the window rows of a checkpoint at `position`.

    Raises:
        ValueError: no page boundary, or a ring that isn't a multiple of the window and a divisor of the page.
    """
    check_position(position)
    if ring_rows % WINDOW_TOKENS or PAGE_TOKENS % ring_rows:
        raise ValueError(
            f"ring_rows must be a multiple of {WINDOW_TOKENS} that divides {PAGE_TOKENS} (128 or 256), got {ring_rows}"
        )
    first = position - WINDOW_TOKENS
    return RingSpan(begin=first % ring_rows, rows=WINDOW_TOKENS, first_position=first)


def overlap_span(position: int, state_rows: int) -> RingSpan:
    """Where a compressor state of `state_rows` rows holds the raw rows of the group that ends at `position`.

    Raises:
        ValueError: no page boundary, or a state that isn't a multiple of the group and a divisor of the page.
    """
    check_position(position)
    if state_rows % OVERLAP_TOKENS or PAGE_TOKENS % state_rows:
        raise ValueError(
            f"state_rows must be a multiple of {OVERLAP_TOKENS} that divides {PAGE_TOKENS} (8 or 16), got {state_rows}"
        )
    first = position - OVERLAP_TOKENS
    return RingSpan(begin=first % state_rows, rows=OVERLAP_TOKENS, first_position=first)


def still_intact(position: int, written_end: int, ring_rows: int, state_rows: int) -> bool:
    """Whether both rings still hold everything a checkpoint at `position` needs after [0, written_end) was written.

    A ring of R rows holds the last R positions, so the oldest one needed must be at most R behind. Plain decode (128
    and 8 rows) leaves exactly one moment: `written_end == position`. Rings widened for speculation leave some slack.
    """
    return (
        position <= written_end
        and written_end - (position - WINDOW_TOKENS) <= ring_rows
        and written_end - (position - OVERLAP_TOKENS) <= state_rows
    )


def chunk_rows(position: int, rows: int, chunk_begin: int, chunk_end: int) -> range | None:
    """Indices in the chunk [chunk_begin, chunk_end) of the last `rows` positions before `position`.

    None when some of them lie before the chunk. That can't happen to a chunk that begins at a page boundary, and
    SGLang cuts prefills at page boundaries; other chunks simply leave no checkpoint there.

    Raises:
        ValueError: the chunk doesn't reach `position`.
    """
    check_position(position)
    if not chunk_begin < position <= chunk_end:
        raise ValueError(f"position {position} is not in (begin, end] of the chunk ({chunk_begin}, {chunk_end}]")
    first = position - rows - chunk_begin
    return range(first, first + rows) if first >= 0 else None
