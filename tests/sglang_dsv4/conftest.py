"""Loaded models that the tests of this folder share: each (schedule, dtype, switches) is built once a session."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.harness import Harness
from model.oracle import as_stored, configuration, random_weights, write_checkpoint
from model.reference import FULL, OFF, Quant
from model.served import SCHEDULES, SEED, Served

sys.path.append(str(Path(__file__).resolve().parents[1] / "emulator"))  # for experts that the emulator computes

# These dimensions are far too small for a second thread, whose barriers cost more than it gains.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """Return a function that builds or finds a served model.

    `serve(schedule="flash-like", dtype="float32", qat="off", seed=SEED, server_args=None, **config overrides)`.
    """
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
            if dtype == "bfloat16":  # the model holds them in bf16; the references' fp32 copies get the same numbers
                weights = {name: as_stored(name, value) for name, value in weights.items()}
            folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), config, weights)
            harness = Harness(folder, dtype=dtype, qat=qat, **(server_args or {}))
            quant = {"off": OFF, "kv": Quant(kv_fp8=True, indexer_fp4=True), "full": FULL}[qat]
            made[key] = Served(harness, config, weights, quant, seed)
        return made[key]

    return build
