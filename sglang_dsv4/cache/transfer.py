"""The parts of a KV pool that travel to another server, as SGLang's transfer engines take them.

    pages           entries and indexer keys of a FULL page, one item a page and layer
    packed pages    HCA entries in the FP8 format: their two rows of a page are two runs of bytes, so the transfer reads
                    and writes a copy of them, one run a page and layer
    rings           window rows and raw compressor rows of a request slot, one item a slot and layer

An engine copies item i of a buffer to item j of the other server's buffer of the same place in the list, so both lists
must have the same order and item sizes. `describe` names everything that this depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_ROWS, KVRows, RowFormat
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page
from sglang_dsv4.cache.page_records import FORMAT_VERSION, TABLES
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, HCA_RATIO

HCA_ENTRIES = "HCA entries"


class Buffers(NamedTuple):
    """Parallel lists, one element for each layer of each tensor: bytes, as SGLang's pools return them."""

    addresses: list[int]
    lengths: list[int]
    item_lengths: list[int]

    def add(self, tensor: Tensor, items: int) -> None:
        """Append a contiguous tensor that holds `items` items of equal size.

        Raises:
            ValueError: the tensor has gaps, or does not divide into the items.
        """
        if not tensor.is_contiguous() or tensor.nbytes % items:
            raise ValueError(f"{tuple(tensor.shape)} {tensor.dtype} is not {items} items of equal size in one run")
        self.addresses.append(tensor.data_ptr())
        self.lengths.append(tensor.nbytes)
        self.item_lengths.append(tensor.nbytes // items)


class PackedPages:
    """A copy of the HCA entries of every FULL page, with a page's two rows of a layer in one run of bytes.

    The prefill server packs a page after each forward or copy that has written it; the decode server unpacks the pages
    of a request when they have arrived.
    """

    def __init__(self, entries: KVRows, layers: int, storage: Tensor) -> None:
        """Use `storage` for the copy.

        Args:
            entries: the HCA entries of all layers as one table, in a byte format.
            layers: number of layers.
            storage: [layers, pages, bytes of a page's rows] uint8 on the entries' device.
        """
        self._views = [
            view.view(torch.int64).unflatten(0, (layers, -1))
            for view in entries.page_views(entries_per_page(HCA_RATIO))
        ]
        self._packed = storage.view(torch.int64)

    def pack(self, pages: Tensor) -> None:
        """Copy pages, [N] int64 page numbers on the device, from the entries."""
        parts = [view[:, pages // view.shape[2], pages % view.shape[2]] for view in self._views]
        self._packed[:, pages] = torch.cat(parts, 2)

    def unpack(self, pages: Tensor) -> None:
        """Copy pages, [N] int64 page numbers on the device, to the entries. Pages must differ."""
        parts = self._packed[:, pages].split([view.shape[3] for view in self._views], 2)
        for view, part in zip(self._views, parts, strict=True):
            view[:, pages // view.shape[2], pages % view.shape[2]] = part


def page_buffers(tables: Mapping[str, Iterable[KVRows]], packed: Tensor | None) -> Buffers:
    """The buffers whose items are FULL pages.

    Args:
        tables: the layers of each table that follows FULL pages, by name.
        packed: the storage of `PackedPages`, in place of the HCA entries; None for rows that need no packing.
    """
    buffers = Buffers([], [], [])
    for name, layers in tables.items():
        if name == HCA_ENTRIES and packed is not None:
            for layer in packed:
                buffers.add(layer, len(layer))
            continue
        rows_per_page = entries_per_page(TABLES[name])
        for rows in layers:
            if rows.format is not RowFormat.PLAIN and rows_per_page != PAGE_ROWS:
                raise ValueError(f"{name}: {rows_per_page} rows in the format {rows.format.value} are not one run")
            buffers.add(rows.storage, rows.num_rows // rows_per_page)
    return buffers


def ring_buffers(rings: Mapping[str, Tensor], request_slots: int) -> Buffers:
    """The buffers whose items are request slots: the layers of each ring, [layers, rows of all request slots, ...]."""
    buffers = Buffers([], [], [])
    for stack in rings.values():
        for layer in stack:
            buffers.add(layer, request_slots)
    return buffers


def describe(geometry: PoolGeometry, version: str, model: str) -> str:
    """Everything in which two servers must agree to exchange pages and rings: ``name value; name value; …``.

    Args:
        geometry: the target worker's.
        version: this package's.
        model: a digest of the model's config.
    """
    g = geometry
    states = ", ".join(f"{ratio}: {g.state_rows(ratio)}" for ratio in g.compressed)
    parts = {
        "sglang-dsv4": version,
        "model": model,
        "layers": "-".join(map(str, g.ratios)),
        "page": str(FULL_PAGE_TOKENS),
        "rows": f"{g.row_format.name} of {g.row_dim} channels ({g.rope_dim} rotated)",
        "indexer-keys": f"{g.index_format.name} of {g.index_dim} channels" if CSA_RATIO in g.ratios else "none",
        "dtype": str(g.dtype).removeprefix("torch."),
        "window-ring": str(g.ring_rows),
        "compressor-rings": states or "none",
        "draft-layers": str(g.draft_layers),
        "draft-tokens": str(g.draft_tokens),
        "format": str(FORMAT_VERSION),
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def differences(theirs: str, ours: str) -> list[str]:
    """The parts in which two descriptions differ, each as ``name: theirs there, ours here``."""
    there, here = (dict(part.partition(" ")[::2] for part in text.split("; ")) for text in (theirs, ours))
    return [
        f"{name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here"
        for name in dict.fromkeys((*here, *there))
        if there.get(name) != here.get(name)
    ]
