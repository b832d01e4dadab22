"""V4-Flash's real widths with few layers, and a checkpoint of a shape without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sglang_dsv4.cpu.random_checkpoint import PRESETS, Shape, hf_config, write_checkpoint
from sglang_dsv4.cpu.random_tokenizer import write_tokenizer

FLASH = replace(
    PRESETS["flash"], hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=256, vocab_size=129_280
)

MODELS = {
    "april": FLASH,
    "dspark": replace(FLASH, dspark_markov_rank=256, dspark_target_layer_ids=(3, 4, 5), dspark_noise_token_id=128_799),
}
TINY = {"april": PRESETS["flash-april"], "dspark": PRESETS["flash-0731"]}
ALL_LAYERS = (0, 0, *(4, 128) * 20, 4)
FULL_SIZE = {
    "april": replace(MODELS["april"], compress_ratios=ALL_LAYERS),
    "dspark": replace(MODELS["dspark"], compress_ratios=ALL_LAYERS, dspark_target_layer_ids=(40, 41, 42)),
}


def write_config(model: Path, shape: Shape) -> None:
    """Write a checkpoint folder without weights: config.json and tokenizer."""
    model.mkdir(parents=True, exist_ok=True)
    write_tokenizer(model, shape.vocab_size, shape.max_position_embeddings)
    (model / "config.json").write_text(json.dumps(hf_config(shape), indent=2) + "\n")


def write_models(folder: Path, tiny: bool, full_size: bool = False) -> None:
    """Write `april` and `dspark` unless they exist: small ones with weights, or configs of six or of all layers."""
    for name, shape in (TINY if tiny else FULL_SIZE if full_size else MODELS).items():
        model = folder / name
        if (model / "config.json").exists():
            continue
        if tiny:
            write_checkpoint(model, shape)
        else:
            write_config(model, shape)
