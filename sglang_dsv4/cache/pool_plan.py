"""Pool sizes: the plan of a pool to the byte, and the largest plan that fits into memory.

The plan is the list of tensors that the pool allocates. Its bytes are measured on meta tensors of the same shapes, so
no second formula can drift from the allocation: `PoolPlan.total_bytes` equals the pool's bytes.

Costs are of two kinds. A FULL token costs its share of entries and indexer keys; a request slot (running requests + the
null slot) costs its rings, which do not grow with the context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.kv_layout import ROW_BYTES, KVRows, RowFormat
from sglang_dsv4.cache.geometry import PoolGeometry, entries_per_page
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, FULL_PAGE_TOKENS, HCA_RATIO, WINDOW_TOKENS, LayerKind

# SGLang admits a request only if its tokens and a page more fit (PrefillAdder.add_one_req), and lets it generate only
# as many tokens as whole pages hold after its prompt and that page (max_new_tokens_for_memory): no request uses the
# last two pages.
ADMISSION_TOKENS = 2 * FULL_PAGE_TOKENS
MIN_FULL_TOKENS = ADMISSION_TOKENS + FULL_PAGE_TOKENS
PACKED_PAGES = "HCA pages for transfers"


@dataclass(frozen=True)
class PoolSpec:
    """One kind of tensor, the same for each of `layers`."""

    name: str
    layers: tuple[int, ...]
    rows: int  # per layer
    per: str  # "token", "request" or "tail": the unit that the rows grow with, as the table prints it
    rows_per_unit: float
    row_format: RowFormat | None  # None: raw compressor rows, fp32 [rows, 2, row_dim]
    row_dim: int
    rope_dim: int
    dtype: torch.dtype

    def allocate(self, device: str | torch.device, rows: int | None = None) -> KVRows | torch.Tensor:
        """The tensor of one layer, zero: null rows and rows never written stay finite."""
        rows = self.rows if rows is None else rows
        if self.row_format is None:
            return torch.zeros((rows, 2, self.row_dim), dtype=torch.float32, device=device)
        return KVRows.allocate(rows, self.row_format, self.row_dim, self.rope_dim, self.dtype, device, fill=0)

    def allocate_stack(self, device: str | torch.device) -> tuple[torch.Tensor, list[KVRows | torch.Tensor]]:
        """One zero tensor [layers, ...] for all layers, and each layer's part of it."""
        one = self.allocate("meta")
        storage = one.storage if isinstance(one, KVRows) else one
        stack = torch.zeros((len(self.layers), *storage.shape), dtype=storage.dtype, device=device)
        if isinstance(one, KVRows):
            return stack, [dataclasses.replace(one, storage=layer) for layer in stack]
        return stack, list(stack)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, padding included."""
        return self.allocate("meta").nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return self.layer_bytes * len(self.layers)

    @property
    def bytes_per_unit(self) -> float:
        """Marginal bytes of one more unit, over all layers (padding of 64-row pages included)."""
        return self.allocate("meta", rows=64).nbytes / 64 * self.rows_per_unit * len(self.layers)

    @property
    def format_name(self) -> str:
        """The row format as the table prints it."""
        return "fp32 raw" if self.row_format is None else self.row_format.name.lower()


@dataclass(frozen=True)
class PoolPlan:
    """The pools of a geometry for a number of FULL tokens and request slots.

    Attributes:
        full_tokens: tokens that SGLang may hand out, a multiple of 256. FULL page 0, the null page, is additional.
        request_slots: running requests + 1; slot 0 is the null slot.
        tail_slots: tail slots on the device, without the transit slot (`tail_memory`).
        pools: every kind of tensor that is allocated.
    """

    geometry: PoolGeometry
    full_tokens: int
    request_slots: int
    tail_slots: int
    pools: tuple[PoolSpec, ...]

    @classmethod
    def of(cls, geometry: PoolGeometry, full_tokens: int, request_slots: int, tail_slots: int = 0) -> PoolPlan:
        """The plan for `full_tokens`, `request_slots` and `tail_slots`; pools without layers are left out.

        If there are tail slots, one more is allocated: the transit slot of `tail_memory`.
        """
        if full_tokens % FULL_PAGE_TOKENS:
            raise ValueError(f"{full_tokens} tokens are not a multiple of the page of {FULL_PAGE_TOKENS}")
        g = geometry
        rows = {"row_dim": g.row_dim, "rope_dim": g.rope_dim, "dtype": g.dtype}
        draft_layers = tuple(range(g.draft_layers))

        def rings(name: str, layers: tuple[int, ...], count: int, **how: Any) -> PoolSpec:  # noqa: ANN401
            return PoolSpec(name, layers, request_slots * count, "request", count, **how)

        pools = [
            rings("window rings", g.layers(), g.ring_rows, row_format=g.row_format, **rows),
            rings("draft window rings", draft_layers, g.ring_rows, row_format=g.row_format, **rows),
        ]
        for ratio in g.compressed:
            kind, layers = LayerKind(ratio).name, g.layers(ratio)
            entries = (full_tokens + FULL_PAGE_TOKENS) // ratio
            pools.append(PoolSpec(f"{kind} entries", layers, entries, "token", 1 / ratio, g.row_format, **rows))
            state = {"row_format": None, "rope_dim": 0, "dtype": torch.float32}
            states = g.state_rows(ratio)
            dim = g.state_dim(ratio, indexer=False)
            pools.append(rings(f"{kind} compressor state", layers, states, row_dim=dim, **state))
            if ratio == CSA_RATIO:
                keys = {"row_format": g.index_format, "row_dim": g.index_dim, "rope_dim": 0, "dtype": g.dtype}
                pools.append(PoolSpec("indexer keys", layers, entries, "token", 1 / ratio, **keys))
                dim = g.state_dim(ratio, indexer=True)
                pools.append(rings("indexer compressor state", layers, states, row_dim=dim, **state))
        if g.packs_pages:
            pages, layers = full_tokens // FULL_PAGE_TOKENS + 1, g.layers(HCA_RATIO)
            of_bytes = {"row_dim": entries_per_page(HCA_RATIO) * ROW_BYTES, "rope_dim": 0, "dtype": torch.uint8}
            per_token = 1 / FULL_PAGE_TOKENS
            pools.append(PoolSpec(PACKED_PAGES, layers, pages, "token", per_token, RowFormat.PLAIN, **of_bytes))
        if tail_slots:
            pools += tail_specs(g, tail_slots + 1)
        return cls(geometry, full_tokens, request_slots, tail_slots, tuple(p for p in pools if p.layers))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the plan."""
        return sum(p.total_bytes for p in self.pools)

    @property
    def bytes_per_token(self) -> float:
        """Marginal bytes of one more FULL token."""
        return sum(p.bytes_per_unit for p in self.pools if p.per == "token")

    @property
    def bytes_per_request(self) -> float:
        """Marginal bytes of one more request slot."""
        return sum(p.bytes_per_unit for p in self.pools if p.per == "request")

    @property
    def bytes_per_tail(self) -> float:
        """Bytes of one tail."""
        return sum(p.bytes_per_unit for p in self.pools if p.per == "tail")

    def table(self) -> str:
        """The plan as a printed table."""
        units = {"token": self.bytes_per_token, "request": self.bytes_per_request}
        if self.tail_slots:
            units["tail"] = self.bytes_per_tail
        header = ("pool", "layers", "rows/layer", "format", "bytes", *(f"bytes/{unit}" for unit in units))
        lines = [header]
        for p in self.pools:
            cost = f"{p.bytes_per_unit:,.2f}".removesuffix(".00")
            each = tuple(cost if p.per == unit else "" for unit in units)
            lines.append((p.name, str(len(p.layers)), f"{p.rows:,}", p.format_name, f"{p.total_bytes:,}", *each))
        totals = (f"{cost:,.2f}" if unit == "token" else f"{cost:,.0f}" for unit, cost in units.items())
        lines.append(("total", "", "", "", f"{self.total_bytes:,}", *totals))
        widths = [max(len(line[c]) for line in lines) for c in range(len(header))]
        text = [
            "  ".join(line[c].ljust(w) if c in (0, 3) else line[c].rjust(w) for c, w in enumerate(widths))
            for line in lines
        ]
        tails = f"{self.tail_slots:,} tails, " if self.tail_slots else ""
        title = (
            f"DeepSeek-V4 pools: {self.full_tokens:,} tokens in pages of {FULL_PAGE_TOKENS}, "
            f"{self.request_slots - 1:,} requests, {tails}{format_bytes(self.total_bytes)}"
        )
        return "\n".join([title, *(line.rstrip() for line in text)])


