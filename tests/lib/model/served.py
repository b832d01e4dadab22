"""A checkpoint in the harness, the independent models of the same weights, and sequences with known logits."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from model.harness import Harness
from model.oracle import FLASH_LIKE, PRO_LIKE, OracleRun, TransformersOracle
from model.reference import Quant, Reference
from torch import Tensor

# With these weights and tokens every top-k and router decision of the corpus is clearer than 1e-5 of the score's std.
SEED = 6
SCHEDULES = {"flash-like": FLASH_LIKE, "pro-like": PRO_LIKE}
# Lengths of the sequences with oracle logits; requests in one batch hold different tokens.
CORPUS_LENGTHS = (1040, 520, 520, 300, 300, 140, 140)


@dataclass(frozen=True)
class Served:
    """One checkpoint in the harness, with the independent models of the same weights."""

    harness: Harness
    config: dict[str, Any]
    weights: dict[str, Tensor]
    quant: Quant
    seed: int

    @cached_property
    def oracle(self) -> TransformersOracle:
        return TransformersOracle(self.config, self.weights)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.config, self.weights, self.quant)

    @cached_property
    def corpus(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.seed)
        vocab = self.config["vocab_size"]
        return [torch.randint(2, vocab, (n,), generator=generator) for n in CORPUS_LENGTHS]

    @cached_property
    def expected(self) -> list[OracleRun]:
        """Return transformers' logits of every corpus sequence; a prompt's are the first rows (the model is causal)."""
        return [self.oracle.run(tokens) for tokens in self.corpus]
