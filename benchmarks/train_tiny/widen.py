"""The same model with the sizes that Hopper's kernels need; all added channels and heads are zero.

    PYTHONPATH=benchmarks python -m train_tiny.widen CHECKPOINT OUT

hidden size 1,024      the hyper-connection kernel takes multiples of 1,024. A stream's added channels stay zero, so
                       every product is the same; an RMS norm over four times as many channels divides by half as much,
                       and its weight is halved, which is exact (but for the norm's epsilon, 1e-6, which then counts
                       four times as much)
64 heads               FlashMLA, which SGLang's own DeepSeek-V4 calls, takes 64 or 128. An added head's query is zero,
                       and so are its columns of the output projection
64 index heads         as the release has them; an added head's weight is zero
1,024 expert channels  four ranks get 256 each, the fewest that our experts take
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

NORMS = ("attn_norm.weight", "ffn_norm.weight", "enorm.weight", "hnorm.weight", "main_norm.weight")
INPUTS = ("wq_a", "wkv", "wgate", "weights_proj", "gate", "w1", "w3", "embed", "head", "e_proj", "h_proj")
"""Matrices whose columns are the hidden channels; the embedding's rows are tokens."""
OUTPUTS = ("wo_b", "w2", "e_proj", "h_proj")
"""Matrices whose rows are the hidden channels."""
SIZES = {"hidden_size": 1024, "num_attention_heads": 64, "index_n_heads": 64, "moe_intermediate_size": 1024}
"""Fields of the wider ``config.json``."""


def padded(value: Tensor, rows: int, columns: int, fill: int = 0) -> Tensor:
    """A matrix with more rows and columns, whose bytes are those of `fill`."""
    out = torch.full((rows, columns * value.element_size()), fill, dtype=torch.uint8)
    out[: value.shape[0], : value.shape[1] * value.element_size()] = value.contiguous().view(torch.uint8)
    return out.view(value.dtype)


def widened(name: str, value: Tensor, narrow: int, wide: int) -> Tensor:
    """A tensor of the checkpoint for a model of `wide` channels.

    Raises:
        ValueError: `wide` is not `narrow` times a power of four, so that norms' weights would be rounded.
    """
    factor = wide // narrow
    root = round(factor**0.5)
    if narrow * factor != wide or root * root != factor or root & (root - 1):
        raise ValueError(f"a hidden size of {wide}; expected {narrow} times 4, 16, 64, ...")
    if name == "norm.weight" or re.fullmatch(r"mtp\.\d+\.norm\.weight", name) or name.endswith(NORMS):
        return torch.nn.functional.pad(value / root, (0, wide - narrow))
    if name.endswith("confidence_head.proj.weight"):  # [1, hidden channels and the Markov head's]
        return torch.cat((torch.nn.functional.pad(value[:, :narrow], (0, wide - narrow)), value[:, narrow:]), 1)
    if name.endswith("_fn"):
        streams = value.unflatten(1, (-1, narrow)) / root
        return torch.nn.functional.pad(streams, (0, wide - narrow)).flatten(1)
    words = name.split(".")
    if value.dim() != 2 or words[-1] not in ("weight", "scale"):
        return value
    if words[-2] == "main_proj":  # its inputs are the streams of several layers
        layers = value.view(torch.uint8).chunk(value.shape[1] // len(value), 1)
        grown = [padded(one, len(one) * factor, one.shape[1] * factor, fill_of(name)) for one in layers]
        return torch.cat(grown, 1).view(value.dtype)
    reads, writes = words[-2] in INPUTS, words[-2] in OUTPUTS
    height, width = value.shape
    return padded(value, height * (factor if writes else 1), width * (factor if reads else 1), fill_of(name))


def fill_of(name: str) -> int:
    """The byte that pads a tensor: in scales 127, which is 1.0 in e8m0; else 0."""
    return 127 if name.endswith(".scale") else 0


def with_heads(name: str, value: Tensor, groups: int, factor: int, index_factor: int) -> Tensor:
    """A tensor of the checkpoint for `factor` times as many heads; an output group's heads stay its first ones."""
    if ".indexer.wq_b." in name or ".indexer.weights_proj." in name:
        return padded(value, value.shape[0] * index_factor, value.shape[1], fill_of(name))
    if ".wo_a." in name:
        return padded(value, value.shape[0], value.shape[1] * factor, fill_of(name))
    if ".wq_b." in name:
        parts = value.view(torch.uint8).chunk(groups)
        grown = [padded(part, len(part) * factor, part.shape[1], fill_of(name)) for part in parts]
        return torch.cat(grown).view(value.dtype)
    if name.endswith(".attn_sink"):
        return torch.nn.functional.pad(value.view(groups, -1), (0, len(value) // groups * (factor - 1))).flatten()
    return value


def with_channels(name: str, value: Tensor, factor: int) -> Tensor:
    """A tensor of the checkpoint for `factor` times as many intermediate channels of an expert."""
    if "experts." not in name:
        return value
    height, width = value.shape
    reads = ".w2." in name
    return padded(value, height * (1 if reads else factor), width * (factor if reads else 1), fill_of(name))


def widen(checkpoint: Path, out: Path) -> None:
    """Write the widened checkpoint to `out`, with the tokenizer of the first.

    Raises:
        ValueError: as `widened`, or a number is not a multiple of the checkpoint's.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    for name, size in SIZES.items():
        if size % config[name]:
            raise ValueError(f"{checkpoint}: {name} is {config[name]}; expected a divisor of {size}")
    _, heads, index_heads, channels = (size // config[name] for name, size in SIZES.items())
    out.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name != "config.json" and path.suffix == ".json":
            shutil.copy(path, out / path.name)
    for path in sorted(checkpoint.rglob("*.safetensors")):  # a DSpark draft is in a folder of its own
        tensors = {}
        for name, value in load_file(path).items():
            value = with_heads(name, value, config["o_groups"], heads, index_heads)
            value = with_channels(name, value, channels)
            tensors[name] = widened(name, value, config["hidden_size"], SIZES["hidden_size"])
        place = out / path.relative_to(checkpoint)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(save(tensors, metadata={"format": "pt"}))
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    (out / "model.safetensors.index.json").write_text(json.dumps(index | {"metadata": {}}) + "\n")
    (out / "config.json").write_text(json.dumps(config | SIZES, indent=2) + "\n")


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Pad a checkpoint for Hopper's kernels.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    widen(arguments.checkpoint, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
