"""Batch state -> kernel arguments: which rows each token reads and writes, as pure functions.

Two builders make a `ForwardMetadata`:

* `extend_metadata`: prefill chunks of any length, and mixed batches. Lengths are known on the host, so every size is,
  and nothing waits for the device. A query's window reaches over rows of the chunk itself, so attention reads a
  workspace:

      workspace rows [0, G)     the last <= 127 window rows of each request's prefix, copied from its ring
      workspace rows [G, G+T)   the rows of this forward's T tokens

  and only the last rows of each chunk go to the ring. If rows are stored as FP8, `UnpackPlan` says what may be read,
  for an attention over bf16 rows of the same values.
* `uniform_metadata`: k tokens for every request (decode k = 1, speculation). All shapes follow from (B, k) alone and
  all inputs are device tensors, so the whole function can be recorded into a CUDA graph. Rows are written to the ring
  first and attention reads them there.

The null slot (request slot 0) and the null page (FULL page 0) belong to nobody. Padding reads and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4_kernels.compressor import Groups
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS
from dsv4_kernels.step_mapping import GroupLayout, StepLayout, step_mapping
from sglang_dsv4.attention.to_device import arrays_to_device
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page, overlap_groups
from sglang_dsv4.determinism import flag
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS


@dataclass(frozen=True)
class UnpackPlan:
    """What the tokens of a chunk may read, numbered without gaps, so that it can be unpacked into a table of its own.

    Pages that requests share are there once for each. Of a request's last page entries are unpacked that nobody has
    written yet; nobody reads them either.
    """

    window_rows: Tensor  # [G+T] int32: all rows of the workspace
    pages: Tensor  # [N] int32: FULL pages of the batch's requests, a request's side by side
    page_table: Tensor  # [B, P] int32: in place of the metadata's, page numbers in the unpacked table
    spans: tuple[tuple[int, int], ...]
    """Of each request: positions [begin, end) of its tokens in this forward."""

    def keys(self, ratio: int, limit: int) -> int:
        """Entries of a ratio that the tokens read, all together, at most `limit` each; with ratio 1, window rows.

        The token at position t may read (t + 1) // ratio. Over the tokens up to there, n = t + 1 of them, that is a
        sum over entries: the k-th is read by n - k * ratio + 1 tokens.
        """

        def up_to(n: int) -> int:
            k = min(n // ratio, limit)
            return k * (n + 1) - ratio * k * (k + 1) // 2

        return sum(up_to(end) - up_to(begin) for begin, end in self.spans)


@dataclass(frozen=True)
class ForwardMetadata:
    """Everything that attention needs to know about a batch, the same for all layers."""

    positions: Tensor  # [T] int64
    token_to_request: Tensor  # [T] int32
    req_slots: Tensor  # [B] int64
    page_table: Tensor  # [B, P] int32: FULL page numbers
    window_in_ring: bool
    window_gather: Tensor  # [G] int64: ring rows copied in front of the workspace; empty if window_in_ring
    window_rows: Tensor  # [T, W] int32, ring or workspace: column c is position t-W+1+c; -1 = before the start
    ring_rows: Tensor  # [T] int64: ring row that keeps a token's window row; -1: none
    compress: dict[int, Groups]  # by ratio: the groups that this forward may close
    visible: dict[int, Tensor]  # by ratio: [T] int32, entries a token may read: (t+1)//r, 0 for padding
    unpack: UnpackPlan | None  # of a chunk whose rows are stored as FP8

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    @property
    def split_keys(self) -> int | None:
        """How attention divides a token's keys: few tokens are computed in parts side by side, a chunk's many are not.

        By the kind of forward and nothing else: a token's bits must not depend on its batch. Where they must not depend
        on the kind either (`exact`), a chunk's tokens are divided as well; up to 128K of context that is no division.
        """
        return DECODE_SPLIT_KEYS if self.window_in_ring or flag.is_on() else None


def page_table_of(req_to_token: Tensor, req_slots: Tensor, num_pages: int, *, may_have_null: bool = True) -> Tensor:
    """FULL page numbers [B, num_pages] int32 of the requests' first `num_pages` pages.

    SGLang hands out whole pages of 256 slots, so the slot of a page's first token names the page. The null slot has the
    null page, whatever its row of the table says: a padding request must not write an entry of somebody's.

    Args:
        req_to_token: [slots, max_context] int32, SGLang's table of full slots by position.
        req_slots: [B] int64.
        may_have_null: whether a request may have the null slot.
    """
    pages = req_to_token[:, ::FULL_PAGE_TOKENS][:, :num_pages].index_select(0, req_slots) // FULL_PAGE_TOKENS
    return (pages.masked_fill_((req_slots == 0)[:, None], 0) if may_have_null else pages).int()


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a ragged batch in which b has counts[b] elements in a row: each element's b, and its offset in b's row."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def rows_by_token(tokens: np.ndarray, rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """[num_tokens] int64: `rows [N]` at `tokens [N]`, -1 elsewhere."""
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
) -> ForwardMetadata:
    """Metadata of a batch in which request b appends `extend_lens[b]` tokens to the `prefix_lens[b]` it has.

    All but the page numbers is known on the host, and computed there: on the device it would be some 240 launches,
    which take the host longer than a short chunk takes the GPU. What has 128 columns a token is left to the device.

    Args:
        prefix_lens, extend_lens: [B] host integers.
        req_slots: [B] int64, request slots (rows of `req_to_token`).
        req_to_token: [slots, max_context] int32; the new tokens' slots are already in it.
        request_slots: slots that the pools hold; state row S - 1 is the last one's.
        num_tokens: rows of the forward if it is padded beyond sum(extend_lens). Padding tokens see only themselves.
        host_slots: `req_slots` on the host; None reads them from the device, which waits for it.
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
    num_pages = -(-int(end.max(initial=1)) // FULL_PAGE_TOKENS)

    owner, offset = ragged(extend)
    positions = np.pad(prefix[owner] + offset, (0, padding))
    gather_owner, gather_offset = ragged(gather)
    gathered = (prefix - gather)[gather_owner] + gather_offset

    # Only the last W rows can be read again, and position % R of these is what a snapshot at `end` copies.
    kept = np.minimum(extend, W)
    kept_owner, kept_offset = ragged(kept)
    kept_positions = (end - kept)[kept_owner] + kept_offset

    # Of the windows: a position's row in the workspace is a number of its request's further, another one for those of
    # the chunk than for those of the prefix. A padding token is at position 0 of a chunk of its own.
    from_chunk = np.concatenate([(G + begin - prefix)[owner], G + np.arange(real_tokens, num_tokens)])
    from_prefix = np.pad((gather_begin - (prefix - gather))[owner], (0, padding))
    chunk_begin = np.pad(prefix[owner], (0, padding))
    arrays = {
        "positions": positions,
        "token_to_request": np.pad(owner, (0, padding), constant_values=requests).astype(np.int32),
        "window_gather": slots[gather_owner] * R + gathered % R,
        "windows": np.stack([positions, chunk_begin, from_chunk, from_prefix]).astype(np.int32),
        "ring_rows": rows_by_token(
            (begin - prefix)[kept_owner] + kept_positions, slots[kept_owner] * R + kept_positions % R, num_tokens
        ),
    }
    for ratio in geometry.compressed:
        of_ratio = _group_arrays(prefix, end, begin, slots, positions, ratio, geometry, request_slots, num_pages)
        arrays |= {f"{name} {ratio}": array for name, array in of_ratio.items()}
        arrays[f"visible {ratio}"][real_tokens:] = 0
    held = -(-end // FULL_PAGE_TOKENS)
    if geometry.row_format is RowFormat.FP8:
        page_owner, page_place = ragged(held)
        arrays["pages"] = page_owner * num_pages + page_place
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
    unpack = None
    if geometry.row_format is RowFormat.FP8:
        unpack = UnpackPlan(
            window_rows=torch.arange(G + num_tokens, dtype=torch.int32, device=device),
            pages=page_numbers.index_select(0, there["pages"]),
            page_table=there["unpacked table"],
            spans=tuple(zip(prefix_lens, end.tolist(), strict=True)),
        )
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
    )


def _window_rows(windows: Tensor, width: int) -> Tensor:
    """[T, width] int32 rows of the workspace, from [4, T] int32: a token's position, where its chunk begins, and what
    is added to a position of the chunk and to one of the prefix."""
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
    """Of one ratio: the groups that a prefill closes, and the raw rows that later ones need (see `extend_metadata`)."""
    C, S, per_page = overlap_groups(ratio), geometry.state_rows(ratio), entries_per_page(ratio)
    first = prefix // ratio
    owner, offset = ragged(end // ratio - first)
    entries = first[owner] + offset
    raw = entries[:, None] * ratio + np.arange((1 - C) * ratio, ratio)  # [M, C*r] positions
    in_state = slots[owner, None] * S + raw % S
    in_chunk = request_slots * S + (begin - prefix)[owner, None] + raw
    sources = np.where(raw < prefix[owner, None], in_state, in_chunk)
    sources[raw < 0] = -1
    # Raw rows that a later entry still needs: the open group and, with overlap, the group before it.
    needed_from = np.maximum(prefix, (end // ratio + 1 - C) * ratio)
    state_owner, state_offset = ragged(end - needed_from)
    kept = needed_from[state_owner] + state_offset
    return {
        "sources": sources.astype(np.int32),
        "entry_positions": entries * ratio,
        "pages": owner * num_pages + entries // per_page,
        "within": entries % per_page,
        "state_rows": rows_by_token(
            (begin - prefix)[state_owner] + kept, slots[state_owner] * S + kept % S, len(positions)
        ),
        "visible": ((positions + 1) // ratio).astype(np.int32),
    }


def step_layout(geometry: PoolGeometry, *, blocks: bool = False) -> StepLayout:
    """What a step's mapping is compiled for; `blocks`: of a DSpark draft."""
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
    """Metadata of a batch in which every request appends the same number of tokens; shapes depend on (B, k, P) only.

    Args:
        first_positions: [B] int64, position of each request's first new token.
        req_slots: [B] int64; 0 for padding requests.
        tokens_per_request: k. Token b*k + i is request b's i-th.
        req_to_token: [slots, max_context] int32; the new tokens' slots are already in it.
        num_pages: P, enough for position first + k - 1.
        request_slots: slots that the pools hold.
        blocks: whether a request's tokens are a DSpark draft's block.
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

    The window does not move with the row. A block's own rows lie in the ring behind it, where the next block's, or
    those of the tokens that were kept, take their places before anybody reads them.

    Args:
        first_positions: [B] int64, of each block's first row.
        req_slots: [B] int64; 0 for padding requests.
        block_tokens: rows of a block.
        req_to_token: [slots, max_context] int32.
        geometry: of the draft's pool.
        request_slots: slots that it holds.
    """
    return uniform_metadata(
        first_positions, req_slots, block_tokens, req_to_token, 1, geometry, request_slots, blocks=True
    )
