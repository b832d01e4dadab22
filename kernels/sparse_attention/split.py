"""The division of a query's keys into KV splits, from its own lists alone, never from its batch.

A query's key slots are its window list (width W) and then its entries (the first `visible` slots of its list, or all
its visible entries), each padded with holes to whole key steps of STEP_KEYS slots. Its key steps are divided into KV
splits of nearly equal length, and the partial results of the KV splits are combined in fp32 in order. No function here
depends on other queries, so a query has the same bits in every batch. (The Hopper kernel may divide KV splits further,
into sub-splits, while multiprocessors are free, in a way that does not change the bits.)
"""

from __future__ import annotations

STEP_KEYS = 128
"""Key slots of one key step; KV splits begin and end at key steps."""
DECODE_SPLIT_KEYS = 1152
"""`split_keys` of forwards with few queries a request: decode and draft verification."""


def num_steps(window_slots: int, entry_slots: int) -> int:
    """Key steps of a query whose window list has `window_slots` slots and that may read `entry_slots` entries."""
    return (window_slots + STEP_KEYS - 1) // STEP_KEYS + (entry_slots + STEP_KEYS - 1) // STEP_KEYS


def num_kv_splits(steps: int, split_keys: int | None) -> int:
    """KV splits of a query of `steps` key steps: the fewest that hold at most `split_keys` keys each, at least one.

    Args:
        steps: at least 0.
        split_keys: a multiple of STEP_KEYS, or None for one KV split at any length.
    """
    if split_keys is None:
        return 1
    return max(1, (steps * STEP_KEYS + split_keys - 1) // split_keys)


def kv_split_steps(kv_split: int, kv_splits: int, steps: int) -> tuple[int, int]:
    """The key steps [begin, end) of one of a query's KV splits; lengths differ by at most one."""
    return kv_split * steps // kv_splits, (kv_split + 1) * steps // kv_splits


def check_split_keys(split_keys: int | None) -> None:
    """Raises ValueError unless `split_keys` is None or a positive multiple of STEP_KEYS."""
    if split_keys is not None and (split_keys < STEP_KEYS or split_keys % STEP_KEYS):
        raise ValueError(
            f"sparse_attention: split_keys is {split_keys}; expected None or a positive multiple of {STEP_KEYS}"
        )
