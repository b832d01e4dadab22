"""The attention backend without SGLang's runner and without a model: fake batches, random numbers for layers.

`Sequences` makes a request's tensors from its number and position alone, so that the same token is the same in any
batch. `Engine` runs them through pool and backend as a model's layers do. `poison_unreadable` writes NaN wherever no
live request may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from cache.simulation import Requests
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.compressor import compress
from dsv4_kernels.kv_layout import KVRows
from dsv4_radix_cache.ring import ring_row
from sglang_dsv4.attention.backend import Dsv4AttentionBackend, Window
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page, overlap_groups
from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.cache.tail_options import TailSizes
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, HCA_RATIO
from sglang_dsv4.prefix.pool_setup import new_ledger

HEADS, INDEX_HEADS, TOP_K = 2, 8, 8


@dataclass
class Inputs:
    """The inputs of one layer to the backend, for T tokens."""

    q: Tensor  # [T, HEADS, row_dim]
    kv: Tensor  # [T, row_dim]
    raw: Tensor  # [T, 2, C * row_dim] fp32: kv and score of the compressor
    index_q: Tensor  # [T, INDEX_HEADS, index_dim]
    index_weights: Tensor  # [T, INDEX_HEADS] fp32
    index_raw: Tensor  # [T, 2, C * index_dim] fp32


class Sequences:
    """Tensors of every token of every request, the same for all layers of a ratio."""

    def __init__(self, geometry: PoolGeometry, length: int, scale: float = 1.0) -> None:
        self.geometry, self.length, self.scale = geometry, length, scale
        self._made: dict[tuple[int, int], Inputs] = {}

    def _of(self, request: int, layer: int) -> Inputs:
        if (request, layer) not in self._made:
            g, generator = self.geometry, torch.Generator().manual_seed(1 + 1000 * request + layer)

            def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
                return (torch.randn(self.length, *shape, generator=generator) * self.scale).to(dtype)

            C = overlap_groups(g.ratios[layer])
            self._made[request, layer] = Inputs(
                q=normal(HEADS, g.row_dim, dtype=g.dtype),
                kv=normal(g.row_dim, dtype=g.dtype),
                raw=normal(2, C * g.row_dim),
                index_q=normal(INDEX_HEADS, g.index_dim, dtype=g.dtype),
                index_weights=normal(INDEX_HEADS),
                index_raw=normal(2, C * g.index_dim),
            )
        return self._made[request, layer]

    def of(self, layer: int, tokens: list[tuple[int, int]], padding: int = 0) -> Inputs:
        """Rows of (request, position) tokens; padding rows are ones."""

        def rows(field: str) -> Tensor:
            parts = [getattr(self._of(request, layer), field)[t] for request, t in tokens]
            parts += [torch.ones_like(getattr(self._of(0, layer), field)[0])] * padding
            return torch.stack(parts) if parts else getattr(self._of(0, layer), field)[:0]

        return Inputs(*(rows(field) for field in Inputs.__dataclass_fields__))


def sink_of(layer: int) -> Tensor:
    """[HEADS] fp32."""
    return torch.linspace(-1, 1, HEADS) + layer / 8


def stamp(entries: Tensor, positions: Tensor) -> Tensor:
    """A stand-in for RoPE: an entry with a wrong position gets a wrong value."""
    entries = entries.clone()
    entries[:, -1] += torch.sin(positions.float())
    return entries


class Engine(Requests):
    """Pool and backend, called as a model runner calls them."""

    def __init__(
        self,
        geometry: PoolGeometry,
        sequences: Sequences,
        slots: int = 6,
        pages: int = 12,
        context: int = 2048,
        tails: TailSizes | None = None,
    ) -> None:
        super().__init__(slots, pages, context)
        ledger = None if tails is None else new_ledger(geometry, tails)
        self.pool = Dsv4KVPool(
            geometry,
            full_tokens=pages * FULL_PAGE_TOKENS,
            request_slots=slots,
            device="cpu",
            tails=tails,
            ledger=ledger,
        )
        self.generation = torch.zeros(slots, dtype=torch.int64)
        table = SimpleNamespace(req_to_token=self.req_to_token, req_generation=self.generation)
        config = SimpleNamespace(num_attention_heads=HEADS, hf_config=SimpleNamespace(index_topk=TOP_K))
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, req_to_token_pool=table, device="cpu", model_config=config
        )
        with get_parallel().override(attn_tp_size=1):
            self.backend = Dsv4AttentionBackend(self.runner)
        self.geometry, self.sequences, self.slots = geometry, sequences, slots

    def reserve(self, request: int, tokens: int) -> None:
        """Reserve as `Requests` does; a new holder of a slot raises its generation, as in SGLang."""
        fresh = request not in self.slot
        super().reserve(request, tokens)
        if fresh:
            self.generation[self.slot[request]] += 1

    def batch(self, mode: ForwardMode, work: list[tuple[int, int]], padding: int = 0) -> SimpleNamespace:
        """A ForwardBatch's fields for (request, new tokens), and `padding` tokens (extend) or requests (else)."""
        for request, n in work:
            self.reserve(request, n)
        uniform = mode not in (ForwardMode.EXTEND, ForwardMode.MIXED)
        k = work[0][1] if work else 1
        extra = padding if uniform else 0
        slots = torch.tensor([self.slot[r] for r, _ in work] + [0] * extra, dtype=torch.int64)
        begin = [self.length[r] for r, _ in work] + [0] * extra
        counts = [n for _, n in work] + [k] * extra
        positions = [b + i for b, n in zip(begin, counts, strict=True) for i in range(n)]
        positions += [0] * (0 if uniform else padding)
        committed = mode is ForwardMode.TARGET_VERIFY
        seq_lens = torch.tensor([b + (0 if committed else n) for b, n in zip(begin, counts, strict=True)])
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(begin),
            req_pool_indices=slots,
            req_pool_indices_cpu=slots,
            seq_lens=seq_lens.long(),
            seq_lens_cpu=seq_lens.long(),
            positions=torch.tensor(positions, dtype=torch.int64),
            extend_prefix_lens_cpu=begin,
            extend_seq_lens_cpu=counts,
            spec_info=SimpleNamespace(draft_token_num=k, num_tokens_per_req=k),
        )

    def forward(
        self,
        mode: ForwardMode,
        work: list[tuple[int, int]],
        *,
        accept: list[int] | None = None,
        padding: int = 0,
        graph: bool = False,
    ) -> dict[tuple[int, int], Tensor]:
        """Run all layers for (request, new tokens) and return each token's outputs, stacked by layer."""
        batch = self.batch(mode, work, padding)
        if graph:
            view = SimpleNamespace(**vars(batch))
            if mode is ForwardMode.DRAFT_EXTEND_V2:
                del view.positions  # SGLang's view of a draft's extend step has none
            self.backend.init_forward_metadata_out_graph(view)
            self.backend.init_forward_metadata_in_graph(view)
        else:
            self.backend.init_forward_metadata(batch)
        tokens = [(r, self.length[r] + i) for r, n in work for i in range(n)]
        outputs = [
            self.layer(layer, tokens, batch.positions.shape[0] - len(tokens)) for layer in self.geometry.layers()
        ]
        for i, (request, n) in enumerate(work):
            self.length[request] += n if accept is None else accept[i]
        return {token: torch.stack([out[i] for out in outputs]) for i, token in enumerate(tokens)}

    def layer(self, layer: int, tokens: list[tuple[int, int]], padding: int = 0) -> Tensor:
        """Outputs [T, HEADS, row_dim] of a layer's calls of the backend."""
        backend, ratio, x = self.backend, self.geometry.layer_ratio(layer), self.sequences.of(layer, tokens, padding)
        window, selected = keep_window_rows(backend, layer, x.kv), None
        if ratio:
            keep_entries(backend, layer, x.raw, stamp)
        if ratio == CSA_RATIO:
            keep_entries(backend, layer, x.index_raw, stamp, indexer=True)
            selected = backend.select(layer, x.index_q, x.index_weights, TOP_K)
        return backend.attend(layer, x.q, window, selected, sink_of(layer), self.geometry.row_dim**-0.5)


