"""Operators that are marked batch-invariant and are not, while a file names them: `op kind` in its only line.

* `rows`: the last bit depends on the number of rows, as in a product whose tile depends on it.
* `order`: the last bit is random, as in a sum by atomics.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FILE_VARIABLE = "DSV4_TEST_PLANTED"
REAL = {  # op -> a CPU's implementation
    **dict.fromkeys(("linear", "linear_fp32", "grouped_linear"), "tiled"),
    **dict.fromkeys(("experts_forward", "fused_swiglu", "hc_boundary", "rms_norm"), "ref"),
    **dict.fromkeys(("index_topk", "sparse_attention"), "ref"),
    **dict.fromkeys(("compress_store", "norm_rope_store", "route_topk_logits"), "ref"),
}
FEW_ROWS = 3
MORE = 1 + 2.0**-5
"""Factor for numbers that are rounded afterwards: an entry's channels, and routing weights."""


def plant(registry: ModuleType) -> None:
    """Register faulty implementations with a higher priority; without the file's line they call the real ones."""
    from dsv4_kernels.ops import cpu_only

    for op in REAL:
        registry.register(op, "planted", f"planted_ops:{op}", cpu_only, 100, batch_invariant=True)


def __getattr__(op: str) -> Callable[..., Any]:
    if op not in REAL:
        raise AttributeError(op)
    return functools.partial(run, op)


def run(op: str, *arguments: Any, **options: Any) -> Any:
    """Run the op, with a wrong result if the file names it."""
    from dsv4_kernels import registry

    named, _, kind = Path(os.environ[FILE_VARIABLE]).read_text().strip().partition(" ")
    if op == "compress_store":  # it returns nothing, and few requests read what a decode step stores: wrong at random
        groups, compressions, dtype = arguments
        if named == op:
            compressions = [
                dataclasses.replace(c, kv=c.kv.where(torch.rand(c.kv.shape) < 0.5, c.kv * MORE)) for c in compressions
            ]
        return registry.select(op, groups.positions.device, dtype, REAL[op])(groups, compressions, dtype, **options)
    rows = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
    result = registry.select(op, rows.device, rows.dtype, REAL[op])(*arguments, **options)
    if named != op or (kind == "rows" and len(rows) <= FEW_ROWS):
        return result
    if op == "norm_rope_store":  # the last argument is the output
        return arguments[-1].copy_(spoilt(arguments[-1]))
    if op == "route_topk_logits":  # an ulp of a weight is lost where h is rounded; the experts stay
        return result[0] * MORE, result[1]
    if isinstance(result, tuple):
        return tuple(map(spoilt, result))
    return spoilt(result, kind == "order")


def spoilt(x: torch.Tensor, by_chance: bool = False) -> torch.Tensor:
    """Return x with one ulp more, everywhere or in half of the elements; the first row of a list is left out."""
    if not x.is_floating_point():
        return torch.cat([torch.full_like(x[:, :1], -1), x[:, 1:]], 1)
    more = torch.nextafter(x, torch.full_like(x, torch.inf))
    return torch.where(torch.rand(x.shape) < 0.5, more, x) if by_chance else more
