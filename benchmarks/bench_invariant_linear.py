"""The batch-invariant bf16 products against cuBLAS, whose order of summation may depend on the batch.

    python benchmarks/bench_invariant_linear.py [--layers REGEX] [--tokens 1,4,...] [--sweep] [--out FILE]

Contenders, in CUDA graphs: `ours` (`linear_fp32` or `grouped_linear`, with the tile that a call chooses), `cublas` (the
server without --enable-deterministic-inference), and with --sweep `ours_by_*`, every tile of this GPU's generation, and
some that Hopper's kernel never chooses. First every tile must have the bits of `ours` in all elements, and some
elements are compared with float64. Calls alternate between sets of weights that exceed L2 in size.

    floor = the larger of the time to move operands and result once, and that of the products at the card's bf16 rate

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from lib.invariant_linear_layers import LAYERS, name_of
from lib.measuring import Ceilings, heading, interleaved, l2_bytes
from torch import Tensor

from dsv4_kernels.host import compile_pool
from dsv4_kernels.host.arch import architecture, implementation_of
from dsv4_kernels.linear import grouped_linear, linear_fp32

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)
CHANNELS = 4096
MOST_LOGITS = 128
"""Most tokens of a forward that need logits."""
MOST_SETS = 32
SECONDS = 0.05
WRONG = 0.004
CHECKED = 64

Inputs = tuple[Tensor, Tensor]
"""x [T, G, K] and weight [G, N, K]."""


def product(inputs: Inputs, impl: str) -> Tensor:
    """Return the product by the public functions."""
    x, weight = inputs
    if len(weight) > 1:
        return grouped_linear(x, weight, impl=impl)
    return linear_fp32(x[:, 0], weight[0], impl=impl)


def by_tile(tile: object, inputs: Inputs, impl: str = "sm90") -> Tensor:
    """Return the product by our kernel with a tile that need not be the chosen one."""
    from dsv4_kernels.linear import gpu

    x, weight = inputs
    if len(weight) > 1:
        return getattr(gpu, f"{impl}_grouped_linear")(x, weight, tile=tile)
    return getattr(gpu, f"{impl}_linear_fp32")(x[:, 0], weight[0], tile=tile)


def swept(gpu: ModuleType, impl: str = "sm90") -> list:
    """Return the kernel's tiles and, for Hopper, some that it never chooses."""
    if impl != "sm90":
        return [*gpu.TILES, *gpu.CLUSTER_TILES]
    others = ((64, 64, 6), (64, 192, 6), (128, 176, 5))
    return [*gpu.HOPPER_TILES, *gpu.TILES[1:], *gpu.CLUSTER_TILES, *(gpu.wgmma.Tile(*numbers) for numbers in others)]


def check(inputs: Inputs, calls: dict[str, Callable[[Inputs], Tensor]]) -> float:
    """Check that all of our calls have the same bits; return the distance from float64.

    Raises:
        AssertionError: bits differ, or a product is wrong.
    """
    x, weight = inputs
    mine = calls["ours"](inputs)
    for name, call in calls.items():
        assert name == "cublas" or torch.equal(call(inputs), mine), f"{name} has other bits than ours"
    some = torch.linspace(0, len(x) - 1, min(len(x), CHECKED), device=x.device).long()
    rows = torch.linspace(0, weight.shape[1] - 1, CHECKED, device=x.device).long()
    exact = torch.einsum("tgk,gnk->tgn", x[some].double(), weight[:, rows].double())
    got = mine.view(len(x), len(weight), -1)[some][:, :, rows].double()
    error = float((got - exact).norm() / exact.norm())
    assert error <= WRONG, f"the product is off by {error}"
    return error


def run_case(name: str, tokens: int, device: torch.device, ceilings: Ceilings, sweep: bool) -> dict:
    """Return one row of the result."""
    groups, rows = LAYERS[name]
    weight_bytes = 2 * groups * rows * CHANNELS
    count = min(MOST_SETS, -(-2 * l2_bytes(device) // weight_bytes) + 1) if tokens <= 512 else 2
    torch.manual_seed(tokens)
    sets = []
    for _ in range(count):
        x = torch.randn(tokens, groups, CHANNELS, device=device).bfloat16()
        sets.append((x, (torch.randn(groups, rows, CHANNELS, device=device) / math.sqrt(CHANNELS)).bfloat16()))
    impl = implementation_of(device)
    calls: dict[str, Callable[[Inputs], Tensor]] = {
        "ours": partial(product, impl=impl),
        "cublas": partial(product, impl="cublas"),
    }
    if sweep:
        from dsv4_kernels.linear import gpu

        for tile in swept(gpu, impl):
            if tile.tokens <= max(32, 8 * tokens) and (tokens < 1024 or tile.tokens >= 64):
                calls[name_of(tile)] = partial(by_tile, tile, impl=impl)
    row: dict[str, object] = {"name": f"{name}-t{tokens}", "rel_err": float(f"{check(sets[0], calls):.3e}")}
    timed = {contender: [partial(call, inputs) for inputs in sets] for contender, call in calls.items()}
    for contender, timing in interleaved(timed, device, SECONDS * len(timed)).items():
        row[f"{contender}_us"], row[f"{contender}_spread"] = round(timing.median_us, 2), round(timing.spread, 4)
    result_bytes = tokens * groups * rows * (2 if groups > 1 else 4)
    moved = (weight_bytes + 2 * tokens * groups * CHANNELS + result_bytes) / ceilings.bytes_per_second
    row["floor_us"] = round(1e6 * max(moved, weight_bytes * tokens / ceilings.flops_per_second), 2)
    return row


def line(row: dict) -> str:
    """Return a row of the table."""
    others = sorted((v, k[8:-3]) for k, v in row.items() if k.startswith("ours_by_") and k.endswith("_us"))
    return (
        f"{row['name']:14} {row['ours_us']:9.2f} {row['cublas_us']:9.2f} {row['ours_us'] / row['cublas_us']:6.2f} "
        f"{row['floor_us']:9.2f} {row['floor_us'] / row['ours_us']:6.0%}  "
        + ", ".join(f"{tile} {us:.1f}" for us, tile in others)
    )


def compile_all(device: torch.device, sweep: bool) -> None:
    """Compile missing kernels in several processes."""
    from dsv4_kernels.linear import gpu

    impl = implementation_of(device)
    arch = architecture(impl, device)
    todo = [
        (f"{tile} {fp32}", partial(gpu.compile, gpu.configuration(tile, fp32), arch))
        for tile in (swept(gpu, impl) if sweep else gpu.tiles(arch))
        for fp32 in (True, False)
    ]
    compile_pool.fill(todo, arch, lambda *progress: None)


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=".", help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="also by each tile")
    parser.add_argument("--out", type=Path, help="write the result there, row by row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cuda")
    compile_all(device, options.sweep)
    ceilings, result = heading("invariant_linear", device)
    print(f"{'case':14} {'ours':>9} {'cublas':>9} {'ratio':>6} {'floor':>9} {'of it':>6}")
    for name in (name for name in LAYERS if re.search(options.layers, name)):
        for tokens in map(int, options.tokens.split(",")):
            if name == "logits" and tokens > MOST_LOGITS:
                continue
            result["cases"].append(run_case(name, tokens, device, ceilings, options.sweep))
            print(line(result["cases"][-1]), flush=True)
            torch.cuda.empty_cache()
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
