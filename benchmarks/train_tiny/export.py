"""Write the trained model in the released format: FP8 matrices, MXFP4 experts, the tokenizer, one safetensors file.

    PYTHONPATH=benchmarks python -m train_tiny.export STATE OUT --tokenizer DATA/tokenizer.json \
        --log benchmarks/results/train_tiny.json
    PYTHONPATH=benchmarks python -m train_tiny.export DRAFT_STATE OUT --draft --log …/train_tiny_draft.json

STATE is the folder that `train.py` writes, DRAFT_STATE that of `train_draft.py`. The values written are those that the
last step computed with. A draft becomes a file in the checkpoint's folder, and `train_tiny.variants` joins the two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from sglang_dsv4.cpu.random_checkpoint import Shape, StoredAs, hf_config, stored
from sglang_dsv4.cpu.random_tokenizer import write_tokenizer_files
from train_tiny.draft import DraftShape, draft_parameters
from train_tiny.shape import Parameter, TinyShape, hash_tables, parameters, stored_names
from train_tiny.state import load_state

FORMATS = {"fp8": StoredAs.FP8, "fp4": StoredAs.FP4, "bf16": StoredAs.BF16, "fp32": StoredAs.FP32}

DRAFT_FILE = Path("dspark", "model.safetensors")
"""In a checkpoint's folder; loaders read the files beside ``config.json`` only."""


def config_of(shape: TinyShape) -> dict[str, Any]:
    """The fields of ``config.json``."""
    fields = {name: getattr(shape, name) for name in Shape.__dataclass_fields__ if hasattr(shape, name)}
    return hf_config(Shape(**fields))


def tensors_of(masters: dict[str, Tensor], table: dict[str, Parameter]) -> dict[str, Tensor]:
    """Tensors under the release's names, quantised."""
    found: dict[str, Tensor] = {}
    for name, parameter in table.items():
        value, as_stored = masters[name].float().cpu(), FORMATS[parameter.stored]
        names = stored_names(name, parameter)
        for each, weight in zip(names, [value] if names == [name] else value, strict=True):
            found |= stored(each, weight, as_stored)
    return found


def write_draft(out: Path, masters: dict[str, Tensor], shape: TinyShape, draft: DraftShape) -> int:
    """Write a DSpark draft's tensors to the file `DRAFT_FILE` of a checkpoint; returns its bytes."""
    (out / DRAFT_FILE).parent.mkdir(parents=True, exist_ok=True)
    return (out / DRAFT_FILE).write_bytes(_contents(tensors_of(masters, draft_parameters(shape, draft))))


def write_checkpoint(out: Path, masters: dict[str, Tensor], shape: TinyShape, tokenizer: Path) -> int:
    """Write config, tokenizer and weights; returns the bytes of the weights' file."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(masters, parameters(shape)) | hash_tables(shape)
    file_name = "model-00001-of-00001.safetensors"
    written = (out / file_name).write_bytes(_contents(tensors))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), file_name)}
    (out / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    shutil.copy(tokenizer, out / "tokenizer.json")
    write_tokenizer_files(out, shape.max_position_embeddings)
    # Last: a folder with a config.json is a complete checkpoint.
    (out / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    return written


def _contents(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})


def main() -> int:
    """Run the command line of the module's docstring; returns the exit status."""
    parser = argparse.ArgumentParser(description="Export a trained model in the released format.")
    parser.add_argument("state", type=Path)
    parser.add_argument("out", type=Path)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", type=Path, help="of the model")
    kind.add_argument("--draft", action="store_true", help="STATE is that of a DSpark draft")
    parser.add_argument("--log", type=Path, help="file for the log of the training")
    arguments = parser.parse_args()
    state = load_state(arguments.state)
    if arguments.log is not None:
        figures = {name: state[name] for name in ("shape", "step", "minutes", "tokens")}
        rows = ",\n  ".join(json.dumps(row) for row in state["log"])
        arguments.log.write_text(json.dumps(figures)[:-1] + f',\n "rows": [\n  {rows}\n]}}\n')
    torch.set_num_threads(1)
    shape = TinyShape.from_json(state["shape"])
    if arguments.draft:
        written = write_draft(arguments.out, state["masters"], shape, DraftShape())
    else:
        written = write_checkpoint(arguments.out, state["masters"], shape, arguments.tokenizer)
    print(f"{arguments.out}: step {state['step']}, {written / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
