"""Sequences, their states and the allowed results, for the tests of `compress_store`.

A token's raw row is a function of its request and position, so a forward may begin anywhere: the state gets the rows
that it must hold there (specification, section 3.6), and NaN in all others, unused channel halves included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4_kernels.compressor import Compression, Groups
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.rope import YarnScaling, rope_frequencies

NAN = float("nan")
EPS = 1e-6
YARN = rope_frequencies(64, 160000.0, YarnScaling(16, 65536, 32, 1))
RATIOS = {"csa": 4, "hca": 128}
DIMS = {"csa": (512, 128), "hca": (512,)}
PACKED = {512: RowFormat.FP8, 128: RowFormat.INDEX_FP4}
SLOTS, TABLE_ROWS, OVERLAPS = 12, 200, 20


class Request(NamedTuple):
    """Appends `count` tokens from position `begin` on."""

    slot: int
    begin: int
    count: int


@dataclass(frozen=True)
class Setting:
    """A kind of layer and its storage format."""

    kind: str
    ring: int
    formats: tuple[RowFormat, ...] = (RowFormat.PLAIN, RowFormat.PLAIN)
    rounded: bool = False
    hadamard: bool = False
    dims: tuple[int, ...] = ()

    @property
    def ratio(self) -> int:
        return RATIOS[self.kind]

    @property
    def parts(self) -> int:
        return 2 if self.kind == "csa" else 1

    @property
    def all_dims(self) -> tuple[int, ...]:
        return self.dims or DIMS[self.kind]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ape_of(setting: Setting, dim: int) -> Tensor:
    return normal(setting.ratio, setting.parts * dim, seed=dim)


def weight_of(dim: int) -> Tensor:
    return 1.0 + 0.3 * normal(dim, seed=dim + 1)


def product_rows(setting: Setting, dim: int, slot: int, begin: int, end: int) -> Tensor:
    """Return raw rows of positions [begin, end) without the positional term: [n, 2 * C * dim]; requests differ in
    magnitude."""
    rows = [normal(2 * setting.parts * dim, seed=(slot << 40) + (dim << 24) + p) for p in range(begin, end)]
    made = torch.stack(rows) if rows else torch.empty(0, 2 * setting.parts * dim)
    made[:, : setting.parts * dim] *= (1.0, 100.0, 2.0**-6)[slot % 3]
    made[:, setting.parts * dim :] *= 3.0
    return made


def raw_rows(setting: Setting, dim: int, slot: int, begin: int, end: int) -> Tensor:
    """Return the same rows as a state keeps them: [n, 2, C * dim]."""
    made = product_rows(setting, dim, slot, begin, end).unflatten(1, (2, -1))
    made[:, 1] += ape_of(setting, dim)[torch.arange(begin, end) % setting.ratio]
    return made


@dataclass
class Forward:
    """One forward's groups and compressions, and the entry (slot, number) of each table row."""

    groups: Groups
    compressions: list[Compression]
    rows: dict[tuple[int, int], int] = field(default_factory=dict)

    def entries(self, which: int) -> dict[tuple[int, int], Tensor]:
        """Return the plain rows that a compression has made."""
        storage = self.compressions[which].table.storage
        return {entry: storage[row] for entry, row in self.rows.items()}


