"""A target and a draft whose weights tests exchange: the `tiny` preset's layers, and its MTP module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model.checkpoint_tensors import SMALL, Checkpoint, read, snapshot
from model.harness import Harness
from model.updates import Trainer

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint

SHAPE = replace(SMALL, n_routed_experts=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for seed, name in enumerate(("old", "new"), 3):
        made[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(made[name], SHAPE, seed=seed)
    return made


@pytest.fixture(scope="module")
def old(folders: dict[str, Path]) -> Checkpoint:
    return read(folders["old"])


@pytest.fixture(scope="module")
def new(folders: dict[str, Path]) -> Checkpoint:
    return read(folders["new"])


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> Trainer:
    from sglang_dsv4.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    harness = Harness(folders["old"], dtype="bfloat16", max_total_tokens=1024, max_requests=2)
    with harness._active():
        torch.set_default_dtype(torch.bfloat16)
        try:
            draft = DeepseekV4ForCausalLMNextN(harness.model.config)
        finally:
            torch.set_default_dtype(torch.float32)
    draft.set_embed_and_head(*harness.model.get_embed_and_head())
    return Trainer(harness, draft)


@pytest.fixture(scope="module")
def old_values(models: Trainer, old: Checkpoint) -> dict[str, Checkpoint]:
    for model in models.models.values():
        model.load_weights(old.items())
    return {role: snapshot(model) for role, model in models.models.items()}


@pytest.fixture
def trainer(models: Trainer, old_values: dict[str, Checkpoint]) -> Trainer:
    """Both models with the old weights and no update."""
    for role, model in models.models.items():
        model.weight_update, model.weights_are_lost = None, False
        for name, parameter in model.named_parameters():
            parameter.data.copy_(old_values[role][name])
    models.manager._session, models.idle, models.flushes = None, True, 0
    models.manager.offload_tags.clear()
    models.versions.clear()
    return models
