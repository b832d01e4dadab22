"""Page records: everything that the KV pools hold of one FULL page of 256 tokens, in one run of bytes.

    64 entries of each CSA layer | 64 indexer keys of each CSA layer | 2 entries of each HCA layer

byte for byte as in the pools: nothing is quantised again. Windows and compressor states are not part of it: they belong
to a request, and at a prefix's end to its tail.

A copy to host memory and a file need one run of bytes: the rows of a page are gathered on the device, all layers of a
kind at once, and cross the bus together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from sglang_dsv4.cache.geometry import entries_per_page
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, HCA_RATIO

ALIGNMENT = 16
FORMAT_VERSION = 1
"""Version of the bytes of page records and tails; it changes with them."""
TABLES = {"CSA entries": CSA_RATIO, "HCA entries": HCA_RATIO, "indexer keys": CSA_RATIO}


class PackedPages(Protocol):
    """A second copy of some rows of each page: `transfer.PackedPages`."""

    def pack(self, pages: Tensor) -> None: ...  # noqa: D102


class Part(NamedTuple):
    """One piece of a record, for all layers of a kind: its position in the record and in the pool."""

    name: str
    offset: int  # 8-byte words, in the record
    words: int  # per layer
    view: Tensor  # [layers, N, per, words] int64: page p is at [:, p // per, p % per]


class PageRecords:
    """The layout of a pool's page records, and the copies between pool and records on the pool's device.

    Attributes:
        record_bytes: bytes of a record.
        layout: a description of the parts; two pools can exchange records if and only if theirs are equal.
    """

    def __init__(
        self,
        ratios: tuple[int, ...],
        tables: Mapping[str, tuple[KVRows, int]],
        device: torch.device | str,
        packed: PackedPages | None = None,
    ) -> None:
        """Lay out the record of a target worker's pool; a draft has no entries.

        Args:
            ratios: compression ratio of each layer.
            tables: for each table that follows FULL pages its rows, all layers as one, and the number of layers.
            device: the pool's device.
            packed: packed anew when records are copied into the pool; None where nothing is packed.
        """
        self.device = torch.device(device)
        self._packed = packed
        self.parts: list[Part] = []
        offset, described = 0, [f"ratios {ratios}"]
        for name, (rows, layers) in tables.items():
            for piece, view in enumerate(rows.page_views(entries_per_page(TABLES[name]))):
                nbytes = view.shape[2]
                if nbytes % 8:
                    raise ValueError(f"{name}: {nbytes} bytes of a page are no whole number of 8-byte words")
                # In words: a copy of bytes would move one byte at a time.
                words = view.view(torch.int64).unflatten(0, (layers, -1))
                self.parts.append(Part(name, offset // 8, nbytes // 8, words))
                kind = f"{rows.format.value} {rows.row_dim} {rows.storage.dtype}"
                described.append(f"{name}.{piece} {kind} @{offset}+{layers}*{nbytes}")
                offset += -(-layers * nbytes // ALIGNMENT) * ALIGNMENT
        self.record_bytes = offset
        self.layout = "; ".join(described)

    @property
    def fingerprint(self) -> str:
        """A digest of the layout."""
        return hashlib.blake2b(f"{FORMAT_VERSION} {self.layout}".encode(), digest_size=8).hexdigest()

    def gather(self, pages: Tensor, records: Tensor) -> None:
        """Copy pages of the pool into records.

        Args:
            pages: [N] int64 page numbers, on the pool's device.
            records: [N, record_bytes] uint8 on the same device. Padding is not written.
        """
        for part, inside in self._parts_of(records):
            inside.copy_(part.view[:, *_index_of(pages, part)].transpose(0, 1))

    def scatter(self, pages: Tensor, records: Tensor) -> None:
        """Copy records into pages of the pool; arguments as for `gather`. Pages must differ."""
        for part, inside in self._parts_of(records):
            part.view[:, *_index_of(pages, part)] = inside.transpose(0, 1)
        if self._packed is not None:
            self._packed.pack(pages)

    def _parts_of(self, records: Tensor) -> list[tuple[Part, Tensor]]:
        """Each part with its view of the records: [N, layers, words] int64."""
        words = records.view(torch.int64)
        return [
            (part, words[:, part.offset : part.offset + len(part.view) * part.words].unflatten(1, (len(part.view), -1)))
            for part in self.parts
        ]


def pages_of(token_slots: Tensor) -> Tensor:
    """The page numbers [pages] int64 of the full slots [tokens] of a sequence's first tokens, without waiting for their
    device."""
    return token_slots[::FULL_PAGE_TOKENS].long() // FULL_PAGE_TOKENS


def _index_of(pages: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    per = part.view.shape[2]
    return pages // per, pages % per
