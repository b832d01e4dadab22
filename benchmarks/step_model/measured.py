"""Measured times of our kernels and steps on H200s beside the model's: the fit, and the errors of what is held out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lib.experts_inputs import MODELS, Model
from lib.fp8_layers import LAYERS as FP8_LAYERS
from lib.invariant_linear_layers import LAYERS as FP32_LAYERS

from dsv4_kernels.hyper_connection import choice
from dsv4_kernels.hyper_connection.choice import MOST_TOKENS_OF_ONE_CTA
from dsv4_kernels.hyper_connection.plan import PRE_ROWS
from dsv4_kernels.linear.gpu import TILES
from dsv4_kernels.moe.sm90.plan import NARROW, PAIRED, WIDE
from dsv4_kernels.sparse_attention.problem import FEW_HEADS
from step_model import attention, experts, index, products, rows
from step_model.hardware import H200, Fitted, Gpu
from step_model.launch import Launch, time_us
from step_model.step import FLASH, Forward, predict

RESULTS = Path(__file__).resolve().parents[1] / "results"
CONTEXTS = {"4k": 4 << 10, "32k": 32 << 10, "128k": 128 << 10, "1m": 1 << 20}
WO_A_GROUPS = {"flash": 8, "flash-tp2": 4, "flash-tp4": 2, "pro": 16}
LEAST_LOADED_CLOCK = 1200.0
MOST_SWEPT = 256
BOUNDARY_IDLE_US = 4.0
"""Time for which a boundary leaves memory idle, its chain, in which the next boundary loads `fn`."""
CHAIN_IDLE_US = 2.0
"""Time of the row kernel before a boundary in the chain, during which the boundary loads `fn`."""


@dataclass(frozen=True)
class Case:
    """A measured time of one launch or several."""

    name: str
    us: float
    launches: tuple[Launch, ...]
    clocks_us: float
    early: bool = True
    idle_us: float = 0.0

    def predicted(self, fitted: Fitted) -> float:
        """Return the model's microseconds."""
        gpu = replace(H200, clocks_us=self.clocks_us, fitted=fitted)
        return sum(time_us(launch, gpu, self.early, self.idle_us) for launch in self.launches)


def _read(name: str) -> tuple[dict, Gpu]:
    document = json.loads((RESULTS / f"{name}.json").read_text())
    states = (document.get(key) for key in ("state", "clocks", "gpu"))
    state = next(found for found in states if isinstance(found, dict))
    clock = float(state["clocks.sm"].split()[0])
    # A clock that was read when the GPU was idle again says nothing.
    return document, H200.at(clock if clock > LEAST_LOADED_CLOCK else H200.clocks_us)


def fp8_products() -> Iterator[Case]:
    """Yield FP8 products of few tokens, launched in turns and early."""
    document, gpu = _read("linear_fp8_h200")
    for case in document["cases"]:
        model, layer, tokens = case["name"].rsplit("-", 2)
        launch = products.fp8_hopper(case["name"], int(tokens[1:]), *FP8_LAYERS[model][layer], gpu)
        yield Case(f"{case['name']} in turns", case["ours_us"], (launch,), gpu.clocks_us, early=False)
        yield Case(case["name"], case["ours_early_us"], (launch,), gpu.clocks_us)


def fp32_products() -> Iterator[Case]:
    """Yield batch-invariant products of bf16 operands."""
    document, gpu = _read("invariant_linear_h200")
    for case in document["cases"]:
        layer, tokens = case["name"].rsplit("-t", 1)
        groups, n = FP32_LAYERS[layer]
        launch = products.in_fp32(case["name"], int(tokens), n, gpu, groups, one_cta_ahead=False)
        yield Case(case["name"], case["ours_us"], (launch,), gpu.clocks_us)


def tiles_of_mma_sync() -> Iterator[Case]:
    """Yield products by tiles of `mma.sync`, most of which an H200's calls do not choose, of up to 256 tokens; logits
    left out, whose tiles read the weight again for every tile of tokens."""
    document, gpu = _read("invariant_linear_h200")
    for case in document["cases"]:
        layer, tokens = case["name"].rsplit("-t", 1)
        groups, n = FP32_LAYERS[layer]
        for tile in TILES:
            key = f"ours_by_{tile.rows}x{tile.tokens}x{tile.stages}_us"
            if key in case and layer != "logits" and int(tokens) <= MOST_SWEPT:
                launch = products.by_mma_sync(case["name"], tile, int(tokens), n, groups, gpu, one_cta_ahead=False)
                yield Case(f"{case['name']} by {tile.rows} x {tile.tokens}", case[key], (launch,), gpu.clocks_us)


