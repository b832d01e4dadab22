"""The hyper-connection boundary in one launch, against SGLang's own kernels and against the card's bandwidth.

    python benchmarks/bench_hyper_connection.py [--tokens 1,64] [--dims 4096] [--sweep] [--out FILE.json]

Between two sublayers of DeepSeek-V4: `hc_post` of the one, `hc_pre` of the next, RMSNorm. Contenders:

    ours           `hc_boundary` with the kernel forced by name
    ours_fp8       as `ours`, with x also in e4m3
    ours_then_fp8  ours, and `fp8_quantise` of x: two launches
    ours_of_experts (up to 64 tokens) as `ours_fp8`, after a sum over six experts and the shared expert
    ours_sum_apart the same in two launches: the sum, and `ours_fp8`
    ours_by_NxM    (--sweep) as ours, with groups of N tokens and M teams a CTA instead of `choice.chosen`'s choice
    ours_by_N_alone (--sweep) with groups of N tokens, one CTA a multiprocessor, and interleaved products
    sglang         `mhc_fused_post_pre` as SGLang 0.5.23 calls it by default: TileLang; above 32 tokens with DeepGEMM's
                   `tf32_hc_prenorm_gemm`. fn is rounded to TF32 there
    sglang_parts   `mhc_post` and `mhc_pre`, with the norm

First every result is compared with float64 on up to 64 tokens, in the Frobenius norm; if ours is off by more than
WRONG nothing is timed. Then as in `bench_sparse_attention`: each contender's calls over all sets of inputs, fn
included, which together are twice as large as L2, are captured in a CUDA graph, and the graphs are replayed in turns.

    floor = (streams and output read, streams and x written, fn read once) / copy bandwidth

with the bandwidth (read + written) that is measured in the same run. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from lib.experts_inputs import CHOSEN
from lib.measuring import gpu_state, interleaved, l2_bytes, measure_ceilings
from lib.versions import versions
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.host.joint_launch import MOST_TOKENS
from dsv4_kernels.hyper_connection import hc_boundary
from dsv4_kernels.quant import fp8_quantise

TOKENS = (1, 4, 16, 64, 128, 1024, 8192)
DIMS = {4096: "Flash", 7168: "Pro"}
EPS, ITERATIONS = 1e-6, 20
WRONG = {"streams": 0.004, "x": 0.006, "post": 3e-4, "comb": 3e-4}
"""Largest relative errors. bf16 rounds by 2**-8 at most, once or twice. fp32 sums are off by some 1e-6, but one channel
in 10,000 rounds to another bf16 than in float64, which moves a product by some 3e-5."""
SECONDS = 0.15
MOST_SETS = 64
Results = tuple[Tensor, ...]
Call = Callable[[], Results]
"""Enqueues one boundary; returns streams, x, post, comb and any further results."""


class Inputs(NamedTuple):
    """Inputs of one boundary."""

    y: Tensor  # [T, d] bf16
    streams: Tensor  # [T, 4, d] bf16
    post: Tensor  # [T, 4] fp32
    comb: Tensor  # [T, 4, 4] fp32
    fn: Tensor  # [24, 4 * d] fp32
    base: Tensor  # [24] fp32
    scale: Tensor  # [3] fp32
    weight: Tensor  # [d] bf16, as in the checkpoint

    @staticmethod
    def random(num_tokens: int, d: int, device: torch.device, seed: int) -> Inputs:
        """Return random inputs; products with fn are around 1, as in a trained model."""
        g = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device)

        return Inputs(
            normal(num_tokens, d).bfloat16(),
            normal(num_tokens, 4, d).bfloat16(),
            2 * normal(num_tokens, 4).sigmoid(),
            normal(num_tokens, 4, 4).softmax(1),
            normal(24, 4 * d) / math.sqrt(4 * d),
            normal(24),
            1 + 0.3 * normal(3),
            (1 + 0.1 * normal(d)).bfloat16(),
        )

    def bytes(self) -> int:
        """Return the least bytes to move: streams and a row are read and written."""
        through = sum(x.numel() * x.element_size() for x in (self.y, self.streams, self.post, self.comb))
        return 2 * through + self.fn.numel() * 4

    def read_bytes(self) -> int:
        """Return the bytes of all inputs."""
        return sum(x.numel() * x.element_size() for x in self)


def exact(i: Inputs, tokens: Tensor) -> Results:
    """Return the results in float64; streams are rounded to bf16 before they are used, as the definition says."""
    y, x, post, comb = (v[tokens].double() for v in (i.y, i.streams, i.post, i.comb))
    streams = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
    rounded = streams.bfloat16().double()
    flat = rounded.flatten(1)
    mix = flat @ i.fn.double().T * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)
    logits = mix * i.scale.double()[[0] * 4 + [1] * 4 + [2] * 16] + i.base.double()
    row = torch.einsum("tn,tnd->td", logits[:, :4].sigmoid() + EPS, rounded).bfloat16().double()
    new_comb = logits[:, 8:].unflatten(1, (4, 4)).softmax(2) + EPS
    new_comb = new_comb / (new_comb.sum(1, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        new_comb = new_comb / (new_comb.sum(2, keepdim=True) + EPS)
        new_comb = new_comb / (new_comb.sum(1, keepdim=True) + EPS)
    x = row * torch.rsqrt(row.square().mean(1, keepdim=True) + EPS) * i.weight.double()
    return streams, x, 2 * logits[:, 4:8].sigmoid(), new_comb


# ---- contenders: the inputs of all sets -> a call for each set


def ours(sets: list[Inputs], impl: str) -> list[Call]:
    """Return calls of the public function."""
    return [lambda i=i: hc_boundary(*i, EPS, EPS, ITERATIONS, impl=impl) for i in sets]


def ours_fp8(sets: list[Inputs], impl: str) -> list[Call]:
    """Return calls that also make codes and scales of x."""
    return [lambda i=i: hc_boundary(*i, EPS, EPS, ITERATIONS, fp8=True, impl=impl) for i in sets]


def ours_then_fp8(sets: list[Inputs], impl: str) -> list[Call]:
    """Return calls of the boundary and the quantiser in two launches."""

    def call(i: Inputs) -> Results:
        made = hc_boundary(*i, EPS, EPS, ITERATIONS, impl=impl)
        return *made, *fp8_quantise(made[1], 128, column_major=True, impl=impl)

    return [lambda i=i: call(i) for i in sets]


def of_experts(sets: list[Inputs], impl: str, launches: int) -> list[Call]:
    """Return calls that begin with a sum over experts, which is `y`: a call of one launch or of two."""
    from dsv4_kernels.host.arch import architecture
    from dsv4_kernels.host.expert_rows import ExpertRows
    from dsv4_kernels.moe import sums

    def rows_of(i: Inputs) -> ExpertRows:
        slots = torch.arange(CHOSEN * len(i.y), dtype=torch.int32, device=i.y.device).view(-1, CHOSEN)
        experts = slots.flip(1).contiguous()
        rows = torch.zeros(slots.numel(), i.y.shape[1], dtype=i.y.dtype, device=i.y.device)
        given = (rows, experts, slots)
        arch = architecture(impl, i.y.device)
        return ExpertRows(*given, i.y, i.y.dtype, lambda: sums.sum_rows(*given, i.y.dtype, i.y, arch))

    def call(i: Inputs, rows: ExpertRows) -> Results:
        y = rows if launches == 1 else rows.total()
        return hc_boundary(y, *i[1:], EPS, EPS, ITERATIONS, fp8=True, impl=impl)

    return [lambda i=i, rows=rows: call(i, rows) for i, rows in zip(sets, map(rows_of, sets), strict=True)]


def ours_by(sets: list[Inputs], impl: str, tokens: int, teams: int, interleaved: bool = False) -> list[Call]:
    """Return calls with groups of `tokens` tokens and `teams` teams a CTA."""
    from dsv4_kernels.hyper_connection import gpu
    from dsv4_kernels.hyper_connection.plan import PRE_ROWS

    def call(i: Inputs) -> Results:
        written_back, parameters = (i.y, i.post, i.comb), (i.fn, i.base, i.scale)
        numbers = (EPS, EPS, ITERATIONS, tokens, teams)
        tensors = (i.streams, written_back, parameters, i.weight)
        return gpu.run(impl, "hc_boundary", PRE_ROWS, *tensors, *numbers, interleaved=interleaved)

    return [lambda i=i: call(i) for i in sets]


def sglang_module() -> types.ModuleType:
    """Return SGLang's module, set up outside of a server: no tensor parallelism, no symmetric memory.

    Raises:
        ImportError: SGLang or a package that its kernels need is missing.
    """
    from sglang.kernels.ops.layernorm import mhc

    mhc.get_parallel = lambda: types.SimpleNamespace(tp_group=None)
    mhc.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    mhc.is_allocation_symmetric = lambda: False
    mhc.is_dsa_prefill_cp_interleave = lambda: False
    return mhc


def sglang(sets: list[Inputs]) -> list[Call]:
    """Return calls as SGLang's DeepSeek-V4 makes them: the norm inside, a factor of 2 for post."""
    mhc = sglang_module()

    def call(i: Inputs) -> Results:
        streams, post, comb, x = mhc.mhc_fused_post_pre(
            i.y, i.streams, i.post[..., None], i.comb, i.fn, i.scale, i.base, EPS, EPS, EPS, 2.0, ITERATIONS,
            norm_weight=i.weight, norm_eps=EPS,
        )  # fmt: skip
        return streams, x, post.squeeze(-1), comb

    return [lambda i=i: call(i) for i in sets]


