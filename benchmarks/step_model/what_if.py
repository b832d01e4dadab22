"""Gains by the model on a B200 of plans that do not exist, and of work tiles over larger ones: the input for work on
kernels."""

from __future__ import annotations

from dataclasses import replace

from dsv4_kernels.host.arch import ARCHITECTURES
from dsv4_kernels.hyper_connection import choice
from dsv4_kernels.hyper_connection.plan import PRE_ROWS, Plan
from dsv4_kernels.linear import fp8_tcgen05_plan
from dsv4_kernels.linear import gpu as linear
from step_model import blackwell, products
from step_model.hardware import B200
from step_model.launch import time_us
from step_model.rows import boundary, boundary_of_parts
from step_model.step import FLASH, PRO, Released

CHUNK = 8192
"""Tokens of a prefill chunk of one request; smaller numbers of tokens are requests that decode."""
FEW_HEADS_CASES = tuple(
    (kind, context, tokens, heads)
    for kind, context in (("csa512", 32_768), ("hca", 32_768), ("hca", 1 << 20))
    for tokens in (1, 16, 64, 128, 256, CHUNK)
    for heads in (8, 16, 32)
)
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


def products_of(model: Released, ranks: int) -> dict[str, tuple[int, int]]:
    """Return rows and channels of a rank's FP8 products of few tokens, by name."""
    heads, groups, channels = model.heads // ranks, max(1, model.groups // ranks), model.experts.channels // ranks
    return {
        "wqkv_a": (model.q_lora + 512, model.dim),
        "wq_b": (heads * 512, model.q_lora),
        "index wq_b": (8192, model.q_lora),
        "wo_b": (model.dim, groups * 1024),
        "shared gate and up": (2 * channels, model.dim),
        "shared down": (model.dim, channels),
    }


def tiles_of_products() -> list[dict[str, object]]:
    """Return FP8 products' times in the chosen work tiles, in tiles of 128 rows and all tokens, and in the chosen ones
    if pairs of CTAs shared the tokens."""
    found = []
    for model, ranks in ((FLASH, 1), (FLASH, 4), (FLASH, 8), (PRO, 1), (PRO, 4), (PRO, 8)):
        for name, (rows, channels) in products_of(model, ranks).items():
            for tokens in (1, 16, 64, 128):
                case = name, tokens, rows, channels, B200
                plan = fp8_tcgen05_plan.plan_for(tokens, rows, B200.multiprocessors)
                widest = fp8_tcgen05_plan.Plan(next(width for width in fp8_tcgen05_plan.WIDTHS if tokens <= width))
                launch = products.fp8_by_tcgen05(*case)
                found.append(
                    {
                        "model": model.name,
                        "gpus": ranks,
                        "product": name,
                        "tokens": tokens,
                        "rows": plan.rows,
                        "tile_tokens": plan.tokens,
                        "ctas": launch.ctas,
                        "us": round(time_us(launch, B200), 2),
                        "of_128_rows_us": round(time_us(products.fp8_by_tcgen05(*case, widest), B200), 2),
                        "sharing_us": round(time_us(products.fp8_by_tcgen05(*case, sharing=2), B200), 2),
                    }
                )
    return found


def clusters(model: Released = FLASH, ranks: int = 4) -> list[dict[str, object]]:
    """Return times of the products of bf16 operands in the chosen tiles, and in the best tile of one CTA."""
    groups = model.groups // ranks
    shapes = {
        "gate": (model.experts.experts, 1, model.dim),
        "projections, HCA": (1024, 1, model.dim),
        "projections, CSA": (2624, 1, model.dim),
        "wo_a": (1024, groups, model.heads // model.groups * 512),
    }
    found = []
    for name, (rows, of_groups, channels) in shapes.items():
        for tokens in (1, 16, 64, 128, 256):
            case = tokens, rows, of_groups, B200

            def us(tile: linear.Tile, case: tuple = case, channels: int = channels) -> float:
                return time_us(products.by_mma_sync("", tile, *case, channels), B200)

            tile = linear.chosen(ARCHITECTURES["sm100"], *case[:3], B200.multiprocessors)
            found.append(
                {
                    "product": name,
                    "tokens": tokens,
                    "tile": f"{tile.rows} x {tile.tokens}",
                    "ctas": products.by_mma_sync("", tile, *case, channels).ctas,
                    "cluster": tile.ctas > 1,
                    "us": round(us(tile), 2),
                    "one_cta_us": round(min(map(us, linear.TILES)), 2),
                }
            )
    return found


def boundaries(ranks: int = 4) -> list[dict[str, object]]:
    """Return boundaries of 16, 64 and 128 tokens: by Hopper's plans, by other groups, and by the kernel's choice.

    Up to MOST_PARTS tokens they sum over the ranks. The number after a plan is that of the clusters that run at once.
    """
    found = []
    for dim in (4096, 7168):
        form = (dim, PRE_ROWS, True, False, True)
        for tokens in (16, 64, 128):
            hopper = choice.chosen(tokens, *form)
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
