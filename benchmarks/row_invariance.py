"""Batch invariance of operators: does a row have the same bits in any batch, and in a second call?

    python benchmarks/row_invariance.py [--model flash|pro] [--device cuda] [--out FILE.json]

Each operator of a forward that sums, at the model's shapes: the implementation under `--enable-deterministic-inference`
and the default one. The registry, or for operators without a row there this script, marks the batch-invariant ones. The
rows of the largest batch are the reference. A smaller batch has its first or its last rows, so that a row's index
changes as well. The last line is JSON; the exit status is 1 if an operator that is marked batch-invariant is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.hyper_connection import hc_boundary
from dsv4_kernels.indexer import index_topk
from dsv4_kernels.kv_layout import KVRows, RowFormat
from dsv4_kernels.linear import grouped_linear, linear_fp32
from dsv4_kernels.moe import fused_swiglu
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.quant import fp4_qdq, fp8_quantise
from dsv4_kernels.router import route_topk_logits

MOST_ROWS = 2048
DECODED = 64
"""Most rows for which the indexer is called as in a decode step."""
BATCHES = (
    *(1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 170, 171, 200),
    *(255, 256, 257, 300, 384, 385, 500, 511, 512, 513, 1000, 1023, 1024, 1025, 2047),
)


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a model."""

    hidden: int
    heads: int
    q_lora: int
    o_groups: int
    experts: int
    intermediate: int
    vocabulary: int = 129_280
    o_lora: int = 1024
    head_dim: int = 512
    index_heads: int = 64
    index_dim: int = 128
    streams: int = 4


MODELS = {
    "flash": Dimensions(4096, 64, 1024, 8, 256, 2048),
    "pro": Dimensions(7168, 128, 1536, 16, 384, 3072),
    "tiny": Dimensions(256, 4, 64, 2, 16, 128, vocabulary=512, o_lora=32, head_dim=64, index_heads=4),  # for a CPU
}

Rows = Callable[[slice], Tensor]
"""Computes some rows of one batch as a batch of their own: [n, ...], n rows first."""


@dataclass(frozen=True)
class Operator:
    """One operator at one shape."""

    name: str
    implementation: str
    shape: str
    marked: bool
    """Whether it is marked batch-invariant."""
    rows: Rows


@dataclass(frozen=True)
class Verdict:
    """Result of one operator."""

    operator: Operator
    differs_at: tuple[int, ...]
    """Batch sizes at which some row's bits differ."""
    repeats: bool
    """Whether the same call gave the same bits twice."""

    @property
    def breaks_its_word(self) -> bool:
        """Whether it is marked batch-invariant and is not."""
        return self.operator.marked and bool(self.differs_at or not self.repeats)


def ask(operator: Operator, most: int = MOST_ROWS, batches: Sequence[int] = BATCHES) -> Verdict:
    """Compare batches of all sizes with the rows of the largest one."""
    whole = operator.rows(slice(0, most)).clone()
    repeats = torch.equal(bits(operator.rows(slice(0, most))), bits(whole))
    differs = []
    for size in (batch for batch in batches if batch < most):
        for place in (slice(0, size), slice(most - size, most)):
            if not torch.equal(bits(operator.rows(place)), bits(whole[place])):
                differs.append(size)
                break
    return Verdict(operator, tuple(differs), repeats)


def bits(x: Tensor) -> Tensor:
    """Return integers that are equal only if all bits are."""
    return x.contiguous().view(torch.uint8)


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Return random numbers, the same at every call."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def operators(d: Dimensions, device: torch.device, most: int = MOST_ROWS) -> Iterator[Operator]:
    """Yield all operators that this device has."""
    yield from products(d, device, most)
    yield from others(d, device, most)
    yield from indexer(d, device, most)
    if device.type == "cuda":
        yield from fp8_products(d, device, most)
        yield from packed_experts(d, device, most)


def implementations(op: str, device: torch.device) -> list[registry.Implementation]:
    """Return the implementations that a model may get here: the best batch-invariant one, and the default if it
    differs."""
    default = registry.chosen(op, device, torch.bfloat16)
    registry.require_batch_invariance()
    try:
        found = [registry.chosen(op, device, torch.bfloat16)]
    except NotImplementedError:
        found = []
    finally:
        registry.require_batch_invariance(False)
    return list(dict.fromkeys((*found, default)))


