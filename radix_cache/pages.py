"""Tokens and whole pages."""

from __future__ import annotations

from dsv4_radix_cache.ring import PAGE_TOKENS


def whole_pages(tokens: int) -> int:
    """Pages that `tokens` tokens fill."""
    return tokens // PAGE_TOKENS


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens need; the last one may be partly empty."""
    return -(-tokens // PAGE_TOKENS)


def page_floor(position: int) -> int:
    """The last page boundary at or before `position`, in tokens."""
    return position // PAGE_TOKENS * PAGE_TOKENS
