"""Groups of slots and work tiles of a call of the experts, and its temporary memory. Sizes follow from shapes."""

from __future__ import annotations

from enum import IntEnum

from dsv4_kernels.moe.sm90.weights import STEP

GROUP = 8
"""Adjacent slots of a group: the rows of a swizzle atom, and the smallest N of an instruction."""
TILE_WORDS = 8
"""int32 fields of a work tile."""
EARLY_TOKENS = 512
"""Tokens of a call up to which launches may begin early. With more tokens a launch is a small part of the time, and
waiting CTAs hold memory and issue slots: on Hopper a call of 1,024 tokens or more takes 0.97 of the time without early
launches."""


class TileField(IntEnum):
    """Indices of the int32 fields of a work tile."""

    EXPERT = 0
    FIRST_GROUP = 1
    GROUPS = 2
    RUN_FIRST = 3
    """First tile of the same expert."""
    RUN_TILES = 4
    """Tiles of the same expert."""


def most_groups(pairs: int, num_experts: int) -> int:
    """The most groups of eight slots for `pairs` pairs of token and expert: each expert may have one partial group."""
    return (pairs + (GROUP - 1) * min(pairs, num_experts)) // GROUP


def workspace_bytes(tokens: int, chosen: int, num_experts: int, hidden_size: int, channels: int) -> int:
    """Bytes of temporaries of a call on Hopper, freed after it; a call on Blackwell needs fewer.

    Args:
        tokens: T.
        chosen: experts of a token.
        num_experts: experts of the rank.
        hidden_size: d.
        channels: I of the rank.
    """
    pairs = tokens * chosen
    groups = most_groups(pairs, num_experts)
    quantised = max(hidden_size, channels) * (STEP + 4) // STEP  # codes, and a fp32 scale for every 128 channels
    rows = 2 * (channels + hidden_size)  # h and the product's rows, bf16
    of_group = 4 + 4 * TILE_WORDS  # its work tile's number, and a work tile: at most as many as groups
    return groups * (GROUP * (quantised + rows + 8) + of_group) + 4 * pairs