def chain() -> Iterator[Case]:
    """Yield a layer of the chain of row kernels: two boundaries and eight others."""
    document, gpu = _read("dependent_launch_h200")
    names = [name for name in rows.ROW_KERNELS if name != "compress_store"]
    for row in document["rows"]:
        tokens = row["tokens"]
        plan = replace(choice.chosen(tokens, 4096, PRE_ROWS, True, False, True), one_cta=False)  # of that day
        launches = [rows.boundary("boundary", tokens, 4096, gpu, plan)] * 2
        launches += [rows.row_kernel(name, tokens, gpu) for name in names]
        for key, early in (("us", False), ("early_us", True)):
            name = f"chain-t{tokens}{'' if early else ' in turns'}"
            yield Case(name, row[key] / document["layers"], tuple(launches), gpu.clocks_us, early, CHAIN_IDLE_US)


def sums(ranks: int) -> Callable[[], Iterator[Case]]:
    """Return the sums over so many ranks."""

    def cases() -> Iterator[Case]:
        document, gpu = _read(f"all_reduce_h200_x{ranks}")
        for size in document["sizes"]:
            launch = rows.sum_over_ranks("sum", size["rows"], document["dim"], ranks, gpu)
            yield Case(f"{ranks} ranks, {size['rows']} rows", size["us"]["ours"], (launch,), gpu.clocks_us)

    return cases


def boundaries_alone() -> Iterator[Case]:
    """Yield boundaries one after the other, with one CTA a multiprocessor and with two."""
    for ranks in (4, 2):
        document, gpu = _read(f"boundary_h200_x{ranks}")
        for size in document["sizes"]:
            tokens = size["rows"]
            if ranks == 4 or tokens > 64:
                plan = choice.chosen(tokens, document["dim"], PRE_ROWS, True, False, True)
                for key, one_cta in (("boundary", False), ("boundary_wide", True)):
                    launch = rows.boundary("boundary", tokens, document["dim"], gpu, replace(plan, one_cta=one_cta))
                    name = f"{tokens} rows, {2 - one_cta} CTAs a multiprocessor"
                    yield Case(name, size["us"][key], (launch,), gpu.clocks_us, idle_us=BOUNDARY_IDLE_US)


def boundaries_of_one_gpu() -> Iterator[Case]:
    """Yield boundaries of one to 8,192 tokens of both models, one after the other."""
    document, gpu = _read("hyper_connection_h200")
    for row in document["rows"]:
        launch = rows.boundary("boundary", row["tokens"], row["d"], gpu)
        name = f"{row['model']}, {row['tokens']} tokens"
        yield Case(name, row["ours_us"], (launch,), gpu.clocks_us, idle_us=BOUNDARY_IDLE_US)


def sums_and_boundaries() -> Iterator[Case]:
    """Yield a sum over two and over four ranks, and a boundary after it."""
    for ranks in (2, 4):
        document, gpu = _read(f"boundary_h200_x{ranks}")
        for size in document["sizes"]:
            tokens, dim = size["rows"], document["dim"]
            plan = replace(choice.chosen(tokens, dim, PRE_ROWS, True, False, True), one_cta=False)
            summed = rows.sum_over_ranks("sum", tokens, dim, ranks, gpu)
            launches = summed, rows.boundary("boundary", tokens, dim, gpu, plan)
            yield Case(
                f"{ranks} ranks, {tokens} rows", size["us"]["ours"], launches, gpu.clocks_us, idle_us=CHAIN_IDLE_US
            )


def boundaries_of_parts() -> Iterator[Case]:
    """Yield boundaries that sum the parts of two and of four ranks."""
    for ranks in (2, 4):
        document, gpu = _read(f"boundary_h200_x{ranks}")
        for size in document["sizes"]:
            tokens, us = size["rows"], size["us"]
            launch = rows.boundary_of_parts("boundary", tokens, document["dim"], ranks, gpu, in_turn=True)
            key = "fused_wide" if tokens <= MOST_TOKENS_OF_ONE_CTA else "fused"  # today's choice
            yield Case(f"{ranks} ranks, {tokens} rows", us[key], (launch,), gpu.clocks_us)


