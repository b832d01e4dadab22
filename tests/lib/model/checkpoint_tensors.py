"""Checkpoints as dicts of tensors: loading them into a model, comparing parameters, and planting mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_dsv4.cpu.random_checkpoint import PRESETS

Checkpoint = dict[str, Tensor]
SMALL = replace(  # messages in tests name its shapes
    PRESETS["tiny"],
    hidden_size=256,
    num_attention_heads=8,
    q_lora_rank=128,
    moe_intermediate_size=128,
    n_routed_experts=8,
)


def read(folder: Path) -> Checkpoint:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def snapshot(model: nn.Module) -> Checkpoint:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def empty(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else -1)


def unfilled(model: nn.Module) -> list[str]:
    return [
        name for name, p in model.named_parameters() if (p.isnan().any() if p.is_floating_point() else (p < 0).any())
    ]


def assert_same(actual: Checkpoint, expected: Checkpoint) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def loaded(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    empty(model)
    model.load_weights(iter(checkpoint.items()))
    return snapshot(model)


def without(name: str) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.pop(name)


def with_tensor(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.update({name: make(checkpoint.get(name, torch.zeros(1)))})


def with_last(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


def e8m0(byte: int) -> Callable[[Tensor], Tensor]:
    return lambda scale: with_last(scale.view(torch.uint8), byte).view(torch.float8_e8m0fnu)


@contextmanager
def changed_tensor(folder: Path, name: str) -> Iterator[Tensor]:
    """Yield a tensor of a checkpoint's files, to be changed in place, and write its file again afterwards."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            if name not in shard.keys():
                continue
            metadata = shard.metadata()
        tensors = load_file(file)
        yield tensors[name]
        save_file(tensors, file, metadata=metadata)
        return
    raise KeyError(f"{folder} has no tensor {name}")
