"""What a call of the experts on Hopper needs beside its result. Sizes follow from shapes."""

from __future__ import annotations

from dsv4_kernels.moe.sm90.weights import STEP

GROUP = 8
"""Slots that lie together: the rows of a swizzle atom, and the least N of an instruction."""
TILE_WORDS = 8
"""int32 of a work tile."""


def most_groups(pairs: int, num_experts: int) -> int:
    """Groups of eight slots that `pairs` of token and expert take at most: each expert has one that is not full."""
    return (pairs + (GROUP - 1) * min(pairs, num_experts)) // GROUP


def workspace_bytes(tokens: int, chosen: int, num_experts: int, hidden_size: int, channels: int) -> int:
    """Of a call, given back afterwards.

    Args:
        tokens: T.
        chosen: experts of a token.
        num_experts: of the rank.
        hidden_size: d.
        channels: I, of the rank.
    """
    pairs = tokens * chosen
    groups = most_groups(pairs, num_experts)
    quantised = max(hidden_size, channels) * (STEP + 4) // STEP  # codes, and a scale for every 128
    rows = 2 * (channels + hidden_size)  # of h and of the result, bf16
    of_group = 4 + 4 * TILE_WORDS  # its tile; as many tiles as groups
    return groups * (GROUP * (quantised + rows + 8) + of_group) + 4 * pairs
