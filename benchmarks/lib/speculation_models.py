"""Models with the drafts of both releases: April's MTP module, and DSpark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lib.model_shapes import FLASH, write_config
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

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


def write_models(folder: Path, tiny: bool, full_size: bool = False) -> None:
    """Write the two models unless they exist."""
    for name, shape in (TINY if tiny else FULL_SIZE if full_size else MODELS).items():
        model = folder / name
        if (model / "config.json").exists():
            continue
        if tiny:
            write_checkpoint(model, shape)
        else:
            write_config(model, shape)
