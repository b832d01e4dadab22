"""Resources and emulated cycles of Blackwell's attention kernel, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4_kernels.kv_layout import ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.sm100 import launch as sm100
from dsv4_kernels.sparse_attention.sm100.plan import HEADS, TILE_KEYS, Smem
from lib.cubin import resources

RESULTS = Path(__file__).resolve().parents[1] / "results" / "sparse_attention_sm100_static.json"
FLOPS_PER_CYCLE = 8192
UNITS = ("floor", "fma", "alu", "issue", "sfu", "tmem", "shared", "operands", "port", "l2", "hbm")


@dataclass(frozen=True)
class StaticCase:
    """A case of one token."""

    name: str
    entries: int
    heads: int = 64
    dense: bool = False
    row_format: RowFormat = RowFormat.FP8
    large: bool = False
    """Whether the main loop outweighs prologue and epilogue."""


CASES = (
    StaticCase("SWA", 0),
    StaticCase("CSA 512", 512, large=True),
    StaticCase("CSA 512, bf16 rows", 512, row_format=RowFormat.PLAIN, large=True),
    StaticCase("HCA 32 (context 4K)", 32, dense=True),
    StaticCase("HCA 256 (context 32K)", 256, dense=True),
    StaticCase("HCA 8192 (context 1M)", 8192, dense=True, large=True),
    StaticCase("SWA, 128 heads", 0, heads=128),
    StaticCase("CSA 1024, 128 heads", 1024, heads=128, large=True),
    StaticCase("CSA 1024, 128 heads, bf16 rows", 1024, heads=128, row_format=RowFormat.PLAIN, large=True),
    StaticCase("HCA 256, 128 heads", 256, heads=128, dense=True),
    StaticCase("HCA 8192, 128 heads", 8192, heads=128, dense=True, large=True),
)


def all_resources() -> dict[str, dict[str, int]]:
    """Return resources by configuration. Call it inside `emulated()`, which keeps the cubins."""
    shared = {"dynamic_smem_bytes": Smem.BYTES}
    return {str(config): resources(sm100.compile(config).__cubin__) | shared for config in sm100.configurations()}


def problem_of(case: StaticCase) -> Problem:
    """Return a problem whose rows are all live. Of the values only the maxima of scores affect the counts: they cause O
    to be rescaled."""
    generator = torch.Generator().manual_seed(0)

    def table(num_rows: int) -> KVRows:
        rows = KVRows.allocate(num_rows, case.row_format, ROW_DIM, 64, torch.bfloat16, "cpu", 0.0)
        rows.scatter(torch.arange(num_rows), torch.randn(num_rows, ROW_DIM, generator=generator).bfloat16())
        return rows

    entries = table(case.entries) if case.entries else None
    order = torch.randperm(max(case.entries, 1), generator=generator).int()[None]
    lists = dict.fromkeys(("entry_indices", "page_table", "token_to_request", "visible")) | {"entries_per_page": 0}
    if case.dense:
        one = torch.zeros(1, dtype=torch.int32)
        lists |= {"page_table": order[:, : case.entries // 2] // 2, "token_to_request": one, "entries_per_page": 2}
        lists["visible"] = one + case.entries
    elif case.entries:
        lists["entry_indices"] = order
    return Problem.of(
        q=torch.randn(1, case.heads, ROW_DIM, generator=generator).bfloat16(),
        window=table(128),
        window_rows=torch.arange(128, dtype=torch.int32)[None],
        entries=entries,
        sink=torch.zeros(case.heads),
        scale=ROW_DIM**-0.5,
        out=None,
        split_keys=None,
        **lists,
    )


def cycles_of(case: StaticCase) -> dict[str, float | str]:
    """Return the table's columns for a case."""
    from ptx_emulator import B200, emulated

    with emulated(checks=_without_checks()) as device:
        sm100.sparse_attention(problem_of(case))
    cycles = device.reports[0].cycles
    tiles = 2 + -(-case.entries // TILE_KEYS)
    floor = 4 * HEADS * tiles * TILE_KEYS * ROW_DIM / FLOPS_PER_CYCLE
    assert cycles["tensor"] == floor, (cycles["tensor"], floor)
    columns = {name: cycles[name] for name in UNITS if name in cycles} | {
        "floor": floor,
        "port": cycles["shared"] + cycles["operands"],
        "hbm": cycles["hbm"] * B200.sms / (case.heads // HEADS),  # the report's is of the whole GPU
    }
    bound_by = max(columns, key=columns.__getitem__)
    bounds = {
        "bound": round(columns[bound_by] / floor, 3),
        "roofline": round(columns[bound_by] / max(floor, columns["hbm"]), 3),
        "bound by": bound_by,
    }
    return {name: round(columns[name], 1) for name in UNITS} | bounds


def _without_checks() -> object:
    from ptx_emulator import Checks

    return Checks(order=False)