def wo_a() -> Iterator[Case]:
    """Yield `wo_a` from FP8 for as many tokens as a server multiplies so."""
    for name, may_reside in (("grouped_linear_h200", False), ("grouped_resident_h200", True)):
        document, gpu = _read(name)
        for case in document["cases"]:
            model, tokens = case["name"].rsplit("-t", 1)
            if int(tokens) <= 16:
                groups = WO_A_GROUPS[model]
                launch = products.wo_a_from_fp8(case["name"], int(tokens), groups, gpu, may_reside=may_reside)
                where = ", resident" if may_reside else ""
                yield Case(case["name"] + where, case["ours_us"], (launch,), gpu.clocks_us)


def _experts(name: str, gpu: Gpu, shape: object = None, codes: bool = False) -> tuple[tuple[Launch, ...], bool]:
    model_name, tokens = name.rsplit("-t", 1)
    parts = model_name.split("-")
    ranks = int(parts[1][2:]) if parts[1].startswith("tp") else 1
    whole = MODELS[parts[0]]
    model = Model(whole.experts, whole.d, whole.channels // ranks)
    slots = experts.slots_of_experts(model.experts, int(tokens), parts[-1])
    return tuple(experts.calls(model, slots, int(tokens), gpu, codes, shape)), experts.early(int(tokens))


def experts_of_decode() -> Iterator[Case]:
    """Yield calls of up to 256 tokens; one token by NARROW, since FEW came later."""
    document, gpu = _read("experts_h200")
    for case in document["cases"]:
        if int(case["name"].rsplit("-t", 1)[1]) <= 256:
            launches, early = _experts(case["name"], gpu, NARROW if case["name"].endswith("-t1") else None)
            yield Case(case["name"], case["ours_us"], launches, gpu.clocks_us, early)
    document, gpu = _read("experts_few_h200")
    for case in document["cases"]:
        for key, codes in (("narrow", False), ("narrow_codes", True)):
            launches, early = _experts(case["name"], gpu, NARROW, codes)
            yield Case(f"{case['name']} by {key}", case[f"ours_by_{key}_us"], launches, gpu.clocks_us, early)


def experts_of_prefill() -> Iterator[Case]:
    """Yield calls of many tokens by both shapes of work tiles, launched in turns."""
    document, gpu = _read("experts_prefill_h200")
    for case in document["cases"]:
        for key, shape in (("paired_turns", PAIRED), ("wide_turns", WIDE)):
            if f"{key}_us" in case:
                launches, _ = _experts(case["name"], gpu, shape)
                yield Case(f"{case['name']} by {key}", case[f"{key}_us"], launches, gpu.clocks_us, early=False)


def _attention_case(name: str) -> tuple[str, int, int, int]:
    """Return (kind, context, tokens, heads)."""
    parts = name.split("-")
    context = CONTEXTS[parts[2]] if parts[1] != "swa" else CONTEXTS["4k"]
    heads, tokens = (next(part[1:] for part in parts[2:] if part[0] in of and part[1:].isdigit()) for of in ("h", "bt"))
    return parts[1], context, int(tokens), int(heads)


def attention_of_decode() -> Iterator[Case]:
    """Yield decode batches with 64 and 128 heads."""
    document, gpu = _read("sparse_attention_h200")
    for case in document["cases"]:
        if case["name"].startswith("decode"):
            launch = attention.many_heads(case["name"], *_attention_case(case["name"]), gpu)
            yield Case(case["name"], case["ours_us"], (launch,), gpu.clocks_us)


def attention_of_prefill() -> Iterator[Case]:
    """Yield chunks with 64 and 128 heads, FP8 rows as stored or expanded before."""
    document, gpu = _read("sparse_attention_h200")
    for case in document["cases"]:
        if case["name"].startswith("prefill"):
            fp8 = case["name"].endswith("fp8") and case["rows"] == "as stored"
            launch = attention.many_heads(case["name"], *_attention_case(case["name"]), gpu, fp8, prefill=True)
            yield Case(case["name"], case["ours_us"], (launch,), gpu.clocks_us)


def attention_of_few_heads() -> Iterator[Case]:
    """Yield decode batches with 8, 16 and 32 heads, measured before few tokens had a CTA for each tile."""
    document, gpu = _read("few_heads_h200")
    for case in document["cases"]:
        kind, context, tokens, heads = _attention_case(case["name"])
        if heads <= FEW_HEADS:
            launch = attention.few_heads(case["name"], kind, context, tokens, heads, gpu, by_tiles=False)
        elif heads < 64:
            launch = attention.many_heads(case["name"], kind, context, tokens, heads, gpu)
        else:
            continue
        yield Case(case["name"], case["ours_us"], (launch,), gpu.clocks_us)


def few_tokens() -> Iterator[Case]:
    """Yield scores and choice, and attention of HCA layers, of few tokens on a rank of four."""
    document, gpu = _read("few_tokens_h200")
    for row in document["rows"]:
        tokens, context = row["tokens"], row["context"]
        if row["op"] == "index":
            scores = index.scores("scores", tokens, context // 4, CONTEXTS["128k"] // 4, gpu)
            launches = scores, index.choice("choice", tokens, context // 4, gpu)
        elif row["op"] == "hca":
            launches = (attention.few_heads("attention", "hca", context, tokens, 16, gpu),)
        else:
            continue
        yield Case(f"{row['op']}-t{tokens}", row["few_us"], launches, gpu.clocks_us)


def index_of_prefill() -> Iterator[Case]:
    """Yield scores and choice of a chunk of 8,192 tokens."""
    document, _ = _read("indexer_h200")
    gpu = H200  # the clock was read after calls of decode that the host bounds
    for row in document["rows"]:
        if row["work"] == "prefill":
            tokens, context = row["tokens"], row["context"]
            seen = [(context - tokens + i) / 4 for i in range(tokens)]
            scores = index.scores_of_chunk("scores", sum(n for n in seen if n > 512), gpu)
            launches = scores, index.choice("choice", tokens, sum(seen) / tokens, gpu)
            yield Case(f"context {context}", row["prefill_us"], launches, gpu.clocks_us)


FITTED = {
    "FP8 products": fp8_products,
    "products in fp32": fp32_products,
    "row kernels and boundaries": chain,
    "sums over two ranks": sums(2),
}
ONE_RATE = {"products in fp32 by every tile of mma.sync": tiles_of_mma_sync}
"""Cases from which one rate was found by hand, that of `cp.async` into shared memory (`products.by_mma_sync`)."""
HELD_OUT = {
    "experts, decode": experts_of_decode,
    "experts, prefill": experts_of_prefill,
    "attention, decode": attention_of_decode,
    "attention, prefill": attention_of_prefill,
    "attention with few heads": attention_of_few_heads,
    "scores, choice, attention of few tokens": few_tokens,
    "scores and choice, prefill": index_of_prefill,
    "wo_a in FP8": wo_a,
    "boundaries": boundaries_alone,
    "boundaries of one to 8,192 tokens": boundaries_of_one_gpu,
    "boundaries of parts": boundaries_of_parts,
    "a sum over ranks, then a boundary": sums_and_boundaries,
    "sums over four ranks": sums(4),
}
LEFT_OUT = {
    "experts_h200: from 1,024 tokens on": "work tiles of prefill have changed since; experts_prefill_h200 has today's",
    "experts_few_h200: few, paired, wide": "few's kernel has changed since; the others are not chosen there",
    "grouped_linear_h200: from 32 tokens on": "a server multiplies so many tokens from bf16",
    "indexer_h200: decode": "calls were not in a graph: the host's time",
    "few_tokens_h200: csa": "with a launch of PyTorch that the benchmark no longer has; 16 tokens by another kernel",
    "invariant_linear_h200: tiles of clusters": "1.48 times the blind predictions, see the document; no call gets one",
    "joint_launch_h200": "the model counts launches that run together as two streams",
}

SIX_LAYERS = replace(FLASH, layers=(0, 0, 4, 128, 4, 128))


def steps() -> Iterator[tuple[str, float, Forward]]:
    """Yield (name, measured microseconds, forward): busy time of six layers on one GPU; wall time of the whole model on
    several GPUs."""
    older = {"gate_ahead": False}
    for name in ("serve_ab_torch_2_14_h200", "serve_ab_h200"):
        document = json.loads((RESULTS / f"{name}.json").read_text())
        for row in document["rows"]:
            if row["metric"] != "busy_us_per_step":
                continue
            if row["work"] == "decode":
                f = Forward(SIX_LAYERS, row["requests"], 4608, expert_rows=False, **older)
                yield f"six layers, {row['requests']} requests, busy ({name})", row["ours"], f
            else:
                f = Forward(SIX_LAYERS, 8192, 36_864, prefill=True)  # eight chunks of 64K: their mean context
                yield f"six layers, a chunk of 64K, busy ({name})", row["ours"], f
    document = json.loads((RESULTS / "step_switches_h200.json").read_text())
    for row in document["runs"][-1]["rows"]:
        switches = row["switches"]
        if switches.get("SGLANG_DSV4_WO_A") == "both" and switches.get("SGLANG_DSV4_SIDE_STREAM") == "on":
            name = f"six layers, {row['requests']} requests, busy (step_switches_h200)"
            yield name, row["busy_us"], Forward(SIX_LAYERS, row["requests"], 4608, expert_rows=False, **older)
    alone = {"parts": False, "of_few": False, "expert_rows": False} | older
    for name, gpus, of_ours, about, how in (
        ("variants_h200_x4", 4, "ours+our_all_reduce", "each launch alone", alone),
        ("h200_x4", 4, "ours", "as served", older),
        ("h200_x2", 2, "ours", "as served", {}),  # comb was balanced by the next boundary there, which has no counts
    ):
        document = json.loads((RESULTS / f"serve_ab_{name}.json").read_text())
        found = {
            row["requests"]: row["ours"]
            for row in document["rows"]
            if row["work"] == "decode" and row["metric"] == "tok_s" and row["of_ours"] == of_ours
        }
        for requests, tok_s in found.items():
            f = Forward(FLASH, requests, 4608, gpus, **how)
            words = {2: "two", 4: "four"}[gpus]
            yield f"43 layers on {words} GPUs, {requests} requests, {about}, wall", 1e6 * requests / tok_s, f


CONSTANTS = tuple(Fitted.__dataclass_fields__)
LEAST = {"issue_clocks": 1.0}
"""A warp issues at most one instruction a clock."""
POWER = 1.5
"""Exponent of an error's logarithm in the fit: between squares, which few cases decide, and magnitudes."""


def fit() -> Fitted:
    """Return the constants with the least error over FITTED, each of its parts with the same weight, rounded to three
    digits."""
    parts = [list(cases()) for cases in FITTED.values()]

    def error(fitted: Fitted) -> float:
        return sum(
            sum(abs(math.log(case.predicted(fitted) / case.us)) ** POWER for case in cases) / len(cases)
            for cases in parts
        )

    found, step = Fitted(), 0.2
    least = error(found)
    while step > 0.002:
        moved = False
        for name in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(found, **{name: max(LEAST.get(name, 0.0), getattr(found, name) * factor)})
                if (of_tried := error(tried)) < least - 1e-9:
                    found, least, moved = tried, of_tried, True
        step = step if moved else step / 2
    return Fitted(**{name: float(f"{getattr(found, name):.3g}") for name in CONSTANTS})


@dataclass(frozen=True)
class Errors:
    """Errors of several cases."""

    cases: int
    mean: float
    """Geometric mean of the larger of predicted / measured and its inverse, minus one."""
    worst: float
    worst_case: str
    bias: float
    """Geometric mean of predicted / measured."""

    @staticmethod
    def of(ratios: dict[str, float]) -> Errors:
        """Return the errors of ratios predicted / measured."""
        logs = {name: math.log(ratio) for name, ratio in ratios.items()}
        worst = max(logs, key=lambda name: abs(logs[name]))
        mean = sum(map(abs, logs.values())) / len(logs)
        return Errors(
            len(logs),
            round(math.exp(mean) - 1, 3),
            round(math.exp(abs(logs[worst])) - 1, 3),
            worst,
            round(math.exp(sum(logs.values()) / len(logs)), 3),
        )


def ratios(cases: Callable[[], Iterator[Case]]) -> dict[str, float]:
    """Return predicted / measured by case."""
    return {case.name: case.predicted(H200.fitted) / case.us for case in cases()}


def ratios_of_steps() -> dict[str, float]:
    """Return predicted / measured by step."""
    return {name: predict(forward, H200).us / us for name, us, forward in steps()}
