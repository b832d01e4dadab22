"""The three kinds of attention layer, and the token counts that caches, layers and checkpoints share.

Window and page are those of the tail checkpoints (`dsv4_radix_cache.ring`), which rest on them too.
"""

from __future__ import annotations

from enum import Enum

from dsv4_radix_cache.ring import OVERLAP_TOKENS, PAGE_TOKENS
from dsv4_radix_cache.ring import WINDOW_TOKENS as WINDOW_TOKENS

FULL_PAGE_TOKENS = PAGE_TOKENS
"""Tokens of a page of SGLang's allocator; a multiple of every ratio."""


class LayerKind(Enum):
    """The kinds of attention layer; the value is the compression ratio (DeepSeek-V4 specification, section 3.3)."""

    SWA = 0
    """Sliding window only."""
    CSA = OVERLAP_TOKENS
    """Window and the indexer's top-k of the entries of 4 tokens (two overlapping groups)."""
    HCA = 128
    """Window and all entries of 128 tokens."""

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry, 0 for a layer without entries."""
        return self.value

    @property
    def groups(self) -> int:
        """Groups of raw rows that an entry is made of: the previous and its own for CSA, its own for HCA (3.4)."""
        return {LayerKind.SWA: 0, LayerKind.CSA: 2, LayerKind.HCA: 1}[self]


SWA_RATIO, CSA_RATIO, HCA_RATIO = (kind.ratio for kind in LayerKind)
