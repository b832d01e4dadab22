"""Prompts, prefix lengths and the bitwise comparison that tests of prefix hits share."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS

VOCABULARY = PRESETS["tiny"].vocab_size
REMAINDERS = {
    "0-mod-4": 0,
    "1-mod-256": 1,
    "3-mod-4": 3,
    "127-mod-128": 127,
    "1-mod-128": 129,
    "255-mod-256": 255,
}


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


def assert_equals_cold(logits: Tensor, expected: Tensor, hit: int) -> None:
    expected = expected[hit:]
    assert logits.shape == expected.shape
    assert torch.equal(logits, expected), (
        f"after a hit of {hit}: first differing position {hit + int((logits != expected).any(1).nonzero()[0])}, "
        f"largest difference {(logits - expected).abs().nan_to_num(torch.inf).max():.3g}"
    )
