"""Make the state of a training run from a checkpoint of `train_tiny.export`, so that training can go on from it.

    PYTHONPATH=benchmarks python -m train_tiny.restore CHECKPOINT STATE --log benchmarks/results/train_tiny.json

The weights are the checkpoint's rounded values, and the optimiser's moments begin at zero. Schedule, log and number of
tokens go on where the log ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4_kernels.number_formats import dequantise_fp4_weight, dequantise_fp8_weight
from train_tiny.shape import TinyShape, parameters, stored_names
from train_tiny.state import save_state


def masters_of(checkpoint: Path, shape: TinyShape) -> dict[str, Tensor]:
    """The parameters of `shape`, MTP module included; experts stacked as in `shape.parameters`.

    They are fp32 if the checkpoint has them as fp32, else bf16, which holds a product of a code and its scale exactly.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    stored: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(file)
    found = {}
    for name, parameter in parameters(shape).items():
        parts = stored_names(name, parameter)
        missing = [part for part in parts if part not in stored]
        if missing:
            raise ValueError(f"{checkpoint} has no {missing[0]}: a checkpoint with the MTP module of {shape} is needed")
        values = [_dequantised(part, stored, parameter.stored) for part in parts]
        found[name] = values[0] if parts == [name] else torch.stack(values)
        if found[name].shape != parameter.shape:
            raise ValueError(f"{checkpoint}: {name} is {list(found[name].shape)}; expected {list(parameter.shape)}")
    return found


def _dequantised(name: str, stored: dict[str, Tensor], as_stored: str) -> Tensor:
    scale = stored.get(name.removesuffix("weight") + "scale")
    if as_stored == "fp8":
        return dequantise_fp8_weight(stored[name], scale, torch.bfloat16)
    if as_stored == "fp4":
        return dequantise_fp4_weight(stored[name], scale, torch.bfloat16)
    return stored[name]


def state_of(checkpoint: Path, log: dict[str, Any]) -> dict[str, Any]:
    """The state from which `train.py` goes on.

    Args:
        checkpoint: folder of the checkpoint.
        log: of the training that made it, as `train_tiny.export` writes it.
    """
    shape = TinyShape.from_json(log["shape"])
    figures = {name: log[name] for name in ("step", "minutes", "tokens")}
    masters = masters_of(checkpoint, shape)
    return {"shape": shape.as_json(), **figures, "log": log["rows"], "masters": masters, "moments": {}}


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make a training state from an exported checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--log", type=Path, required=True, help="log of the training that made the checkpoint")
    arguments = parser.parse_args()
    state = state_of(arguments.checkpoint, json.loads(arguments.log.read_text()))
    parts = save_state(arguments.state, state)
    print(f"{arguments.state}: step {state['step']}, {sum(part.stat().st_size for part in parts) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
