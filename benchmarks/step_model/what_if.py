"""Gains by the model of plans that do not exist, on a B200: the input for work on kernels."""

from __future__ import annotations

from dataclasses import replace

from dsv4_kernels.hyper_connection import gpu as hyper_connection
from dsv4_kernels.hyper_connection.plan import PRE_ROWS, Plan
from dsv4_kernels.linear import fp8_tcgen05
from step_model import blackwell, products
from step_model.hardware import B200, Gpu
from step_model.launch import Launch, time_us
from step_model.rows import boundary, boundary_of_parts

CHUNK = 8192
"""Tokens of a prefill chunk of one request; smaller numbers of tokens are requests that decode."""
FEW_HEADS_CASES = tuple(
    (kind, context, tokens, heads)
    for kind, context in (("csa512", 32_768), ("hca", 32_768), ("hca", 1 << 20))
    for tokens in (1, 16, 64, 128, 256, CHUNK)
    for heads in (8, 16, 32)
)
NARROW_ROWS = 32
MOST_PARTS = 64
"""Most tokens of a boundary that sums over ranks."""


def few_heads() -> list[dict[str, object]]:
    """Return attention's time today, in a plan for few heads, and with a token's tiles divided among two CTAs.

    More than 16 heads take the plan for few heads once for each 16.
    """
    found = []
    for kind, context, tokens, heads in FEW_HEADS_CASES:
        case = "attention", kind, context, tokens, heads, B200, tokens == CHUNK
        today = time_us(blackwell.attention(*case), B200)
        rounds = -(-heads // 16)
        few = blackwell.attention(*case[:3], tokens * rounds, *case[4:], few_heads=True)
        few = replace(few, memory=blackwell.attention(*case).memory)  # the second 16 heads find their rows in L2
        divided = time_us(blackwell.attention(*case, parts=2), B200)
        found.append(
            {
                "kind": kind,
                "context": context,
                "tokens": tokens,
                "heads": heads,
                "us": round(today, 2),
                "few_heads": round(time_us(few, B200) / today, 3),
                "two_ctas": round(divided / today, 3),
            }
        )
    return found


def narrow(launch: Launch, tokens: int, rows: int, channels: int, gpu: Gpu) -> Launch:
    """Return the counts of an FP8 product on Blackwell as if work tiles had NARROW_ROWS rows of the weight."""
    tiles = -(-rows // NARROW_ROWS)
    rounds = -(-tiles // gpu.multiprocessors)
    tile = (NARROW_ROWS + tokens) * channels
    return replace(
        launch,
        ctas=min(tiles, gpu.multiprocessors),
        l2=tiles * tile + 2 * tokens * rows,
        busiest=rounds * tile,
        clocks={unit: n * rounds / -(-rows // fp8_tcgen05.TILE_ROWS) for unit, n in launch.clocks.items()},
    )


def narrow_tiles(tokens: int = 64) -> list[dict[str, object]]:
    """Return FP8 products of V4-Flash on one of four ranks: today, and with tiles of NARROW_ROWS rows."""
    shapes = {
        "wqkv_a": (1536, 4096), "wq_b": (8192, 1024), "index wq_b": (8192, 1024), "wo_b": (4096, 2048),
        "shared gate and up": (1024, 4096), "shared down": (4096, 512),
    }  # fmt: skip
    found = []
    for name, (rows, channels) in shapes.items():
        launch = products.fp8_by_tcgen05(name, tokens, rows, channels, B200)
        us, less = time_us(launch, B200), time_us(narrow(launch, tokens, rows, channels, B200), B200)
        found.append({"product": name, "ctas": launch.ctas, "us": round(us, 2), "narrow_us": round(less, 2)})
    return found


def boundaries(ranks: int = 4) -> list[dict[str, object]]:
    """Return boundaries of 16, 64 and 128 tokens: by Hopper's plans, by other groups, and by the kernel's choice.

    Up to MOST_PARTS tokens they sum over the ranks. The number after a plan is that of the clusters that run at once.
    """
    found = []
    for dim in (4096, 7168):
        form = (dim, PRE_ROWS, True, False, True)
        for tokens in (16, 64, 128):
            hopper = hyper_connection.chosen(tokens, *form)
            larger = Plan(min(8, 2 * hopper.tokens), dim, PRE_ROWS, True, fp8=True, one_cta=True)
            plans = {
                "as on Hopper, 15": (hopper, 15),
                "as on Hopper, 16": (hopper, 16),
                "interleaved, 15": (replace(hopper, one_cta=True, interleaved=True), 15),
                "groups twice as large, 15": (larger, 15),
                "chosen, 15": (None, 15),
                "chosen, 16": (None, 16),
            }
            row: dict[str, object] = {"dim": dim, "tokens": tokens}
            for name, (plan, at_once) in plans.items():
                if tokens <= MOST_PARTS:
                    launch = boundary_of_parts(name, tokens, dim, ranks, B200, plan, at_once)
                else:
                    launch = boundary(name, tokens, dim, B200, plan, at_once)
                row[name] = round(time_us(launch, B200), 2)
            found.append(row)
    return found
