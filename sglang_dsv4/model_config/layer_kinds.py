"""The three kinds of attention layer, and the token counts that caches, layers and tails share.

`dsv4_radix_cache` defines page (`pages`), window and overlap (`ring`), since tails depend on them.
"""

from __future__ import annotations

from enum import Enum

from dsv4_radix_cache.pages import PAGE_TOKENS
from dsv4_radix_cache.ring import OVERLAP_TOKENS
from dsv4_radix_cache.ring import WINDOW_TOKENS as WINDOW_TOKENS

FULL_PAGE_TOKENS = PAGE_TOKENS
"""Tokens in a page of SGLang's allocator; a multiple of every compression ratio."""


class LayerKind(Enum):
    """The kinds of attention layer; the value is the compression ratio (DeepSeek-V4 specification, section 3.3)."""

    SWA = 0
    """Sliding window only."""
    CSA = OVERLAP_TOKENS
    """Sliding window, and the indexer's top-k of the entries; an entry is made of two compression groups of 4."""
    HCA = 128
    """Sliding window, and all entries; an entry is made of one compression group of 128."""

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry; 0 for a layer without entries."""
        return self.value

    @property
    def groups(self) -> int:
        """Number of compression groups in an entry: for CSA the previous and its own, for HCA its own (section 3.4)."""
        return {LayerKind.SWA: 0, LayerKind.CSA: 2, LayerKind.HCA: 1}[self]


SWA_RATIO, CSA_RATIO, HCA_RATIO = (kind.ratio for kind in LayerKind)
