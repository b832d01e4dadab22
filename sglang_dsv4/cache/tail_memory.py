"""Bytes of the tails: device and host slots, and the copies between them, the rings and a prefill chunk.

A tail slot holds, for one position p of one sequence (DeepSeek-V4 specification, section 3.6):

    every layer   the 128 window rows of [p-128, p), in the row format of the rings
    CSA layers    of the main and of the indexer compressor: the raw (kv, score) rows of [p-4, p), first channel half
    the draft     with speculation, the 128 window rows of each of its layers

HCA layers need no rows at a page boundary. Everything is copied byte for byte, except rows that a prefill chunk writes
while it computes them; these are quantised as the ring's rows are. All work is issued in the stream that runs
the forwards, in the order of the scheduler's decisions, so no copy needs a fence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import KVRows
from dsv4_radix_cache.moves import TailRestore, TailWrite, Tier, TierCopy
from dsv4_radix_cache.ring import OVERLAP_TOKENS, WINDOW_TOKENS, chunk_rows, overlap_span, ring_row, window_span
from sglang_dsv4.attention.to_device import to_device
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.pool_plan import PoolSpec, tail_specs
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO


@dataclass(frozen=True)
class ChunkWrites:
    """The N tails that one prefill forward writes, as index lists."""

    window_tokens: Tensor  # [N*128] int64: tokens of the forward
    window_rows: Tensor  # [N*128] int64: rows of a layer's tail windows
    overlap_tokens: Tensor  # [N*4] int64
    overlap_rows: Tensor  # [N*4] int64: rows of a CSA layer's tail overlaps

    def by_token(self, num_tokens: int) -> TailRows:
        """The same assignment as one row number per token of the forward."""

        def rows(tokens: Tensor, values: Tensor) -> Tensor:
            return torch.full((num_tokens,), -1, device=values.device).index_copy_(0, tokens, values)

        return TailRows(rows(self.window_tokens, self.window_rows), rows(self.overlap_tokens, self.overlap_rows))


def chunk_writes(writes: Sequence[tuple[int, int, int, TailWrite]], device: torch.device | str) -> ChunkWrites | None:
    """Index lists of the tails that a forward writes; None if it writes none.

    Args:
        writes: (first token, begin, end, write): the chunk [begin, end) starts at this token of the forward.
        device: of the index lists.
    """
    if not writes:
        return None
    tokens, rows, overlap, overlap_rows = [], [], [], []
    for first_token, begin, end, write in writes:
        window = chunk_rows(write.position, WINDOW_TOKENS, begin, end)
        group = chunk_rows(write.position, OVERLAP_TOKENS, begin, end)
        tokens.extend(first_token + i for i in window)
        overlap.extend(first_token + i for i in group)
        slot = write.device_slot
        rows.extend(range(slot * WINDOW_TOKENS, (slot + 1) * WINDOW_TOKENS))
        overlap_rows.extend(range(slot * OVERLAP_TOKENS, (slot + 1) * OVERLAP_TOKENS))
    lists = (tokens, rows, overlap, overlap_rows)
    together = to_device([value for values in lists for value in values], device)
    return ChunkWrites(*together.split([len(values) for values in lists]))


class TailRows(NamedTuple):
    """The row of a layer's tails that each token of a forward writes; -1: none."""

    window: Tensor  # [T] int64: row of `TailMemory.window_rows`
    overlap: Tensor  # [T] int64: row of `TailMemory.overlap_rows`