def products(d: Dimensions, device: torch.device, most: int) -> Iterator[Operator]:
    """Yield bf16 products with weights: gate, compressors and indexer, logits, the first half of the output
    projection."""
    x = normal(most, d.hidden, device=device)
    widths = {
        "gate": d.experts,
        "CSA projection": 4 * d.head_dim + d.index_heads + 4 * d.index_dim,
        "HCA projection": 2 * d.head_dim,
        "logits": d.vocabulary,
    }
    for name, width in widths.items():
        weight = normal(width, d.hidden, device=device, seed=1)
        for chosen in implementations("linear_fp32", device):
            yield Operator(
                f"linear_fp32: {name}",
                chosen.name,
                f"{width} x {d.hidden}",
                chosen.is_batch_invariant(device),
                lambda rows, weight=weight, name=chosen.name: linear_fp32(x[rows], weight, impl=name),
            )
    channels = d.heads * d.head_dim // d.o_groups
    grouped = normal(most, d.o_groups, channels, device=device, seed=2)
    weight = normal(d.o_groups, d.o_lora, channels, device=device, seed=3)
    for chosen in implementations("grouped_linear", device):
        yield Operator(
            "grouped_linear: wo_a",
            chosen.name,
            f"{d.o_groups} x {d.o_lora} x {channels}",
            chosen.is_batch_invariant(device),
            lambda rows, name=chosen.name: grouped_linear(grouped[rows], weight, impl=name),
        )


def others(d: Dimensions, device: torch.device, most: int) -> Iterator[Operator]:
    """Yield norms, the boundary between sublayers, the router, activations and sampling."""
    x = normal(most, d.hidden, device=device)
    streams = normal(most, d.streams, d.hidden, device=device, seed=4)
    fp32 = {"device": device, "dtype": torch.float32}
    post, comb = normal(most, d.streams, seed=5, **fp32), normal(most, d.streams, d.streams, seed=6, **fp32)
    rows_of_fn = (2 + d.streams) * d.streams
    fn = normal(rows_of_fn, d.streams * d.hidden, seed=7, **fp32) * 0.02
    base, scale = normal(rows_of_fn, seed=8, **fp32), normal(3, seed=9, **fp32)
    weight, logits = torch.ones(d.hidden, **fp32), normal(most, d.experts, seed=10, **fp32)
    gate_up = normal(most, 2 * d.intermediate, device=device, seed=11)
    last = normal(min(most, 256), d.vocabulary, seed=12, **fp32)

    def boundary(rows: slice, name: str) -> Tensor:
        parts = (x[rows], streams[rows], post[rows], comb[rows], fn, base, scale, weight, 1e-6, 1e-6, 20)
        return torch.cat([part.float().flatten(1) for part in hc_boundary(*parts, impl=name)], 1)

    called: dict[str, Callable[[slice, str], Tensor]] = {
        "rms_norm": lambda rows, name: rms_norm(x[rows], weight, 1e-6, impl=name),
        "hc_boundary": boundary,
        "route_topk_logits": lambda rows, name: torch.cat(
            [part.float() for part in route_topk_logits(logits[rows], base[:1].expand(d.experts), 6, 1.5, impl=name)], 1
        ),
        "fused_swiglu": lambda rows, name: fused_swiglu(gate_up[rows], 10.0, impl=name),
        "fp8_quantise": lambda rows, name: fp8_quantise(x[rows], 128, impl=name)[0].view(torch.uint8),
    }
    for op, call in called.items():
        for chosen in implementations(op, device):
            yield Operator(
                op,
                chosen.name,
                f"{d.hidden}",
                chosen.is_batch_invariant(device),
                lambda rows, call=call, name=chosen.name: call(rows, name),
            )
    for name, function in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        yield Operator(
            f"sampler: {name}",
            "torch",
            f"{d.vocabulary}",
            True,
            lambda rows, function=function: function(last[rows], -1),
        )