def sglang_parts(sets: list[Inputs]) -> list[Call]:
    """Return calls as with SGLANG_OPT_FUSE_MHC_POST_PRE off."""
    mhc = sglang_module()

    def call(i: Inputs) -> Results:
        streams = mhc.mhc_post(i.y, i.streams, i.post[..., None], i.comb)
        post, comb, x = mhc.mhc_pre(
            streams, i.fn, i.scale, i.base, EPS, EPS, EPS, 2.0, ITERATIONS, norm_weight=i.weight, norm_eps=EPS
        )
        return streams, x, post.squeeze(-1), comb

    return [lambda i=i: call(i) for i in sets]


# ---- a row


def relative_errors(found: Results, expected: Results, tokens: Tensor) -> dict[str, float]:
    """Return |found - exact| / |exact| of each result."""
    pairs = zip(WRONG, found[: len(WRONG)], expected, strict=True)
    return {name: float((x[tokens].double() - e).norm() / e.norm()) for name, x, e in pairs}


def run_case(num_tokens: int, d: int, impl: str, device: torch.device, sweep: bool, bandwidth: float) -> dict:
    """Return one row of the result.

    Raises:
        AssertionError: our results are wrong.
    """
    first = Inputs.random(num_tokens, d, device, 0)
    count = max(2, min(MOST_SETS, -(-2 * l2_bytes(device) // first.read_bytes())))
    sets = [first, *(Inputs.random(num_tokens, d, device, seed) for seed in range(1, count))]
    makers: dict[str, Callable[[], list[Call]]] = {
        "ours": lambda: ours(sets, impl),
        "ours_fp8": lambda: ours_fp8(sets, impl),
        "ours_then_fp8": lambda: ours_then_fp8(sets, impl),
        "sglang": lambda: sglang(sets),
        "sglang_parts": lambda: sglang_parts(sets),
    }
    if num_tokens <= MOST_TOKENS["sm100"] and impl != "ref":
        makers |= {
            "ours_of_experts": lambda: of_experts(sets, impl, 1),
            "ours_sum_apart": lambda: of_experts(sets, impl, 2),
        }
    if sweep:
        sizes = [(n, 1) for n in (1, 2, 4, 8) if n <= num_tokens]
        sizes += [(8, 2)] if num_tokens > 64 and d == 4096 else []  # Pro's fn does not fit
        makers |= {f"ours_by_{n}x{m}": lambda n=n, m=m: ours_by(sets, impl, n, m) for n, m in sizes}
        alone = {n for n, _ in sizes}
        makers |= {f"ours_by_{n}_alone": lambda n=n: ours_by(sets, impl, n, 1, True) for n in sorted(alone)}
    tokens = torch.linspace(0, num_tokens - 1, min(64, num_tokens), device=device).long()
    expected = exact(first, tokens)
    row: dict[str, object] = {"tokens": num_tokens, "d": d, "model": DIMS.get(d), "sets": count}
    contenders: dict[str, list[Call]] = {}
    for name, maker in makers.items():
        try:
            calls = maker()
            errors = relative_errors(calls[0](), expected, tokens)
        except Exception as error:  # a missing opponent, or one that does not support the case, is reported
            if name.startswith("ours"):
                raise
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
            continue
        row[f"{name}_rel_err"] = {part: float(f"{value:.2e}") for part, value in errors.items()}
        if name.startswith("ours"):
            wrong = {part: value for part, value in errors.items() if not value <= WRONG[part]}
            assert not wrong, f"{num_tokens} tokens, d {d}: {name} is off by {wrong}; nothing is timed"
        contenders[name] = calls
    floor = 1e6 * first.bytes() / bandwidth
    row |= {"floor_us": round(floor, 2), "bytes": first.bytes()}
    for name, timing in interleaved(contenders, device, SECONDS * len(contenders)).items():
        row[f"{name}_us"], row[f"{name}_spread"] = round(timing.median_us, 2), round(timing.spread, 4)
    return row


def line(row: dict) -> str:
    """Return a row of the table, in microseconds."""
    ours_us, theirs = row["ours_us"], row.get("sglang_us")
    shown = [f"{name[:-3]} {value:.1f}" for name, value in row.items() if name.endswith("_us")][2:]
    return (
        f"{row['model'] or row['d']:>6} {row['tokens']:6} {ours_us:9.1f} {theirs or math.nan:9.1f} "
        f"{(theirs or math.nan) / ours_us:6.2f} {row['floor_us']:9.2f} {row['floor_us'] / ours_us:6.0%}   "
        f"{', '.join(shown)}"
    )


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens of a batch, by commas")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)), help="widths, by commas")
    parser.add_argument("--sweep", action="store_true", help="also with every number of tokens a group")
    parser.add_argument("--device", default="cuda", help="cpu: the reference, to try the script")
    parser.add_argument("--out", type=Path, help="write the result there")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu tries the script on the reference")
    impl = registry.chosen("hc_boundary", device, torch.bfloat16).name
    ceilings = measure_ceilings(device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{gpu}, kernel {impl}: {ceilings.bytes_per_second / 1e12:.2f} TB/s")
    print(f"{'model':>6} {'tokens':>6} {'ours':>9} {'SGLang':>9} {'ratio':>6} {'floor':>9} {'of it':>6}")
    rows = []
    for d in map(int, options.dims.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            sweep = options.sweep and impl != "ref"
            rows.append(run_case(tokens, d, impl, device, sweep, ceilings.bytes_per_second))
            print(line(rows[-1]), flush=True)
            for key in rows[-1]:
                if key.endswith("_error"):
                    print(f"       {key}: {rows[-1][key]}", file=sys.stderr)
    result = {
        "benchmark": "hyper_connection",
        "gpu": gpu,
        "impl": impl,
        "copy_tb_s": round(ceilings.bytes_per_second / 1e12, 3),
        "versions": versions(),
        "state": gpu_state() if device.type == "cuda" else None,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
