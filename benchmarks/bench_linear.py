"""FP8 linear layers of few tokens: ours against DeepGEMM and against the card's bandwidth.

    python benchmarks/bench_linear.py [--models flash,flash-tp2,pro] [--layers REGEX] [--tokens 1,4,16,32,64,128]
        [--sweep] [--processes 8] [--out FILE.json]

Contenders, both from quantised inputs to [T, N] in bf16, in CUDA graphs, one launch a call:

    ours        `dsv4_kernels.linear.linear_fp8`, sm90, each launched after the end of the one before
    ours_early  the same, each launched while the one before runs (`device.dependent_launch`), as it is served
    deepgemm    `deep_gemm.fp8_gemm_nt` as SGLang 0.5.23 calls it

First every case is compared with float64 (distances `rel_err`, `deepgemm_rel_err`; if ours is above WRONG nothing is
timed), `bits` says whether all elements are bitwise equal to DeepGEMM's, `replays` whether a graph's replay is as well.

Calls alternate between sets of weights that are at least twice the L2 cache, so each call reads its own from memory.

    floor = (codes and scales of weight and tokens, and the result, once) / copy bandwidth

`--sweep` also times plans (`fp8_plan.Plan`) that are never chosen, and names the fastest of each case; select few
cases for it. Before anything is timed several processes compile the kernels. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from lib.fp8_layers import LAYERS
from lib.measuring import heading, interleaved, l2_bytes
from torch import Tensor

from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import compile_pool
from dsv4_kernels.linear import linear_fp8
from dsv4_kernels.quant import fp8_quantise

TOKENS = (1, 4, 16, 32, 64, 128)
WRONG = 0.004
"""bf16 rounds to a relative 2^-9."""
SECONDS = 0.05
SWEEP_SECONDS = 0.01


@dataclass(frozen=True)
class Case:
    """A product of a layer at a number of tokens."""

    model: str
    layer: str
    tokens: int

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return LAYERS[self.model][self.layer]

    @property
    def name(self) -> str:
        """Return the case's name, such as flash-wq_b-t16."""
        return f"{self.model}-{self.layer}-t{self.tokens}"

    @property
    def num_bytes(self) -> int:
        """Return the least bytes to read and write."""
        n, k = self.shape
        return n * k + n * k // 128**2 * 4 + self.tokens * (k + k // 128 * 4 + 2 * n)


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call."""

    codes: Tensor  # [T, K] e4m3
    scales: Tensor  # [T, K / 128] fp32, column-major
    weight: Tensor  # [N, K] e4m3
    weight_scale: Tensor  # [ceil(N / 128), K / 128] fp32

    def exact(self) -> Tensor:
        """Return the product [T, N] in fp64."""
        n, k = self.weight.shape
        x = self.codes.double() * self.scales.double().repeat_interleave(128, 1)
        scale = self.weight_scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return x @ (self.weight.double() * scale).T


def inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """Return inputs whose channels and blocks differ in size; weights have all codes but NaN."""
    n, k = case.shape
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.tokens, k, generator=generator, device=device)
    sizes = torch.randint(-3, 4, (case.tokens, k // 128), generator=generator, device=device)
    x *= torch.exp2(sizes.float()).repeat_interleave(128, 1)
    codes, scales = fp8_quantise(x.bfloat16(), 128, column_major=True)
    weight = torch.randint(0, 127, (n, k), generator=generator, dtype=torch.uint8, device=device)
    weight |= torch.randint(0, 2, (n, k), generator=generator, dtype=torch.uint8, device=device) << 7
    exponents = torch.randint(-14, -8, (-(-n // 128), k // 128), generator=generator, device=device)
    return Inputs(codes, scales, weight.view(torch.float8_e4m3fn), torch.exp2(exponents.float()))


# ---- contenders

Contender = Callable[[Inputs], Tensor]


def ours(i: Inputs) -> Tensor:
    """Run our kernel with the plan that it chooses."""
    return linear_fp8(i.codes, i.scales, i.weight, i.weight_scale, impl="sm90")


def ours_by(plan: object, i: Inputs) -> Tensor:
    """Run our kernel with the given plan."""
    from dsv4_kernels.linear import fp8

    return fp8.sm90(i.codes, i.scales, i.weight, i.weight_scale, plan=plan)


def in_turns(call: Contender, i: Inputs) -> Tensor:
    """Run a call whose launch begins when the one before has ended."""
    with dependent_launch.switched(False):
        return call(i)


def early(call: Contender, i: Inputs) -> Tensor:
    """Run a call whose launch begins while the one before runs."""
    with dependent_launch.switched(True):
        return call(i)


def deepgemm(i: Inputs) -> Tensor:
    """Run DeepGEMM as SGLang's `w8a8_block_fp8_matmul_deepgemm` calls it on Hopper.

    Raises:
        ImportError: it is not installed.
    """
    import deep_gemm

    out = i.codes.new_empty(len(i.codes), len(i.weight), dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((i.codes, i.scales), (i.weight, i.weight_scale), out)
    return out


def plans(case: Case, sweep: bool, device: torch.device) -> Iterator[object]:
    """Yield the plan that serves a case and, with `sweep`, every other possible plan."""
    from dsv4_kernels.linear import fp8, fp8_plan

    chosen = fp8_plan.chosen(case.tokens, case.shape[0], fp8.multiprocessors(device))
    yield chosen
    if not sweep:
        return
    seen = {chosen}
    for rows in (16, 32, 64):
        for cluster in (1, 2, 4):
            for blocks in (1, 2, 4):
                for in_flight, ctas in ((32, 1), (64, 1), (96, 1), (128, 1), (32, 2), (64, 2)):
                    stages = in_flight * 1024 // (rows * blocks * 128)
                    fields = rows, chosen.tokens, blocks, stages, cluster, ctas
                    if stages > 32 or rows * blocks < 32 or chosen.tokens < 8 * cluster:
                        continue
                    with contextlib.suppress(ValueError):  # shared memory does not hold the plan
                        plan = fp8_plan.Plan(*fields)
                        if plan not in seen:
                            seen.add(plan)
                            yield plan


def compile_all(cases: list[Case], options: argparse.Namespace, device: torch.device) -> None:
    """Compile our kernels with `compile_pool`, and DeepGEMM's in processes of their own, which leave them on disk."""
    from dsv4_kernels.linear import fp8

    children = []
    if options.processes > 1 and not options.no_deepgemm:
        command = [sys.executable, __file__, "--compile"]
        shares = [cases[i :: options.processes] for i in range(options.processes)]
        children = [subprocess.Popen([*command, *(case.name for case in share)]) for share in shares if share]
    chosen = dict.fromkeys(plan for case in cases for plan in plans(case, options.sweep, device))
    for early_launch in (False, True):
        compiles = [functools.partial(fp8.compile, plan) for plan in chosen]
        todo = [("linear_fp8", functools.partial(dependent_launch.compiled, one, early_launch)) for one in compiles]
        compile_pool.fill(todo, fp8.ARCH, lambda *_: None, options.processes)
    for child in children:
        child.wait()


