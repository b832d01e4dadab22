"""Checkpoints of the same function as the trained one, in another format, for more ranks, or with a DSpark draft.

    PYTHONPATH=benchmarks python -m train_tiny.variants nvfp4 CHECKPOINT OUT
    PYTHONPATH=benchmarks python -m train_tiny.variants four-ranks CHECKPOINT OUT
    PYTHONPATH=benchmarks python -m train_tiny.variants dspark CHECKPOINT OUT

`nvfp4`: the experts of the main model as modelopt exports them. A block of 32 MXFP4 codes becomes two blocks of 16 with
the same scale, relative to a global one, so that every weight keeps its value.

`four-ranks`: two output groups and 256 channels of an expert can't be shared by four ranks. Each output group becomes
two of half the heads, and a column of `wo_b` is repeated for both; experts get channels of zeros. Before rounding the
sums are the same; the input of `wo_b` is quantised in other blocks.

`dspark`: the DSpark draft in the checkpoint's folder ``dspark`` replaces the MTP module.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.weights import nvfp4
from train_tiny.draft import DraftShape
from train_tiny.export import DRAFT_FILE
from train_tiny.widen import with_channels

INPUT_AMAX = 100.0
"""Largest input of an expert's product for the unused `input_scale`."""
Tensors = dict[str, Tensor]


def to_nvfp4(tensors: Tensors, config: dict[str, Any]) -> None:
    """Store the routed experts of the main model as NVFP4, in place.

    Raises:
        ValueError: a matrix has scales further apart than e4m3 can store without rounding.
    """
    names = [name for name in tensors if name.startswith("layers.") and ".ffn.experts." in name]
    for name in [name for name in names if name.endswith(".weight")]:
        partners = [name]
        if name.endswith(("w1.weight", "w3.weight")):  # they share a global scale
            partners = [name.replace(f"w{i}.weight", f"w{j}.weight") for i, j in ((1, 1), (3, 3), (1, 3), (3, 1))]
        scales = [tensors[one.removesuffix("weight") + "scale"].float() for one in partners if one in names]
        largest = max(float(scale.max()) for scale in scales)
        relative = tensors[name.removesuffix("weight") + "scale"].float() / largest * 2.0**8
        stored = relative.to(torch.float8_e4m3fn)
        if not torch.equal(stored.float(), relative):
            raise ValueError(
                f"{name}: its scales are further apart than e4m3 stores, {relative.min()} to {relative.max()}"
            )
        block, of_all, of_input = nvfp4.scale_names(name)
        tensors[block] = stored.repeat_interleave(2, dim=1)
        tensors[of_all] = torch.tensor(largest * 2.0**-8)
        tensors[of_input] = torch.tensor(INPUT_AMAX / (6 * 448))
        tensors[name] = tensors[name].view(torch.uint8)
    for name in names:
        if name.endswith(".scale"):
            del tensors[name]
    config["quantization_config"] = hf_config(PRESETS["nvfp4"])["quantization_config"]


def for_four_ranks(tensors: Tensors, config: dict[str, Any]) -> None:
    """Double the output groups and the experts' channels, in place."""
    groups, rank, inner = config["o_groups"], config["o_lora_rank"], config["moe_intermediate_size"]
    for name in list(tensors):
        value = tensors[name]
        is_scale = name.endswith(".scale")
        rows = -(-rank // 128) if is_scale else rank  # of a group
        if ".wo_a." in name:
            # [groups * rank, channels of a group's heads] -> [groups, 2 halves, rank, half the channels]
            halves = value.view(torch.uint8).unflatten(0, (groups, rows)).chunk(2, dim=2)
            tensors[name] = torch.stack(halves, 1).flatten(0, 2).contiguous().view(value.dtype)
        elif ".wo_b." in name:
            of_groups = value.view(torch.uint8).unflatten(1, (groups, rows))
            tensors[name] = of_groups.repeat_interleave(2, dim=1).flatten(1).contiguous().view(value.dtype)
        else:
            tensors[name] = with_channels(name, value, 2)
    config |= {"o_groups": 2 * groups, "moe_intermediate_size": 2 * inner}


def with_draft(tensors: Tensors, config: dict[str, Any], of_draft: Tensors, draft: DraftShape) -> None:
    """Replace the MTP module by a DSpark draft, in place."""
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]
    tensors |= of_draft
    config |= {f"dspark_{name}": value for name, value in dataclasses.asdict(draft).items()}
    layers = config["num_hidden_layers"]
    config["compress_ratios"] = [*config["compress_ratios"][:layers], *[0] * len(draft.target_layer_ids)]


Change = Callable[[Tensors, dict[str, Any]], None]
CHANGES: dict[str, Change] = {"nvfp4": to_nvfp4, "four-ranks": for_four_ranks}
KINDS = (*CHANGES, "dspark")


def write(kind: str, checkpoint: Path, out: Path) -> None:
    """Write a variant of a checkpoint.

    Raises:
        ValueError: the checkpoint can't be stored this way.
        FileNotFoundError: it has no DSpark draft.
    """
    (file,) = checkpoint.glob("*.safetensors")
    tensors, config = load_file(file), json.loads((checkpoint / "config.json").read_text())
    if kind == "dspark":
        with_draft(tensors, config, load_file(checkpoint / DRAFT_FILE), DraftShape())
    else:
        CHANGES[kind](tensors, config)
    out.mkdir(parents=True, exist_ok=True)
    (out / file.name).write_bytes(save({n: t.contiguous() for n, t in tensors.items()}, metadata={"format": "pt"}))
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(tensors), file.name)}
    (out / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    for extra in checkpoint.glob("*token*.json"):
        shutil.copy(extra, out)
    shutil.copy(checkpoint / "generation_config.json", out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the trained checkpoint in another format or for more ranks.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.kind, arguments.checkpoint, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
