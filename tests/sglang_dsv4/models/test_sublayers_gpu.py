"""Sublayers on a GPU with its kernels, compared with the equations in fp32 for the same input.

The checkpoint has the released format (FP8, MXFP4) and dimensions, but fewer layers and experts. The reference gets the
choices of the indexer and of the router. On random weights bf16 differs from fp32 by some 4e-2 in an attention
sublayer, with the quantisers on (specification, section 11.1). So our result may not differ more than the reference
does with every activation rounded to bf16.

On a CPU the same test runs over the references, which tests the test itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from model.compare import relative_error
from model.harness import Harness
from model.oracle import read_dequantised
from model.recording import Recording, recording
from model.reference import FULL, Reference
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config, write_checkpoint

# A layer of each kind; two more experts than a token chooses.
FEW = {"num_hash_layers": 1, "n_routed_experts": 8, "num_nextn_predict_layers": 0}
FLASH = {"hidden_size": 4096, "moe_intermediate_size": 2048, "compress_ratios": (0, 4, 128)}
PRO = {"hidden_size": 7168, "moe_intermediate_size": 3072, "compress_ratios": (128, 4)}
SHAPES = {"flash": replace(PRESETS["flash"], **FLASH, **FEW), "pro": replace(PRESETS["pro"], **PRO, **FEW)}
PROMPT, CHUNK, DECODE_FROM = 300, 150, 290


class Run(NamedTuple):
    """Inputs and outputs of one request's forwards."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokens: Tensor
    record: Recording

    def attention(self, reference: Reference, layer: int) -> Tensor:
        """The reference's output for our input, with our choice of entries."""
        ratio = self.config["compress_ratios"][layer]
        selected = self.record("selected", layer)[:, : PROMPT // 4] if ratio == 4 else None
        x = self.record("attn.in", layer).to(reference.dtype)
        return reference.attention(x, f"layers.{layer}.", ratio, selected=selected)

    def moe(self, reference: Reference, layer: int) -> Tensor:
        """The reference's output for our input, with our choice of experts."""
        x = self.record("ffn.in", layer).to(reference.dtype)
        return reference.moe(x, f"layers.{layer}.", self.tokens, experts=self.record("experts", layer))


def run(folder: Path, shape: str) -> Run:
    """Record a prompt in two chunks, then decode."""
    write_checkpoint(folder, SHAPES[shape], seed=0)
    config = hf_config(SHAPES[shape])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, config["vocab_size"], (PROMPT,), generator=generator)
    harness = Harness(folder, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    with recording(harness) as record:
        harness.run(tokens, CHUNK, DECODE_FROM)
    return Run(config, read_dequantised(folder), tokens, record)


def check(found: Run) -> None:
    """Compare every sublayer of every layer."""
    exact = Reference(found.config, found.weights, FULL)
    in_bf16 = Reference(found.config, found.weights, FULL, torch.bfloat16)
    for layer in range(found.config["num_hidden_layers"]):
        for name, of in (("attn", found.attention), ("ffn", found.moe)):
            ours, expected = found.record(f"{name}.out", layer), of(exact, layer)
            error, allowed = relative_error(ours, expected), relative_error(of(in_bf16, layer), expected)
            assert error.median() <= 1.1 * allowed.median() and error.max() <= 1.5 * allowed.max(), (
                f"layer {layer} {name}: median {error.median():.1e}, largest {error.max():.1e}; the reference in bf16: "
                f"{allowed.median():.1e}, {allowed.max():.1e}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu(tmp_path: Path, shape: str) -> None:
    check(run(tmp_path, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(tmp_path: Path, shape: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch sees none")
    check(run(tmp_path, shape))
