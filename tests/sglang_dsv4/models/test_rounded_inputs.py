"""How far FP8 inputs of the experts' products move likelihoods: the measure for W4A16 experts on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model.harness import Harness
from serving.small_release import LENGTHS, ROUNDED_INPUTS, SHAPE, difference
from serving.speculation import random_prompts

from sglang_dsv4.cpu.random_checkpoint import write_checkpoint
from sglang_dsv4.layers.moe import ReferenceExperts


@pytest.mark.slow
def test_rounded_inputs_of_experts_move_likelihoods(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPE)
    harness = Harness(tmp_path, "bfloat16", "full")
    experts = [module for module in harness.model.modules() if isinstance(module, ReferenceExperts)]

    def likelihoods() -> torch.Tensor:
        prompts = map(torch.tensor, random_prompts(3, LENGTHS * 5)[: len(LENGTHS)])
        of_prompts = ((harness.run(tokens).log_softmax(-1)[:-1], tokens[1:, None]) for tokens in prompts)
        return torch.cat([found.gather(1, tokens)[:, 0] for found, tokens in of_prompts])

    rounded = likelihoods()
    for module in experts:
        module.activation_block = None
    plain = likelihoods()
    assert difference(rounded, plain) == pytest.approx(ROUNDED_INPUTS, rel=0.02)

    experts[1].w2_weight.data[3] *= 2
    assert difference(rounded, likelihoods()) > 1.4 * ROUNDED_INPUTS
