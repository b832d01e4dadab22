"""A page's record: all that the KV pools hold of one FULL page of 256 tokens, in one run of bytes.

    CSA layer   64 entries and 64 indexer keys          HCA layer   2 entries

in the order of the layers, each part padded to 16 bytes, byte for byte as in the pools: nothing is quantised again.
Windows and compressor states are no part of it: they belong to a request, and at a prefix's end to its tail checkpoint.

One run of bytes, because that is what a copy to host memory and a file want: the parts of a page are gathered on the
device, where a few hundred short rows cost microseconds, and cross the bus together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from sglang_dsv4.cache.geometry import entries_per_page
from sglang_dsv4.layer_kinds import CSA_RATIO, SWA_RATIO

if TYPE_CHECKING:
    from sglang_dsv4.cache.kv_pool import Dsv4KVPool

ALIGNMENT = 16
FORMAT_VERSION = 1
"""Of records and tails; a change of their bytes needs another one."""


class Part(NamedTuple):
    """A piece of a record: where it lies there, and in the pool."""

    name: str
    offset: int  # bytes
    nbytes: int
    view: Tensor  # [N, per, nbytes / 8] int64: page p is at [p // per, p % per]


class PageRecords:
    """The layout of a pool's page records, and the copies between pool and records on the pool's device.

    Attributes:
        record_bytes: bytes of a record.
        token_bytes: the same for a token.
        layout: the parts in words; equal exactly if records can be exchanged.
    """

    def __init__(self, pool: Dsv4KVPool) -> None:
        """`pool`: the worker's; a draft has no entries."""
        self.device = torch.device(pool.device)
        self.parts: list[Part] = []
        offset = 0
        for name, rows, count in _tables(pool):
            for piece, view in enumerate(rows.page_views(count)):
                nbytes = view.shape[2]
                if nbytes % 8:
                    raise ValueError(f"{name}: {nbytes} bytes of a page are no whole number of 8-byte words")
                what = f"{name}.{piece} {rows.format.value} {rows.row_dim} {rows.storage.dtype}"
                # As words: a copy of bytes would move one at a time.
                self.parts.append(Part(what, offset, nbytes, view.view(torch.int64)))
                offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.record_bytes = offset
        self.layout = "; ".join(f"{part.name} @{part.offset}+{part.nbytes}" for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Of the layout."""
        return hashlib.blake2b(f"{FORMAT_VERSION} {self.layout}".encode(), digest_size=8).hexdigest()

    def gather(self, pages: Tensor, records: Tensor) -> None:
        """Copy pages of the pool into records.

        Args:
            pages: [N] int64 page numbers, on the pool's device.
            records: [N, record_bytes] uint8 there. Padding is not written.
        """
        words = records.view(torch.int64)
        for part in self.parts:
            per = part.view.shape[1]
            words[:, part.offset // 8 : (part.offset + part.nbytes) // 8] = part.view[pages // per, pages % per]

    def scatter(self, pages: Tensor, records: Tensor) -> None:
        """Copy records into pages of the pool; arguments as of `gather`. No page may be named twice."""
        words = records.view(torch.int64)
        for part in self.parts:
            per = part.view.shape[1]
            part.view[pages // per, pages % per] = words[:, part.offset // 8 : (part.offset + part.nbytes) // 8]


def _tables(pool: Dsv4KVPool) -> Iterator[tuple[str, KVRows, int]]:
    """(name, rows, rows of a page) of everything in the pool that follows FULL pages."""
    for layer in pool.geometry.layers():
        ratio = pool.geometry.layer_ratio(layer)
        if ratio == SWA_RATIO:
            continue
        yield f"layer {layer} entries/{ratio}", pool.entries(layer), entries_per_page(ratio)
        if ratio == CSA_RATIO:
            yield f"layer {layer} keys", pool.index_keys(layer), entries_per_page(ratio)

