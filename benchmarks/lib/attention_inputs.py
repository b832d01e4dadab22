"""Cases of the attention benchmark and their inputs, laid out as in a server.

A decode case is a batch of requests at one context length. A request has a ring of 128 window rows and a range of the
entry pool: context / 4 entries, of which a CSA layer reads 512 or 1,024 spread over the whole range in any order, or
context / 128, all of which an HCA layer reads through its page table. A prefill case is the last chunk of one request:
each token reads its own window row and the 127 rows before it in the chunk's workspace, and entries as above; their
pages, of 256 tokens, are in any order. Rows have the values of quantised Gaussian noise, the same in every row format.

Several sets of inputs, of different requests, are used in turn until they have touched SETS_OVER_L2 times the L2 cache,
so that no set finds its rows there. The entry pool is bounded (`Pools`); requests beyond the bound share rows with
earlier requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_kernels.kv_layout import PAGE_BYTES, PAGE_ROWS, ROW_BYTES, ROW_DIM, KVRows, RowFormat

WINDOW = 128
SCALE = ROW_DIM**-0.5
HCA_PAGE_ENTRIES = 2
"""Entries of a 256-token page at ratio 128."""
CSA_PAGE_ENTRIES = 64
"""Entries of a 256-token page at ratio 4."""
CONTEXTS = {"4k": 4 << 10, "32k": 32 << 10, "128k": 128 << 10, "1m": 1 << 20}
SETS_OVER_L2 = 2
MAX_SETS = 512
NOISE_ROWS = 16_384
"""Number of rows that are generated and quantised; pools repeat them."""


@dataclass(frozen=True)
class Case:
    """One row of the result's table."""

    prefill: bool
    kind: str
    """One of "swa", "csa512", "csa1024", "hca"."""
    context: int
    """Tokens of a request, the new ones included."""
    heads: int
    tokens: int
    """Requests of a decode batch, or tokens of a chunk."""
    fp8: bool = True

    @property
    def name(self) -> str:
        """Return the case's name, such as decode-csa512-32k-h64-b16 or prefill-hca-32k-h128-t512-bf16."""
        length = next((name for name, tokens in CONTEXTS.items() if tokens == self.context), str(self.context))
        parts = [self.kind] if self.kind == "swa" else [self.kind, length]
        if self.prefill:
            return "-".join(["prefill", *parts, f"h{self.heads}", f"t{self.tokens}", "fp8" if self.fp8 else "bf16"])
        return "-".join(["decode", *parts, f"h{self.heads}", f"b{self.tokens}"])

    @property
    def ratio(self) -> int:
        """Tokens of an entry; 0 in a layer without entries."""
        return {"swa": 0, "hca": 128}.get(self.kind, 4)

    @property
    def context_entries(self) -> int:
        """Number of entries that a request has."""
        return self.context // self.ratio if self.ratio else 0

    @property
    def page_entries(self) -> int:
        """Entries of a 256-token page."""
        return HCA_PAGE_ENTRIES if self.kind == "hca" else CSA_PAGE_ENTRIES

    @property
    def entries_read(self) -> int:
        """Number of entries that a token reads; in an HCA chunk, that the last token reads."""
        if self.kind.startswith("csa"):
            return min(int(self.kind.removeprefix("csa")), self.context_entries)
        return self.context_entries


def all_cases() -> list[Case]:
    """Return the cases of the full run. A sliding-window layer has one context, because its work does not depend on
    it."""
    kinds = [("swa", CONTEXTS["4k"])]
    kinds += [(kind, context) for kind in ("csa512", "csa1024", "hca") for context in CONTEXTS.values()]
    cases = [
        Case(False, kind, context, heads, batch)
        for (kind, context), heads, batch in itertools.product(kinds, (64, 128), (1, 4, 16, 64, 128, 256))
    ]
    cases += [
        Case(True, kind, CONTEXTS["32k"], heads, tokens, fp8)
        for fp8, kind, heads, tokens in itertools.product(
            (False, True), ("swa", "csa512", "csa1024", "hca"), (64, 128), (128, 512, 4096)
        )
    ]
    return cases


def few_heads_cases() -> list[Case]:
    """Return cases with 8 and 16 heads (ranks of tensor parallelism), and with 64 heads to compare with."""
    kinds = [("swa", "4k"), ("csa512", "32k"), ("csa1024", "32k"), ("hca", "32k"), ("hca", "1m")]
    heads = (64, 16, 8)
    cases = [
        Case(False, kind, CONTEXTS[context], h, batch)
        for (kind, context), batch, h in itertools.product(kinds, (1, 4, 16, 64, 128, 256), heads)
    ]
    chunks = itertools.product(("swa", "csa512", "hca"), (128, 4096), heads)
    return cases + [Case(True, kind, CONTEXTS["32k"], h, tokens) for kind, tokens, h in chunks]


