"""Loaded models shared by the tests of this folder: each (schedule, dtype, switches) is built once a session."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from model.harness import Harness
from model.oracle import (
    FLASH_LIKE,
    PRO_LIKE,
    OracleRun,
    TransformersOracle,
    as_stored,
    configuration,
    random_weights,
    write_checkpoint,
)
from model.reference import FULL, OFF, Quant, Reference
from torch import Tensor

# These dimensions are far too small for a second thread, whose barriers cost more than it brings.
torch.set_num_threads(1)

# With these weights and tokens every top-k and router decision of the corpus is clearer than 1e-5 of the score's std.
SEED = 6
SCHEDULES = {"flash-like": FLASH_LIKE, "pro-like": PRO_LIKE}
# Lengths of the sequences whose oracle logits are at hand; requests that share a batch hold different tokens.
CORPUS_LENGTHS = (1040, 520, 520, 300, 300, 140, 140)


@dataclass(frozen=True)
class Served:
    """One checkpoint behind the harness, with the independent models of the same weights."""

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
        """transformers' logits of every corpus sequence; those of a prompt are the first rows (it is causal)."""
        return [self.oracle.run(tokens) for tokens in self.corpus]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """`serve(schedule="flash-like", dtype="float32", qat="off", seed=SEED, server_args=None, **config overrides)`."""
    made: dict[Any, Served] = {}

    def build(
        schedule: str = "flash-like",
        dtype: str = "float32",
        qat: str = "off",
        seed: int = SEED,
        server_args: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> Served:
        key = (schedule, dtype, qat, seed, repr(server_args), repr(sorted(overrides.items())))
        if key not in made:
            config = configuration(SCHEDULES[schedule], torch_dtype=dtype, **overrides)
            weights = random_weights(config, seed)
            if dtype == "bfloat16":  # the model holds them in bf16; the others' fp32 copies shall be the same numbers
                weights = {name: as_stored(name, value) for name, value in weights.items()}
            folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), config, weights)
            harness = Harness(folder, dtype=dtype, qat=qat, **(server_args or {}))
            quant = {"off": OFF, "kv": Quant(kv_fp8=True, indexer_fp4=True), "full": FULL}[qat]
            made[key] = Served(harness, config, weights, quant, seed)
        return made[key]

    return build