class TierSlots:
    """The tail slots of one tier as four tensors [layers, slots, ...].

    On the device the slots of a layer are contiguous, as kernels write them; on the host the layers of a slot are, so a
    copy between the tiers is four transfers from or to pinned memory, none of which makes the host wait.
    """

    def __init__(
        self, geometry: PoolGeometry, slots: int, device: torch.device | str, *, slot_first: bool, pin: bool = False
    ) -> None:
        def zeros(spec: PoolSpec) -> Tensor:
            one = spec.allocate("meta")
            one = one.storage if isinstance(one, KVRows) else one
            layers, slot_shape = len(spec.layers), (one.shape[0] // max(1, slots), *one.shape[1:])
            if not slot_first:
                return torch.zeros((layers, slots, *slot_shape), dtype=one.dtype, device=device)
            shape = (slots, layers, *slot_shape)
            return torch.zeros(shape, dtype=one.dtype, device=device, pin_memory=pin).transpose(0, 1)

        specs = tail_specs(geometry, slots)
        # [layers, slots, rows, ...]
        self.window, self.overlap, self.index_overlap, self.draft_window = map(zeros, specs)
        self.names = tuple(spec.name for spec in specs)
        self.slots = slots
        self._geometry = geometry
        self._layer = {layer: i for i, layer in enumerate(specs[0].layers)}
        self._csa_layer = {layer: i for i, layer in enumerate(specs[1].layers)}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors."""
        return self.window, self.overlap, self.index_overlap, self.draft_window

    def window_rows(self, layer_id: int, *, draft: bool = False) -> KVRows:
        """The tail windows of a layer as one table: slot s has rows [128 s, 128 s + 128)."""
        g = self._geometry
        rows = (self.draft_window[layer_id] if draft else self.window[self._layer[layer_id]]).flatten(0, 1)
        return KVRows(rows, g.row_format, self.slots * WINDOW_TOKENS, g.row_dim, g.rope_dim)

    def overlap_rows(self, layer_id: int, *, indexer: bool) -> Tensor:
        """The half rows of a CSA layer: [slots, 4, 2, D] fp32."""
        return (self.index_overlap if indexer else self.overlap)[self._csa_layer[layer_id]]

    def copy_slot(self, to_slot: int, source: TierSlots, from_slot: int) -> None:
        """Copy one slot from another tier, byte for byte; asynchronous where memory is pinned."""
        for mine, theirs in zip(self.parts(), source.parts(), strict=True):
            mine[:, to_slot].copy_(theirs[:, from_slot], non_blocking=True)

    # A slot as one run of bytes, on the host, where the layers of a slot are contiguous

    def named_parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the four tensors."""
        return zip(self.names, self.parts(), strict=True)

    def record(self, slot: int) -> Tensor:
        """A copy of a slot: [bytes] uint8."""
        return torch.cat(self._runs(slot))

    def set_record(self, slot: int, record: Tensor) -> None:
        """Fill a slot from the bytes that `record` returned."""
        for run, part in zip(runs := self._runs(slot), record.split([run.numel() for run in runs]), strict=True):
            run.copy_(part)

    def _runs(self, slot: int) -> list[Tensor]:
        return [part.transpose(0, 1)[slot].reshape(-1).view(torch.uint8) for part in self.parts() if part.numel()]


class TailMemory:
    """Device and host slots of the tails of one pool, and all copies of their bytes.

    The device has one slot that the bookkeeping does not know, the transit slot: a tail that is restored from the host
    without being promoted passes through it.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        rings: Mapping[str, Tensor],
        device: torch.device | str,
        device_slots: int,
        host_slots: int,
    ) -> None:
        """Allocate both tiers; host memory is pinned where the device is a GPU.

        Args:
            geometry: of the pool.
            rings: the pool's rings and compressor states by name (`pool_plan`), each [layers, ...] over request slots.
            device: of the rings.
            device_slots, host_slots: tail slots of each tier.

        Raises:
            ValueError: the model's window is not the 128 tokens that a tail holds.
        """
        if geometry.window_tokens != WINDOW_TOKENS:
            raise ValueError(
                f"prefix reuse needs a sliding window of {WINDOW_TOKENS} tokens, this model has "
                f"{geometry.window_tokens}: start with --disable-radix-cache"
            )
        self._geometry, self._rings_by_name = geometry, rings
        self._draft_rings: Tensor | None = None
        self._device = device
        self.device = TierSlots(geometry, device_slots + 1, device, slot_first=False)
        self.host = TierSlots(geometry, host_slots, "cpu", slot_first=True, pin=torch.device(device).type == "cuda")
        self.device_slots = self.transit_slot = device_slots
        self.slot_bytes = self.device.nbytes // (device_slots + 1)

    def issue(self, ring_saves: Sequence[tuple[int, TailWrite]], copies: Sequence[TierCopy]) -> None:
        """Save rings of (request slot, tail), then copy between the tiers, before other work touches these slots."""
        for request_slot, write in ring_saves:
            self.save_rings(request_slot, write)
        for copy in copies:
            if copy.to is Tier.HOST:
                self.host.copy_slot(copy.host_slot, self.device, copy.device_slot)
            else:
                self.device.copy_slot(copy.device_slot, self.host, copy.host_slot)

    def restore(self, request_slot: int, restore: TailRestore) -> None:
        """Copy a tail into the rings of a request, which then continues at the tail's position."""
        slot = restore.slot
        if restore.tier is Tier.HOST:
            self.device.copy_slot(self.transit_slot, self.host, slot)
            slot = self.transit_slot
        for ring, saved in self._rings(request_slot, restore.position):
            ring.copy_(saved[:, slot])

    def save_rings(self, request_slot: int, write: TailWrite) -> None:
        """Copy the rings of a request into a tail; the request has computed [0, write.position), or slightly more."""
        for ring, saved in self._rings(request_slot, write.position):
            saved[:, write.device_slot].copy_(ring)

    def load_fetched(self, tail: TierSlots, device_slot: int) -> None:
        """Copy a tail that the storage backend delivered, the only slot of `tail`, to a device slot."""
        self.device.copy_slot(device_slot, tail, 0)

    def attach_draft(self, rings: Tensor) -> None:
        """Save and restore the window rings of a draft, [layers, ...] over request slots, with the target's."""
        self._draft_rings = rings

    def window_rows(self, layer_id: int, *, draft: bool = False) -> KVRows:
        """The tail windows of a layer as one table, into which the layer writes a chunk's rows."""
        return self.device.window_rows(layer_id, draft=draft)

    def overlap_rows(self, layer_id: int, *, indexer: bool) -> Tensor:
        """The tail overlaps of a CSA layer: slot s has rows [4 s, 4 s + 4) of [rows, 2, D] fp32."""
        return self.device.overlap_rows(layer_id, indexer=indexer).flatten(0, 1)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of the device slots."""
        return list(self.device.named_parts())

    def new_host_slot(self) -> TierSlots:
        """One slot in host memory of its own, for a tail that is read from the storage backend."""
        return TierSlots(self._geometry, 1, "cpu", slot_first=True, pin=torch.device(self._device).type == "cuda")

    def _rings(self, request_slot: int, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows in a request's rings, the matching device slots) for each part of a tail, both [layers, ...]."""
        g, rings, device = self._geometry, self._rings_by_name, self.device
        span = window_span(position, g.ring_rows)
        unit = WINDOW_TOKENS // device.window.shape[2]  # tokens in one row of the tensor: 1, or 64 in a byte format
        first = ring_row(request_slot, span.first_position, g.ring_rows) // unit
        rows = slice(first, first + span.rows // unit)
        yield rings["window rings"][:, rows], device.window
        if self._draft_rings is not None:
            yield self._draft_rings[:, rows], device.draft_window
        if g.layers(CSA_RATIO):
            span = overlap_span(position, g.state_rows(CSA_RATIO))
            first = ring_row(request_slot, span.first_position, g.state_rows(CSA_RATIO))
            rows = slice(first, first + span.rows)
            yield rings["CSA compressor state"][:, rows, :, : g.row_dim], device.overlap
            yield rings["indexer compressor state"][:, rows, :, : g.index_dim], device.index_overlap
