"""Routed experts with MXFP4 weights: ours against SGLang's Marlin and against the card's bandwidth.

    python benchmarks/bench_experts.py [--models flash,pro] [--slices 1,2] [--routing uniform,zipf,six]
        [--tokens 1,4,16,...] [--out FILE.json]

Contenders, both from x and the router's output to [T, d] in bf16, in CUDA graphs, weights arranged beforehand:

    ours      `dsv4_kernels.moe.sm90`: e4m3 activations as in the release
    marlin    `fused_marlin_moe` as SGLang 0.5.23's runner calls it: bf16 activations
    ours_by_* (--sweep) `ours` by shape of work tiles: `few` (decode of at most 16 tokens), `narrow` (decode),
              `paired` (decode of more than 32 tokens, up to 64 slots of an expert in a tile), `wide` (prefill);
              `few_codes`, `narrow_codes`: from codes of tokens, as after a boundary; `overlap`, `turns`: with
              launches that overlap (programmatic dependent launch), and without

First a few tokens of every case are compared with float64 of the dequantised weights. `rel_err` and `marlin_rel_err`
are distances from the sum without any rounding of activations, `release_rel_err` is ours from the release's definition,
which rounds both products' inputs to e4m3; if that, or Marlin's, is above WRONG nothing is timed.

A call's tokens are routed differently in each of several sets, so that no call finds its experts in L2.

    floor = (codes and scales of the touched experts, 17/32 byte a weight; x and the result once) / copy bandwidth

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from lib.experts_inputs import BYTES_A_WEIGHT, LIMIT, MODELS, Inputs, Model, inputs, random_experts
from lib.measuring import heading, interleaved
from torch import Tensor, nn

from dsv4_kernels.moe import Mxfp4Experts
from dsv4_kernels.moe.ref import ACTIVATION_BLOCK
from dsv4_kernels.number_formats import dequantise_fp4_weight
from dsv4_kernels.quant import fp8_quantise as quantise
from dsv4_kernels.quant.ref import fp8_quantise

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
ROUTING = ("uniform", "zipf", "six")
WRONG = 0.01
CHECKED_TOKENS = 3
SECONDS = 0.12
SETS = {1: 12, 4: 8, 16: 6, 64: 4, 128: 4, 256: 3}
MOST_SETS_OF_PREFILL = 2


def exact(packed: Mxfp4Experts, i: Inputs, tokens: Tensor, rounds: bool) -> Tensor:
    """Return [tokens, d] in float64; with `rounds` both products' inputs are rounded as in the release."""

    def rounded(row: Tensor) -> Tensor:
        if not rounds:
            return row
        codes, scales = fp8_quantise(row.bfloat16()[None], ACTIVATION_BLOCK, False)
        return (codes.double() * scales.double().repeat_interleave(ACTIVATION_BLOCK, 1))[0]

    out = torch.zeros(len(tokens), packed.hidden_size, dtype=torch.float64, device=i.x.device)
    for at, token in enumerate(tokens.tolist()):
        for expert, weight in zip(i.experts[token].tolist(), i.weights[token].double(), strict=True):
            w13, w2 = (
                dequantise_fp4_weight(codes[expert], scale[expert], torch.float64)
                for codes, scale in ((packed.w13, packed.w13_scale), (packed.w2, packed.w2_scale))
            )
            sums = w13 @ rounded(i.x[token].double())
            gate, up = (sums.bfloat16().double() if rounds else sums).chunk(2)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            out[at] += w2 @ rounded(weight * gate * gate.sigmoid() * up)
    return out


# ---- contenders: made once from the weights, then called with inputs

Contender = Callable[[Inputs], Tensor]