def quick_cases() -> list[Case]:
    """Return cases of one context, with the smallest, middle and largest batch, and one chunk."""
    return [c for c in all_cases() if c.context in (4096, 32 << 10) and c.tokens in (1, 64, 256, 512)]


@dataclass
class Inputs:
    """Arguments of one attention call."""

    q: Tensor  # [T, H, 512] bf16
    window: KVRows
    window_rows: Tensor  # [T, 128] int32
    entries: KVRows | None
    entry_list: (
        Tensor | None
    )  # [T, K] int32: rows that a token reads, -1 after its last; HCA: the same rows as page_table
    page_table: Tensor | None  # HCA: [B, P] int32
    token_to_request: Tensor | None  # HCA: [T] int32
    visible: Tensor | None  # [T] int32
    sink: Tensor  # [H] fp32
    pages: Tensor | None = (
        None  # chunks with entries: [n] int32, all pages of the request, in units of page_entries rows
    )

    def arguments(self) -> dict[str, object]:
        """Return the keyword arguments of `dsv4_kernels.sparse_attention.sparse_attention`."""
        arguments = {
            "q": self.q,
            "window": self.window,
            "window_rows": self.window_rows,
            "entries": self.entries,
            "visible": self.visible,
            "sink": self.sink,
            "scale": SCALE,
        }
        if self.page_table is not None:
            dense = {"page_table": self.page_table, "token_to_request": self.token_to_request}
            return {**arguments, **dense, "entries_per_page": HCA_PAGE_ENTRIES}
        return {**arguments, "entry_indices": self.entry_list}

    def keys(self) -> int:
        """Return the number of rows that all tokens read in total, without holes."""
        return sum(int((rows >= 0).sum()) for rows in (self.window_rows, self.entry_list) if rows is not None)

    def flops(self) -> int:
        """Return the flops of Q·K and P·V over the rows that are read."""
        return 4 * self.q.shape[1] * ROW_DIM * self.keys()

    def bytes(self) -> int:
        """Return the least bytes to move: each distinct row once, q, the output, and the lists or the page table."""
        total = 2 * self.q.numel() * self.q.element_size() + 4 * self.window_rows.numel()
        named = self.entry_list if self.page_table is None else self.page_table
        total += 0 if named is None else 4 * named.numel()
        for table, rows in ((self.window, self.window_rows), (self.entries, self.entry_list)):
            if table is not None:
                total += int(rows[rows >= 0].unique().numel()) * table.row_bytes
        return total


