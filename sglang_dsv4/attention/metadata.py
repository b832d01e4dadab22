"""Kernel arguments of a batch: which rows each token reads and writes, as pure functions of the batch's state.

Two builders make a `ForwardMetadata`:

* `extend_metadata`: prefill chunks of any length, and mixed batches. The host knows the lengths, and so every size, and
  waits for nothing. A query's window includes rows of the chunk itself, so attention reads a workspace:

      workspace rows [0, G)     the last <= 127 window rows of each request's prefix, copied from its ring
      workspace rows [G, G+T)   the rows of this forward's T tokens

  and only the last rows of each chunk are written to the ring. If rows are stored as FP8, `UnpackPlan` lists the rows
  that tokens may read, for an attention over bf16 rows of the same values.
* `uniform_metadata`: k tokens for every request (decode k = 1, speculation). All shapes follow from (B, k) alone and
  all inputs are device tensors, so a CUDA graph can capture the whole function. Rows are written to the ring first, and
  attention reads them from it.

The null slot (request slot 0) and the null page (FULL page 0) belong to no request. Padding reads and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4_kernels.compressor import Groups
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention import unpacking
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS
from dsv4_kernels.step_mapping import GroupLayout, StepLayout, step_mapping
from dsv4_radix_cache.pages import pages_for
from dsv4_radix_cache.ring import ring_row
from sglang_dsv4.attention.to_device import arrays_to_device
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page, overlap_groups
from sglang_dsv4.determinism import flag
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, SWA_RATIO


class AttentionReader(NamedTuple):
    """Dimensions of a rank's attention that decide whether a chunk's rows are worth unpacking."""

    heads: int
    """Query heads of this rank."""
    top_k: int
    """Most entries that a token of a CSA layer reads."""


@dataclass(frozen=True)
class UnpackPlan:
    """Rows that a chunk's tokens may read, numbered without gaps, so that they can be unpacked into a table.

    A page that several requests share is listed once for each of them. The entries of a request's last page are all
    unpacked, including unwritten ones, which no token reads.
    """

    window_rows: Tensor  # [G+T] int32: all rows of the workspace
    pages: Tensor  # [N] int32: FULL pages of the batch's requests, consecutive for each request
    page_table: Tensor  # [B, P] int32: in place of the metadata's, page numbers in the unpacked table
    spans: tuple[tuple[int, int], ...]
    """Positions [begin, end) of each request's tokens in this forward."""

    def keys(self, ratio: int, limit: int) -> int:
        """Number of entries that all tokens together read in a layer of this ratio, at most `limit` a token.

        With ratio 1 it is the number of window rows. The token at position t may read (t + 1) // ratio entries. Summed
        over the first n tokens of a sequence, the k-th entry is read n - k * ratio + 1 times.
        """

        def up_to(n: int) -> int:
            k = min(n // ratio, limit)
            return k * (n + 1) - ratio * k * (k + 1) // 2

        return sum(up_to(end) - up_to(begin) for begin, end in self.spans)

    def pays(self, ratio: int, window_tokens: int, reader: AttentionReader) -> bool:
        """Whether unpacking takes less time than a layer of this ratio saves by reading bf16 rows.

        Args:
            ratio: compression ratio of the layer.
            window_tokens: window rows that a token reads.
            reader: the layer's attention.
        """
        rows, keys = len(self.window_rows), self.keys(1, window_tokens)
        if ratio != SWA_RATIO:
            rows += len(self.pages) * entries_per_page(ratio)
            longest = max((end for _, end in self.spans), default=0)
            keys += self.keys(ratio, reader.top_k if ratio == CSA_RATIO else longest)
        return unpacking.pays(rows, keys, reader.heads)


@dataclass(frozen=True)
class ForwardMetadata:
    """Arguments of a forward's attention kernels that are the same for all layers."""

    positions: Tensor  # [T] int64
    token_to_request: Tensor  # [T] int32
    req_slots: Tensor  # [B] int64
    page_table: Tensor  # [B, P] int32: FULL page numbers
    window_in_ring: bool
    window_gather: Tensor  # [G] int64: ring rows copied in front of the workspace; empty if window_in_ring
    window_rows: Tensor  # [T, W] int32, ring or workspace: column c is position t-W+1+c; -1 = before the start
    ring_rows: Tensor  # [T] int64: ring row that keeps a token's window row; -1: none
    compress: dict[int, Groups]  # by ratio: the compression groups that this forward may close
    visible: dict[int, Tensor]  # by ratio: [T] int32, entries a token may read: (t+1)//r, 0 for padding
    unpack: UnpackPlan | None  # of a chunk whose rows are stored as FP8
    unpacked_ratios: frozenset[int] = frozenset()  # ratios of the layers whose attention reads unpacked rows

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    @property
    def split_keys(self) -> int | None:
        """Most keys of a KV split; None: a token's keys are not split.

        Decode steps have few tokens, whose KV splits are computed in parallel; chunks have enough tokens without
        splits. Only the kind of forward decides, so that a token's bits do not depend on its batch. Under
        --enable-deterministic-inference they must not depend on the kind of forward either, so a chunk's keys are split
        as well; up to 128K of context there is one split.
        """
        return DECODE_SPLIT_KEYS if self.window_in_ring or flag.is_on() else None


def page_table_of(req_to_token: Tensor, req_slots: Tensor, num_pages: int, *, may_have_null: bool = True) -> Tensor:
    """FULL page numbers [B, num_pages] int32 of the requests' first `num_pages` pages.

    SGLang allocates whole pages of 256 token slots, so the token slot of a page's first token gives the page. The null
    slot gets the null page, whatever its row of the table contains: a padding request must not write entries of a real
    one.

    Args:
        req_to_token: [slots, max_context] int32, SGLang's table of token slots by position.
        req_slots: [B] int64, request slots.
        num_pages: columns of the result.
        may_have_null: whether a request may have the null slot.
    """
    pages = req_to_token[:, ::FULL_PAGE_TOKENS][:, :num_pages].index_select(0, req_slots) // FULL_PAGE_TOKENS
    return (pages.masked_fill_((req_slots == 0)[:, None], 0) if may_have_null else pages).int()


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Owner and offset of each element of a ragged batch, in which owner b has counts[b] consecutive elements."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def rows_by_token(tokens: np.ndarray, rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """`rows [N]` at the indices `tokens [N]`, -1 elsewhere: [num_tokens] int64."""
    found = np.full(num_tokens, -1)
    found[tokens] = rows
    return found


def extend_metadata(
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    req_slots: Tensor,
    req_to_token: Tensor,
    geometry: PoolGeometry,
    request_slots: int,
    num_tokens: int | None = None,
    host_slots: Sequence[int] | None = None,
    reader: AttentionReader | None = None,
) -> ForwardMetadata:
    """Metadata of a batch in which request b appends `extend_lens[b]` tokens to the `prefix_lens[b]` it has.

    The host computes everything except the page numbers: on the device that would be some 240 launches, which take the
    host longer than a short chunk takes the GPU. Lists with 128 columns a token are made on the device.

    Args:
        prefix_lens, extend_lens: [B] host integers.
        req_slots: [B] int64, request slots (rows of `req_to_token`).
        req_to_token: [slots, max_context] int32; it contains the token slots of the new tokens already.
        geometry: dimensions of the pools.
        request_slots: request slots that the pools hold.
        num_tokens: rows of a forward that is padded beyond sum(extend_lens). A padding token reads only itself.
        host_slots: `req_slots` on the host; None reads them from the device, which waits for it.
        reader: the attention, which may read unpacked rows; None: it reads rows as they are stored.
    """
    device, W, R = req_slots.device, geometry.window_tokens, geometry.ring_rows
    requests, real_tokens = len(extend_lens), sum(extend_lens)
    num_tokens = real_tokens if num_tokens is None else num_tokens
    padding = num_tokens - real_tokens
    if padding < 0:
        raise ValueError(f"the forward has {num_tokens} tokens, but its requests extend by {real_tokens}")
    prefix, extend = (np.array(lengths, dtype=np.int64) for lengths in (prefix_lens, extend_lens))
    slots = np.array(req_slots.tolist() if host_slots is None else host_slots, dtype=np.int64)
    end, begin = prefix + extend, extend.cumsum() - extend  # begin: first token of each request
    gather = np.minimum(prefix, W - 1)
    gather_begin, G = gather.cumsum() - gather, int(gather.sum())
    num_pages = pages_for(int(end.max(initial=1)))

    owner, offset = ragged(extend)
    positions = np.pad(prefix[owner] + offset, (0, padding))
    gather_owner, gather_offset = ragged(gather)
    gathered = (prefix - gather)[gather_owner] + gather_offset

    # Later forwards can read the last W rows only, and a tail at `end` is copied from these ring rows.
    kept = np.minimum(extend, W)
    kept_owner, kept_offset = ragged(kept)
    kept_positions = (end - kept)[kept_owner] + kept_offset

    # Workspace row of a position = position + an offset of the request: one offset for positions in the chunk, another
    # for positions in the prefix. A padding token is position 0 of a chunk of its own.
    from_chunk = np.concatenate([(G + begin - prefix)[owner], G + np.arange(real_tokens, num_tokens)])
    from_prefix = np.pad((gather_begin - (prefix - gather))[owner], (0, padding))
    chunk_begin = np.pad(prefix[owner], (0, padding))
    arrays = {
        "positions": positions,
        "token_to_request": np.pad(owner, (0, padding), constant_values=requests).astype(np.int32),
        "window_gather": ring_row(slots[gather_owner], gathered, R),
        "windows": np.stack([positions, chunk_begin, from_chunk, from_prefix]).astype(np.int32),
        "ring_rows": rows_by_token(
            (begin - prefix)[kept_owner] + kept_positions, ring_row(slots[kept_owner], kept_positions, R), num_tokens
        ),
    }
    for ratio in geometry.compressed:
        of_ratio = _group_arrays(prefix, end, begin, slots, positions, ratio, geometry, request_slots, num_pages)
        arrays |= {f"{name} {ratio}": array for name, array in of_ratio.items()}
        arrays[f"visible {ratio}"][real_tokens:] = 0
    held = pages_for(end)
    if geometry.row_format is RowFormat.FP8:
        page_owner, page_offset = ragged(held)
        arrays["pages"] = page_owner * num_pages + page_offset
        unpacked = (held.cumsum() - held)[:, None] + np.arange(num_pages)
        arrays["unpacked table"] = np.pad(unpacked, ((0, 1 if padding else 0), (0, 0))).astype(np.int32)
    there = arrays_to_device(arrays, device)

    page_table = page_table_of(req_to_token, req_slots, num_pages, may_have_null=bool((slots == 0).any()))
    page_numbers = page_table.flatten()
    compress = {
        ratio: Groups(
            ratio=ratio,
            positions=there["positions"],
            sources=there[f"sources {ratio}"],
            entry_positions=there[f"entry_positions {ratio}"],
            slots=torch.add(
                there[f"within {ratio}"],
                page_numbers.index_select(0, there[f"pages {ratio}"]),
                alpha=entries_per_page(ratio),
            ),
            state_rows=there[f"state_rows {ratio}"],
        )
        for ratio in geometry.compressed
    }
    unpack, unpacked_ratios = None, frozenset()
    if geometry.row_format is RowFormat.FP8:
        unpack = UnpackPlan(
            window_rows=torch.arange(G + num_tokens, dtype=torch.int32, device=device),
            pages=page_numbers.index_select(0, there["pages"]),
            page_table=there["unpacked table"],
            spans=tuple(zip(prefix_lens, end.tolist(), strict=True)),
        )
        if reader is not None:
            ratios = sorted(set(geometry.ratios))
            unpacked_ratios = frozenset(ratio for ratio in ratios if unpack.pays(ratio, W, reader))
    if padding:  # its tokens belong to an extra request in the null slot
        req_slots, page_table = F.pad(req_slots, (0, 1)), F.pad(page_table, (0, 0, 0, 1))
    return ForwardMetadata(
        positions=there["positions"],
        token_to_request=there["token_to_request"],
        req_slots=req_slots,
        page_table=page_table,
        window_in_ring=False,
        window_gather=there["window_gather"],
        window_rows=_window_rows(there["windows"], W),
        ring_rows=there["ring_rows"],
        compress=compress,
        visible={ratio: there[f"visible {ratio}"] for ratio in geometry.compressed},
        unpack=unpack,
        unpacked_ratios=unpacked_ratios,
    )


def _window_rows(windows: Tensor, width: int) -> Tensor:
    """[T, width] int32 rows of the workspace, from [4, T] int32: each token's position, its chunk's first position, and
    the offsets that give the workspace row of a position in the chunk and in the prefix."""
    position, chunk_begin, from_chunk, from_prefix = windows.unsqueeze(2)
    seen = position + torch.arange(1 - width, 1, dtype=torch.int32, device=windows.device)
    return seen.add(torch.where(seen >= chunk_begin, from_chunk, from_prefix)).masked_fill_(seen < 0, -1)


def _group_arrays(
    prefix: np.ndarray,
    end: np.ndarray,
    begin: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    ratio: int,
    geometry: PoolGeometry,
    request_slots: int,
    num_pages: int,
) -> dict[str, np.ndarray]:
    """Arrays of one ratio: compression groups that a prefill closes, and raw rows that later groups need."""
    C, S, per_page = overlap_groups(ratio), geometry.state_rows(ratio), entries_per_page(ratio)
    first = prefix // ratio
    owner, offset = ragged(end // ratio - first)
    entries = first[owner] + offset
    raw = entries[:, None] * ratio + np.arange((1 - C) * ratio, ratio)  # [M, C*r] positions
    in_state = ring_row(slots[owner, None], raw, S)
    in_chunk = request_slots * S + (begin - prefix)[owner, None] + raw
    sources = np.where(raw < prefix[owner, None], in_state, in_chunk)
    sources[raw < 0] = -1
    # Raw rows that a later entry still needs: those of the open group and, with overlap, of the group before it.
    needed_from = np.maximum(prefix, (end // ratio + 1 - C) * ratio)
    state_owner, state_offset = ragged(end - needed_from)
    kept = needed_from[state_owner] + state_offset
    return {
        "sources": sources.astype(np.int32),
        "entry_positions": entries * ratio,
        "pages": owner * num_pages + entries // per_page,
        "within": entries % per_page,
        "state_rows": rows_by_token(
            (begin - prefix)[state_owner] + kept, ring_row(slots[state_owner], kept, S), len(positions)
        ),
        "visible": ((positions + 1) // ratio).astype(np.int32),
    }


def step_layout(geometry: PoolGeometry, *, blocks: bool = False) -> StepLayout:
    """Dimensions for which the step mapping kernel is compiled; `blocks`: for the blocks of a DSpark draft."""
    return StepLayout(
        page_tokens=FULL_PAGE_TOKENS,
        window_tokens=geometry.window_tokens,
        ring_rows=geometry.ring_rows,
        groups=tuple(GroupLayout(r, overlap_groups(r), geometry.state_rows(r)) for r in geometry.compressed),
        blocks=blocks,
    )


def uniform_metadata(
    first_positions: Tensor,
    req_slots: Tensor,
    tokens_per_request: int,
    req_to_token: Tensor,
    num_pages: int,
    geometry: PoolGeometry,
    request_slots: int,
    *,
    blocks: bool = False,
) -> ForwardMetadata:
    """Metadata of a batch in which every request appends k tokens; shapes depend on (B, k, P) only.

    Args:
        first_positions: [B] int64, position of each request's first new token.
        req_slots: [B] int64 request slots; 0 for padding requests.
        tokens_per_request: k. Token b*k + i is request b's i-th.
        req_to_token: [slots, max_context] int32; it contains the token slots of the new tokens already.
        num_pages: P, enough for position first + k - 1.
        geometry: dimensions of the pools.
        request_slots: request slots that the pools hold.
        blocks: whether a request's tokens are a DSpark draft's block.

    Raises:
        ValueError: k is larger than the rings are laid out for.
    """
    limit = max(1, geometry.draft_tokens)
    if not 1 <= tokens_per_request <= limit:
        raise ValueError(f"{tokens_per_request} tokens a request, but the rings are laid out for at most {limit}")
    found = step_mapping(
        first_positions,
        req_slots,
        req_to_token,
        tokens_per_request,
        num_pages,
        request_slots,
        step_layout(geometry, blocks=blocks),
    )
    of_ratio = dict(zip(geometry.compressed, found.groups, strict=True))
    return ForwardMetadata(
        positions=found.positions,
        token_to_request=found.token_to_request,
        req_slots=req_slots,
        page_table=found.page_table,
        window_in_ring=True,
        window_gather=found.positions[:0],
        window_rows=found.window_rows,
        ring_rows=found.ring_rows,
        compress={
            ratio: Groups(
                ratio=ratio,
                positions=found.positions,
                sources=group.sources,
                entry_positions=group.positions,
                slots=group.slots,
                state_rows=group.state_rows,
                tokens_per_request=tokens_per_request,
            )
            for ratio, group in of_ratio.items()
        },
        visible={ratio: group.visible for ratio, group in of_ratio.items()},
        unpack=None,
    )


def block_metadata(
    first_positions: Tensor,
    req_slots: Tensor,
    block_tokens: int,
    req_to_token: Tensor,
    geometry: PoolGeometry,
    request_slots: int,
) -> ForwardMetadata:
    """Metadata of a DSpark draft's blocks: all rows of a block read the window before it, and the whole block.

    The window is the same for all rows. A block's rows are stored at the ring rows after the window; the rows of
    accepted tokens, or of the next block, overwrite them before they are read again.

    Args:
        first_positions: [B] int64, position of each block's first row.
        req_slots: [B] int64 request slots; 0 for padding requests.
        block_tokens: rows of a block.
        req_to_token: [slots, max_context] int32.
        geometry: dimensions of the draft's pool.
        request_slots: request slots that the pool holds.
    """
    return uniform_metadata(
        first_positions, req_slots, block_tokens, req_to_token, 1, geometry, request_slots, blocks=True
    )
