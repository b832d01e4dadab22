"""Resources and emulated cycles of Blackwell's index scores, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from dsv4_kernels.indexer import gpu, prefill_tcgen05, scores
from dsv4_kernels.kv_layout import PAGE_ROWS, KVRows, RowFormat
from lib.cubin import resources

RESULTS = Path(__file__).resolve().parents[1] / "results" / "index_scores_sm100_static.json"
HEADS = 64
ENTRIES = prefill_tcgen05.MAX_PAGES_A_CTA * PAGE_ROWS
"""Entries that each token sees: those of one CTA of the prefill's kernel."""
TOKENS = prefill_tcgen05.TOKENS
UNITS = ("tensor", "issue", "alu", "fma", "tmem", "shared", "operands", "port", "l2")
KERNELS: dict[str, Callable[[], object]] = {
    "prefill": lambda: prefill_tcgen05.compile("sm_100a", HEADS),
    "many tokens": lambda: scores.compile("sm_100a", HEADS),
    "few tokens": lambda: scores.compile("sm_100a", HEADS, True),
}


def resources_of(name: str) -> dict[str, int]:
    """Return registers, stack and code bytes of a kernel. Call it inside `emulated()`, which keeps the cubins."""
    found = resources(KERNELS[name]().__cubin__)
    if name == "prefill":
        plan = prefill_tcgen05.Plan(HEADS)
        found |= {"dynamic_smem_bytes": plan.smem_bytes, "tmem_columns": plan.tmem_columns}
    return found


def cycles_of(prefill: bool) -> dict[str, float]:
    """Return the table's columns, in cycles of one multiprocessor for a token and an entry: of the prefill's kernel, or
    of the one for many tokens."""
    from ptx_emulator import B200, Checks, emulated

    keys = KVRows.allocate(ENTRIES, RowFormat.INDEX_FP4, 128, 0, torch.bfloat16, "cpu", 0.0)
    table = torch.arange(ENTRIES // PAGE_ROWS, dtype=torch.int32)[None]
    request, visible = torch.zeros(TOKENS, dtype=torch.int32), torch.full((TOKENS,), ENTRIES, dtype=torch.int32)
    q, weights = torch.zeros(TOKENS, HEADS, 128, dtype=torch.bfloat16), torch.zeros(TOKENS, HEADS)
    one_cta = mock.patch.object(prefill_tcgen05, "CTAS", 1)
    many_tokens = mock.patch.object(gpu, "FEW_TOKENS", dict.fromkeys(gpu.FEW_TOKENS, 0))
    with one_cta, many_tokens, emulated(checks=Checks(order=False)) as device:
        gpu.sm100(q, weights, keys, table, PAGE_ROWS, request, visible, 512, table, prefill)
    report = device.reports[0]
    at_once = min(B200.sms, report.grid[0] * report.grid[1])
    cycles = report.cycles | {"port": report.cycles["shared"] + report.cycles["operands"]}
    return {unit: round(cycles[unit] * at_once / (TOKENS * ENTRIES), 3) for unit in UNITS}