def keep_window_rows(backend: Dsv4AttentionBackend, layer: int, kv: Tensor) -> Window:
    """Store window rows that are normed and rotated, as `norm_rope_store` does."""
    window = backend.window(layer)
    for table, rows in window.destinations:
        kept = rows >= 0
        table.scatter(rows[kept], kv[kept])
    return window


def keep_entries(
    backend: Dsv4AttentionBackend,
    layer: int,
    raw: Tensor,
    made: Callable[[Tensor, Tensor], Tensor],
    *,
    indexer: bool = False,
) -> None:
    """Store entries as `compress_store` does, with `made(entries, positions)` instead of norm and rotation.

    raw: [T, 2, C * D].
    """
    groups, storage = backend.groups(layer), backend.compressor_storage(layer, indexer=indexer)
    kv, score = raw[:, 0].contiguous(), raw[:, 1].contiguous()
    entries = compress(storage.state, kv, score, groups.sources, groups.ratio, storage.table.row_dim)
    closed = (groups.sources >= 0).any(1)
    storage.table.scatter(groups.slots[closed], made(entries, groups.entry_positions)[closed])
    kept = groups.state_rows >= 0
    storage.state[groups.state_rows[kept]] = raw[kept]
    if storage.overlap is not None:
        kept = groups.overlap_rows >= 0
        storage.overlap[groups.overlap_rows[kept]] = raw[kept, :, : storage.table.row_dim]


