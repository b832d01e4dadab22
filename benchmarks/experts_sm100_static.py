"""What is known of Blackwell's experts without a Blackwell GPU: resources, and cycles that they cannot beat.

    PYTHONPATH=tests/emulator python benchmarks/experts_sm100_static.py [--write]

Compiles every plan for sm_100a and reads registers, stack and code from the cubins. Then runs one work tile of either
product with full K (V4-Flash: hidden 4096, intermediate 2048) in the emulator and divides what it did by published
rates (report.py there names them), as sparse_attention_sm100_static.py does. The largest quotient is a lower bound of
the time of a work tile on one multiprocessor, not a prediction. `--write` puts everything into
benchmarks/results/experts_sm100_static.json, which a test compares.

Columns, in clock cycles of one multiprocessor for one work tile of 128 output rows and all its slots:

    floor    codes and scales of its weights once, at 1/148 of 8 TB/s: what decoding cannot beat
    tensor   products, as report.py counts them for the padded kind (8 bits a code)
    issue, alu, fma, sfu, tmem, shared, operands, port, l2    as in sparse_attention_sm100_static.py
    bound    the largest of all over the larger of floor and tensor, and its name

A tile of few slots is bound by memory, one of many by the tensor core; the widest here is 96.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from cubin import resources

from dsv4_kernels.host import compile_cache
from dsv4_kernels.moe.sm100 import launch
from dsv4_kernels.moe.sm100.plan import TILE_ROWS, Numbers, Plan, Product

RESULTS = Path(__file__).resolve().parent / "results" / "experts_sm100_static.json"
PLANS = tuple(
    Plan(product, tokens, numbers) for numbers in Numbers for product in Product for tokens in (16, 32, 64, 96)
)
K = {Product.GATE_UP: 4096, Product.DOWN: 2048}
UNITS = ("floor", "tensor", "issue", "alu", "fma", "sfu", "tmem", "shared", "operands", "port", "l2")


def resources_of(plan: Plan) -> dict[str, int]:
    """Of one plan; inside `emulated()`, which keeps the cubins."""
    return resources(launch.compile(plan, "sm_100a").__cubin__) | {
        "dynamic_smem_bytes": plan.smem_bytes,
        "stages": plan.stages,
        "tmem_columns": plan.tmem_columns,
    }


def cycles_of(plan: Plan) -> dict[str, float | str]:
    """The columns above, of one work tile with all its slots."""
    from ptx_emulator import B200, Checks, emulated

    k, slots = K[plan.product], plan.tokens
    rows = plan.matrices * TILE_ROWS
    listed = launch.work_list(torch.ones(slots, 1), torch.zeros(slots, 1, dtype=torch.int32), 1, 0, plan.tokens)
    scale_tiles = k // plan.step * plan.scale_tiles

    def buffer(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    arguments = (
        buffer(1, rows, k // 2),
        buffer(1, rows // TILE_ROWS, scale_tiles, 512),
        buffer(slots, k // plan.codes_per_byte),
        buffer(slots, 4 * scale_tiles),
        buffer(slots, 2 * TILE_ROWS),  # enough for either product
        buffer(slots, 4 * scale_tiles),
        torch.ones(1, 2),
        torch.ones(1),
    )
    with emulated(checks=Checks(order=False)) as device:
        launch.run(plan, listed, 10.0, *arguments)
    cycles = device.reports[0].cycles
    weight_bytes = rows * k // 2 + rows // TILE_ROWS * scale_tiles * 512
    columns = {name: cycles[name] for name in UNITS if name in cycles}
    columns["floor"] = weight_bytes / (B200.hbm_bytes_per_clock / B200.sms)
    columns["port"] = cycles["shared"] + cycles["operands"]
    bound_by = max(columns, key=columns.__getitem__)
    bound = columns[bound_by] / max(columns["floor"], columns["tensor"])
    return {name: round(columns[name], 1) for name in UNITS} | {"bound": round(bound, 3), "bound by": bound_by}


def main() -> None:
    """Prints the tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    os.environ[compile_cache.FOLDER_VARIABLE] = "off"  # the emulator needs the PTX that compiling gives
    from ptx_emulator import emulated

    document: dict[str, Any] = {"resources": {}, "cycles": {}}
    with emulated():
        for plan in PLANS:
            document["resources"][str(plan)] = resources_of(plan)
            print(plan, document["resources"][str(plan)])
    print(f"\n{'one work tile':34}" + "".join(f"{unit:>9}" for unit in (*UNITS, "bound")))
    for plan in PLANS:
        name = f"{plan.numbers.name}, {plan.product.name}, {plan.tokens} slots"
        columns = document["cycles"][name] = cycles_of(plan)
        cells = "".join(f"{columns[unit]:9,.0f}" for unit in UNITS)
        print(f"{name:34}{cells}{columns['bound']:9.2f} {columns['bound by']}")
    if options.write:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
