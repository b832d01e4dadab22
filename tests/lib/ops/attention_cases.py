"""Adversarial cases of the sparse attention as data, and their tensors. `ops.attention_check` bounds a kernel's error.

    case = build(CASES["csa_512-fp8"], device="cuda")
    out = case.run(impl="sm90")         # first: recycled memory must not hold the right answer
    check(case, out)

Every table is NaN except in rows that a token reads, and lists hold invalid numbers where they must not be read: a
kernel that reads a wrong row, or another token's row, gives NaN or a wrong value. No tensor is contiguous: rows of q,
pages of either table and lists each have their own gaps. Sinks weigh about as much as all keys together. All random
numbers come from the CPU, so a case has the same contents on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from ops.memory_layout import BEYOND_BYTES, NONSENSE, sparse, strided
from torch import Tensor

from dsv4_kernels.kv_layout import NOPE_DIM, PAGE_ROWS, ROW_DIM, SCALE_GROUP, KVRows, RowFormat
from dsv4_kernels.sparse_attention import sparse_attention
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.unpack import Pages

INF = float("inf")
Q_GAPS = (0, 1, 8)
"""Gap in heads, and in channels after every head: rows of q must begin at multiples of 16 bytes."""
PAGE_GAP_BYTES = {"window": 48, "entries": 176}
"""Gap after a page (FP8) or a row (PLAIN)."""
LIST_GAPS = {"window_rows": (0, 5), "entry_indices": (0, 3), "page_table": (0, 2)}
EXTREME_SCALES = (0, 1, 64, 127, 190, 253, 254)
"""Scale bytes of the seven groups in `scales="extreme"`: 2**-127, ..., 1, ..., 2**127."""


@dataclass(frozen=True)
class Spec:
    """One case. Token t has the lengths at index t modulo their number."""

    tokens: int = 3
    heads: int = 64
    window: int = 128
    """Width of the window lists; live slots are at their end, as at the beginning of a sequence."""
    window_lengths: tuple[int, ...] = (128,)
    entry_lengths: tuple[int, ...] = ()
    """Entries that a token reads; () for a layer without entries."""
    entries: int = 0
    """Width of the entry lists; 0: the longest length."""
    dense: bool = False
    """Entries come through a page table instead of a list."""
    entries_per_page: int = 2
    tokens_per_request: int = 1
    visible: bool = True
    """A list is cut by `visible` and continues with invalid numbers; otherwise it has holes."""
    holes: float = 0.0
    """Share of live slots of lists that are holes."""
    repeats: bool = False
    """A few rows fill the lists many times."""
    fp8: bool = True
    scales: str = "usual"
    sink: float | str | None = "random"
    """"random", "mixed" (finite, huge and infinite ones), a value for all heads, or None."""
    q_layout: str = "gaps"
    q_scale: float = 1.0
    magnitude: float = 1.0
    """Magnitude of rows; q is divided by it."""
    split_keys: int | None = None


LENGTHS = (0, 1, 127, 128, 129)
_BOTH_FORMATS = {
    # Window only
    **{f"window_{n}": Spec(window=n, window_lengths=(n,)) for n in (1, 127, 128, 129)},
    "window_lengths": Spec(tokens=5, window=129, window_lengths=LENGTHS),
    "start_of_sequence": Spec(tokens=9, window_lengths=(1, 2, 3, 4, 5, 6, 7, 8, 9), tokens_per_request=9),
    # Lists
    "list_lengths": Spec(tokens=5, entry_lengths=LENGTHS),
    "list_lengths_as_holes": Spec(tokens=5, entry_lengths=LENGTHS, visible=False),
    "lengths_of_both": Spec(tokens=25, window=129, window_lengths=LENGTHS, entry_lengths=(0,) * 5 + LENGTHS * 4),
    "no_entry_visible": Spec(entry_lengths=(0,), entries=512),
    "empty_list": Spec(entry_lengths=(0,), visible=False),
    "holes": Spec(tokens=5, entry_lengths=(512, 300), holes=0.4),
    "mostly_holes": Spec(tokens=5, entry_lengths=(512,), holes=0.97),
    "repeats": Spec(entry_lengths=(512,), repeats=True),
    "keys_256": Spec(entry_lengths=(128,)),
    "keys_384": Spec(entry_lengths=(256,)),
    # Dense
    "dense_lengths": Spec(tokens=5, entry_lengths=LENGTHS, dense=True),
    "dense_pages_of_64": Spec(tokens=4, entry_lengths=(63, 64, 65, 200), dense=True, entries_per_page=64),
    "dense_one_request": Spec(tokens=6, entry_lengths=(30, 30, 31, 31, 31, 32), dense=True, tokens_per_request=6),
    # As served
    "csa_512": Spec(tokens=2, entry_lengths=(512,)),
    "csa_1024": Spec(tokens=2, heads=128, entry_lengths=(1024,)),
    "hca_32k": Spec(tokens=3, heads=128, entry_lengths=(256, 255, 250), dense=True),
    "hca_1m": Spec(tokens=2, entry_lengths=(8192, 8191), dense=True),
    "hca_1m_split": Spec(tokens=2, entry_lengths=(8192, 8065), dense=True, split_keys=512),
    "speculation": Spec(tokens=12, entry_lengths=(500, 500, 501, 501), entries=512, tokens_per_request=4),
    "odd_batch": Spec(tokens=7, heads=8, entry_lengths=(17, 512, 300), entries=512),
    "more_tokens_than_sms": Spec(tokens=133, heads=16, window_lengths=(128, 5), entry_lengths=(3, 0, 140)),
    # Heads
    **{f"heads_{h}": Spec(tokens=2, heads=h, entry_lengths=(130,)) for h in (1, 8, 16, 24, 32, 63, 65, 127, 128)},
    # Sinks
    "only_the_sink": Spec(tokens=3, window_lengths=(0,), entry_lengths=(0,), entries=128),
    "nothing_at_all": Spec(tokens=3, window_lengths=(0,), entry_lengths=(0,), entries=128, sink=None),
    "one_of_three_has_nothing": Spec(tokens=3, window_lengths=(128, 0, 7), entry_lengths=(64, 0, 200), sink=None),
    "no_sink": Spec(entry_lengths=(100,), sink=None),
    "sink_plus_inf": Spec(entry_lengths=(100,), sink=INF),
    "sink_minus_inf": Spec(window_lengths=(3,), entry_lengths=(2,), sink=-INF),
    "sinks_mixed": Spec(tokens=4, window_lengths=(128, 0), entry_lengths=(100, 100, 0, 0), sink="mixed"),
    # Scores and q
    "large_scores": Spec(entry_lengths=(300,), q_scale=300.0),
    "large_scores_split": Spec(entry_lengths=(700,), q_scale=300.0, split_keys=128),
    "zero_scores": Spec(entry_lengths=(300,), q_scale=0.0),
    "q_contiguous": Spec(entry_lengths=(64,), q_layout="contiguous"),
    "q_rows_of_a_wider_tensor": Spec(entry_lengths=(64,), q_layout="wider"),
    "q_heads_first": Spec(entry_lengths=(64,), q_layout="heads_first"),
    "q_unaligned": Spec(entry_lengths=(64,), q_layout="unaligned"),
    "q_same_for_all_tokens": Spec(entry_lengths=(64,), q_layout="expanded"),
    # KV splits
    **{
        f"split_{n}": Spec(
            tokens=8,
            window_lengths=(128, 128, 128, 3),
            entry_lengths=(0, 1, 128, 129, 512, 640, 1000, 1024),
            split_keys=n,
        )
        for n in (128, 256, 384, 512, 1024)
    },
    "split_with_a_kv_split_of_holes": Spec(entry_lengths=(512,), holes=0.99, window_lengths=(0,), split_keys=128),
    "split_of_nothing": Spec(window_lengths=(0,), entry_lengths=(0, 1, 0), entries=512, split_keys=128),
    "split_128_heads": Spec(heads=128, entry_lengths=(1024, 640, 2), split_keys=256),
    "split_8_heads": Spec(tokens=5, heads=8, entry_lengths=(1024, 640, 2), split_keys=128, sink="mixed"),
    "split_in_40_kv_splits": Spec(tokens=1, heads=8, entry_lengths=(4900,), dense=True, split_keys=128),
    "sub_splits": Spec(tokens=2, entry_lengths=(512, 300), split_keys=1280),
    "whole_tokens_of_kv_splits": Spec(tokens=3, heads=65, entry_lengths=(1300,), split_keys=512),
    "sub_splits_of_kv_splits": Spec(tokens=1, heads=65, entry_lengths=(2900,), split_keys=640),
    # Maxima grow by some 2**30 from the window to the entries: without rescaled weights O would overflow
    "large_values": Spec(tokens=4, window_lengths=(1,), entry_lengths=(512,), q_scale=8.0, magnitude=2.0**105),
}
CASES: dict[str, Spec] = {
    f"{name}-{'fp8' if fp8 else 'bf16'}": replace(spec, fp8=fp8)
    for name, spec in _BOTH_FORMATS.items()
    for fp8 in (True, False)
} | {"scales_at_the_extremes-fp8": Spec(window_lengths=(20,), entry_lengths=(40, 3, 0), scales="extreme")}
"""Cases by name, small enough for a CPU; `csa_1024`, `hca_1m` and `more_tokens_than_sms` are the long ones."""


@dataclass
class Case:
    """Arguments of one call, and the rows that each token reads."""

    spec: Spec
    q: Tensor  # [T, H, 512] bf16
    window: KVRows
    window_rows: Tensor  # [T, W] int32
    entries: KVRows | None
    entry_arguments: dict[str, Tensor | int]
    """entry_indices and visible, or page_table, entries_per_page, token_to_request and visible."""
    sink: Tensor | None
    read_entries: Tensor | None  # [T, n] int64: the entries that a token reads, -1 for none
    scale: float = ROW_DIM**-0.5

    def arguments(self) -> dict[str, object]:
        """Return the keyword arguments of `sparse_attention`."""
        return {
            "q": self.q,
            "window": self.window,
            "window_rows": self.window_rows,
            "entries": self.entries,
            **self.entry_arguments,
            "sink": self.sink,
            "scale": self.scale,
            "split_keys": self.spec.split_keys,
        }

    def problem(self, out: Tensor | None = None) -> Problem:
        """Return the problem that the op hands to a kernel, with its output, for kernels that are called without the
        registry."""
        given = {"entries_per_page": 0, **self.arguments()}
        tables = ("q", "window", "window_rows", "entries", "entry_indices", "page_table", "entries_per_page")
        rest = ("token_to_request", "visible", "sink")
        options = {name: given[name] for name in ("scale", "split_keys")}
        return Problem.of(*(given.get(name) for name in (*tables, *rest)), out=out, **options)

    def run(self, **overrides: object) -> Tensor:
        """Return the public function's result."""
        return sparse_attention(**{**self.arguments(), **overrides})

    def unpacked(self, unpack: Callable[[list[Pages], Tensor], object]) -> Case:
        """Return the case over bf16 rows, which `unpack(parts, out)` makes from the FP8 rows."""

        def plain(table: KVRows, name: str) -> KVRows:
            pages = torch.arange(len(table.storage), dtype=torch.int32, device=table.device)
            shape = (PAGE_ROWS * len(pages), ROW_DIM)
            out = _with_gaps(torch.full(shape, float("nan"), dtype=torch.bfloat16), name, table.device)
            unpack([Pages(table, pages, PAGE_ROWS)], out)
            return KVRows(out, RowFormat.PLAIN, len(out), ROW_DIM, table.rope_dim)

        return replace(
            self,
            spec=replace(self.spec, fp8=False),
            window=plain(self.window, "window"),
            entries=None if self.entries is None else plain(self.entries, "entries"),
        )

    def spread(self, num_bytes: int = BEYOND_BYTES) -> Case:
        """Return the case over tables of at least `num_bytes`, with its pages spread over them and arbitrary bytes
        between."""
        window, step = _spread(self.window, num_bytes)
        spread = replace(self, window=window, window_rows=_moved(self.window_rows, step))
        if self.entries is None:
            return spread
        entries, step = _spread(self.entries, num_bytes)
        name, rows = ("page_table", self.spec.entries_per_page) if self.spec.dense else ("entry_indices", 1)
        listed = _moved(self.entry_arguments[name], step, rows)
        return replace(
            spread,
            entries=entries,
            entry_arguments={**self.entry_arguments, name: listed},
            read_entries=_moved(self.read_entries, step),
        )

    def take(self, tokens: list[int]) -> Case:
        """Return the case for these tokens only, in this order; a token may be repeated."""
        index = torch.tensor(tokens, device=self.q.device)
        by_token = {
            name: _as_list(value[index], name) if name in ("entry_indices", "visible", "token_to_request") else value
            for name, value in self.entry_arguments.items()
        }
        return replace(
            self,
            q=strided(self.q[index], *Q_GAPS),
            window_rows=_as_list(self.window_rows[index], "window_rows"),
            entry_arguments=by_token,
            read_entries=None if self.read_entries is None else self.read_entries[index],
        )


