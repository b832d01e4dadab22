"""SGLANG_DSV4_COMPARE_ATTENTION=FILE: compute every attention twice, and write the distance between the results.

The server continues with the kernel's result. The reference gets the same queries, rows and lists; where the kernel
reads unpacked rows, the reference unpacks them itself. The file gets a line of JSON for every layer of every forward:

    {"layer": 2, "kind": "CSA", "mode": "decode", "attended": [...], "sublayer": [...]}

with |kernel - reference| / |reference| of each token, for the attention's result and for the sublayer's output (after
the output projection). Ranks above 0 of a tensor-parallel group write to FILE.1, FILE.2, .... The comparison waits for
the device, so CUDA graphs are off, and it is slow: for checks, not for service.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sglang_dsv4 import env
from sglang_dsv4.model_config.layer_kinds import LayerKind

if TYPE_CHECKING:
    from sglang_dsv4.attention.backend import Dsv4AttentionBackend
    from sglang_dsv4.layers.sequence_parallel import RowShards

FILE_VARIABLE = "SGLANG_DSV4_COMPARE_ATTENTION"


def file_of_rank(rank: int) -> Path | None:
    """The file that this rank writes; None if the variable is not set."""
    name = env.text(FILE_VARIABLE)
    return Path(name + (f".{rank}" if rank else "")) if name else None


def install(backend: Dsv4AttentionBackend, model: nn.Module, file: Path) -> Callable[[], None]:
    """Start comparing; returns a function that stops it."""
    from sglang_dsv4.layers.attention import Attention

    file.write_text("")
    attend, results = backend.attend, {}
    handles = []

    def compared(layer_id: int, *arguments: object) -> Tensor:
        out = attend(layer_id, *arguments)
        named, backend.attention_impl = backend.attention_impl, "ref"
        try:
            results[layer_id] = out.clone(), attend(layer_id, *arguments)  # the layer rotates the result in place
        finally:
            backend.attention_impl = named
        return out

    def after(module: nn.Module, arguments: tuple[object, Tensor, RowShards], output: Tensor) -> None:
        _, positions, rows = arguments
        out, reference = results.pop(module.layer_id)
        line = {
            "layer": module.layer_id,
            "kind": LayerKind(backend.token_to_kv_pool.geometry.layer_ratio(module.layer_id)).name,
            "mode": "decode" if backend.metadata.window_in_ring else "prefill",
            "attended": relative_distances(out, reference),
            "sublayer": relative_distances(output, module.project(reference, positions, rows)),
        }
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    backend.attend = compared
    for module in model.modules():
        if isinstance(module, Attention):
            handles.append(module.register_forward_hook(after))

    def end() -> None:
        del backend.attend
        for handle in handles:
            handle.remove()

    return end


def relative_distances(x: Tensor, reference: Tensor) -> list[float]:
    """|x - reference| / |reference| of each token; 0 where both norms are zero."""
    x, reference = x.flatten(1).double(), reference.flatten(1).double()
    distance, size = (x - reference).norm(dim=1), reference.norm(dim=1)
    return [float(f"{value:.4g}") for value in torch.where(distance == 0, 0.0, distance / size).tolist()]
