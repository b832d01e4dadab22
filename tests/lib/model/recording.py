"""Inputs and outputs of our model's sublayers and backend while a request runs, token by token in order."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from model.harness import Harness
from torch import Tensor

from dsv4_kernels.compressor import Compression, Groups
from dsv4_kernels.host import joint_launch
from dsv4_kernels.host.expert_rows import ExpertRows, summed
from dsv4_kernels.hyper_connection import hc_post
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.norm_rope_store import Destination
from sglang_dsv4.layers import attention
from sglang_dsv4.layers.hyper_connection import Pending
from sglang_dsv4.layers.linear import SublayerInput


class Recording:
    """Tensors by (name, layer), concatenated over the forwards, on the CPU; token axis first.

    "attn.in", "attn.out", "ffn.in", "ffn.out": normed inputs and outputs of the sublayers. "block.in", "block.out":
    streams. "kv", "entries", "index_keys": rows before they are stored in the pools. "q", "attended": input and output
    of the attention kernel. "index_q", "index_weights", "selected" [num_tokens, num_entries] bool: the indexer.
    "experts", "weights": the router.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def add(self, name: str, layer: int, value: Tensor) -> None:
        self._parts[name, layer].append(value.detach().clone())

    def __call__(self, name: str, layer: int) -> Tensor:
        parts = self._parts[name, layer]
        if name == "selected":
            width = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
        return torch.cat(parts).cpu()


def tensor_of(value: Tensor | SublayerInput | ExpertRows | Pending) -> Tensor:
    """Return the rows of an input; the sum of experts' rows; streams with a pending update applied; other tensors as
    they are."""
    if isinstance(value, Tensor | ExpertRows):
        return summed(value)
    if isinstance(value, SublayerInput):
        return value.rows
    if value.output is None:
        return value.streams
    return hc_post(summed(value.output), value.streams, value.post, value.comb)


@contextmanager
def at_once() -> Iterator[None]:
    """Launch the kernels that are called inside at once, also while a joint launch is noted: their results are read
    before its end, and it has room for the forward's own kernels only."""
    noted = getattr(joint_launch._of_thread, "noted", None)
    joint_launch._of_thread.noted = None
    try:
        yield
    finally:
        joint_launch._of_thread.noted = noted


@contextmanager
def recording(harness: Harness) -> Iterator[Recording]:
    """Record one request's forwards (several requests in a batch would be mixed up)."""
    record, backend, undo = Recording(), harness.backend, []

    layers, window = [0], backend.window

    def recorded_window(layer: int) -> Any:
        layers[0] = layer
        return window(layer)

    backend.window = recorded_window
    undo.append(lambda: delattr(backend, "window"))
    original_store, original_compress = attention.norm_rope_store, attention.compress_store

    def recorded_store(q: Tensor, kv: Tensor, *parameters: Any, qat: bool) -> Tensor:
        *parameters, destinations = parameters
        stored = destinations[0].table
        plain = KVRows.allocate(len(kv), RowFormat.PLAIN, kv.shape[1], stored.rope_dim, kv.dtype, kv.device)
        alone = Destination(plain, torch.arange(len(kv), device=kv.device))
        with at_once():
            original_store(q, kv, *parameters, (alone,), qat=qat and stored.format is RowFormat.PLAIN)
        record.add("kv", layers[0], plain.storage)
        return original_store(q, kv, *parameters, destinations, qat=qat)

    def recorded_compress(groups: Groups, compressions: list[Compression], dtype: torch.dtype) -> None:
        count, closed = len(groups.sources), (groups.sources >= 0).any(1)
        apart = replace(groups, slots=torch.arange(count, device=groups.slots.device), overlap_rows=None)
        for name, c in zip(("entries", "index_keys"), compressions, strict=False):
            plain = KVRows.allocate(count, RowFormat.PLAIN, c.head_dim, c.table.rope_dim, dtype, c.kv.device)
            values_of = c.values_of if c.table.format is RowFormat.PLAIN else RowFormat.PLAIN
            alone = replace(c, table=plain, values_of=values_of, state=c.state.clone(), overlap=None)
            with at_once():
                original_compress(apart, [alone], dtype)
            record.add(name, layers[0], plain.storage[closed])
        original_compress(groups, compressions, dtype)

    attention.norm_rope_store, attention.compress_store = recorded_store, recorded_compress
    undo.append(lambda: setattr(attention, "norm_rope_store", original_store))
    undo.append(lambda: setattr(attention, "compress_store", original_compress))

    select, attend = backend.select, backend.attend

    def recorded_select(layer: int, q: Tensor, weights: Tensor, top_k: int, tokens: slice) -> Tensor:
        rows = select(layer, q, weights, top_k, tokens)
        record.add("index_q", layer, q)
        record.add("index_weights", layer, weights)
        metadata = backend.metadata
        rows_of = metadata.unpack if 4 in metadata.unpacked_ratios else metadata
        pages = rows_of.page_table[0].long()
        place = torch.full((int(pages.max()) + 1,), -1, device=pages.device)
        place[pages] = torch.arange(len(pages), device=pages.device)
        entries = place[rows.long().clamp(min=0) // 64] * 64 + rows % 64
        mask = torch.zeros(len(rows), 64 * len(pages) + 1, dtype=torch.bool, device=rows.device)
        record.add("selected", layer, mask.scatter(1, torch.where(rows < 0, 64 * len(pages), entries), True)[:, :-1])
        return rows

    def recorded_attend(layer: int, q: Tensor, *rest: Any) -> Tensor:
        out = attend(layer, q, *rest)
        record.add("q", layer, q)
        record.add("attended", layer, out)
        return out

    backend.select, backend.attend = recorded_select, recorded_attend
    undo += [lambda: delattr(backend, "select"), lambda: delattr(backend, "attend")]

    def hook(layer: int, name: str) -> Any:
        def store(module: Any, args: tuple[Any, ...], output: Any) -> None:
            record.add(f"{name}.in", layer, tensor_of(args[0]))
            record.add(f"{name}.out", layer, tensor_of(output))
            while name == "ffn" and chosen[layer]:
                weights, experts = chosen[layer].pop(0)
                record.add("weights", layer, weights)
                record.add("experts", layer, experts.long())

        return store

    chosen: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def router(layer: int) -> Any:
        """Keeps a choice until the sublayer's end: a joint launch that makes it is still only noted."""
        return lambda module, args, output: chosen[layer].append(output)

    for i, block in enumerate(harness.model.model.layers):
        for name, module in (("block", block), ("attn", block.attn), ("ffn", block.ffn)):
            undo.append(module.register_forward_hook(hook(i, name)).remove)
        undo.append(block.ffn.gate.register_forward_hook(router(i)).remove)
    try:
        yield record
    finally:
        for restore in undo:
            restore()
