"""The page: its size in tokens, and conversions between tokens and whole pages.

Another size must be a multiple of every ring (`ring`) and of every compression ratio.
"""

from __future__ import annotations

from typing import Any, TypeVar

PAGE_TOKENS = 256
"""Tokens in a page of SGLang's allocator; a tail stands at a multiple of it."""

Position = TypeVar("Position", int, Any)  # int, or integer arrays of any library


def whole_pages(tokens: Position) -> Position:
    """Number of pages that `tokens` tokens fill completely."""
    return tokens // PAGE_TOKENS


def pages_for(tokens: Position) -> Position:
    """Number of pages that `tokens` tokens need; the last one may be partly empty."""
    return -(-tokens // PAGE_TOKENS)


def page_floor(position: Position) -> Position:
    """The last page boundary at or before `position`, in tokens."""
    return position // PAGE_TOKENS * PAGE_TOKENS
