"""The same model with a hidden size that Hopper's kernels take: 1,024 channels, of which all but the first are zero.

    PYTHONPATH=benchmarks python -m train_tiny.widen CHECKPOINT OUT [--hidden 1024]

The hyper-connection kernel takes widths in multiples of 1,024. A stream's added channels stay zero, so every product is
the same; an RMS norm over four times as many channels divides by half as much, and its weight is halved, which is exact
(but for the norm's epsilon, 1e-6, which then counts four times as much).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

NORMS = ("attn_norm.weight", "ffn_norm.weight", "enorm.weight", "hnorm.weight")
INPUTS = ("wq_a", "wkv", "wgate", "weights_proj", "gate", "w1", "w3", "embed", "head", "e_proj", "h_proj")
"""Matrices whose columns are the hidden channels; the embedding's rows are tokens."""
OUTPUTS = ("wo_b", "w2", "e_proj", "h_proj")
"""Matrices whose rows are the hidden channels."""


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
    if name in ("norm.weight", "mtp.0.norm.weight") or name.endswith(NORMS):
        return torch.nn.functional.pad(value / root, (0, wide - narrow))
    if name.endswith("_fn"):
        streams = value.unflatten(1, (-1, narrow)) / root
        return torch.nn.functional.pad(streams, (0, wide - narrow)).flatten(1)
    words = name.split(".")
    if value.dim() != 2 or words[-1] not in ("weight", "scale"):
        return value
    reads, writes = words[-2] in INPUTS, words[-2] in OUTPUTS
    rows = value.shape[0] * (factor if writes else 1)
    columns = value.shape[1] * (factor if reads else 1)
    # A scale of 1 for blocks of zeros: e8m0's byte 127.
    return padded(value, rows, columns, 127 if words[-1] == "scale" else 0)


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Pad a checkpoint's hidden channels for Hopper's kernels.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    widen(arguments.checkpoint, arguments.out, arguments.hidden)
    return 0


def widen(checkpoint: Path, out: Path, hidden: int) -> None:
    """Write the widened checkpoint to `out`, with the tokenizer of the first.

    Raises:
        ValueError: as `widened`.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name != "config.json" and path.suffix == ".json":
            shutil.copy(path, out / path.name)
    total = 0
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors = {name: widened(name, value, config["hidden_size"], hidden) for name, value in load_file(path).items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        (out / path.name).write_bytes(save(tensors, metadata={"format": "pt"}))
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] = total
    (out / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    (out / "config.json").write_text(json.dumps(config | {"hidden_size": hidden}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
