"""Operators that say they are batch-invariant and are not, while a file names them: `op kind` in its only line.

rows     the last bit depends on the number of rows, as that of a product whose tile does
order    it depends on chance, as that of a sum by atomics
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FILE_VARIABLE = "DSV4_TEST_PLANTED"
REAL = {  # op -> the implementation of a CPU
    **dict.fromkeys(("linear", "linear_fp32", "grouped_linear"), "tiled"),
    **dict.fromkeys(("experts_forward", "fused_swiglu", "hc_boundary", "rms_norm"), "ref"),
    **dict.fromkeys(("index_topk", "sparse_attention"), "ref"),
}
FEW_ROWS = 3


def plant(registry: ModuleType) -> None:
    """In front of each op's own implementation; without the file's word it is that one."""
    for op in REAL:
        registry.register(op, "planted", f"planted_ops:{op}", registry.cpu_only, 100, batch_invariant=True)


def __getattr__(op: str) -> Callable[..., Any]:
    if op not in REAL:
        raise AttributeError(op)
    return functools.partial(run, op)


def run(op: str, *arguments: Any, **options: Any) -> Any:
    """The op, spoilt if the file says so."""
    from dsv4_kernels import registry

    rows = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
    result = registry.select(op, rows.device, rows.dtype, REAL[op])(*arguments, **options)
    named, _, kind = Path(os.environ[FILE_VARIABLE]).read_text().strip().partition(" ")
    if named != op or (kind == "rows" and len(rows) <= FEW_ROWS):
        return result
    return tuple(map(spoilt, result)) if isinstance(result, tuple) else spoilt(result, kind == "order")


def spoilt(x: torch.Tensor, by_chance: bool = False) -> torch.Tensor:
    """One ulp more, everywhere or in half of the places; of a list of rows the first is left out."""
    if not x.is_floating_point():
        return torch.cat([torch.full_like(x[:, :1], -1), x[:, 1:]], 1)
    more = torch.nextafter(x, torch.full_like(x, torch.inf))
    return torch.where(torch.rand(x.shape) < 0.5, more, x) if by_chance else more
