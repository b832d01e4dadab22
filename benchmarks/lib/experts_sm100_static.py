"""Resources and emulated cycles of Blackwell's expert kernels, without a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from dsv4_kernels.moe.sm100 import launch
from dsv4_kernels.moe.sm100.plan import TILE_ROWS, Numbers, Plan, Product
from lib.cubin import resources

RESULTS = Path(__file__).resolve().parents[1] / "results" / "experts_sm100_static.json"
PLANS = tuple(
    Plan(product, tokens, numbers) for numbers in Numbers for product in Product for tokens in (16, 32, 64, 96)
)
K = {Product.GATE_UP: 4096, Product.DOWN: 2048}
UNITS = ("floor", "tensor", "issue", "alu", "fma", "sfu", "tmem", "shared", "operands", "port", "l2")


def resources_of(plan: Plan) -> dict[str, int]:
    """Return registers, stack and code bytes of one plan. Call it inside `emulated()`, which keeps the cubins."""
    return resources(launch.compile(plan, "sm_100a").__cubin__) | {
        "dynamic_smem_bytes": plan.smem_bytes,
        "stages": plan.stages,
        "tmem_columns": plan.tmem_columns,
    }


def cycles_of(plan: Plan) -> dict[str, float | str]:
    """Return the table's columns for one work tile with all its slots."""
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
        buffer(slots, 2 * TILE_ROWS),  # large enough for either product
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
