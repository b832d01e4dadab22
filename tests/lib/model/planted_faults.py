"""Faults of a served model that a measurement of its quality must notice, planted in this process's code.

    with FAULTS["rope sign"](harness):
        harness.run(tokens)

`wrong_experts_scale` changes the checkpoint instead, before it is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from model.harness import Harness
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4_kernels.rope import apply_rope_in_place
from sglang_dsv4.attention import backend
from sglang_dsv4.attention.metadata import ForwardMetadata
from sglang_dsv4.layers import rope
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO

STALE_EVERY, STALE_AT = 128, 5
"""One position in 128 keeps the ring row of the position 128 before."""


@contextmanager
def rope_sign(_: Harness) -> Iterator[None]:
    """The attention's result is rotated further instead of back."""

    def forward(x: Tensor, positions: Tensor, frequencies: Tensor, *, inverse: bool) -> Tensor:
        return apply_rope_in_place(x, positions, frequencies, inverse=not inverse)

    with mock.patch.object(rope, "apply_rope_in_place", forward):
        yield


@contextmanager
def changed_metadata(change: Callable[[ForwardMetadata], ForwardMetadata]) -> Iterator[None]:
    """Every forward's metadata, changed."""

    def wrapped(function: Callable[..., ForwardMetadata]) -> Callable[..., ForwardMetadata]:
        return lambda *arguments, **options: change(function(*arguments, **options))

    with (
        mock.patch.object(backend, "extend_metadata", wrapped(backend.extend_metadata)),
        mock.patch.object(backend, "uniform_metadata", wrapped(backend.uniform_metadata)),
    ):
        yield


@contextmanager
def one_group_late(_: Harness) -> Iterator[None]:
    """A token sees an entry of a CSA layer four tokens late."""

    def late(meta: ForwardMetadata) -> ForwardMetadata:
        visible = (meta.visible[CSA_RATIO] - 1).clamp(min=0)
        return replace(meta, visible=meta.visible | {CSA_RATIO: visible})

    with changed_metadata(late):
        yield


@contextmanager
def stale_ring_row(_: Harness) -> Iterator[None]:
    """The window row of one position in 128 is not written to the ring: later forwards read the row before it."""

    def stale(meta: ForwardMetadata) -> ForwardMetadata:
        here = meta.positions[: len(meta.ring_rows)] % STALE_EVERY == STALE_AT
        return replace(meta, ring_rows=meta.ring_rows.masked_fill(here, -1))

    with changed_metadata(stale):
        yield


@contextmanager
def indexer_off_by_one(harness: Harness) -> Iterator[None]:
    """A CSA layer reads the entry after each chosen one."""
    select = type(harness.backend).select

    def off_by_one(*arguments: Any, **options: Any) -> Tensor:
        rows = select(*arguments, **options)
        return torch.where(rows >= 0, rows + 1, rows)

    with mock.patch.object(type(harness.backend), "select", off_by_one):
        yield


@contextmanager
def tap_of_another_layer(harness: Harness) -> Iterator[None]:
    """The MTP draft gets the streams that the last layer reads, in place of those that it writes."""
    model, last = harness.model.model, harness.model.model.layers[-1]
    forward, boundary, read = type(model).forward, last.hc_attn.forward, []

    def noted(*arguments: Any, **options: Any) -> Any:
        x, pending = boundary(*arguments, **options)
        read.append(pending.streams.flatten(1).clone())
        return x, pending

    def tapped(self: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        row, _, taps = forward(self, *arguments, **options)
        return row, read.pop(), taps

    with mock.patch.object(last.hc_attn, "forward", noted), mock.patch.object(type(model), "forward", tapped):
        yield


@contextmanager
def taps_of_the_layers_before(harness: Harness) -> Iterator[None]:
    """A DSpark draft gets the streams of the layer before each layer that it was trained with."""
    model = harness.model.model
    with mock.patch.object(model, "tapped_layers", tuple(layer - 1 for layer in model.tapped_layers)):
        yield


FAULTS: dict[str, Callable[[Harness], Any]] = {
    "rope sign": rope_sign,
    "one group late": one_group_late,
    "stale ring row": stale_ring_row,
    "indexer off by one": indexer_off_by_one,
}
"""Faults that move the logits."""


def wrong_experts_scale(checkpoint: Path, out: Path) -> Path:
    """Write the checkpoint with the scales of two experts' `w2` exchanged in one layer; return its folder."""
    shutil.copytree(checkpoint, out)
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    one, other = (f"layers.3.ffn.experts.{expert}.w2.scale" for expert in (0, 1))
    assert not torch.equal(tensors[one].view(torch.uint8), tensors[other].view(torch.uint8)), "the same scales"
    tensors[one], tensors[other] = tensors[other], tensors[one]
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return out