def ours(packed: Mxfp4Experts, sweep: bool) -> dict[str, Contender]:
    """Return our kernels with the shape that they choose and, with `sweep`, with each shape."""
    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import FEW, NARROW, PAIRED, WIDE

    arranged = packed.for_hopper()

    def by(shape: object, overlaps: bool | None = None) -> Contender:
        return lambda i: launch.experts_forward(
            i.x, i.weights, i.experts, arranged, LIMIT, dtype=torch.bfloat16, shape=shape, overlaps=overlaps
        )

    made: dict[int, tuple[Inputs, tuple[Tensor, Tensor]]] = {}  # with the inputs, so that no id is used twice

    def from_codes(shape: object) -> Contender:
        def call(i: Inputs) -> Tensor:
            if id(i) not in made:  # in the check of the first set, or in the warm-up: not in a timed graph
                made[id(i)] = i, quantise(i.x, ACTIVATION_BLOCK, column_major=True)
            work = i.x, i.weights, i.experts, arranged, LIMIT
            return launch.experts_forward(*work, dtype=torch.bfloat16, shape=shape, quantised=made[id(i)][1])

        return call

    found = {"ours": by(None)}
    if sweep:
        found |= {"ours_by_few": by(FEW), "ours_by_few_codes": from_codes(FEW)}
        found |= {"ours_by_narrow_codes": from_codes(NARROW)}
        found |= {"ours_by_narrow": by(NARROW), "ours_by_paired": by(PAIRED), "ours_by_wide": by(WIDE)}
        found |= {"ours_by_overlap": by(None, overlaps=True), "ours_by_turns": by(None, overlaps=False)}
    return found


def marlin(packed: Mxfp4Experts) -> Contender:
    """Return SGLang's Marlin.

    Raises:
        ImportError: SGLang or a package that its kernels need is missing.
    """
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace
    from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

    layer = nn.Module()
    for name in ("w13", "w2"):
        codes, scale = getattr(packed, name), getattr(packed, f"{name}_scale")
        setattr(layer, f"{name}_weight", nn.Parameter(codes.view(torch.int8), requires_grad=False))
        setattr(layer, f"{name}_weight_scale", nn.Parameter(scale, requires_grad=False))
    layer.orig_dtype = torch.bfloat16
    prepare_moe_mxfp4_layer_for_marlin(layer)

    def call(i: Inputs) -> Tensor:
        return fused_marlin_moe(
            hidden_states=i.x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=i.x.new_empty(len(i.x), 0),
            topk_weights=i.weights,
            topk_ids=i.experts,
            workspace=marlin_make_workspace(i.x.device, max_blocks_per_sm=4),
            num_bits=4,
            clamp_limit=LIMIT,
        )

    return call


def most_tokens(contender: str) -> int | float:
    """Return the most tokens of a call with which a contender is worth a measurement."""
    of_few = {"ours_by_few": 16, "ours_by_few_codes": 16, "ours_by_narrow_codes": 16}
    return of_few.get(contender, math.inf)


# ---- a row


def distance(found: Tensor, expected: Tensor, tokens: Tensor) -> float:
    """Return |found - expected| / |expected|."""
    return float(f"{float((found[tokens].double() - expected).norm() / expected.norm()):.3e}")