def compile_deepgemm(cases: list[Case], device: torch.device) -> None:
    """Call DeepGEMM once for each case; it keeps compiled kernels on disk."""
    for case in cases:
        with contextlib.suppress(Exception):  # the run itself reports the error
            deepgemm(inputs(case, 0, device))
    torch.cuda.synchronize()


# ---- a row


def distance(found: Tensor, exact: Tensor) -> float:
    """Return |found - exact| / |exact|."""
    return float(f"{float((found.double() - exact).norm() / exact.norm()):.3e}")


def number_of_sets(case: Case, device: torch.device) -> int:
    """Return the number of sets whose weights together are twice the L2 cache."""
    n, k = case.shape
    return max(3, -(-2 * l2_bytes(device) // (n * k)))


def run_case(case: Case, contenders: dict[str, Contender], device: torch.device, bandwidth: float) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: a result of ours is wrong.
    """
    sets = [inputs(case, seed, device) for seed in range(number_of_sets(case, device))]
    row: dict[str, object] = {"name": case.name, "sets": len(sets)}
    exact, outputs = sets[0].exact(), {}
    for name, call in list(contenders.items()):
        try:
            outputs[name] = call(sets[0])
        except Exception as error:
            if name != "deepgemm":
                raise
            row["deepgemm_error"] = f"{type(error).__name__}: {error}"[:300]  # reported
            continue
        error = distance(outputs[name], exact)
        row["rel_err" if name == "ours" else f"{name}_rel_err"] = error
        assert name == "deepgemm" or error <= WRONG, f"{case.name}: {name} is off by {error}; nothing is timed"
        assert name == "deepgemm" or torch.equal(outputs[name], outputs["ours"]), f"{case.name}: {name} has other bits"
    if "deepgemm" in outputs:
        other = int((outputs["ours"].view(torch.int16) != outputs["deepgemm"].view(torch.int16)).sum())
        row |= {"bits": other == 0, "other_bits": other}
    calls = {name: [functools.partial(contenders[name], i) for i in sets] for name in outputs}
    seconds = sum(SWEEP_SECONDS if name.startswith("plan ") else SECONDS for name in calls)
    for name, timing in interleaved(calls, device, seconds).items():
        row[f"{name}_us"] = round(timing.median_us, 2)
        row[f"{name}_spread"] = round(timing.spread, 4)
    row["floor_us"] = round(1e6 * case.num_bytes / bandwidth, 2)
    return row


def replays_alike(case: Case, device: torch.device) -> bool:
    """Whether graphs of our kernel, launched early and in turns, give the bits of a call, also with other inputs."""
    first, second = inputs(case, 0, device), inputs(case, 1, device)
    held = Inputs(first.codes.clone(), first.scales, first.weight, first.weight_scale)
    graph = torch.cuda.CUDAGraph()
    in_turns(ours, held), early(ours, held)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = in_turns(ours, held), *(early(ours, held) for _ in range(4))
    alike = True
    for codes in (first.codes, second.codes, first.codes):
        held.codes.copy_(codes)
        graph.replay()
        expected = ours(Inputs(codes, first.scales, first.weight, first.weight_scale))
        alike &= all(torch.equal(found, expected) for found in out)
    return alike


def line(row: dict) -> str:
    """Return a row of the table, in microseconds."""
    theirs, mine, early_us = row.get("deepgemm_us", math.nan), row["ours_us"], row["ours_early_us"]
    bits = {True: "same", False: f"{row.get('other_bits')}"}.get(row.get("bits"), "-")
    best = min((key for key in row if key.startswith("plan ") and key.endswith("_us")), key=row.get, default=None)
    swept = "" if best is None else f"  best {row[best]:.2f}: {best[5:-3]}"
    return (
        f"{row['name']:26} {mine:8.2f} {early_us:8.2f} {theirs:8.2f} {mine / theirs:6.2f} {early_us / theirs:6.2f} "
        f"{row['floor_us']:8.2f} {row['floor_us'] / mine:6.0%} {row['rel_err']:8.1e} {bits:>6}{swept}"
    )


def summary(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Return, by model and tokens, the microseconds of all products of a layer for each contender that has them all."""
    found: dict[str, dict[str, float]] = {}
    by_name = {row["name"]: row for row in rows}
    for model in LAYERS:
        for tokens in TOKENS:
            of_layer = [by_name.get(Case(model, layer, tokens).name) for layer in LAYERS[model]]
            if any(row is None or "deepgemm_us" not in row for row in of_layer):
                continue
            keys = ("ours_us", "ours_early_us", "deepgemm_us", "floor_us")
            found[f"{model}-t{tokens}"] = {key: round(sum(row[key] for row in of_layer), 2) for key in keys}
    return found


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(LAYERS))
    parser.add_argument("--layers", default="", help="a regular expression of their names")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="also with plans that are never chosen")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--no-deepgemm", action="store_true")
    parser.add_argument("--compile", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the result there, row by row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cuda", 0)
    tokens = [int(number) for number in options.tokens.split(",")]
    models = options.models.split(",")
    cases = [Case(model, layer, number) for model in models for layer in LAYERS[model] for number in tokens]
    cases = [case for case in cases if re.search(options.layers, case.layer)]
    if options.compile is not None:
        compile_deepgemm([case for case in cases if case.name in options.compile], device)
        return
    compile_all(cases, options, device)
    ceilings, result = heading("linear_fp8", device)
    heads = ("ours", "early", "DeepGEMM", "ratio", "early", "floor", "of it", "error", "bits")
    widths = (8, 8, 8, 6, 6, 8, 6, 8, 6)
    print(f"{'case':26} " + " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    rows: list[dict] = result["cases"]
    for case in cases:
        of_launch = {"ours": in_turns, "ours_early": early}
        contenders: dict[str, Contender] = {name: functools.partial(of, ours) for name, of in of_launch.items()}
        if not options.no_deepgemm:
            contenders["deepgemm"] = deepgemm
        if options.sweep:
            for plan in plans(case, True, device):
                fields = ",".join(f"{name[0]}{value}" for name, value in vars(plan).items())
                by_plan = functools.partial(ours_by, plan)
                contenders[f"plan {fields}"] = functools.partial(in_turns, by_plan)
                contenders[f"plan {fields} early"] = functools.partial(early, by_plan)
        rows.append(run_case(case, contenders, device, ceilings.bytes_per_second))
        rows[-1]["replays"] = replays_alike(case, device)
        print(line(rows[-1]), "" if rows[-1]["replays"] else " REPLAYS DIFFER", flush=True)
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(result | {"summary": summary(rows)}, indent=1) + "\n")
    result["summary"] = summary(rows)
    for name, times in result["summary"].items():
        print(f"{name}: {times}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