def indexer(d: Dimensions, device: torch.device, most: int) -> Iterator[Operator]:
    """Yield the choice of entries, called as in a decode step for few rows and as in a prefill chunk for many."""
    context = 16_384 if device.type == "cuda" else 1024
    keys = KVRows.allocate(context // 4, RowFormat.INDEX_FP4, d.index_dim, 0, torch.bfloat16, device)
    apart = torch.exp2(torch.randint(-8, 9, (4,), generator=torch.Generator().manual_seed(15))).to(device)
    # Blocks whose scales differ widely: their sums are rounded, and another instruction may round them differently.
    values = normal(context // 4, d.index_dim, device=device, dtype=torch.float32, seed=16)
    keys.scatter(torch.arange(context // 4, device=device), values * apart.repeat_interleave(d.index_dim // 4))
    q = fp4_qdq(normal(most, d.index_heads, d.index_dim, device=device, seed=17), 32)
    weights = normal(most, d.index_heads, device=device, dtype=torch.float32, seed=18)
    table = torch.arange(context // 256, dtype=torch.int32, device=device)[None]
    visible = (context // 4 - torch.arange(most, device=device) % 512 % (context // 8)).int()
    top_k = min(512, context // 16)

    def choose(rows: slice, name: str) -> Tensor:
        count = rows.stop - rows.start
        of_rows = torch.zeros(count, dtype=torch.int32, device=device), visible[rows].contiguous()
        return index_topk(q[rows], weights[rows], keys, table, 64, *of_rows, top_k, prefill=count > DECODED, impl=name)

    for chosen in implementations("index_topk", device):
        yield Operator(
            "index_topk",
            chosen.name,
            f"{context // 4} entries",
            chosen.is_batch_invariant(device),
            lambda rows, name=chosen.name: choose(rows, name),
        )


def packed_experts(d: Dimensions, device: torch.device, most: int) -> Iterator[Operator]:
    """Yield Hopper's routed experts, a few of them, so that tiles of all widths occur."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return
    from lib.experts_inputs import LIMIT, Model, inputs, random_experts

    from dsv4_kernels.moe.sm90 import launch

    model = Model(24, d.hidden, d.intermediate)
    packed = random_experts(model, device).for_hopper()
    for routing in ("uniform", "zipf"):
        i = inputs(model, most, routing, 19, device)
        yield Operator(
            f"experts: {routing}",
            "sm90",
            f"{model.experts} of {d.hidden} x {d.intermediate}",
            True,
            lambda rows, i=i: launch.experts_forward(i.x[rows], i.weights[rows], i.experts[rows], packed, LIMIT),
        )


def fp8_products(d: Dimensions, device: torch.device, most: int) -> Iterator[Operator]:
    """Yield SGLang's FP8 linear layers by DeepGEMM; none where it is not installed."""
    try:
        import deep_gemm
    except ImportError:
        print("no DeepGEMM: its products are left out", file=sys.stderr)
        return
    shapes = {
        "wqkv_a": (d.q_lora + d.head_dim, d.hidden),
        "wq_b": (d.heads * d.head_dim, d.q_lora),
        "wo_b": (d.hidden, d.o_groups * d.o_lora),
        "indexer wq_b": (d.index_heads * d.index_dim, d.q_lora),
        "shared w13": (2 * d.intermediate, d.hidden),
        "shared w2": (d.hidden, d.intermediate),
    }
    for name, (n, k) in shapes.items():
        codes, scales = fp8_quantise(normal(most, k, device=device, seed=13), 128)
        weight = normal(n, k, device=device, seed=14).to(torch.float8_e4m3fn)
        weight_scales = torch.full((-(-n // 128), -(-k // 128)), 2.0**-6, device=device)

        def multiply(
            rows: slice,
            codes: Tensor = codes,
            scales: Tensor = scales,
            weight: Tensor = weight,
            weight_scales: Tensor = weight_scales,
        ) -> Tensor:
            out = torch.empty(rows.stop - rows.start, len(weight), dtype=torch.bfloat16, device=device)
            operands = (codes[rows].contiguous(), scales[rows].contiguous()), (weight, weight_scales)
            deep_gemm.fp8_gemm_nt(*operands, out)
            return out

        yield Operator(f"FP8: {name}", "DeepGEMM", f"{n} x {k}", True, multiply)


def main() -> int:
    """Check all operators, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="flash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=MOST_ROWS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    verdicts = []
    for operator in operators(MODELS[arguments.model], device, arguments.rows):
        # The sampler gets fewer rows, as each has a vocabulary's size.
        most = min(arguments.rows, 256) if operator.name.startswith("sampler") else arguments.rows
        verdict = ask(operator, most)
        verdicts.append(verdict)
        said = f"differs at: {', '.join(map(str, verdict.differs_at)) or '-'}"
        if not verdict.repeats:
            said = f"NOT TWICE THE SAME, {said}"
        print(
            f"{operator.name:32}{operator.implementation:10}{operator.shape:20}"
            f"{'marked' if operator.marked else '':8}{said}",
            flush=True,
        )
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": arguments.model,
        "rows": [
            {
                "operator": verdict.operator.name,
                "implementation": verdict.operator.implementation,
                "shape": verdict.operator.shape,
                "marked": verdict.operator.marked,
                "differs_at": verdict.differs_at,
                "repeats": verdict.repeats,
            }
            for verdict in verdicts
        ],
    }
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)
    return int(any(verdict.breaks_its_word for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