def run_case(
    name: str,
    model: Model,
    packed: Mxfp4Experts,
    contenders: dict[str, Contender],
    tokens: int,
    routing: str,
    device: torch.device,
    bandwidth: float,
) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: a result is wrong.
    """
    count = SETS.get(tokens, MOST_SETS_OF_PREFILL)
    sets = [inputs(model, tokens, routing, seed, device) for seed in range(count)]
    checked = torch.linspace(0, tokens - 1, min(CHECKED_TOKENS, tokens), device=device).long()
    plain, released = (exact(packed, sets[0], checked, rounds) for rounds in (False, True))
    touched = sum(len(i.experts.unique()) for i in sets) / count
    weight_bytes = touched * 3 * model.d * model.channels * BYTES_A_WEIGHT
    row: dict[str, object] = {"name": name, "touched_experts": round(touched, 1)}
    contenders = {contender: call for contender, call in contenders.items() if tokens <= most_tokens(contender)}
    for contender, call in contenders.items():
        found = call(sets[0])
        error = distance(found, plain, checked)
        row["rel_err" if contender == "ours" else f"{contender}_rel_err"] = error
        if contender != "marlin":
            error = distance(found, released, checked)
            row["release_rel_err" if contender == "ours" else f"{contender}_release_rel_err"] = error
        assert error <= WRONG, f"{name}: {contender} is off by {error}; nothing is timed"
    calls = {contender: [lambda i=i, call=call: call(i) for i in sets] for contender, call in contenders.items()}
    for contender, timing in interleaved(calls, device, SECONDS * len(calls)).items():
        row[f"{contender}_us"] = round(timing.median_us, 2)
        row[f"{contender}_spread"] = round(timing.spread, 4)
    row["floor_us"] = round(1e6 * (weight_bytes + 4 * tokens * model.d) / bandwidth, 2)
    return row


def line(row: dict) -> str:
    """Return a row of the table, in microseconds."""
    ours_us, theirs = row["ours_us"], row.get("marlin_us", math.nan)
    others = ", ".join(
        f"{key[8:-3]} {value:.1f}" for key, value in row.items() if key[:8] == "ours_by_" and key[-3:] == "_us"
    )
    return (
        f"{row['name']:24} {ours_us:9.1f} {theirs:9.1f} {ours_us / theirs:6.2f} {row['floor_us']:9.1f} "
        f"{row['floor_us'] / ours_us:6.0%} {row['release_rel_err']:9.1e} {row['rel_err']:9.1e} "
        f"{row.get('marlin_rel_err', math.nan):9.1e}  {others}"
    )


CLASSES = {"decode_1_4": (1, 4), "decode_16_256": (16, 64, 128, 256), "prefill": (1024, 4096, 8192)}


def summary(rows: list[dict]) -> dict[str, float]:
    """Return, by kind of case, geometric means of ours / Marlin, the mean share of the floor, and each variant over
    ours."""
    found: dict[str, float] = {}

    def mean(name: str, numbers: list[float]) -> None:
        if numbers:
            found[name] = round(math.exp(sum(map(math.log, numbers)) / len(numbers)), 3)

    def ratios(key: str, of: str, tokens: tuple[int, ...], among: list[dict] = rows) -> list[float]:
        chosen = [row for row in among if int(row["name"].rsplit("-t", 1)[1]) in tokens and {key, of} <= row.keys()]
        return [row[key] / row[of] for row in chosen]

    for what, tokens in CLASSES.items():
        mean(what, ratios("ours_us", "marlin_us", tokens))
    largest = max((row["ours_us"] / row["marlin_us"] for row in rows if "marlin_us" in row), default=None)
    if largest is not None:
        found["largest"] = round(largest, 3)
    mean("floor_share_64_128", ratios("floor_us", "ours_us", (64, 128)))
    for routing in ROUTING:
        of_it = [row for row in rows if routing in row["name"].split("-")]
        mean(f"floor_share_64_128_{routing}", ratios("floor_us", "ours_us", (64, 128), of_it))
    variants = dict.fromkeys(key for row in rows for key in row if key[:8] == "ours_by_" and key[-3:] == "_us")
    for key in variants:
        for what, tokens in CLASSES.items():
            mean(f"{key[8:-3]}_over_ours_{what}", ratios(key, "ours_us", tokens))
    return found


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--slices", default="1,2", help="ranks of tensor parallelism, by commas")
    parser.add_argument("--routing", default=",".join(ROUTING))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="also with each shape of work tiles, and with overlap")
    parser.add_argument("--out", type=Path, help="write the result there, row by row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cuda")
    ceilings, result = heading("experts", device)
    heads = ("ours", "Marlin", "ratio", "floor", "of it", "release", "error", "its")
    widths = (9, 9, 6, 9, 6, 9, 9, 9)
    print(f"{'case':24} " + " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    rows: list[dict] = result["cases"]
    for model_name in options.models.split(","):
        for ranks in map(int, options.slices.split(",")):
            whole = MODELS[model_name]
            model = Model(whole.experts, whole.d, whole.channels // ranks)
            packed = random_experts(model, device)
            contenders = ours(packed, options.sweep)
            try:
                contenders["marlin"] = marlin(packed)
            except Exception as error:  # a missing opponent is reported, not an error
                result["marlin_error"] = f"{type(error).__name__}: {error}"[:300]
                print(f"    marlin: {result['marlin_error']}", file=sys.stderr)
            for routing in options.routing.split(","):
                for tokens in map(int, options.tokens.split(",")):
                    name = f"{model_name}{'' if ranks == 1 else f'-tp{ranks}'}-{routing}-t{tokens}"
                    rows.append(
                        run_case(name, model, packed, contenders, tokens, routing, device, ceilings.bytes_per_second)
                    )
                    print(line(rows[-1]), flush=True)
                    torch.cuda.empty_cache()
                    if options.out:
                        with contextlib.suppress(KeyError, ValueError):
                            result["summary"] = summary(rows)
                        options.out.write_text(json.dumps(result, indent=1) + "\n")
            del packed, contenders
            torch.cuda.empty_cache()
    result["summary"] = summary(rows)
    print(json.dumps(result["summary"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
