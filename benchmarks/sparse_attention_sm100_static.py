"""What is known of the Blackwell attention kernel without a Blackwell GPU: resources, and cycles that it cannot beat.

    PYTHONPATH=tests/emulator python benchmarks/sparse_attention_sm100_static.py [--write]

Compiles every configuration for sm_100a and reads registers, stack and code from the cubins. Then runs one token of
every case in the emulator (tests/emulator) and divides what the launch did by published rates (report.py there names
them), for a full GPU: all 148 multiprocessors are taken to do the same. The largest quotient is a lower bound of the
time, not a prediction. `--write` puts everything into benchmarks/results/sparse_attention_sm100_static.json, which a
test compares.

Columns, in clock cycles of one multiprocessor for one token and 64 heads; 128 heads are a pair of multiprocessors:

    floor    tensor core: 4 * 64 heads * keys * 512 flops at 8,192 a cycle, for the keys in whole tiles
    fma      arithmetic in f32 and bf16, 128 lanes a cycle
    alu      integers, comparisons, logic and conversions, 64 lanes a cycle
    issue    all instructions, four a cycle
    sfu      exponentials, 16 a cycle
    tmem     loads or stores of threads, 512 bytes a cycle
    shared   loads and stores of threads, 128 bytes a cycle
    operands matrices that the tensor core reads from shared memory, 128 bytes a cycle
    port     shared + operands: threads and tensor core take turns at shared memory
    l2       global loads and stores, 64 bytes a cycle
    hbm      each row, q and the output once, at 1/148 of 8 TB/s; tokens that share rows in L2 need less
    bound    the largest of these over the floor, and its name
    roofline the same over the larger of floor and hbm

fma, alu and issue count PTX as it is written; the assembler removes some of it (every move behind a tcgen05.ld).
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from cubin import resources

from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import ROW_DIM, KVRows, RowFormat
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.sparse_attention.sm100 import launch as sm100
from dsv4_kernels.sparse_attention.sm100.plan import HEADS, TILE_KEYS, Smem

RESULTS = Path(__file__).resolve().parent / "results" / "sparse_attention_sm100_static.json"
FLOPS_PER_CYCLE = 8192
UNITS = ("floor", "fma", "alu", "issue", "sfu", "tmem", "shared", "operands", "port", "l2", "hbm")


@dataclass(frozen=True)
class StaticCase:
    """One token."""

    name: str
    entries: int
    heads: int = 64
    dense: bool = False
    row_format: RowFormat = RowFormat.FP8
    large: bool = False
    """The main loop outweighs prologue and epilogue."""


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
    """By configuration; inside `emulated()`, which keeps the cubins."""
    shared = {"dynamic_smem_bytes": Smem.BYTES}
    return {str(config): resources(sm100.compile(config).__cubin__) | shared for config in sm100.configurations()}


def problem_of(case: StaticCase) -> Problem:
    """Live rows everywhere; contents do not matter to the counts, but for the maxima that make O be rescaled."""
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
    """The columns above."""
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


def main() -> None:
    """Prints the tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # the emulator needs the PTX that compiling gives
    from ptx_emulator import emulated

    with emulated():
        document = {"resources": all_resources(), "cycles": {}}
    for config, values in document["resources"].items():
        print(config, values)
    print(f"\n{'one token':31}" + "".join(f"{unit:>9}" for unit in (*UNITS, "bound", "roofline")))
    for case in CASES:
        columns = document["cycles"][case.name] = cycles_of(case)
        cells = "".join(f"{columns[unit]:9,.0f}" for unit in UNITS)
        print(f"{case.name:31}{cells}{columns['bound']:9.2f}{columns['roofline']:9.2f} {columns['bound by']}")
    if options.write:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