def tail_specs(geometry: PoolGeometry, slots: int) -> tuple[PoolSpec, PoolSpec, PoolSpec, PoolSpec]:
    """The four tensors that hold `slots` tails (specification, section 3.6; `tail_memory`).

    The window rows of every layer; for a CSA layer's main and indexer compressor the raw rows of one compression group,
    whose first channel half the overlap needs; the window rows of a draft's layers.
    """
    g, csa = geometry, geometry.layers(CSA_RATIO)
    raw = {"row_format": None, "rope_dim": 0, "dtype": torch.float32}

    def part(name: str, layers: tuple[int, ...], count: int, **how: Any) -> PoolSpec:  # noqa: ANN401
        return PoolSpec(f"tail {name}", layers, slots * count, "tail", count, **how)

    rows = {"row_format": g.row_format, "row_dim": g.row_dim, "rope_dim": g.rope_dim, "dtype": g.dtype}
    return (
        part("windows", g.layers(), WINDOW_TOKENS, **rows),
        part("overlaps", csa, CSA_RATIO, row_dim=g.row_dim, **raw),
        part("indexer overlaps", csa, CSA_RATIO, row_dim=g.index_dim, **raw),
        part("draft windows", tuple(range(g.draft_layers)), WINDOW_TOKENS, **rows),
    )


