"""Resources and emulated cycles of Blackwell's expert kernels, without a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from dsv4_kernels.host.arch import hardware_multiprocessors
from dsv4_kernels.moe.sm100 import launch
from dsv4_kernels.moe.sm100.plan import TILE_ROWS, Numbers, Plan, Product
from dsv4_kernels.moe.work_list import list_work
from lib.cubin import resources

RESULTS = Path(__file__).resolve().parents[1] / "results" / "experts_sm100_static.json"
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
    """Return the table's columns for one work tile of one CTA, alone or of a pair, with all its slots."""
    from ptx_emulator import B200, Checks, emulated

    k, slots = K[plan.product], plan.tokens
    channels = plan.ctas * TILE_ROWS
    rows = plan.matrices * channels
    scale_tiles = k // plan.step * plan.scale_tiles

    def buffer(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    def quantised(width: int) -> launch.Rows:
        if plan.numbers is Numbers.NVFP4:
            return launch.Rows(buffer(slots, width // 2), buffer(slots, width // 16))
        return launch.Rows(buffer(slots, width), torch.zeros(slots, width // 128))

    is_gate_up = plan.product is Product.GATE_UP
    out = quantised(channels) if is_gate_up else torch.zeros(slots, channels, dtype=torch.bfloat16)
    weights = buffer(1, rows, k // 2), buffer(1, rows // TILE_ROWS, scale_tiles, 512)
    hardware_multiprocessors.cache_clear()
    with emulated(checks=Checks(order=False), multiprocessors=plan.ctas) as device:  # cycles are a mean over the CTAs
        one_expert = torch.ones(slots, 1), torch.zeros(slots, 1, dtype=torch.int32)
        listed = list_work(*one_expert, 1, 0, plan.tokens, "sm_100a")
        launch.multiply(plan, listed, quantised(k), *weights, out, 10.0, torch.ones(1, 2), torch.ones(1))
    hardware_multiprocessors.cache_clear()
    cycles = device.reports[1].cycles
    weight_bytes = plan.matrices * (TILE_ROWS * k // 2 + scale_tiles * 512)
    columns = {name: cycles[name] for name in UNITS if name in cycles}
    columns["floor"] = weight_bytes / (B200.hbm_bytes_per_clock / B200.sms)
    columns["port"] = cycles["shared"] + cycles["operands"]
    bound_by = max(columns, key=columns.__getitem__)
    bound = columns[bound_by] / max(columns["floor"], columns["tensor"])
    return {name: round(columns[name], 1) for name in UNITS} | {"bound": round(bound, 3), "bound by": bound_by}
