"""Counts of Blackwell's attention and experts, from what the emulator counted (the static results)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lib.experts_inputs import BYTES_A_WEIGHT, CHOSEN, Model

from dsv4_kernels.kv_layout import ROW_BYTES, ROW_DIM
from dsv4_kernels.moe.sm100.launch import PAIR_TOKENS, tokens_of_a_tile
from dsv4_kernels.moe.sm100.plan import TILE_ROWS, Numbers, Plan, Product
from dsv4_kernels.sparse_attention.sm100.plan import HEADS, TILE_KEYS
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS, num_kv_splits, num_steps
from step_model.attention import MERGE_CLOCKS, RESULT_BYTES, ROW_SECTORS, SCRATCH_CLOCK_BYTES, keys_of
from step_model.experts import row_launch, work_list
from step_model.hardware import Gpu
from step_model.launch import Launch

RESULTS = Path(__file__).resolve().parents[1] / "results"
UNITS = ("floor", "alu", "issue", "sfu", "tmem", "port")
"""Units of a multiprocessor in the static results; "floor" is the tensor core."""
TWO_CASES = {1: ("SWA", "HCA 8192 (context 1M)"), 2: ("SWA, 128 heads", "HCA 8192, 128 heads")}
WINDOW_TILES = 2
STATIC_ENTRIES = 8192
STATIC_CHANNELS = {Product.GATE_UP: 4096, Product.DOWN: 2048}


@cache
def _static(name: str) -> dict[str, dict[str, float]]:
    return json.loads((RESULTS / name).read_text())["cycles"]


@cache
def attention_clocks(pair: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return ({unit: clocks of a token besides its key tiles}, {unit: clocks of a key tile}) of one multiprocessor."""
    few, many = (_static("sparse_attention_sm100_static.json")[name] for name in TWO_CASES[1 + pair])
    tiles = STATIC_ENTRIES // TILE_KEYS
    of_tile = {unit: (many[unit] - few[unit]) / tiles for unit in UNITS}
    return {unit: max(0.0, few[unit] - WINDOW_TILES * of_tile[unit]) for unit in UNITS}, of_tile


FEW_HEADS_PORT = 3 * TILE_KEYS * ROW_DIM * 2 / 128
"""Clocks of the port of shared memory for a key tile in a plan for up to 16 heads: keys written, and read as the left
operand of both products. Scores, weights and Q of 16 heads are a few per cent of it."""


def attention(
    name: str,
    kind: str,
    context: int,
    tokens: int,
    heads: int,
    gpu: Gpu,
    prefill: bool = False,
    few_heads: bool = False,
    parts: int = 1,
) -> Launch:
    """Return the counts of attention over FP8 rows (kernels/sparse_attention/sm100).

    Each token and KV split has a CTA, or a pair for 128 heads; up to 64 heads cost what 64 cost.

    Args:
        name: of the launch.
        kind, context: see `keys_of`.
        tokens: T, with one token a request in decode.
        heads: of the rank.
        gpu: its multiprocessors.
        prefill: whether the tokens are a chunk of one request.
        few_heads: whether to count a plan for up to 16 heads, which does not exist.
        parts: CTAs that divide a KV split's tiles, which no plan does.
    """
    window, entries = keys_of(kind, context)
    splits = parts * (1 if prefill else num_kv_splits(num_steps(window, entries), DECODE_SPLIT_KEYS))
    pair = heads > HEADS
    tiles = -(-window // TILE_KEYS) + -(-entries // TILE_KEYS)
    at_once = gpu.multiprocessors // (2 if pair else 1)
    work = tokens * min(splits, tiles)
    rounds = -(-work // at_once)
    of_token, of_tile = attention_clocks(pair)
    if few_heads:
        of_tile = of_tile | {"port": FEW_HEADS_PORT}
    splits = min(splits, tiles)
    of_split = -(-tiles // splits)
    ratio = {"swa": 0, "hca": 128}.get(kind, 4)
    rows = tokens * (window + entries)
    if prefill:
        rows = tokens + window + min(tokens * entries, context // ratio if ratio else 0)
    q_and_o = tokens * 2 * heads * ROW_DIM * 2
    merge = 2 * rounds * RESULT_BYTES / SCRATCH_CLOCK_BYTES + MERGE_CLOCKS if splits > 1 else 0
    serial = sum(of_tile[unit] for unit in ("floor", "issue"))  # the first tile's gather, the last tile's product
    return Launch(
        name,
        ctas=min(work * (2 if pair else 1), gpu.multiprocessors),
        memory=rows * ROW_SECTORS[True] + q_and_o,
        waves=work / at_once,
        l2=tokens * (window + entries) * ROW_BYTES + q_and_o,
        busiest=rounds * of_split * TILE_KEYS * ROW_BYTES / (2 if pair else 1),
        clocks={unit: rounds * (of_token[unit] + of_split * of_tile[unit]) for unit in UNITS},
        chain=serial + merge,
        from_memory=1,
        from_l2=3,
    )


def experts(model: Model, slots: Sequence[int], tokens: int, gpu: Gpu) -> list[Launch]:
    """Return the launches of the experts, MXFP4 times e4m3 quantised by the boundary (kernels/moe/sm100)."""
    width = tokens_of_a_tile(tokens, CHOSEN, model.experts)
    groups = [-(-n // width) for n in slots if n]
    weights = len(groups) * model.d * model.channels * BYTES_A_WEIGHT
    pairs = sum(slots)
    found = [work_list(pairs)]
    for product, rows, k, matrices in (
        (Product.GATE_UP, model.channels, model.d, 2),
        (Product.DOWN, model.d, model.channels, 1),
    ):
        found.append(_product(product, sum(groups), rows, k, width, matrices * weights, gpu))
    found.append(row_launch("sum of experts", (pairs + 2 * tokens) * model.d * 2, 250, loads=3))
    return found


def _product(product: Product, groups: int, rows: int, k: int, width: int, weights: float, gpu: Gpu) -> Launch:
    """Return the counts of a product of `groups` tiles of slots; pairs of CTAs share the codes of wide tiles."""
    tiles = groups * rows // TILE_ROWS
    pairs = width >= PAIR_TOKENS[Numbers.MXFP8_MXFP4] and rows % (2 * TILE_ROWS) == 0
    plan = Plan(product, width, ctas=2 if pairs else 1)
    name = f"MXFP8_MXFP4, {product.name}, {width} slots" + ", pair" * pairs
    static = _static("experts_sm100_static.json")[name]
    rounds = -(-tiles // (gpu.multiprocessors // plan.ctas * plan.ctas))
    of_k = k / STATIC_CHANNELS[product]
    num_bytes = plan.matrices * TILE_ROWS * k * BYTES_A_WEIGHT + plan.own_tokens * k * 33 / 32
    loaded = plan.matrices * TILE_ROWS * 64 + plan.own_tokens * 128  # bytes of a stage in global memory
    units = ("tensor", "issue", "alu", "port")
    return Launch(
        product.name.lower().replace("_", " and "),
        ctas=min(tiles, gpu.multiprocessors),
        memory=weights,
        waves=tiles / gpu.multiprocessors,
        l2=tiles * num_bytes,
        busiest=rounds * num_bytes,
        in_flight=plan.stages * loaded,
        clocks={unit: rounds * static[unit] * of_k for unit in units},
        chain=1000,
        from_l2=4,
    )
