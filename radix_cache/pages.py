"""Conversions between tokens and whole pages, for integers or integer arrays of any library."""

from __future__ import annotations

from dsv4_radix_cache.ring import PAGE_TOKENS, Position


def whole_pages(tokens: Position) -> Position:
    """Number of pages that `tokens` tokens fill completely."""
    return tokens // PAGE_TOKENS


def pages_for(tokens: Position) -> Position:
    """Number of pages that `tokens` tokens need; the last one may be partly empty."""
    return -(-tokens // PAGE_TOKENS)


def page_floor(position: Position) -> Position:
    """The last page boundary at or before `position`, in tokens."""
    return position // PAGE_TOKENS * PAGE_TOKENS
