"""The caches as tables of names: each row holds which request and position wrote it, and every read is checked.

`Simulation` does with names what the attention backend does with numbers, driven by the same metadata. The rows
that a token must read are derived position by position from the specification (sections 3.3, 3.4), without the
metadata.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import RowFormat
from sglang_dsv4.attention.metadata import ForwardMetadata, extend_metadata, uniform_metadata
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS

FORBIDDEN = -7  # a row that was never written
SPAN = 1 << 20


def name(request: int, position: int) -> int:
    """The content of a row: request and position (or entry number) in one integer; -1 for a hole."""
    return request * SPAN + position if position >= 0 else -1


class Requests:
    """Request slots and FULL pages, handed out in random order, as SGLang's allocator may do."""

    def __init__(self, slots: int, pages: int, context: int = 4096, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.free_slots = list(range(1, slots))
        self.free_pages = list(range(1, pages + 1))
        self.random.shuffle(self.free_slots)
        self.random.shuffle(self.free_pages)
        # Stale garbage: SGLang does not clear a row when its request ends.
        generator = torch.Generator().manual_seed(seed)
        highest = (pages + 1) * FULL_PAGE_TOKENS
        self.req_to_token = torch.randint(0, highest, (slots, context), generator=generator, dtype=torch.int32)
        self.slot: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}

    def reserve(self, request: int, tokens: int) -> None:
        """Give the request a slot, if it has none, and pages for `tokens` more tokens."""
        if request not in self.slot:
            self.slot[request], self.length[request], self.pages[request] = self.free_slots.pop(), 0, []
        pages, end = self.pages[request], self.length[request] + tokens
        while len(pages) * FULL_PAGE_TOKENS < end:
            page = self.free_pages.pop()
            begin = len(pages) * FULL_PAGE_TOKENS
            pages.append(page)
            slots = torch.arange(page * FULL_PAGE_TOKENS, (page + 1) * FULL_PAGE_TOKENS)
            width = min(FULL_PAGE_TOKENS, self.req_to_token.shape[1] - begin)
            self.req_to_token[self.slot[request], begin : begin + width] = slots[:width]

    def release(self, request: int) -> None:
        """Free slot and pages; the next request gets the same ones first."""
        self.free_slots.append(self.slot.pop(request))
        self.free_pages.extend(self.pages.pop(request))
        del self.length[request]


