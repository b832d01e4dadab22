"""The first half of the output projection at few tokens: one launch with an FP8 weight against three launches.

    python benchmarks/bench_grouped_linear.py [--models flash,flash-tp2,flash-tp4,pro] [--tokens 1,4,...] [--sweep]
        [--out FILE.json]

Contenders, in CUDA graphs, each from the attention's output to the codes that the next product reads:

    ours        `grouped_linear_fp8_weight`: rotates back, multiplies, quantises
    today       `apply_rope_in_place`, `grouped_linear` by cuBLAS with the weight in bf16, `fp8_quantise`
    product     the product of `ours` alone;   cublas: that of `today`
    invariant   `today` with the products of `--enable-deterministic-inference`
    expanded    `today` after expanding the FP8 weight into a bf16 buffer that all layers share, as in prefill
    ours_by_*   (--sweep) by each tile, and with launches that do not overlap (`turns`)

First `ours` must have the bits of `invariant`, and `product` the bits of its product, which is compared with
float64 of the dequantised weight. Calls alternate between sets of weights that exceed L2 in size.

    floor = (codes, scales, x and the result once) / copy bandwidth

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lib.measuring import heading, interleaved, l2_bytes
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.linear import HeadRotation, expand_fp8_weight, grouped_linear, grouped_linear_fp8_weight
from dsv4_kernels.number_formats import quantise_fp8_weight
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.rope import apply_rope_in_place, rope_frequencies

TOKENS = (1, 4, 16, 32, 64, 128)
GROUPS = {"flash": 8, "flash-tp2": 4, "flash-tp4": 2, "pro": 16}
"""Output groups of a rank."""
ROWS, CHANNELS, HEAD, ROTATED = 1024, 4096, 512, 64
WRONG = 0.01
CHECKED_TOKENS = 3
SECONDS = 0.06


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call."""

    codes: Tensor  # [G, N, K] e4m3
    scale: Tensor  # [G, N / 128, K / 128] fp32
    plain: Tensor  # [G, N, K] bf16
    x: Tensor  # [T, G, K] bf16
    rotation: HeadRotation

    def rotated(self) -> Tensor:
        """Rotate x back in place and return it. Each call rotates it further; in a model x is new in every step."""
        positions, frequencies, head = self.rotation
        apply_rope_in_place(self.x.view(len(self.x), -1, head), positions, frequencies, inverse=True)
        return self.x


def weights(groups: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and the bf16 weight, such that outputs are around 1."""
    torch.manual_seed(seed)
    matrix = torch.randn(groups * ROWS, CHANNELS, device=device) / math.sqrt(CHANNELS)
    codes, scale = quantise_fp8_weight(matrix)
    codes, scale = codes.view(groups, ROWS, CHANNELS), scale.float().view(groups, ROWS // 128, CHANNELS // 128)
    return codes, scale, expand_fp8_weight(codes, scale, torch.empty(codes.shape, dtype=torch.bfloat16, device=device))


def with_tokens(of: tuple[Tensor, Tensor, Tensor], tokens: int, device: torch.device) -> Inputs:
    """Return inputs with random x at large positions."""
    x = torch.randn(tokens, of[0].shape[0], CHANNELS, device=device).bfloat16()
    frequencies = rope_frequencies(ROTATED, 10000.0, None).to(device)
    return Inputs(*of, x, HeadRotation(torch.arange(tokens, device=device) * 7 + 50_000, frequencies, HEAD))


# ---- contenders

Contender = Callable[[Inputs], object]


def of_layer(product: Callable[[Inputs], Tensor], i: Inputs) -> tuple[Tensor, Tensor]:
    """Return the result of a layer's three launches with this product."""
    i.rotated()
    return fp8_quantise(product(i).flatten(1), column_major=True)


def contenders(tokens: int, buffer: Tensor, sweep: bool) -> dict[str, Contender]:
    """Return the contenders by name."""
    found: dict[str, Contender] = {
        "ours": lambda i: grouped_linear_fp8_weight(i.x, i.codes, i.scale, i.rotation, quantises=True),
        "today": partial(of_layer, lambda i: grouped_linear(i.x, i.plain)),
        "product": lambda i: grouped_linear_fp8_weight(i.x, i.codes, i.scale),
        "cublas": lambda i: grouped_linear(i.x, i.plain),
        "invariant": partial(of_layer, lambda i: grouped_linear(i.x, i.plain, impl="sm90")),
    }
    if tokens >= 64:
        found["expanded"] = partial(
            of_layer, lambda i: grouped_linear(i.x, expand_fp8_weight(i.codes, i.scale, buffer))
        )
    if sweep:

        def in_turns(i: Inputs) -> object:
            with dependent_launch.switched(False):
                return found["ours"](i)

        for tile in swept():
            if min(tokens, 32) <= tile.tokens <= 4 * tokens:
                found[f"ours_by_{tile.tokens}x{tile.warps}x{tile.stages}"] = partial(by_tile, tile)
        found["ours_by_turns"] = in_turns
    return found


def swept() -> list:
    """Return the tiles of both kernels and further ones (tokens, warps, stages)."""
    from dsv4_kernels.linear import fp8_weight_gpu
    from dsv4_kernels.linear.fp8_weight import STEP, Tile
    from dsv4_kernels.linear.kernel import SEGMENTS

    others = ((8, 4, 5), (8, 8, 5), (16, 4, 4), (32, 8, 4), (64, 8, 3))
    resident = [tile for tile in fp8_weight_gpu.RESIDENT if CHANNELS == tile.stages * SEGMENTS * STEP]
    return [*fp8_weight_gpu.TILES, *resident, *(Tile(*numbers) for numbers in others)]


def by_tile(tile: object, i: Inputs) -> object:
    """Run our kernel with a tile that need not be the chosen one."""
    from dsv4_kernels.linear import fp8_weight_gpu

    return fp8_weight_gpu.sm90(i.x, i.codes, i.scale, i.rotation, True, tile=tile)


# ---- a row


def check(i: Inputs, calls: dict[str, Contender]) -> float:
    """Check that ours has the bits of the batch-invariant products; return the product's distance from float64.

    Raises:
        AssertionError: the bits differ, or the product is wrong.
    """
    product = grouped_linear_fp8_weight(i.x, i.codes, i.scale)
    assert torch.equal(product, grouped_linear(i.x, i.plain, impl="sm90")), "the product's bits differ"
    some = torch.linspace(0, len(i.x) - 1, min(CHECKED_TOKENS, len(i.x)), device=i.x.device).long()
    exact = torch.einsum("tgk,gnk->tgn", i.x[some].double(), i.plain.double())
    error = float((product[some].double() - exact).norm() / exact.norm())
    assert error <= WRONG, f"the product is off by {error}"
    kept = i.x.clone()
    made = {name: call(i) for name, call in calls.items() if name.startswith("ours")}
    assert torch.equal(i.x, kept), "x was written to"
    expected = calls["invariant"](i)
    i.x.copy_(kept)
    for name, (codes, scales) in made.items():
        same = torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])
        assert same, f"{name} has not the bits of rotation, product and quantiser one by one"
    return error


