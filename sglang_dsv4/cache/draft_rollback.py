"""Rollback of rejected drafts: nothing is copied or cleared, because the rings are long enough.

A speculative step writes the rows of all its k tokens at positions [t, t + k) and keeps between 1 and k of them. The
rows of rejected tokens stay in the rings; the next step begins at the first rejected position and overwrites them
before any token reads them. The same holds for the entry of a compression group that rejected tokens have closed: it is
written again when the group closes again, and until then no token sees it. What a rollback needs is therefore only that
a step leaves alone the older rows that the next step may read, and this fixes the length of each ring.
"""

from __future__ import annotations


def window_ring_rows(window_tokens: int, draft_tokens: int) -> int:
    """Window rows per request and layer, a power of two.

    A step that writes k tokens at positions [t, t + k) before any of them is read must leave rows t - 127 .. t alone.
    """
    return _power_of_two(window_tokens - 1 + max(1, draft_tokens))


def state_ring_rows(groups: int, ratio: int, draft_tokens: int) -> int:
    """Raw compressor rows per request and layer, a power of two.

    They are the rows of the open compression group, of the groups that its entry overlaps, and the rows that are read
    again after a rollback: after a step of k tokens at [t, t + k) the next one may start at t + 1. If that closes a
    group, it reads the C*r - 1 rows before it, t included, which the k - 1 rows after t must have left alone.

    Args:
        groups: compression groups that one entry is made of, C.
        ratio: positions of a compression group, r.
        draft_tokens: tokens of a speculative step, k; 0 without speculation.
    """
    return _power_of_two(groups * ratio - 2 + max(1, draft_tokens))


def _power_of_two(needed: int) -> int:
    """Smallest power of two >= `needed`: it divides the 256-token page, so a ring starts over at every page start."""
    return 1 << (needed - 1).bit_length()