def format_bytes(count: float) -> str:
    """The number of bytes with a binary unit and four significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def largest_plan(
    geometry: PoolGeometry,
    available_bytes: int,
    slots_for: Callable[[int], int],
    tails_for: Callable[[int, int], int] = lambda full_tokens, request_slots: 0,
) -> PoolPlan:
    """The plan with the most FULL tokens that fits in `available_bytes`.

    Args:
        slots_for: request slots for a number of FULL tokens; must not fall when the tokens grow.
        tails_for: tail slots for numbers of FULL tokens and request slots; must not fall either.

    Raises:
        ValueError: `MIN_FULL_TOKENS` do not fit; the message has the numbers and what to change.
    """

    def plan(pages: int) -> PoolPlan:
        tokens = pages * FULL_PAGE_TOKENS
        slots = slots_for(tokens)
        return PoolPlan.of(geometry, tokens, slots, tails_for(tokens, slots))

    smallest = plan(MIN_FULL_TOKENS // FULL_PAGE_TOKENS)
    if smallest.total_bytes > available_bytes:
        rings = smallest.bytes_per_request * smallest.request_slots
        tokens = smallest.total_bytes - rings
        fitting = int((available_bytes - tokens) // smallest.bytes_per_request) - 1
        advice = f"lower --max-running-requests to at most {fitting}, or " if fitting >= 1 else ""
        raise ValueError(
            f"DeepSeek-V4's KV pools do not fit into the {format_bytes(available_bytes)} that are left for them: "
            f"{smallest.request_slots} request slots (running requests + 1) need {format_bytes(rings)} "
            f"({format_bytes(smallest.bytes_per_request)} each) and the smallest number of tokens, {MIN_FULL_TOKENS}, "
            f"{format_bytes(tokens)}. To serve, {advice}raise --mem-fraction-static or free memory."
        )
    low = MIN_FULL_TOKENS // FULL_PAGE_TOKENS
    if not smallest.bytes_per_token:
        return smallest
    high = int(available_bytes // (smallest.bytes_per_token * FULL_PAGE_TOKENS)) + 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle).total_bytes <= available_bytes else (low, middle)
    return plan(low)