class Simulation(Requests):
    """Runs forwards on tables of names and checks every row that a token reads."""

    def __init__(self, geometry: PoolGeometry, slots: int = 6, pages: int = 64, seed: int = 0) -> None:
        super().__init__(slots, pages, seed=seed)
        self.geometry, self.slots = geometry, slots

        def table(rows: int) -> Tensor:
            return torch.full((rows,), FORBIDDEN, dtype=torch.int64)

        self.ring = table(slots * geometry.ring_rows)
        self.state = {r: table(slots * geometry.state_rows(r)) for r in geometry.compressed}
        self.entries = {r: table((pages + 1) * entries_per_page(r)) for r in geometry.compressed}

    def extend(self, batch: list[tuple[int, int]], padding: int = 0) -> ForwardMetadata:
        """Prefill: each (request, tokens) appends that many tokens; `padding` tokens belong to no request."""
        for request, tokens in batch:
            self.reserve(request, tokens)
        prefix = [self.length[r] for r, _ in batch]
        meta = extend_metadata(
            prefix,
            [n for _, n in batch],
            torch.tensor([self.slot[r] for r, _ in batch], dtype=torch.int64),
            self.req_to_token,
            self.geometry,
            self.slots,
            num_tokens=sum(n for _, n in batch) + padding,
        )
        tokens = [(r, p + i) for (r, n), p in zip(batch, prefix, strict=True) for i in range(n)]
        self._check_and_apply(meta, [r for r, _ in batch], tokens, padding)
        for request, n in batch:
            self.length[request] += n
        return meta

    def uniform(self, requests: list[int], tokens: int = 1, accept: list[int] | None = None, padding: int = 0) -> None:
        """Decode or verify: `tokens` more for each request, of which it keeps accept[i] (all if None).

        `padding` requests in the null slot are added, as in a captured graph.
        """
        for request in requests:
            self.reserve(request, tokens)
        slots = torch.tensor([self.slot[r] for r in requests] + [0] * padding, dtype=torch.int64)
        first = torch.tensor([self.length[r] for r in requests] + [0] * padding, dtype=torch.int64)
        pages = self.req_to_token.shape[1] // FULL_PAGE_TOKENS
        meta = uniform_metadata(first, slots, tokens, self.req_to_token, pages, self.geometry, self.slots)
        rows = [(r, self.length[r] + i) for r in requests for i in range(tokens)]
        self._check_and_apply(meta, requests, rows, padding * tokens)
        for i, request in enumerate(requests):
            self.length[request] += tokens if accept is None else accept[i]

    def _check_and_apply(
        self, meta: ForwardMetadata, requests: list[int], tokens: list[tuple[int, int]], padding: int
    ) -> None:
        real, W = len(tokens), self.geometry.window_tokens
        assert meta.positions.tolist()[:real] == [t for _, t in tokens]
        assert meta.num_tokens == real + padding
        assert [requests[b] for b in meta.token_to_request.tolist()[:real]] == [r for r, _ in tokens]
        names = torch.tensor([name(r, t) for r, t in tokens] + [FORBIDDEN] * padding, dtype=torch.int64)

        # Window: the last W positions, this forward's own included, oldest first; nothing before the start.
        kept = meta.ring_rows >= 0
        if meta.window_in_ring:
            self.ring[meta.ring_rows[kept]] = names[kept]
            rows = self.ring
        else:
            rows = torch.cat([self.ring[meta.window_gather], names])
            self.ring[meta.ring_rows[kept]] = names[kept]
        seen = torch.where(meta.window_rows >= 0, rows[meta.window_rows.clamp(min=0)], -1)[:real]
        expected = [[name(r, q) for q in range(t - W + 1, t + 1)] for r, t in tokens]
        assert torch.equal(seen, torch.tensor(expected, dtype=torch.int64).view(real, W))
        assert (meta.unpack is not None) == (self.geometry.row_format is RowFormat.FP8 and not meta.window_in_ring)
        if meta.unpack is not None:
            assert meta.unpack.window_rows.tolist() == list(range(len(rows)))
            assert meta.unpack.keys(1, W) == int((meta.window_rows[:real] >= 0).sum())
            assert len(meta.unpack.pages) == sum(len(self.pages[request]) for request in requests)
            assert meta.unpack.page_table.shape == meta.page_table.shape

        new = dict.fromkeys(requests, 0)
        for request, _ in tokens:
            new[request] += 1
        for ratio, plan in meta.compress.items():
            self._check_entries(ratio, meta, names, new)
            kept = plan.state_rows >= 0
            self.state[ratio][plan.state_rows[kept]] = names[kept]
            self._check_visible(ratio, meta, requests, tokens, padding)

    def _check_entries(self, ratio: int, meta: ForwardMetadata, names: Tensor, new: dict[int, int]) -> None:
        """Check that exactly the compression groups closed by this forward are compressed, once, from their rows."""
        plan, state = meta.compress[ratio], self.state[ratio]
        rows = torch.cat([state, names])
        sources = torch.where(plan.sources >= 0, rows[plan.sources.clamp(min=0).long()], -1)
        back = ratio if ratio == CSA_RATIO else 0
        expected = {}
        for request, count in new.items():
            begin = self.length[request]
            for t in range(begin, begin + count):
                if (t + 1) % ratio == 0:
                    first = t + 1 - ratio
                    row = int(self.req_to_token[self.slot[request], first]) // ratio
                    raw = [name(request, q) if q >= 0 else -1 for q in range(first - back, t + 1)]
                    expected[row] = (first, raw, name(request, first // ratio))
        stored = {}
        for row, position, raw in zip(
            plan.slots.tolist(), plan.entry_positions.tolist(), sources.tolist(), strict=True
        ):
            if row < entries_per_page(ratio):  # the null page: an open group, or a padding request's
                assert meta.window_in_ring
                assert set(raw) <= {-1, FORBIDDEN}
                continue
            assert row not in stored, f"two entries for row {row}"
            stored[row] = (position, raw)
        assert stored == {row: (position, raw) for row, (position, raw, _) in expected.items()}
        for row, (_, _, entry) in expected.items():
            self.entries[ratio][row] = entry

    def _check_visible(
        self, ratio: int, meta: ForwardMetadata, requests: list[int], tokens: list[tuple[int, int]], padding: int
    ) -> None:
        """Check that a token at t sees exactly entries j < (t+1)//r, each in the row given by the page table."""
        visible = meta.visible[ratio].tolist()
        assert visible[: len(tokens)] == [(t + 1) // ratio for _, t in tokens]
        if not meta.window_in_ring:
            assert visible[len(tokens) :] == [0] * padding
        per_page = entries_per_page(ratio)
        for b, request in enumerate(requests):
            most = max((t + 1) // ratio for r, t in tokens if r == request)
            j = torch.arange(most)
            expected = [name(request, i) for i in range(most)]
            rows = meta.page_table[b, j // per_page] * per_page + j % per_page
            assert self.entries[ratio][rows.long()].tolist() == expected
            if meta.unpack is not None:
                in_pages = self.entries[ratio].view(-1, per_page)[meta.unpack.pages.long()].flatten()
                rows = meta.unpack.page_table[b, j // per_page] * per_page + j % per_page
                assert in_pages[rows.long()].tolist() == expected
        if meta.unpack is not None:
            for limit in (3, 10**6):
                read = sum(min((t + 1) // ratio, limit) for _, t in tokens)
                assert meta.unpack.keys(ratio, limit) == read