def build(spec: Spec, device: str | torch.device = "cpu", seed: int = 0) -> Case:
    """Return the tensors of a case."""
    generator = torch.Generator().manual_seed(seed)
    T, H = spec.tokens, spec.heads
    lengths = _by_token(spec.window_lengths, T)
    live = torch.arange(spec.window) >= spec.window - lengths[:, None]
    window_rows, window_slots = _random_rows(live, spec, generator)
    read, entry_arguments, entry_slots = None, {}, 0
    if spec.entry_lengths:
        visible = _by_token(spec.entry_lengths, T)
        width = max(spec.entries, max(spec.entry_lengths))
        readable = torch.arange(width) < visible[:, None]
        if spec.dense:
            read, entry_arguments, entry_slots = _dense(spec, visible, readable, generator)
        else:
            read, entry_slots = _random_rows(readable, spec, generator)
            listed = read.clone()
            if spec.visible:
                listed[~readable] = torch.where(
                    torch.arange(int((~readable).sum())) % 2 == 0, NONSENSE, entry_slots - 1
                )
                entry_arguments["visible"] = visible.int()
            entry_arguments["entry_indices"] = listed.int()
    case = Case(
        spec=spec,
        q=_q(spec, torch.randn(T, H, ROW_DIM, generator=generator)).to(device),
        window=_table("window", window_slots, window_rows, spec, generator, device),
        window_rows=_as_list(window_rows.int(), "window_rows", device),
        entries=_table("entries", entry_slots, read, spec, generator, device) if spec.entry_lengths else None,
        entry_arguments={k: _as_list(v, k, device) if isinstance(v, Tensor) else v for k, v in entry_arguments.items()},
        sink=_sink(spec, generator, device),
        read_entries=None if read is None else read.to(device),
    )
    case.q = _with_layout(case.q, spec.q_layout)
    return case