def forward(
    setting: Setting,
    requests: Sequence[Request],
    tokens_per_request: int | None = None,
    overlaps: dict[tuple[int, int], int] | None = None,
    seed: int = 0,
    open_groups: int = 0,
) -> Forward:
    """Return a forward over these requests, ready to run.

    Args:
        setting: the layer.
        requests: no two in one slot. Slot 0 is a padding request, which closes and keeps nothing.
        tokens_per_request: of a uniform batch, whose tokens are all kept; None keeps those that later entries need.
        overlaps: (request slot, position) -> slot of the tail that keeps the four tokens before the position.
        seed: of the entries' slots.
        open_groups: number of groups without sources, in front of the requests' groups.
    """
    ratio, parts, ring = setting.ratio, setting.parts, setting.ring
    num_states, order = SLOTS * ring, torch.randperm(TABLE_ROWS, generator=torch.Generator().manual_seed(seed)).tolist()
    sources = [[-1] * (parts * ratio) for _ in range(open_groups)]
    entry_positions, slots = [0] * open_groups, [7] * open_groups
    positions, state_rows, overlap_rows, made, token = [], [], [], {}, 0
    for slot, begin, count in requests:
        end = begin + count
        first, stop = begin // ratio, end // ratio
        if tokens_per_request:
            stop = first - (-tokens_per_request // ratio)
        for number in range(first, stop):
            closed = (number + 1) * ratio <= end and slot > 0
            members = range((number + 1 - parts) * ratio, (number + 1) * ratio)
            sources.append(
                [
                    -1
                    if p < 0 or not closed
                    else slot * ring + p % ring
                    if p < begin
                    else num_states + token + p - begin
                    for p in members
                ]
            )
            entry_positions.append(number * ratio)
            slots.append(order.pop() if closed else 0)
            if closed:
                made[slot, number] = slots[-1]
        needed = begin if tokens_per_request else max(begin, (end // ratio + 1 - parts) * ratio)
        for p in range(begin, end):
            positions.append(p)
            state_rows.append(slot * ring + p % ring if p >= needed and slot else -1)
            checkpoint = [
                4 * where + p - at + 4 for (s, at), where in (overlaps or {}).items() if s == slot and at - 4 <= p < at
            ]
            overlap_rows.append(checkpoint[0] if checkpoint else -1)
        token += count
    as_list = {"positions": positions, "entry_positions": entry_positions, "slots": slots, "state_rows": state_rows}
    groups = Groups(
        ratio=ratio,
        sources=torch.tensor(sources, dtype=torch.int32).view(-1, parts * ratio),
        **{name: torch.tensor(values, dtype=torch.int64) for name, values in as_list.items()},
        overlap_rows=torch.tensor(overlap_rows, dtype=torch.int64) if overlaps else None,
        tokens_per_request=tokens_per_request,
    )
    compressions = []
    for dim, format in zip(setting.all_dims, setting.formats, strict=False):
        width = parts * dim
        product = torch.cat([torch.empty(0, 2 * width), *(product_rows(setting, dim, *_span(r)) for r in requests)])
        compressions.append(
            Compression(
                kv=product[:, :width],
                score=product[:, width:],
                ape=ape_of(setting, dim),
                state=state_before(setting, dim, requests),
                norm_weight=weight_of(dim),
                eps=EPS,
                frequencies=YARN,
                table=KVRows.allocate(TABLE_ROWS, format, dim, 64, torch.bfloat16, "cpu", NAN),
                hadamard=setting.hadamard and dim == 128,
                values_of=PACKED[dim] if setting.rounded else RowFormat.PLAIN,
                overlap=torch.full((4 * OVERLAPS, 2, dim), NAN) if overlaps else None,
            )
        )
    return Forward(groups, compressions, made)


def _span(request: Request) -> tuple[int, int, int]:
    return request.slot, request.begin, request.begin + request.count


def state_before(setting: Setting, dim: int, requests: Sequence[Request]) -> Tensor:
    """Return the state that earlier forwards must have left, NaN elsewhere."""
    ratio, parts, ring = setting.ratio, setting.parts, setting.ring
    state = torch.full((SLOTS * ring, 2, parts * dim), NAN)
    for slot, begin, _ in requests:
        opened = begin // ratio * ratio
        if parts == 2 and opened:  # the next entry reads the first halves of the closed group before it
            rows = [slot * ring + p % ring for p in range(opened - ratio, opened)]
            state[rows, :, :dim] = raw_rows(setting, dim, slot, opened - ratio, opened)[:, :, :dim]
        rows = [slot * ring + p % ring for p in range(opened, begin)]
        state[rows] = raw_rows(setting, dim, slot, opened, begin)
    return state


# ---- allowed results


class Interval(NamedTuple):
    """Bounds of numbers, float64."""

    low: np.ndarray
    high: np.ndarray

    def widened(self, by: np.ndarray | float) -> Interval:
        return Interval(self.low - by, self.high + by)

    def times(self, other: Interval) -> Interval:
        corners = [a * b for a in self for b in other]
        return Interval(np.minimum.reduce(corners), np.maximum.reduce(corners))

    def plus(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def minus(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def relative(self, by: float) -> Interval:
        """Return the interval widened by a share of the magnitude."""
        return self.widened(by * np.maximum(np.abs(self.low), np.abs(self.high)))

    def in_bf16(self) -> Interval:
        return Interval(bf16(self.low), bf16(self.high))


def bf16(x: np.ndarray) -> np.ndarray:
    """Return the nearest bf16 of normal numbers, ties to even."""
    step = np.exp2(np.frexp(x)[1] - 8.0)
    return np.round(x / step) * step


EXP2 = 2.0**-22
"""Relative error of ex2.approx and, doubled, of 1 / x and 1 / sqrt(x) (PTX ISA)."""
HALF_ULP = 2.0**-24


def allowed_entry(setting: Setting, dim: int, slot: int, number: int) -> Interval:
    """Return the interval of a stored plain row: exact arithmetic, and every step's rounding error in fp32.

    The error of a weight w = e**-x: two products and a difference before the exponential make 3 |x| half ulps, the
    exponential itself EXP2; in HCA layers twice, with a product between. Sums of n terms: n half ulps of the
    magnitudes. After each rounding to bf16 an interval is a single number unless it contains a rounding boundary.
    """
    ratio, parts = setting.ratio, setting.parts
    begin = max(0, (number + 1 - parts) * ratio)
    rows = raw_rows(setting, dim, slot, begin, (number + 1) * ratio).double().numpy()
    own = slice((parts - 1) * dim, parts * dim)
    rows = np.concatenate([rows[: -ratio or None, :, :dim][: len(rows) - ratio], rows[len(rows) - ratio :, :, own]])
    value, score = rows[:, 0], rows[:, 1]
    below = score.max(0) - score
    weight = np.exp(-below)
    error = weight * (2 * EXP2 + (3 * below + 1) * HALF_ULP)
    terms = 24 * HALF_ULP  # 128 rows: 8 in sequence, 2 lanes, 8 warps
    total, total_error = weight.sum(0), (error + terms * weight).sum(0)
    weighted, weighted_error = (weight * value).sum(0), ((error + terms * weight) * np.abs(value)).sum(0)
    entry = weighted / total
    wide = (weighted_error + np.abs(entry) * total_error) / (total - total_error) + np.abs(entry) * 2.0**-22
    e = Interval(entry - wide, entry + wide).in_bf16()
    ends = np.abs(e.low), np.abs(e.high)
    least = np.where(e.low * e.high <= 0, 0.0, np.minimum(*ends))
    mean = Interval((least**2).sum() / dim, (np.maximum(*ends) ** 2).sum() / dim).relative(16 * HALF_ULP).widened(0)
    factor = Interval((mean.high + EPS) ** -0.5, (mean.low + EPS) ** -0.5).relative(2.0**-21)
    gain = weight_of(dim).double().numpy()
    y = e.times(factor).times(Interval(gain, gain)).relative(2 * HALF_ULP).in_bf16()
    angle = (np.float32(number * ratio) * YARN.numpy()).astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    cos, sin = Interval(cos, cos).relative(2.0**-22), Interval(sin, sin).relative(2.0**-22)
    a, b = (Interval(y.low[dim - 64 + i :: 2], y.high[dim - 64 + i :: 2]) for i in (0, 1))
    slack = HALF_ULP * 2 * (np.abs(a.low) + np.abs(a.high) + np.abs(b.low) + np.abs(b.high))
    real = a.times(cos).minus(b.times(sin)).widened(slack).in_bf16()
    imaginary = a.times(sin).plus(b.times(cos)).widened(slack).in_bf16()
    low, high = y.low.copy(), y.high.copy()
    low[dim - 64 :: 2], high[dim - 64 :: 2] = real
    low[dim - 63 :: 2], high[dim - 63 :: 2] = imaginary
    return Interval(low, high)
