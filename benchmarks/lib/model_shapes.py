"""V4-Flash's real widths with few layers, and a checkpoint of a shape without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sglang_dsv4.cpu.random_checkpoint import PRESETS, Shape, hf_config
from sglang_dsv4.cpu.random_tokenizer import write_tokenizer

FLASH = replace(
    PRESETS["flash"], hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=256, vocab_size=129_280
)


def write_config(model: Path, shape: Shape) -> None:
    """Write a checkpoint folder without weights: config.json and tokenizer."""
    model.mkdir(parents=True, exist_ok=True)
    write_tokenizer(model, shape.vocab_size, shape.max_position_embeddings)
    (model / "config.json").write_text(json.dumps(hf_config(shape), indent=2) + "\n")
