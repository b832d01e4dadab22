"""The DSpark draft that a checkpoint's `config.json` describes: releases of 0731, 0813 and the ones named -DSpark.

`config.json` has four fields for the draft, and `compress_ratios` has one more 0 for each stage.
`num_nextn_predict_layers` is 1 although the files hold no MTP module. The draft has as many stages as it reads target
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FIELDS = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")


@dataclass(frozen=True)
class DSpark:
    """A draft of `num_stages` window-only blocks that proposes `block_size` tokens at once."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    """Target layers whose output the draft reads, one for each of its stages."""
    markov_rank: int

    @property
    def num_stages(self) -> int:
        """Number of blocks in the draft: `mtp.0`, `mtp.1`, ... in the checkpoint."""
        return len(self.target_layer_ids)


def dspark_of(
    get: Callable[[str], Any],
    positive_int: Callable[[str], int],
    refuse: Callable[[str, object, str], Exception],
    num_layers: int,
    vocab_size: int,
) -> DSpark | None:
    """The checkpoint's DSpark draft; None if the config has none of :data:`FIELDS`.

    Args:
        get: reads a field of the config; None if it is missing.
        positive_int: reads an integer above 0; raises for another value.
        refuse: makes the error for a field from its name, its value and the accepted values.
        num_layers: number of the target's decoder layers.
        vocab_size: number of the target's token ids.

    Raises:
        ConfigError: some of the fields are missing, or one has a value that no draft can have.
    """
    if all(get(field) is None for field in FIELDS):
        return None
    ids = get("dspark_target_layer_ids")
    accepted = f"a list of rising layer ids below {num_layers}, one for each stage of the draft"
    if not isinstance(ids, list | tuple) or not ids or any(type(i) is not int or not 0 <= i < num_layers for i in ids):
        raise refuse("dspark_target_layer_ids", ids, accepted)
    if sorted(set(ids)) != list(ids):
        raise refuse("dspark_target_layer_ids", ids, accepted)
    noise = positive_int("dspark_noise_token_id")
    if noise >= vocab_size:
        raise refuse("dspark_noise_token_id", noise, f"a token id below vocab_size ({vocab_size})")
    return DSpark(positive_int("dspark_block_size"), noise, tuple(ids), positive_int("dspark_markov_rank"))