class Pools:
    """Rows and queries that all cases share.

    Args:
        device: of all tensors.
        entry_bytes: upper bound of the FP8 entry pool.
        query_bytes: upper bound of the queries of one case, all its sets together.
    """

    def __init__(self, device: torch.device, entry_bytes: int, query_bytes: int, seed: int = 0) -> None:
        self.device = device
        self.random = torch.Generator(device).manual_seed(seed)
        noise = KVRows.allocate(NOISE_ROWS, RowFormat.FP8, ROW_DIM, 64, torch.bfloat16, device, 0.0)
        noise.scatter(torch.arange(NOISE_ROWS, device=device), self._noise(NOISE_ROWS, ROW_DIM))
        self._noise_pages = noise.storage
        self.plain_noise = noise.gather(torch.arange(NOISE_ROWS, device=device)).bfloat16()
        self.window = self._repeated(max(NOISE_ROWS, min(1 << 17, entry_bytes // ROW_BYTES)))
        self.entries = self._repeated(max(NOISE_ROWS, entry_bytes // ROW_BYTES))
        self._queries = torch.empty(query_bytes // 2, dtype=torch.bfloat16, device=device)
        step = 1 << 26
        for begin in range(0, len(self._queries), step):
            part = self._queries[begin : begin + step]
            part.copy_(self._noise(len(part)))

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device) / 3

    def _repeated(self, num_rows: int) -> KVRows:
        pages = num_rows // PAGE_ROWS
        storage = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=self.device)
        for begin in range(0, pages, len(self._noise_pages)):
            part = storage[begin : begin + len(self._noise_pages)]
            part.copy_(self._noise_pages[: len(part)])
        return KVRows(storage, RowFormat.FP8, pages * PAGE_ROWS, ROW_DIM, 64)

    def queries(self, sets: int, tokens: int, heads: int) -> Tensor:
        """Return queries [sets, tokens, heads, 512] bf16."""
        needed = sets * tokens * heads * ROW_DIM
        if needed > len(self._queries):
            raise ValueError(f"{sets} sets of queries [{tokens}, {heads}, {ROW_DIM}] need {2 * needed:,} bytes")
        return self._queries[:needed].view(sets, tokens, heads, ROW_DIM)


def number_of_sets(case: Case, l2_bytes: int) -> int:
    """Return how many sets of inputs touch SETS_OVER_L2 times the L2 cache, counting the least that a set touches."""
    row_bytes = ROW_BYTES if case.fp8 else 2 * ROW_DIM
    if case.prefill:
        rows = case.tokens + WINDOW + min(case.context_entries, case.tokens * case.entries_read)
    else:
        rows = case.tokens * (WINDOW + case.entries_read)
    touched = rows * row_bytes + 4 * case.tokens * case.heads * ROW_DIM
    return min(MAX_SETS, max(2, math.ceil(SETS_OVER_L2 * l2_bytes / touched) + 1))


def build(case: Case, pools: Pools, sets: int) -> list[Inputs]:
    """Return `sets` sets of inputs of a case."""
    queries = pools.queries(sets, case.tokens, case.heads)
    sink = torch.randn(case.heads, generator=pools.random, device=pools.device)
    make = _prefill_set if case.prefill else _decode_set
    return [replace(make(case, pools, index), q=queries[index], sink=sink) for index in range(sets)]


def _decode_set(case: Case, pools: Pools, index: int) -> Inputs:
    device, B = pools.device, case.tokens
    request = torch.arange(index * B, (index + 1) * B, device=device)[:, None]
    ring = request % (pools.window.num_rows // WINDOW)
    window_rows = ring * WINDOW + (torch.arange(WINDOW, device=device) + case.context) % WINDOW
    made = Inputs(None, pools.window, window_rows.int(), None, None, None, None, None, None)
    if not case.ratio:
        return made
    visible = torch.full((B,), case.entries_read, dtype=torch.int32, device=device)
    if case.kind == "hca":
        pages = -(-case.context_entries // HCA_PAGE_ENTRIES)
        first = request * pages % (pools.entries.num_rows // HCA_PAGE_ENTRIES - pages)
        return _with_pages(made, pools.entries, first + torch.arange(pages, device=device), None, visible)
    first = request * case.context_entries % max(1, pools.entries.num_rows - case.context_entries)
    listed = first + _picked(case.entries_read, case.context_entries, B, pools)
    return replace(made, entries=pools.entries, entry_list=listed.int(), visible=visible)


def _prefill_set(case: Case, pools: Pools, index: int) -> Inputs:
    """Return a chunk's inputs. The window is the chunk's workspace; window and entries are adjacent in one table of
    rows."""
    device, T = pools.device, case.tokens
    workspace = -(-(T + WINDOW - 1) // PAGE_ROWS) * PAGE_ROWS
    entry_rows = -(-case.context_entries // PAGE_ROWS) * PAGE_ROWS
    if case.fp8:
        window = _pages_of(pools.window, index, workspace)
        entries = _pages_of(pools.entries, index, entry_rows)
    else:
        picked = torch.arange(workspace + entry_rows, device=device) % NOISE_ROWS
        window, entries = split_plain(pools.plain_noise[picked], workspace)
    token = torch.arange(T, device=device)[:, None]
    window_rows = token + torch.arange(WINDOW, device=device)
    made = Inputs(None, window, window_rows.int(), None, None, None, None, None, None)
    if not case.ratio:
        return made
    visible = (case.context - T + token[:, 0] + 1) // case.ratio
    per_page = case.page_entries
    pages = torch.randperm(entry_rows // per_page, generator=pools.random, device=device)
    pages = pages[: -(-case.context_entries // per_page)]
    made = replace(made, pages=pages.int())
    if case.kind == "hca":
        request = torch.zeros(T, dtype=torch.int32, device=device)
        return _with_pages(made, entries, pages[None], request, visible.int())
    fewest = int(visible[0])
    listed = _picked(min(case.entries_read, fewest), fewest, T, pools)
    rows = pages[listed // per_page] * per_page + listed % per_page
    lengths = torch.full((T,), listed.shape[1], dtype=torch.int32, device=device)
    return replace(made, entries=entries, entry_list=rows.int(), visible=lengths)


def _with_pages(
    made: Inputs, entries: KVRows, page_table: Tensor, token_to_request: Tensor | None, visible: Tensor
) -> Inputs:
    if token_to_request is None:
        token_to_request = torch.arange(len(visible), dtype=torch.int32, device=visible.device)
    entry = torch.arange(int(visible.max()), device=visible.device)
    rows = page_table[token_to_request.long()][:, entry // HCA_PAGE_ENTRIES] * HCA_PAGE_ENTRIES
    rows = (rows + entry % HCA_PAGE_ENTRIES).masked_fill_(entry >= visible[:, None], -1)
    return replace(
        made,
        entries=entries,
        entry_list=rows.int(),
        page_table=page_table.int(),
        token_to_request=token_to_request,
        visible=visible,
    )


def _picked(count: int, available: int, tokens: int, pools: Pools) -> Tensor:
    """Return [tokens, count] int64: `count` distinct numbers below `available`, spread over the range, in any order."""
    edges = torch.arange(count + 1, device=pools.device) * available // count  # one pick from each of `count` stretches
    draw = torch.rand(2, tokens, count, generator=pools.random, device=pools.device)
    picks = edges[:-1] + (draw[0] * edges.diff()).long().clamp_(max=edges.diff() - 1)
    return picks.gather(1, draw[1].argsort(1))


def _pages_of(pool: KVRows, index: int, num_rows: int) -> KVRows:
    """Return a range of a pool as a table of its own, a different range for each set."""
    pages, available = num_rows // PAGE_ROWS, len(pool.storage)
    if pages > available:
        raise ValueError(f"a table of {num_rows:,} rows does not fit into a pool of {pool.num_rows:,}")
    first = index * pages % max(1, available - pages + 1)
    return replace(pool, storage=pool.storage[first : first + pages], num_rows=num_rows)


def split_plain(storage: Tensor, window_rows: int) -> tuple[KVRows, KVRows]:
    """Split one table of plain rows into window rows [0, window_rows) and the entries after them."""
    parts = storage[:window_rows], storage[window_rows:]
    window, entries = (KVRows(part, RowFormat.PLAIN, len(part), ROW_DIM, 64) for part in parts)
    return window, entries


def unpacked(case: Case, inputs: Inputs, storage: Tensor) -> Inputs:
    """Return the chunk's inputs over bf16 rows [window | the request's pages] in `storage`, with lists renumbered for
    it.

    Args:
        storage: [at least unpacked_rows(case), 512] bf16, which the caller fills.
    """
    window, entries = split_plain(storage[: unpacked_rows(case)], case.tokens + WINDOW - 1)
    if inputs.pages is None:
        return replace(inputs, window=window)
    per_page, pages = case.page_entries, inputs.pages.long()
    place = torch.empty(int(pages.max()) + 1, dtype=torch.int64, device=pages.device)
    place[pages] = torch.arange(len(pages), device=pages.device)
    listed = inputs.entry_list.long()
    rows = torch.where(listed >= 0, place[listed // per_page] * per_page + listed % per_page, -1)
    return replace(
        inputs,
        window=window,
        entries=entries,
        entry_list=rows.int(),
        page_table=None if inputs.page_table is None else place[inputs.page_table.long()].int(),
        pages=None,
    )


def unpacked_rows(case: Case) -> int:
    """Return the number of rows that a chunk may read: its workspace and whole pages of entries."""
    entries = -(-case.context_entries // case.page_entries) * case.page_entries if case.ratio else 0
    return case.tokens + WINDOW - 1 + entries


def checked_tokens(inputs: Inputs) -> Iterator[int]:
    """Yield up to four tokens, the first and the last among them."""
    last = inputs.q.shape[0] - 1
    yield from sorted({0, last // 3, 2 * last // 3, last})


def exact(inputs: Inputs, token: int) -> Tensor:
    """Return the output [H, 512] of one token in fp64."""
    parts = []
    for table, rows in ((inputs.window, inputs.window_rows), (inputs.entries, inputs.entry_list)):
        if table is not None:
            named = rows[token]
            parts.append(table.gather(named[named >= 0]).double())
    keys = torch.cat(parts)
    scores = inputs.q[token].double() @ keys.T * SCALE
    total = torch.logaddexp(scores.logsumexp(1), inputs.sink.double())
    return torch.exp(scores - total[:, None]) @ keys
