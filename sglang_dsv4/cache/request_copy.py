"""A copy of one request's pages and rings in host memory, from which a retracted request of a decode server goes on.

A decode server can't compute a prompt, so a request that gives up its pages takes their bytes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.cache.page_records import PageRecords, pages_of


@dataclass(frozen=True)
class RequestCopy:
    """The bytes of a request: whole pages, the last one too, and whole rings."""

    records: Tensor  # [pages, record bytes] uint8 in host memory
    rings: tuple[Tensor, ...]  # each [layers, bytes of a request slot] uint8 in host memory

    @classmethod
    def save(cls, records: PageRecords, rings: Sequence[Tensor], token_slots: Tensor, request_slot: int) -> RequestCopy:
        """Copy a request. The device finishes all its work first: what it has queued may write these rows, and the
        caller gives them to other requests, whose rows another server writes without waiting for this one's streams.

        Args:
            records: the layout of the pool's page records.
            rings: each [layers, request_slots, bytes] uint8.
            token_slots: [tokens] integer full slots of the request's tokens.
            request_slot: its request slot.
        """
        if records.device.type == "cuda":
            torch.cuda.synchronize(records.device)
        pages = pages_of(token_slots)
        gathered = torch.zeros((len(pages), records.record_bytes), dtype=torch.uint8, device=records.device)
        records.gather(pages, gathered)
        return cls(gathered.cpu(), tuple(ring[:, request_slot].to("cpu", copy=True) for ring in rings))

    def load(self, records: PageRecords, rings: Sequence[Tensor], token_slots: Tensor, request_slot: int) -> None:
        """Copy the request back, to other full slots and another request slot. Arguments as for `save`."""
        pages = pages_of(token_slots)
        assert len(pages) == len(self.records), f"{len(self.records)} pages were saved, and {len(pages)} are there now"
        records.scatter(pages, self.records.to(records.device))
        for ring, saved in zip(rings, self.rings, strict=True):
            ring[:, request_slot] = saved.to(ring.device)