def run_case(
    name: str,
    sets: list[tuple[Tensor, Tensor, Tensor]],
    buffer: Tensor,
    tokens: int,
    device: torch.device,
    bandwidth: float,
    sweep: bool,
) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: a result is wrong; nothing is timed.
    """
    inputs = [with_tokens(of, tokens, device) for of in sets]
    calls = contenders(tokens, buffer, sweep)
    row: dict[str, object] = {"name": name, "rel_err": float(f"{check(inputs[0], calls):.3e}"), "sets": len(sets)}
    timed = {contender: [partial(call, i) for i in inputs] for contender, call in calls.items()}
    for contender, timing in interleaved(timed, device, SECONDS * len(timed)).items():
        row[f"{contender}_us"] = round(timing.median_us, 2)
        row[f"{contender}_spread"] = round(timing.spread, 4)
    codes, scale, _ = sets[0]
    moved = codes.numel() + 4 * scale.numel() + 2 * inputs[0].x.numel() + tokens * codes.shape[0] * ROWS * 33 // 32
    row["floor_us"] = round(1e6 * moved / bandwidth, 2)
    return row


def line(row: dict) -> str:
    """Return a row of the table, in microseconds."""
    columns = ("ours", "today", "product", "cublas", "invariant", "expanded")
    times = " ".join(f"{row.get(f'{key}_us', math.nan):9.2f}" for key in columns)
    others = ", ".join(f"{k[8:-3]} {v:.2f}" for k, v in row.items() if k.startswith("ours_by_") and k.endswith("_us"))
    ratio, share = row["ours_us"] / row["today_us"], row["floor_us"] / row["ours_us"]
    return f"{row['name']:14} {times} {ratio:6.2f} {row['floor_us']:8.2f} {share:6.0%}  {others}"


def compile_all(sweep: bool) -> None:
    """Compile missing kernels in several processes."""
    from dsv4_kernels.host import compile_pool
    from dsv4_kernels.linear import fp8_weight_gpu as gpu

    todo = []
    for tile in swept() if sweep else (*gpu.TILES, *gpu.RESIDENT):
        for fused in (False, True):
            compile = partial(gpu.compile, gpu.Configuration(tile, fused, fused), "sm_90a")
            todo.append((f"{tile} {fused}", compile))
            if sweep:
                todo.append((f"{tile} {fused}, in turns", partial(dependent_launch.compiled, compile, False)))
    compile_pool.fill(todo, "sm_90a", lambda *progress: None)


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(GROUPS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="also by each tile, and without overlap")
    parser.add_argument("--out", type=Path, help="write the result there, row by row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cuda")
    compile_all(options.sweep)
    ceilings, result = heading("grouped_linear", device)
    heads = ("ours", "today", "product", "cublas", "invariant", "expanded")
    print(f"{'case':14} " + " ".join(f"{head:>9}" for head in heads) + f" {'ratio':>6} {'floor':>8} {'of it':>6}")
    rows: list[dict] = result["cases"]
    for model in options.models.split(","):
        groups = GROUPS[model]
        count = -(-2 * l2_bytes(device) // (groups * ROWS * CHANNELS)) + 1
        sets = [weights(groups, seed, device) for seed in range(count)]
        buffer = torch.empty_like(sets[0][2])
        for tokens in map(int, options.tokens.split(",")):
            name = f"{model}-t{tokens}"
            rows.append(run_case(name, sets, buffer, tokens, device, ceilings.bytes_per_second, options.sweep))
            print(line(rows[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
        del sets, buffer
        torch.cuda.empty_cache()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