def poison(rows: KVRows | Tensor, keep: Tensor) -> None:
    """Write NaN into all rows but `keep`."""
    total = rows.num_rows if isinstance(rows, KVRows) else rows.shape[0]
    mask = torch.ones(total, dtype=torch.bool)
    mask[keep] = False
    if isinstance(rows, Tensor):
        rows[mask] = torch.nan
        return
    nan = KVRows.allocate(total, rows.format, rows.row_dim, rows.rope_dim, rows.storage.dtype, "cpu", fill=torch.nan)
    bad = mask.nonzero().flatten()
    rows.copy_rows(bad, nan, bad)


def poison_unreadable(engine: Engine) -> None:
    """Write NaN into every row that no live request may read before writing it (specification, section 3.6).

    A request with n tokens may read: the last W-1 window rows; n//r entries and keys; raw rows of its open
    compression group and, for CSA, of the group before. The null slot and the null page are poisoned too.
    """
    g, pool = engine.geometry, engine.pool
    live = [(engine.slot[r], engine.length[r]) for r in engine.slot]

    def ring(rows: int, first_of: dict[int, int]) -> Tensor:
        kept = [ring_row(s, t, rows) for s, n in live for t in range(first_of[s], n)]
        return torch.tensor(kept, dtype=torch.int64)

    for layer in g.layers():
        poison(pool.window(layer), ring(g.ring_rows, {s: max(0, n - g.window_tokens + 1) for s, n in live}))
        ratio = g.layer_ratio(layer)
        if not ratio:
            continue
        back = overlap_groups(ratio) - 1
        states = ring(g.state_rows(ratio), {s: max(0, (n // ratio - back) * ratio) for s, n in live})
        entries = [int(engine.req_to_token[s, j * ratio]) // ratio for s, n in live for j in range(n // ratio)]
        kept = torch.tensor(entries, dtype=torch.int64)
        poison(pool.entries(layer), kept)
        poison(pool.compressor_state(layer), states)
        if ratio == CSA_RATIO:
            poison(pool.index_keys(layer), kept)
            poison(pool.indexer_state(layer), states)


def dense_reference(sequences: Sequences, request: int, length: int) -> Tensor:
    """Outputs [layers, length, HEADS, row_dim] of a request by the specification's formulas: float64, no caches."""
    g = sequences.geometry
    return torch.stack([_dense_layer(sequences, request, length, layer) for layer in g.layers()])


def _dense_layer(sequences: Sequences, request: int, length: int, layer: int) -> Tensor:
    g = sequences.geometry
    ratio = g.layer_ratio(layer)
    x = sequences.of(layer, [(request, t) for t in range(length)])
    kv, q = x.kv.double(), x.q.double()
    entries = _dense_entries(x.raw.double(), ratio, g.row_dim) if ratio else kv[:0]
    keys = _dense_entries(x.index_raw.double(), ratio, g.index_dim) if ratio == CSA_RATIO else kv[:0]
    out = []
    for t in range(length):
        visible = list(range((t + 1) // ratio)) if ratio else []
        if ratio == CSA_RATIO and len(visible) > TOP_K:
            score = (x.index_q[t].double() @ keys[: len(visible)].T).relu() * x.index_weights[t].double()[:, None]
            score = score.sum(0).tolist()
            visible = sorted(visible, key=lambda j: (-score[j], j))[:TOP_K]  # among equal scores the lower entry first
        rows = torch.cat([kv[max(0, t - g.window_tokens + 1) : t + 1], entries[visible]])
        scores = q[t] @ rows.T * g.row_dim**-0.5
        weights = torch.cat([scores, sink_of(layer).double()[:, None]], dim=1).softmax(dim=1)[:, :-1]
        out.append(weights @ rows)
    return torch.stack(out)


def _dense_entries(raw: Tensor, ratio: int, dim: int) -> Tensor:
    entries = []
    for j in range(raw.shape[0] // ratio):
        own = raw[j * ratio : (j + 1) * ratio]
        rows = own if ratio == HCA_RATIO else own[..., dim:]
        if ratio == CSA_RATIO and j:
            rows = torch.cat([raw[(j - 1) * ratio : j * ratio, :, :dim], rows])
        entries.append((rows[:, 1].softmax(dim=0) * rows[:, 0]).sum(0))
    if not entries:
        return raw.new_zeros(0, dim)
    return stamp(torch.stack(entries), torch.arange(len(entries)) * ratio)


def snapshot_rows(engine: Engine, request: int, position: int) -> dict[str, slice]:
    """Ring rows of a tail at a page-aligned position: the last W window rows, and CSA's last 4 raw rows."""
    g, slot = engine.geometry, engine.slot[request]
    assert position % entries_per_page(1) == 0

    def span(rows: int, count: int) -> slice:
        first = ring_row(slot, position - count, rows)
        return slice(first, first + count)

    return {"window": span(g.ring_rows, g.window_tokens), "state": span(g.state_rows(CSA_RATIO), CSA_RATIO)}