def _by_token(lengths: tuple[int, ...], tokens: int) -> Tensor:
    return torch.tensor([lengths[t % len(lengths)] for t in range(tokens)])


def _random_rows(live: Tensor, spec: Spec, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return rows in random order where `live` [T, n] is set, else -1; and the number of rows of their table, whose
    last row is not named."""
    num_rows = 2 * live.numel() + 65
    if spec.repeats:
        rows = torch.randint(0, 5, live.shape, generator=generator) * 7
    else:
        rows = torch.randperm(num_rows - 1, generator=generator)[: live.numel()].view(live.shape)
    rows[~live | (torch.rand(live.shape, generator=generator) < spec.holes)] = -1
    return rows, num_rows


def _dense(
    spec: Spec, visible: Tensor, readable: Tensor, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor | int], int]:
    per_page, width = spec.entries_per_page, readable.shape[1]
    request = torch.arange(spec.tokens) // spec.tokens_per_request
    shape = (int(request[-1]) + 1, -(-width // per_page) + 2)
    pages = torch.randperm(2 * shape[0] * shape[1], generator=generator)[: shape[0] * shape[1]].view(shape)
    entry = torch.arange(width)
    rows = pages[request][:, entry // per_page] * per_page + entry % per_page
    longest = torch.zeros(shape[0], dtype=torch.int64).scatter_reduce(0, request, visible, "amax")
    unused = torch.arange(shape[1]) >= -(-longest[:, None] // per_page)
    arguments = {
        "page_table": pages.masked_fill(unused, NONSENSE).int(),
        "entries_per_page": per_page,
        "token_to_request": request.int(),
        "visible": visible.int(),
    }
    return rows.masked_fill(~readable, -1), arguments, 2 * shape[0] * shape[1] * per_page


def _as_list(x: Tensor, name: str, device: str | torch.device | None = None) -> Tensor:
    """Return x with the gaps of the list of this name; lengths have no gaps."""
    return strided(x, *LIST_GAPS.get(name, (0,)), device=device)


def _with_gaps(storage: Tensor, name: str, device: str | torch.device) -> Tensor:
    """Return pages or rows with the gaps of the table of this name."""
    return strided(storage, 0, PAGE_GAP_BYTES[name] // storage.element_size(), device=device)


def _spread(table: KVRows, num_bytes: int) -> tuple[KVRows, int]:
    """Return a table of `num_bytes` bytes, and the step: page p (or 64 plain rows, range p) has moved to page p *
    step."""
    storage, unit = table.storage, 1 if table.format is RowFormat.FP8 else PAGE_ROWS
    pages = -(-len(storage) // unit)
    step = -(-num_bytes // ((pages - 1) * unit * storage.stride(0) * storage.element_size()))
    shape = (((pages - 1) * step + 1) * unit, storage.shape[1])
    large = sparse(shape, storage.stride(), storage.dtype, storage.device)
    for page in range(pages):
        part = storage[page * unit : (page + 1) * unit]
        large[page * step * unit : page * step * unit + len(part)] = part
    return replace(table, storage=large, num_rows=len(large) * PAGE_ROWS // unit), step


def _moved(listed: Tensor, step: int, rows_per_number: int = 1) -> Tensor:
    """Return rows, or numbers of pages of `rows_per_number` rows, renumbered for a table that was spread."""
    numbers = PAGE_ROWS // rows_per_number
    exists = (listed >= 0) & (listed != NONSENSE)
    moved = torch.where(exists, listed // numbers * step * numbers + listed % numbers, listed)
    return strided(moved, 0, listed.stride(0) - listed.shape[1])


def _table(
    name: str, num_rows: int, read: Tensor, spec: Spec, generator: torch.Generator, device: str | torch.device
) -> KVRows:
    """Return a table that is random in the rows of `read` and NaN elsewhere."""
    format = RowFormat.FP8 if spec.fp8 else RowFormat.PLAIN
    rows = KVRows.allocate(num_rows, format, ROW_DIM, 64, torch.bfloat16, "cpu", float("nan"))
    named = read[read >= 0].unique()
    rows.scatter(named, (torch.randn(len(named), ROW_DIM, generator=generator) * spec.magnitude).bfloat16())
    if spec.scales == "extreme":
        _set_extreme_scales(rows, named, generator)
    return replace(rows, storage=_with_gaps(rows.storage, name, device))


def _set_extreme_scales(rows: KVRows, named: Tensor, generator: torch.Generator) -> None:
    """Set codes and scales that bf16 holds exactly, far from its limits: small codes with large scales."""
    data, scales = rows._split_pages()
    page, place = named // 64, named % 64
    signs = torch.randint(0, 2, (len(named), NOPE_DIM), generator=generator) * 128
    steps = torch.randint(1, 8, (len(named), NOPE_DIM), generator=generator)  # subnormal codes: multiples of 2**-9
    small_scale = torch.arange(NOPE_DIM) // SCALE_GROUP < 3
    normal = (9 << 3) + steps  # 4 * (1 + step / 8)
    data[page, place, :NOPE_DIM] = (torch.where(small_scale, normal, steps) + signs).to(torch.uint8)
    scales[page, place] = torch.tensor([*EXTREME_SCALES, 0xFF], dtype=torch.uint8)


def _q(spec: Spec, q: Tensor) -> Tensor:
    if spec.scales == "extreme":  # each group contributes scores of order one
        for group, byte in enumerate(EXTREME_SCALES):
            typical = 2.0 ** (byte - 127) * (6.0 if group < 3 else 2.0**-7)
            q[..., group * SCALE_GROUP : (group + 1) * SCALE_GROUP] /= typical
    return (q * spec.q_scale / spec.magnitude).bfloat16()


def _with_layout(q: Tensor, layout: str) -> Tensor:
    """Return the same values with other strides; gaps are NaN."""
    T, H, D = q.shape
    if layout == "contiguous":
        return q
    if layout == "gaps":
        return strided(q, *Q_GAPS)
    wide = torch.full((T, H, 3 * D + 24), float("nan"), dtype=q.dtype, device=q.device)
    if layout == "expanded":
        return q[:1].expand(T, H, D)
    if layout == "heads_first":
        return q.transpose(0, 1).contiguous().transpose(0, 1)
    begin = {"wider": D + 8, "unaligned": D + 3}[layout]
    view = wide[..., begin : begin + D]
    view.copy_(q)
    return view


def _sink(spec: Spec, generator: torch.Generator, device: str | torch.device) -> Tensor | None:
    if spec.sink is None:
        return None
    keys = max(spec.window_lengths) + max(spec.entry_lengths, default=0)
    sink = torch.randn(spec.heads, generator=generator) + math.log(keys + 1)
    if spec.sink == "mixed":
        values = torch.tensor([0.3, INF, -INF, 1e4, -1e4, 80.0, -80.0, 0.0])
        sink = values[torch.arange(spec.heads) % len(values)]
    elif spec.sink != "random":
        sink.fill_(spec.sink)
    return sink.to(device)
