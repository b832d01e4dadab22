"""Rollback of rejected drafts: nothing is copied or cleared, because the rings are long enough.

A speculative step writes the rows of all its k tokens at positions [t, t + k) and keeps between 1 and k of them. The
rows of rejected tokens stay in the rings; the next step begins at the first rejected position and overwrites them
before any token reads them. The same holds for the entry of a compression group that rejected tokens have closed: it is
written again when the group closes again, and until then no token sees it. So a rollback needs only rings long enough
that a step does not overwrite older rows which the next step may read; this fixes the length of each ring.
"""

from __future__ import annotations


def window_ring_rows(window_tokens: int, draft_tokens: int) -> int:
    """Window rows per request and layer, a power of two.

    A step writes its k tokens at positions [t, t + k) before any row is read, and its first token reads positions
    [t - 127, t], so the ring must hold [t - 127, t + k) at once (with a window of 128).
    """
    return _power_of_two(window_tokens - 1 + max(1, draft_tokens))


def state_ring_rows(groups: int, ratio: int, draft_tokens: int) -> int:
    """Raw compressor rows per request and layer, a power of two.

    The ring holds the rows of the open compression group, of the groups that its entry overlaps, and the rows that are
    read again after a rollback: after a step of k tokens at [t, t + k) the next one may start at t + 1. If token t + 1
    closes a group, it reads the C*r - 1 rows before it, row t included, which the k - 1 rows written after t must not
    have overwritten.

    Args:
        groups: compression groups that one entry is made of, C.
        ratio: positions of a compression group, r.
        draft_tokens: tokens of a speculative step, k; 0 without speculation.
    """
    return _power_of_two(groups * ratio - 2 + max(1, draft_tokens))


def _power_of_two(needed: int) -> int:
    """Smallest power of two >= `needed`: it divides the 256-token page, so a ring starts over at every page start."""
    return 1 << (needed - 1).bit_length()
