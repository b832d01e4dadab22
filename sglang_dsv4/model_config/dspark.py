"""What a checkpoint says of its DSpark draft (the releases of 0731 and 0813, and those named -DSpark).

`config.json` has four fields for it, and `compress_ratios` one 0 more for each stage; `num_nextn_predict_layers` stays
1 there although no MTP module is in the files. The number of stages is that of the target layers they read.
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
    """Decoder layers whose output the draft reads, one for each of its stages."""
    markov_rank: int

    @property
    def num_stages(self) -> int:
        """Blocks of the draft: `mtp.0`, `mtp.1`, ... in the checkpoint."""
        return len(self.target_layer_ids)


def dspark_of(
    get: Callable[[str], Any],
    positive_int: Callable[[str], int],
    refuse: Callable[[str, object, str], Exception],
    num_layers: int,
    vocab_size: int,
) -> DSpark | None:
    """The draft of a checkpoint; None if it has no field of one.

    Args:
        get: reads a field of the config, None if it is missing.
        positive_int: reads an integer above 0, or raises.
        refuse: the error of a field: its name, its value and what is accepted.
        num_layers: decoder layers of the target.
        vocab_size: token ids of the target.

    Raises:
        ConfigError: some of the fields are missing, or one holds what no draft can have.
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
